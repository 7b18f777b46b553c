"""Which operator loses how much to int8: each alone with all else in float, and all of them up to a point."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from fx_passes.entry.ambient import as_caller, plain_state
from fx_passes.graph.node_meta import source_line
from fx_passes.quantize.accuracy.partial import PartlyQuantized, errors, run
from fx_passes.quantize.accuracy.report import Sensitivity, SensitivityRow
from fx_passes.quantize.qconfig import QConfig

__all__ = ["Sensitivity", "SensitivityRow", "rows_of", "sensitivity"]


@plain_state()
def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    target: str = "tensorrt-rtx",
    qconfig: QConfig | Mapping[Any, Any] | str | os.PathLike[str] | None = None,
    calibration: Iterable[Any] | None = None,
) -> Sensitivity:
    """Measure how much each operator's quantization changes the outputs of `model`.

    Every operator that placement quantizes is run in int8 with all others in float, and again together with all that
    come before it. The cost is three forward passes per operator and batch.

    Args:
        model: a float module or a graph of one, traced in eval mode; it stays as it is.
        batches: what to compare on: tensors, tuples of arguments or dicts of keyword arguments.
        target: "tensorrt", "tensorrt-rtx" or "onnxruntime".
        qconfig: as for `prepare_calibration_fx`.
        calibration: batches to calibrate on; by default the same as `batches`. Iterated twice if rounding is learned.

    Returns:
        The operators, the most sensitive first, with `table()`, `svg()`, `csv()`, `json()` and `save(path)`.

    Raises:
        InputError: there is no batch, or the outputs hold no floating point tensor.
        StageError: `model` is prepared or converted already.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
        >>> report = sensitivity(model, [torch.randn(2, 3, 8, 8)])
        >>> len(report.rows)
        2
    """
    batches = list(as_caller(batches))
    parts = PartlyQuantized.of(model, target, qconfig, batches if calibration is None else calibration, batches)
    rows = rows_of(parts, batches)
    expected = [run(parts.reference, batch)[0] for batch in batches]
    whole = errors(expected, [run(parts.converted, batch)[0] for batch in batches])
    return Sensitivity(target, sorted(rows, key=lambda row: row.sqnr_db), whole.sqnr_db)


def rows_of(parts: PartlyQuantized, batches: list[Any]) -> list[SensitivityRow]:
    """What quantizing each operator does, in the order of the graph."""
    rows, before = [], []
    for node in parts.operators:
        before.append(node.name)
        expected, own = _runs(parts.reference, batches, node.name)
        alone, own_alone = _runs(parts.int8([node.name]), batches, node.name)
        so_far, _ = _runs(parts.int8(before), batches)
        outputs, local, cumulative = errors(expected, alone), errors(own, own_alone), errors(expected, so_far)
        rows.append(
            SensitivityRow(
                node=node.name,
                source=source_line(node),
                sqnr_db=outputs.sqnr_db,
                cosine=outputs.cosine,
                worst=outputs.worst,
                worst_steps=local.worst_steps,
                local_sqnr_db=local.sqnr_db,
                cumulative_sqnr_db=cumulative.sqnr_db,
                cumulative_cosine=cumulative.cosine,
            )
        )
    return rows


def _runs(gm: Any, batches: list[Any], watch: str = "") -> tuple[list[Tensor], list[Tensor]]:
    outputs, watched = zip(*(run(gm, batch, watch) for batch in batches), strict=True)
    return list(outputs), list(watched)
