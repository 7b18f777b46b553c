"""Which operator loses how much to int8: each alone with all else in float, and all of them up to a point."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fx_passes.errors import InputError, StageError
from fx_passes.node_meta import source_line
from fx_passes.quantize.calibrate import calibrate, call_with_batch
from fx_passes.quantize.convert import convert_fx
from fx_passes.quantize.decomposed import is_dequantize
from fx_passes.quantize.prepare import fused_float, prepare_calibration_fx
from fx_passes.quantize.structure import strip_quantization

__all__ = ["Sensitivity", "SensitivityRow", "sensitivity"]


@dataclass(frozen=True)
class SensitivityRow:
    """What quantizing one operator does to the model's outputs.

    Attributes:
        node: name of the operator in the converted graph.
        source: "file.py:12" of the user's line, or None.
        sqnr_db: signal to quantization noise of the outputs with this operator alone in int8, in dB.
        cosine: cosine similarity of the same outputs.
        worst: largest absolute error of an output value.
        cumulative_sqnr_db: the SQNR with this operator and all before it in int8.
    """

    node: str
    source: str | None
    sqnr_db: float
    cosine: float
    worst: float
    cumulative_sqnr_db: float


@dataclass(frozen=True)
class Sensitivity:
    """The operators of a model, the most sensitive first.

    Attributes:
        target: whose scheme and placement was measured.
        rows: sorted by `sqnr_db`, lowest first.
        sqnr_db: SQNR of the outputs with every placed operator in int8, in dB.
    """

    target: str
    rows: list[SensitivityRow]
    sqnr_db: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def table(self) -> str:
        """Aligned text, one line per operator."""
        lines = [f"{'operator':40} {'alone dB':>9} {'cosine':>9} {'worst':>10} {'so far dB':>10}  source"]
        for r in self.rows:
            numbers = f"{r.sqnr_db:9.1f} {r.cosine:9.6f} {r.worst:10.3g} {r.cumulative_sqnr_db:10.1f}"
            lines.append(f"{r.node:40} {numbers}  {r.source or ''}")
        return "\n".join([*lines, f"all in int8 for {self.target}: {self.sqnr_db:.1f} dB"])


def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    target: str = "tensorrt-rtx",
    qconfig: Mapping[Any, Any] | None = None,
    calibration: Iterable[Any] | None = None,
) -> Sensitivity:
    """Measure how much each operator's quantization changes the outputs of `model`.

    Every operator that placement quantizes is run in int8 with all others in float, and again together with all that
    come before it. The cost is two forward passes per operator and batch.

    Args:
        model: a float module or a graph of one, traced in eval mode; it stays as it is.
        batches: what to compare on: tensors, tuples of arguments or dicts of keyword arguments. Must be re-iterable.
        target: "tensorrt", "tensorrt-rtx" or "onnxruntime".
        qconfig: as for `prepare_calibration_fx`.
        calibration: batches to calibrate on; by default the same as `batches`.

    Raises:
        InputError: there is no batch, or the outputs hold no floating point tensor.
        StageError: `model` is prepared or converted already.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
        >>> report = sensitivity(model, [torch.randn(2, 3, 8, 8)])
        >>> len(report.rows)
        2
    """
    if isinstance(model, GraphModule) and model.meta.get("stage") in ("prepared", "prepared_qat", "converted"):
        raise StageError(f"the graph is at stage {model.meta['stage']!r}", hint="pass the float model")
    batches = list(batches)
    if not batches:
        raise InputError("there are no batches to compare on", hint="pass a list with at least one batch")
    fused = fused_float(model)
    prepared = prepare_calibration_fx(fused, target=target, qconfig=qconfig)
    calibrate(prepared, batches if calibration is None else calibration)
    converted = convert_fx(prepared)
    readers = {user.name: user for n in converted.graph.nodes if is_dequantize(n) for user in n.users}
    operators = [n for n in converted.graph.nodes if n.name in readers and not _plumbing(n)]
    expected = [_outputs(fused, batch) for batch in batches]
    rows = []
    before: list[str] = []
    for node in operators:
        before.append(node.name)
        alone = _errors(strip_quantization(converted, fused, [node.name]), batches, expected)
        so_far = _errors(strip_quantization(converted, fused, before), batches, expected)
        rows.append(SensitivityRow(node.name, source_line(node), *alone, so_far[0]))
    rows.sort(key=lambda row: row.sqnr_db)
    return Sensitivity(target, rows, _errors(converted, batches, expected)[0])


def _plumbing(node: torch.fx.Node) -> bool:
    return node.op == "output" or is_dequantize(node) or "quantize_per" in str(node.target)


def _outputs(model: nn.Module, batch: Any) -> Tensor:
    """All floating point outputs as one flat float64 tensor."""
    with torch.no_grad():
        leaves = pytree.tree_leaves(call_with_batch(model, batch))
    values = [t.double().flatten() for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
    if not values:
        raise InputError("the model's outputs hold no floating point tensor to compare")
    return torch.cat(values)


def _errors(model: nn.Module, batches: list[Any], expected: list[Tensor]) -> tuple[float, float, float]:
    """SQNR in dB, cosine and largest absolute error over all batches."""
    actual = torch.cat([_outputs(model, batch) for batch in batches])
    reference = torch.cat(expected)
    noise, signal = float((actual - reference).square().sum()), float(reference.square().sum())
    sqnr = math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf
    cosine = 1.0 if noise == 0 else float(torch.nn.functional.cosine_similarity(actual, reference, dim=0))
    return sqnr, cosine, float((actual - reference).abs().max())
