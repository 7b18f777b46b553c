"""Which values of a float graph have channels that can be scaled together, and which layers write and read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from torch.fx import GraphModule, Node

from fx_passes.ops import Role, bind, module_of, op_of
from fx_passes.quantize.weights.layer import Layer, layer_of
from fx_passes.quantize.weights.parameters import shared_parameters

__all__ = ["ChannelGroup", "channel_groups", "upper_bound"]

# f(a x) = a f(x) for a > 0, channel by channel.
_HOMOGENEOUS = frozenset(
    ["relu", "leaky_relu", "prelu", "identity", "clone", "detach", "contiguous", "interpolate"]
    + [f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_max", "adaptive_avg") for n in (1, 2, 3)]
)
# Of these, the ones that also work on (N, channels), whose channels are the last axis.
_ANY_RANK = frozenset(["relu", "leaky_relu", "prelu", "identity", "clone", "detach", "contiguous"])
_CLIPS = frozenset(["relu6", "hardtanh", "clamp"])


@dataclass(frozen=True)
class Norm:
    """Weight and bias of a normalization over the last axis."""

    weight: Tensor
    bias: Tensor | None


@dataclass
class ChannelGroup:
    """Values whose channels are scaled by the same factors.

    Attributes:
        values: the nodes that have them.
        writers: layers whose output channels they are.
        norms: LayerNorms, or others of one normalized dimension with a weight, whose output they are.
        readers: layers that read them; the number says how many neighbouring inputs of the layer belong to one channel
            (a `flatten` is between).
        clips: nodes that cut the values at a number, with that number.
        reason: why they can't be scaled, or None.
    """

    values: list[Node] = field(default_factory=list)
    writers: dict[Node, Layer] = field(default_factory=dict)
    norms: dict[Node, Norm] = field(default_factory=dict)
    readers: dict[Node, tuple[Layer, int]] = field(default_factory=dict)
    clips: dict[Node, float] = field(default_factory=dict)
    reason: str | None = None


@dataclass
class _Value:
    """One value on its way: its group, where its channels are, and how many neighbours make one channel."""

    group: ChannelGroup
    axis: Literal["second", "last"]
    repeat: int | None  # None: behind a flatten, known at the layer that reads it


def channel_groups(
    gm: GraphModule, takes_part: Callable[[Node], bool], *, clips: bool = False, norms: bool = False
) -> list[ChannelGroup]:
    """The groups of a fused graph, those that can't be scaled with the reason.

    Args:
        gm: functional, BatchNorm folded.
        takes_part: whether a layer's weight may be changed.
        clips: whether values may be scaled that a ReLU6 cuts, which then has to cut every channel elsewhere.
        norms: whether LayerNorm and RMSNorm write values that may be scaled.
    """
    return _Search(gm, takes_part, clips, norms).run()


class _Search:
    """One sweep over the graph."""

    def __init__(self, gm: GraphModule, takes_part: Callable[[Node], bool], clips: bool, norms: bool):
        self.gm, self.takes_part, self.clips, self.norms = gm, takes_part, clips, norms
        self.values: dict[Node, _Value] = {}
        self.shared = shared_parameters(gm)
        self.groups: list[ChannelGroup] = []

    def run(self) -> list[ChannelGroup]:
        for node in self.gm.graph.nodes:
            if not any(step(node) for step in (self._layer, self._norm, self._passes, self._add)):
                self._block(node)
        return self.groups

    def _layer(self, node: Node) -> bool:
        layer = layer_of(self.gm, node)
        if isinstance(layer, str):
            return False
        if self._shares(layer) or "aliased" in node.meta or not self.takes_part(node):
            return False
        axis: Literal["second", "last"] = "last" if layer.op == "linear" else "second"
        source = self.values.get(layer.input)
        if source is not None:
            repeat = source.repeat or inputs_of(layer) // max(outputs_of(source.group), 1)
            if source.axis != axis or repeat * outputs_of(source.group) != inputs_of(layer):
                source.group.reason = source.group.reason or f"'{node.name}' reads them along another axis"
            source.group.readers[node] = layer, repeat
        group = ChannelGroup(writers={node: layer})
        self.groups.append(group)
        self._enter(node, _Value(group, axis, 1))
        return True

    def _norm(self, node: Node) -> bool:
        norm = norm_of(self.gm, node) if self.norms else None
        if norm is None or "aliased" in node.meta or self._shares(norm):
            return False
        self._block(node)  # what it reads
        group = ChannelGroup(norms={node: norm})
        self.groups.append(group)
        self._enter(node, _Value(group, "last", 1))
        return True

    def _enter(self, node: Node, value: _Value) -> None:
        self.values[node] = value
        value.group.values.append(node)

    def _passes(self, node: Node) -> bool:
        op = op_of(node, self.gm)
        inputs = node.all_input_nodes
        value = self.values.get(inputs[0]) if inputs and node.args and node.args[0] is inputs[0] else None
        if op is None or value is None or "aliased" in node.meta:
            return False
        if op.role is Role.SHAPE:
            return True
        if op.name == "flatten" and value.axis == "second" and _flattens_all(node, self.gm):
            self._enter(node, _Value(value.group, "last", None))
            return True
        if self.clips and op.name in _CLIPS and (bound := upper_bound(node, self.gm)) is not None:
            value.group.clips[node] = bound
        elif op.name not in _HOMOGENEOUS or (value.axis == "last" and op.name not in _ANY_RANK):
            return False
        if len(inputs) > 1 and op.name != "prelu":
            return False
        self._enter(node, value)
        return True

    def _add(self, node: Node) -> bool:
        op = op_of(node, self.gm)
        if op is None or op.name not in ("add", "sub") or node.kwargs or len(node.args) != 2 or "aliased" in node.meta:
            return False
        found = [self.values.get(a) if isinstance(a, Node) else None for a in node.args]
        a, b = found
        if a is None or b is None or (a.axis, a.repeat) != (b.axis, b.repeat) or a.repeat is None:
            return False
        if outputs_of(a.group) != outputs_of(b.group):
            return False
        self._enter(node, a)
        if a.group is not b.group:
            self._join(a.group, b.group)
        return True

    def _join(self, into: ChannelGroup, other: ChannelGroup) -> None:
        into.values.extend(other.values)
        into.writers.update(other.writers)
        into.norms.update(other.norms)
        into.readers.update(other.readers)
        into.clips.update(other.clips)
        into.reason = into.reason or other.reason
        self.groups.remove(other)
        for value in self.values.values():
            if value.group is other:
                value.group = into

    def _block(self, node: Node) -> None:
        for value in node.all_input_nodes:
            if value in self.values:
                group = self.values[value].group
                group.reason = group.reason or f"'{node.name}' reads them and is not scaled along"

    def _shares(self, layer: Layer | Norm) -> bool:
        return any(t is not None and t.data_ptr() in self.shared for t in (layer.weight, layer.bias))


def norm_of(gm: GraphModule, node: Node) -> Norm | None:
    """The LayerNorm or RMSNorm over the last axis that `node` computes with parameters of its own, else None."""
    op = op_of(node, gm)
    if op is None or op.name not in ("layer_norm", "rms_norm"):
        return None
    if node.op == "call_module":
        module: Any = module_of(node, gm)
        weight, bias, shape = module.weight, getattr(module, "bias", None), module.normalized_shape
        return Norm(weight.detach(), None if bias is None else bias.detach()) if fits_last(weight, shape) else None
    given = bind(node)
    weight, bias = (parameter_of(gm, given.get(name)) for name in ("weight", "bias"))
    if weight is None or (bias is None) != (given.get("bias") is None):
        return None
    return Norm(weight, bias) if fits_last(weight, given.get("normalized_shape")) else None


def fits_last(weight: Tensor | None, shape: Any) -> bool:
    return weight is not None and isinstance(shape, (tuple, list)) and len(shape) == 1


def parameter_of(gm: GraphModule, node: Any) -> Tensor | None:
    """The float tensor that a get_attr node reads, else None."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value: Any = gm
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value.detach() if isinstance(value, Tensor) and value.is_floating_point() else None


