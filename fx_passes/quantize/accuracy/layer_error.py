"""How much each layer loses to int8: where it arises, and how much of it reaches the outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fx_passes.quantize.accuracy.meter import GraphRun, float_leaves, measured_nodes
from fx_passes.quantize.annotation import Annotation, Granularity, annotation_of, quantized_values
from fx_passes.quantize.calibrate import call_with_batch
from fx_passes.quantize.calibrated import without_observers
from fx_passes.quantize.ranges.fake_quant import fake_quantize
from fx_passes.quantize.scheme import target_scheme
from fx_passes.quantize.weights.layer import Layer, layer_of
from fx_passes.quantize.weights.scales import dequantize_weight, quantize_weight, weight_scale

__all__ = ["LayerError", "layer_errors"]

# One scale for a weight where its layer's output then keeps this signal to noise (dB), or loses this much at most.
_WHOLE_ABOVE, _WHOLE_LOSS = 30.0, 3.0
_PROBES = 6


@dataclass(frozen=True)
class LayerError:
    """What one layer alone in int8 costs.

    Attributes:
        weight: granularity of its weight's scales; one per tensor where that costs the layer's output little. None for
            an operator without a weight.
        sqnr_db: signal to noise of its own output, in dB.
        noise: estimated energy of the error where it is measured (`measured_nodes`: the outputs, as a rule), relative
            to the values' own.
    """

    weight: Granularity | None
    sqnr_db: float
    noise: float


def layer_errors(prepared: GraphModule, batch: Any, seed: int = 0) -> dict[str, LayerError]:
    """Errors of every quantized layer, each alone in int8, from one float pass and a few backward ones.

    A layer is run on rounded operands beside its float run, which gives its error e. What arrives at the outputs is
    J e to first order, J being their derivative by the layer's result. |J e|^2 is the mean of (v' J e)^2 over random
    v (Hutchinson's estimator), and v' J of all layers comes from one backward pass per v. `sensitivity` measures the
    same without the approximation, with two passes per layer.

    Args:
        prepared: from `prepare_calibration_fx`, after calibration; it stays as it is.
        batch: what to measure on, as `calibrate` takes it.
        seed: of the random vectors.

    Returns:
        By node name.
    """
    gm, found = without_observers(prepared)
    gm.recompile()
    meter = _Meter(gm, found.qparams)
    with torch.enable_grad():
        call_with_batch(meter, batch)  # type: ignore[arg-type]
        outputs = [leaf for leaf in float_leaves(meter.values.values()) if leaf.requires_grad]
        noise = _noise_at_outputs(outputs, meter, seed)
    return {
        name: LayerError(form, sqnr, noise.get(name, 0.0)) for name, (form, sqnr) in meter.found.items()
    }  # fmt: skip


def _noise_at_outputs(outputs: list[Tensor], meter: _Meter, seed: int) -> dict[str, float]:
    signal = sum(float(y.detach().double().square().sum()) for y in outputs)
    if not outputs or not meter.results or signal == 0.0:
        return {}
    generator = torch.Generator().manual_seed(seed)
    names, results = list(meter.results), list(meter.results.values())
    noise = dict.fromkeys(names, 0.0)
    for probe in range(_PROBES):
        directions = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
        slopes = torch.autograd.grad(
            outputs, results, directions, retain_graph=probe + 1 < _PROBES, allow_unused=True
        )  # fmt: skip
        for name, slope in zip(names, slopes, strict=True):
            if slope is not None:
                noise[name] += float((slope.double() * meter.errors[name]).sum()) ** 2 / _PROBES / signal
    return noise


class _Meter(GraphRun):
    """Runs the float graph, and every quantized layer again on rounded operands.

    Attributes:
        found: by node name, the granularity of the weight and the layer's own SQNR in dB.
        results: the layers' float results, with a gradient.
        errors: what int8 adds to them.
    """

    def __init__(self, gm: GraphModule, qparams: dict[str, tuple[float, int]]):
        super().__init__(gm, measured_nodes(gm.graph))
        self.scheme = target_scheme(gm.meta["target"])
        self.found: dict[str, tuple[Granularity | None, float]] = {}
        self.results: dict[str, Tensor] = {}
        self.errors: dict[str, Tensor] = {}
        self._qparams = {v.node: qparams[v.scale_of.name] for v in quantized_values(gm.graph)}
        self._layers: dict[Node, Layer | None] = {}
        for node in gm.graph.nodes:
            annotation = annotation_of(node)
            if annotation is not None and annotation.quantized_inputs:
                layer = layer_of(gm, node) if annotation.weight is not None else None
                self._layers[node] = layer if isinstance(layer, Layer) else None

    def prepared(self, values: list[Any]) -> list[Any]:
        return pytree.tree_map_only(Tensor, _with_gradient, values)

    def run_node(self, n: Node) -> Any:
        if n.meta.get("python"):  # what the user wrote need not work on tensors with a gradient
            with torch.no_grad():
                before = {i: self.env[i] for i in n.all_input_nodes}
                self.env.update({i: pytree.tree_map_only(Tensor, Tensor.detach, v) for i, v in before.items()})
                result = super().run_node(n)
                self.env.update(before)
            return result
        result = super().run_node(n)
        if n in self._layers and isinstance(result, Tensor):
            annotation = annotation_of(n)
            assert annotation is not None
            with torch.no_grad():
                rounded = {
                    n.all_input_nodes[i]: self._rounded(n.all_input_nodes[i]) for i in annotation.quantized_inputs
                }
                forms = {form: other - result for form, other in self._again(n, annotation, rounded)}
                form, sqnr = _best({form: _db(result, error) for form, error in forms.items()})
            self.found[n.name] = form, sqnr
            if result.requires_grad:
                self.results[n.name], self.errors[n.name] = result, forms[form]
        return result

    def _rounded(self, node: Node) -> Tensor:
        scale, zero_point = self._qparams[node]
        return fake_quantize(self.env[node], torch.tensor(scale), zero_point, self.scheme.activation)

    def _again(
        self, node: Node, annotation: Annotation, rounded: dict[Node, Tensor]
    ) -> Iterator[tuple[Granularity | None, Tensor]]:
        layer = self._layers[node]
        if layer is None:
            before = {n: self.env[n] for n in rounded}
            self.env.update(rounded)
            yield None, super().run_node(node)
            self.env.update(before)
            return
        x = rounded[layer.input]
        if layer.pad is not None:
            x = torch.nn.functional.pad(x, *layer.pad)
        forms: tuple[Granularity, ...] = ("per_tensor", "per_channel")
        for form in forms:
            axis = layer.axis if form == "per_channel" else None
            scale = weight_scale(layer.weight, self.scheme.weight, axis, annotation.weight_method)
            weight = dequantize_weight(quantize_weight(layer.weight, scale, self.scheme.weight, axis), scale, axis)
            yield form, layer.function(x, weight, layer.bias, *layer.options)


def _with_gradient(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_() if value.is_floating_point() else value


def _best(sqnr: dict[Granularity | None, float]) -> tuple[Granularity | None, float]:
    """One scale for the weight, with which bias and activation fuse into the layer, unless that costs too much."""
    if None in sqnr:
        return None, sqnr[None]
    whole, channels = sqnr["per_tensor"], sqnr["per_channel"]
    if whole >= _WHOLE_ABOVE or channels - whole <= _WHOLE_LOSS:
        return "per_tensor", whole
    return "per_channel", channels


def _db(result: Tensor, error: Tensor) -> float:
    signal, noise = float(result.double().square().sum()), float(error.double().square().sum())
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf
