"""From a calibrated module to one with quantize-dequantize nodes and int8 weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fx_passes.capture.exclusive import in_turn
from fx_passes.entry.ambient import plain_state
from fx_passes.errors import QuantizationError, StageError
from fx_passes.graph.module import copy_graph_module, delete_unused, set_buffer, set_submodule
from fx_passes.graph.node_meta import inherit_meta
from fx_passes.ops import op_of
from fx_passes.ops.effects import has_effects
from fx_passes.quantize.annotation import annotation_of, quantized_values
from fx_passes.quantize.calibrated import Found, without_observers
from fx_passes.quantize.channels.bias import bias_shift, keeps_channels, keeps_mean
from fx_passes.quantize.decomposed import decomposed, is_dequantize
from fx_passes.quantize.insertion import insertion_point
from fx_passes.quantize.scheme import QuantScheme, TargetScheme, target_scheme
from fx_passes.quantize.weights.layer import Layer, layer_of
from fx_passes.quantize.weights.rounding import RoundedLayer, learn_rounding
from fx_passes.quantize.weights.saturation import highest_integers
from fx_passes.quantize.weights.scales import LayerScale, dequantize_weight, integer_bias, quantize_weight

__all__ = ["convert_fx"]


@in_turn
@plain_state()
def convert_fx(prepared: GraphModule, batches: Iterable[Any] | None = None, *, progress: bool = False) -> GraphModule:
    """Replace observers by quantize-dequantize pairs, and float weights by int8 ones.

    A layer at `<path>` becomes `function(dequantize(quantize(x)), dequantize(<path>.weight), <path>.bias)` with
    `<path>.weight` int8 and `<path>.weight_scale` float32; for ONNX Runtime `<path>.bias` is int32 with
    `<path>.bias_scale`. The scales and zero points of activations are constants of the graph.

    Args:
        prepared: from `prepare_calibration_fx`, after calibration, or from `prepare_qat_fx`, after training. It stays
            as it is.
        batches: to learn the rounding of weights on, where the configuration asks for `rounding="learned"`: those that
            were calibrated on. Not read otherwise.
        progress: show a progress bar while learning.

    Returns:
        A GraphModule that runs in PyTorch and gives the numbers of the lowered model (where its float part is fp32).

    Raises:
        StageError: not a prepared module, one that saw no data, or one in train mode that computes something else in
            eval mode; or rounding is to be learned and there are no
            batches.
        QuantizationError: nothing in the model can be quantized for its target; the message says why.

    Example:
        >>> from fx_passes import prepare_calibration_fx
        >>> prepared = prepare_calibration_fx(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3)).eval())
        >>> _ = prepared(torch.rand(2, 3, 8, 8))
        >>> convert_fx(prepared).get_buffer("0.weight").dtype
        torch.int8
    """
    stage = prepared.meta.get("stage") if isinstance(prepared, GraphModule) else None
    if stage == "prepared":
        gm, found = without_observers(prepared)
    elif stage == "prepared_qat":
        from fx_passes.quantize.qat.convert import without_fake_quantization

        gm, found = without_fake_quantization(prepared)
    else:
        raise StageError(
            f"convert_fx got a graph at stage {stage!r}",
            hint="call prepare_calibration_fx or prepare_qat_fx first, and run data through the result",
        )
    _check_mode(gm)
    if not any(a.quantized for node in gm.graph.nodes if (a := annotation_of(node)) is not None):
        raise QuantizationError(
            f"nothing in this model can be quantized for {gm.meta['target']!r}: {_reasons(gm.graph)}",
            hint="lower it with precision='fp16' or 'fp32', or relax the quantization configuration",
        )
    learned = [node for node in gm.graph.nodes if (a := annotation_of(node)) is not None and a.learn_rounding]
    if learned and batches is None:
        raise StageError(
            "the rounding of weights is to be learned, from batches that are not there",
            node=learned[0],
            hint="pass the calibration batches: convert_fx(prepared, batches)",
        )
    reference = copy_graph_module(gm) if learned else gm
    conversion = _Conversion(gm, found)
    conversion.run()
    gm.graph.lint()
    gm.recompile()
    gm.meta["stage"] = "converted"
    if learned and batches is not None:
        rounded = [item for item in conversion.rounded if item.name in {node.name for node in learned}]
        gm.meta["rounding_report"] = learn_rounding(
            gm, reference, rounded, conversion.scheme, batches, progress=progress
        )
    return gm


def _check_mode(gm: GraphModule) -> None:
    """Refuse a graph that goes on drawing random numbers or updating statistics because it is in train mode."""
    for node in gm.graph.nodes if gm.training else ():
        op = op_of(node, gm)
        if op is None or not op.effects or not has_effects(node, gm):
            continue
        raise StageError(
            "the module is in train mode, and this call gives other values in eval mode",
            node=node,
            hint='call eval() on it, or set_qat_state(model, "validate"), before convert_fx',
        )


@dataclass(frozen=True)
class _Stored:
    """A quantized weight; `axis` is None and `scale` 0-dim where it has one scale."""

    integers: Tensor
    scale: Tensor
    axis: int | None


class _Conversion:
    """One run of the conversion."""

    def __init__(self, gm: GraphModule, found: Found):
        self.gm, self.graph, self.found = gm, gm.graph, found
        self.highest: dict[Node, Tensor] = {}  # largest integers per channel of a dequantized value
        self.means: dict[Node, Tensor] = {}
        self.scheme: TargetScheme = target_scheme(gm.meta["target"])
        self.layers: dict[Node, Layer] = {}
        self.informative: dict[str, Tensor] = {}  # buffers that no node reads
        self.rounded: list[RoundedLayer] = []

    def run(self) -> None:
        for value in quantized_values(self.graph):
            name = value.scale_of.name
            qparams = self.found.qparams[name]
            pair = self._insert_pair(value.node, value.readers, *qparams)
            if name in self.found.means and keeps_mean(value.node, value.scale_of):
                self.means[pair] = self.found.means[name]
            if name in self.found.highest and keeps_channels(value.node, value.scale_of):
                self.highest[pair] = highest_integers(self.found.highest[name], *qparams, self.scheme.activation)
        for node in self.graph.nodes:
            annotation = annotation_of(node)
            if annotation is not None and annotation.weight is not None:
                layer = layer_of(self.gm, node)
                if isinstance(layer, str):
                    raise QuantizationError(f"its weight cannot be quantized: {layer}", node=node)
                self.layers[node] = layer
        for node, layer in self.layers.items():
            # No longer calls of a module, so that its place can become a plain container of the quantized parameters.
            node.op, node.target = "call_function", layer.function
        weights = self._quantized_weights()
        for node, layer in self.layers.items():
            self._replace(node, layer, weights[_weight_key(node, layer)])
        self._erase_dead_constants()
        delete_unused(self.gm)
        for path, buffer in self.informative.items():
            set_buffer(self.gm, path, buffer)

    def _insert_pair(self, node: Node, readers: tuple[Node, ...], scale: float, zero_point: int) -> Node:
        """A quantize-dequantize pair behind `node`, which `readers` then read instead."""
        ops, s = decomposed(), self.scheme.activation
        with self.graph.inserting_after(insertion_point(node)):
            args = (scale, zero_point, s.quant_min, s.quant_max, s.dtype)
            q = self._call(ops.quantize_per_tensor.default, (node, *args), f"{node.name}_quantize", node)
        with self.graph.inserting_after(q):
            dq = self._call(ops.dequantize_per_tensor.default, (q, *args), f"{node.name}_dequantize", node)
        for reader in readers:
            reader.replace_input_with(node, dq)
        return dq

    def _quantized_weights(self) -> dict[Any, _Stored]:
        """One entry for every distinct weight, whatever the number of its calls and names."""
        scheme, stored = self.scheme.weight, {}
        groups: dict[Any, list[Node]] = defaultdict(list)
        for node, layer in self.layers.items():
            groups[_weight_key(node, layer)].append(node)
        for key, nodes in groups.items():
            layer, annotation = self.layers[nodes[0]], annotation_of(nodes[0])
            assert annotation is not None
            assert annotation.weight is not None
            scaling = LayerScale.for_layer(layer, self.scheme, annotation.weight, annotation.weight_method)
            scales = [self._scale(node, scaling) for node in nodes]
            scale = torch.stack(scales).amax(0)
            stored[key] = _Stored(quantize_weight(layer.weight, scale, scheme, scaling.axis), scale, scaling.axis)
        return stored

    def _scale(self, node: Node, scaling: LayerScale) -> Tensor:
        layer = self.layers[node]
        try:
            learned, highest = self.found.learned.get(node.name), self.highest.get(_unpadded(layer.input))
            return scaling.of(layer.weight, layer.bias, self._integer_bias_input(layer), learned, highest)
        except QuantizationError as error:
            raise QuantizationError(error.what, node=node, hint=error.hint) from error

    def _integer_bias_input(self, layer: Layer) -> float | None:
        """The input's scale where the bias is stored as integers of input scale * weight scale, else None."""
        source = _unpadded(layer.input)
        if self.scheme.bias is None or layer.transposed or not is_dequantize(source):
            return None
        return float(source.args[1])  # type: ignore[arg-type]

    def _replace(self, node: Node, layer: Layer, weight: _Stored) -> None:
        """Make `node` the functional form of `layer`, in place: it keeps its name."""
        original, layer = layer, self._corrected(node, layer, weight)
        path = self._storage_path(layer)
        self._make_plain(path)
        with self.graph.inserting_before(node):
            activation = self._padded(node, layer)
            dequantized = self._weight(node, path, weight)
            bias = self._bias(node, path, layer, weight)
        self._record(node, original, path, weight, bias)
        node.args, node.kwargs = (activation, dequantized, bias, *layer.options), {}

    def _record(self, node: Node, layer: Layer, path: str, weight: _Stored, bias: Node | None) -> None:
        """Note what may be rounded otherwise: the weight of `node`, if no other layer has it, too."""
        annotation, key = annotation_of(node), _weight_key(node, layer)
        assert annotation is not None and annotation.weight is not None
        if sum(_weight_key(other, its) == key for other, its in self.layers.items()) > 1:
            return
        stored = bias.all_input_nodes[0] if bias is not None and bias.op != "get_attr" else bias
        self.rounded.append(
            RoundedLayer(
                name=node.name,
                layer=layer,
                integers=_join(path, "weight"),
                bias=str(stored.target) if stored is not None and annotation.correct_bias else None,
                scale=weight.scale,
                axis=weight.axis,
                input_scale=self._integer_bias_input(layer) if bias is not None else None,
                pairs=LayerScale.for_layer(layer, self.scheme, annotation.weight, annotation.weight_method).pairs,
                highest=self.highest.get(_unpadded(layer.input)),
            )
        )

    def _corrected(self, node: Node, layer: Layer, weight: _Stored) -> Layer:
        """The layer with a bias that takes back what rounding the weight does to its mean output."""
        mean, annotation = self.means.get(_unpadded(layer.input)), annotation_of(node)
        if mean is None or layer.bias is None or annotation is None or not annotation.correct_bias:
            return layer
        shift = bias_shift(layer, dequantize_weight(weight.integers, weight.scale, weight.axis), mean)
        return layer if shift is None else replace(layer, bias=layer.bias - shift)

    def _make_plain(self, path: str) -> None:
        """Let a container without a class hold the quantized parameters: the layer's own would want the float ones."""
        module = _submodule(self.gm, path)
        if not path or module is None or self.graph.find_nodes(op="call_module", target=path, sort=False):
            return
        plain = torch.nn.Module().train(module.training)
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            getattr(plain, table).update(getattr(module, table))
        set_submodule(self.gm, path, plain)

    def _padded(self, node: Node, layer: Layer) -> Node:
        """The layer's input, padded with its own values if the module says so (which commutes with quantization)."""
        if layer.pad is None:
            return layer.input
        padded = self._call(F.pad, (layer.input, *layer.pad), f"{node.name}_pad", node)
        if not is_dequantize(layer.input):
            return padded
        scale, zero_point = layer.input.args[1:3]
        return self._insert_pair(padded, (), scale, zero_point)  # type: ignore[arg-type]

    def _weight(self, node: Node, path: str, weight: _Stored) -> Node:
        set_buffer(self.gm, _join(path, "weight"), weight.integers)
        integers = self._get(_join(path, "weight"), node)
        s, name = self.scheme.weight, f"{integers.name}_dequantize"
        limits = (s.quant_min, s.quant_max, s.dtype)
        if weight.axis is None:
            # The exporters know this op with a constant scale only; the buffer is kept to be read by people.
            self.informative[_join(path, "weight_scale")] = weight.scale
            per_tensor = (integers, float(weight.scale), 0, *limits)
            return self._call(decomposed().dequantize_per_tensor.default, per_tensor, name, node)
        set_buffer(self.gm, _join(path, "weight_scale"), weight.scale)
        scale = self._get(_join(path, "weight_scale"), node)
        zero_point = None
        if self.scheme.weight_zero_point:
            zeros = torch.zeros_like(weight.scale, dtype=s.dtype)
            set_buffer(self.gm, _join(path, "weight_zero_point"), zeros)
            zero_point = self._get(_join(path, "weight_zero_point"), node)
        per_channel = (integers, scale, zero_point, weight.axis, *limits)
        return self._call(decomposed().dequantize_per_channel.default, per_channel, name, node)

    def _bias(self, node: Node, path: str, layer: Layer, weight: _Stored) -> Node | None:
        if layer.bias is None:
            return None
        input_scale = self._integer_bias_input(layer)
        if input_scale is None:
            set_buffer(self.gm, _join(path, "bias"), layer.bias)
            return self._get(_join(path, "bias"), node)
        s: QuantScheme = self.scheme.bias  # type: ignore[assignment]
        integers, scale = integer_bias(layer.bias, weight.scale, input_scale, self.scheme)
        name = self._free_bias_name(path, scale)
        set_buffer(self.gm, _join(path, name), integers)
        set_buffer(self.gm, _join(path, f"{name}_scale"), scale)
        stored = self._get(_join(path, name), node)
        unit = self._get(_join(path, f"{name}_scale"), node)
        args = (stored, unit, None, 0, s.quant_min, s.quant_max, s.dtype)
        return self._call(decomposed().dequantize_per_channel.default, args, f"{stored.name}_dequantize", node)

    def _free_bias_name(self, path: str, scale: Tensor) -> str:
        """ "bias", or "bias_2" and so on for further calls of a layer, whose inputs have scales of their own."""
        number = 1
        while True:
            name = "bias" if number == 1 else f"bias_{number}"
            taken = _lookup(self.gm, _join(path, f"{name}_scale"))
            if taken is None or torch.equal(taken, scale):
                return name
            number += 1

    def _storage_path(self, layer: Layer) -> str:
        """Where the quantized parameters go: the layer's path, unless float tensors of that name are still read."""
        path = layer.path
        while any(self._read_elsewhere(_join(path, name)) for name in ("weight", "bias")):
            path += "_int8"
        return path

    def _read_elsewhere(self, target: str) -> bool:
        nodes = self.graph.find_nodes(op="get_attr", target=target, sort=False)
        tensor = _lookup(self.gm, target)
        if not nodes or tensor is None or not tensor.is_floating_point():
            return False
        return any(user not in self.layers for node in nodes for user in node.users)

    def _erase_dead_constants(self) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node.op == "get_attr" and not node.users:
                self.graph.erase_node(node)

    def _get(self, target: str, like: Node) -> Node:
        existing = [n for n in self.graph.find_nodes(op="get_attr", target=target) if n < like and n.meta.get("stored")]
        if existing:
            return existing[0]
        node = inherit_meta(self.graph.get_attr(target), like)
        node.meta["stored"] = True
        return node

    def _call(self, target: Any, args: tuple[Any, ...], name: str, like: Node) -> Node:
        return inherit_meta(self.graph.create_node("call_function", target, args, {}, name=name), like)