def outputs_of(group: ChannelGroup) -> int:
    """Number of channels of a group's values."""
    if group.norms:
        return next(iter(group.norms.values())).weight.numel()
    layer = next(iter(group.writers.values()))
    return layer.weight.shape[1] * layer.groups if layer.transposed else layer.weight.shape[0]


def inputs_of(layer: Layer) -> int:
    """Number of input channels of a layer."""
    return layer.weight.shape[0] if layer.transposed else layer.weight.shape[1] * layer.groups


def by_channel(layer: Layer, weight: Tensor) -> Tensor:
    """A view or copy of the weight as (groups, out / groups, in / groups, window)."""
    if layer.transposed:
        grouped = weight.reshape(layer.groups, weight.shape[0] // layer.groups, weight.shape[1], -1)
        return grouped.transpose(1, 2)
    return weight.reshape(layer.groups, weight.shape[0] // layer.groups, weight.shape[1], -1)


def upper_bound(node: Node, gm: GraphModule) -> float | None:
    """Where an activation that is 0 below 0 and the identity above cuts its input; None for others."""
    op = op_of(node, gm)
    name = op.name if op else ""
    if name == "relu6":
        return 6.0
    low_name, high_name = ("min_val", "max_val") if name == "hardtanh" else ("min", "max")
    arguments: Any = vars(module_of(node, gm)) if node.op == "call_module" else bind(node)
    low, high = arguments.get(low_name), arguments.get(high_name)
    fits = low == 0 and isinstance(high, (int, float)) and high > 0
    return float(high) if fits and name in _CLIPS else None


def _flattens_all(node: Node, gm: GraphModule) -> bool:
    """Whether all dimensions but the first become one."""
    arguments: Any = vars(module_of(node, gm)) if node.op == "call_module" else bind(node)
    return arguments.get("start_dim") == 1 and arguments.get("end_dim") == -1
