"""A model with some of its operators in int8 and the others in float, and how far its outputs are from float's."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from fx_passes.entry.call import arguments_of
from fx_passes.errors import InputError, StageError
from fx_passes.graph.module import set_submodule
from fx_passes.partition.recording import bind_inputs, positional, tensors_in
from fx_passes.quantize.accuracy.structure import strip_quantization
from fx_passes.quantize.calibrate import calibrate
from fx_passes.quantize.calibrated import float_reference, rounded_to_nearest
from fx_passes.quantize.convert import convert_fx
from fx_passes.quantize.decomposed import is_dequantize, is_quantize
from fx_passes.quantize.float_graph import fused_float
from fx_passes.quantize.insertion import place_of
from fx_passes.quantize.prepare import OBSERVERS, observers_of, prepare_calibration_fx
from fx_passes.quantize.qconfig import QConfig

__all__ = ["Errors", "PartlyQuantized", "errors", "run"]


@dataclass(frozen=True)
class Errors:
    """Values compared with float ones.

    Attributes:
        sqnr_db: signal to quantization noise in dB; infinite where nothing differs.
        cosine: cosine similarity.
        worst: largest absolute difference.
        worst_steps: the same in steps of an int8 whose range is that of the float values.
    """

    sqnr_db: float
    cosine: float
    worst: float
    worst_steps: float


@dataclass(frozen=True)
class PartlyQuantized:
    """A calibrated and converted model, of which any operators can be left in float.

    Attributes:
        prepared: with what its observers saw.
        reference: the float graph, equalized and smoothed as configured.
        converted: with everything in int8 that its target's placement quantizes.
        operators: the nodes, of `converted`, that read quantized values or weights, in their order.
    """

    fused: GraphModule
    target: str
    calibration: Iterable[Any]
    prepared: GraphModule
    reference: GraphModule
    converted: GraphModule
    operators: list[Node]

    @classmethod
    def of(
        cls, model: nn.Module, target: str, qconfig: Any, calibration: Iterable[Any], batches: list[Any]
    ) -> PartlyQuantized:
        """Prepare, calibrate and convert a float model.

        Raises:
            StageError: `model` is prepared or converted already.
            InputError: there is no batch to compare on.
        """
        if isinstance(model, GraphModule) and model.meta.get("stage") in ("prepared", "prepared_qat", "converted"):
            raise StageError(f"the graph is at stage {model.meta['stage']!r}", hint="pass the float model")
        if not batches:
            raise InputError("there are no batches to compare on", hint="pass a list with at least one batch")
        args, kwargs = arguments_of(batches[0])
        fused = fused_float(model, kwargs or args)
        prepared = prepare_calibration_fx(fused, target=target, qconfig=QConfig.of(qconfig))
        calibrate(prepared, calibration)
        converted = convert_fx(prepared, calibration)
        readers = {user for node in converted.graph.nodes if is_dequantize(node) for user in node.users}
        operators = [node for node in converted.graph.nodes if node in readers and not _is_plumbing(node)]
        return cls(fused, target, calibration, prepared, float_reference(prepared), converted, operators)

    def int8(self, names: Collection[str]) -> GraphModule:
        """The model with these operators in int8, all others in float, placed as they are in `converted`."""
        return strip_quantization(self.converted, self.reference, names)

    def configured(self, qconfig: QConfig, learn: bool) -> GraphModule:
        """The model placed and converted with another configuration, without calibrating again where possible.

        Args:
            qconfig: the configuration.
            learn: learn the rounding of weights where that is configured; otherwise they are rounded to the nearest.
        """
        prepared = prepare_calibration_fx(self.fused, target=self.target, qconfig=qconfig)
        known, wanted = observers_of(self.prepared), observers_of(prepared)
        if wanted.keys() <= known.keys():
            for name in wanted:
                set_submodule(prepared, place_of(prepared, OBSERVERS, name), copy.deepcopy(known[name]))
        else:
            calibrate(prepared, self.calibration)
        return convert_fx(prepared if learn else rounded_to_nearest(prepared), self.calibration)


def _is_plumbing(node: Node) -> bool:
    return node.op == "output" or is_dequantize(node) or is_quantize(node)


def run(gm: GraphModule, batch: Any, watch: str = "") -> tuple[Tensor, Tensor]:
    """All floating point outputs of `gm` and of its node `watch`, each as one flat float64 tensor.

    Raises:
        InputError: the outputs hold no floating point tensor.
    """
    watching = _Watching(gm, watch)
    with torch.no_grad():
        output = watching.run(*positional(bind_inputs(gm, *arguments_of(batch))))
    values = _flat(output)
    if not values.numel():
        raise InputError("the model's outputs hold no floating point tensor to compare")
    return values, watching.seen


class _Watching(Interpreter):
    def __init__(self, gm: GraphModule, watch: str):
        super().__init__(gm)
        self.watch, self.seen = watch, torch.zeros(0, dtype=torch.float64)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.name == self.watch:
            self.seen = _flat(value)
        return value


def _flat(value: Any) -> Tensor:
    parts = [t.detach().double().flatten() for t in tensors_in(value) if t.is_floating_point()]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def errors(expected: list[Tensor], actual: list[Tensor]) -> Errors:
    """Compare values over all batches."""
    reference, found = torch.cat(expected), torch.cat(actual)
    difference = found - reference
    noise, signal = float(difference.square().sum()), float(reference.square().sum())
    if noise == 0:
        return Errors(math.inf, 1.0, 0.0, 0.0)
    worst, largest = float(difference.abs().max()), float(reference.abs().max())
    return Errors(
        sqnr_db=10 * math.log10(signal / noise) if signal else -math.inf,
        cosine=float(torch.nn.functional.cosine_similarity(found, reference, dim=0)),
        worst=worst,
        worst_steps=127 * worst / largest if largest else math.inf,
    )