def _unpadded(node: Node) -> Node:
    """The dequantized value that a layer reads, before the zero padding that belongs to the layer."""
    annotation = annotation_of(node)
    return (
        node.all_input_nodes[0] if annotation is not None and annotation.op == "pad" and annotation.quantized else node
    )


def _weight_key(node: Node, layer: Layer) -> Any:
    annotation = annotation_of(node)
    assert annotation is not None
    weight = layer.weight
    return (
        weight.data_ptr(),
        tuple(weight.shape),
        weight.stride(),
        layer.axis,
        annotation.weight,
        annotation.weight_method,
    )


def _submodule(gm: GraphModule, path: str) -> torch.nn.Module | None:
    """The module at `path` that is no plain container yet."""
    try:
        module = gm.get_submodule(path)
    except AttributeError:
        return None
    return None if type(module) is torch.nn.Module else module


def _lookup(gm: GraphModule, path: str) -> Tensor | None:
    value: Any = gm
    for part in path.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, Tensor) else None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _reasons(graph: Graph) -> str:
    """The reasons of the ops that might have been quantized, for an error message."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        annotation = annotation_of(node)
        if annotation is not None and annotation.tensor_op:
            found[f"'{node.name}' is float: {annotation.reason}"] = None
    shown = list(found)[:5]
    return "; ".join(shown) + (f"; and {len(found) - 5} more" if len(found) > 5 else "") if shown else "it has no ops"
