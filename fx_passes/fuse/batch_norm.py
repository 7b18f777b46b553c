"""BatchNorm folded into the convolution or linear layer before it, in float64 and rounded once.

Every BatchNorm that stays does so for a reason, which the report states.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_passes.fuse.parametrized import is_parametrized, plain_module
from fx_passes.graph.module import set_buffer, set_submodule
from fx_passes.graph.node_meta import inherit_meta
from fx_passes.ops import Role, bind, module_of, op_of
from fx_passes.ops.ranks import infer_ranks

__all__ = ["fold_batch_norm", "fold_batch_norms"]


def fold_batch_norms(gm: GraphModule, report: list[tuple[str, str]]) -> None:
    """Fold, in `gm`, every BatchNorm that can be; add (node name, what was done and why) to `report`.

    `gm` is functional, in eval mode, and the caller's own; modules and tensors that it shares are not changed.
    """
    uses = _Uses(gm)
    for node in list(gm.graph.nodes):
        if _is_batch_norm(node, gm):
            _fold(gm, node, uses, report)


class _Uses:
    """Who calls which module, reads which tensor by name, and writes to which, as the graph was before folding.

    Attributes:
        calls: id of a module -> the nodes that call it.
        reads: path of a module -> a node that reads a tensor of it by name.
        writes: id of a tensor -> a node through which it is written to.
    """

    def __init__(self, gm: GraphModule):
        self.calls: dict[int, list[Node]] = {}
        self.reads: dict[str, Node] = {}
        self.writes: dict[int, Node] = {}
        for node in gm.graph.nodes:
            if node.op == "call_module":
                self.calls.setdefault(id(module_of(node, gm)), []).append(node)
            elif node.op == "get_attr":
                self.reads.setdefault(str(node.target).rpartition(".")[0], node)
                if "aliased" in node.meta:
                    self.writes[id(_attribute(gm, node))] = node

    def written(self, tensors: Any) -> Node | None:
        return next((self.writes[id(t)] for t in tensors if id(t) in self.writes), None)


@dataclass(frozen=True)
class _Affine:
    """What a BatchNorm with fixed statistics does to channel c: x * scale[c] + shift[c], in float64."""

    scale: Tensor
    shift: Tensor


def _is_batch_norm(node: Node, gm: GraphModule) -> bool:
    module = module_of(node, gm) if node.op == "call_module" else None
    op = op_of(node, gm)
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or (op is not None and op.name == "batch_norm")


def _affine_of(gm: GraphModule, node: Node, uses: _Uses) -> _Affine | str:
    """The channel-wise form of a BatchNorm node, or why it has none."""
    if "aliased" in node.meta:
        return node.meta["aliased"]
    if op_of(node, gm) is None:
        return _why_unknown(module_of(node, gm))
    if node.op == "call_module":
        module: Any = module_of(node, gm)
        if module.training:
            return "it is in train mode"
        if module.running_mean is None or module.running_var is None:
            return "it keeps no running statistics, so it uses those of the batch"
        if (writer := uses.written((*module.parameters(), *module.buffers()))) is not None:
            return f"its statistics are changed by '{writer.name}'"
        mean, var, weight, bias, eps = module.running_mean, module.running_var, module.weight, module.bias, module.eps
    else:
        bound = bind(node)
        if bound.get("training", bound.get("use_batch_stats")) is not False:
            return "it is called with training=True, so it uses the statistics of the batch"
        tensors = [bound.get(name) for name in ("running_mean", "running_var", "weight", "bias")]
        if tensors[0] is None or tensors[1] is None:
            return "it is given no running statistics"
        if any(isinstance(t, Node) and (t.op != "get_attr" or "aliased" in t.meta) for t in tensors):
            return "its statistics or weights are computed in the graph"
        mean, var, weight, bias = (_attribute(gm, t) if isinstance(t, Node) else t for t in tensors)
        eps = bound["eps"]
    scale = torch.rsqrt(var.detach().double() + eps)
    if weight is not None:
        scale = scale * weight.detach().double()
    shift = -mean.detach().double() * scale
    if bias is not None:
        shift = shift + bias.detach().double()
    return _Affine(scale, shift)


def _why_unknown(module: nn.Module | None) -> str:
    if module is not None and (module._forward_hooks or module._forward_pre_hooks):
        return "it has hooks"
    return f"{type(module).__name__} is not exactly a class of torch.nn: its forward may do anything"


def _attribute(gm: GraphModule, node: Node) -> Any:
    value: Any = gm
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


# --- folding


def _fold(gm: GraphModule, norm: Node, uses: _Uses, report: list[tuple[str, str]]) -> None:
    affine = _affine_of(gm, norm, uses)
    layer = norm.args[0] if norm.args else bind(norm).get("input")
    reader = norm
    if isinstance(layer, Node) and _flattens_rows(layer, norm, gm):
        reader, (layer, *_) = layer, layer.all_input_nodes
    reason = affine if isinstance(affine, str) else _why_not(gm, layer, reader, affine, uses)
    if reason is not None:
        report.append((norm.name, f"kept: {reason}"))
        return
    assert isinstance(layer, Node) and isinstance(affine, _Affine)
    _guard_rank(gm, layer, norm, rows=reader is not norm)
    if layer.op == "call_module":
        _fold_into_module(gm, layer, affine)
    else:
        _fold_into_function(gm, layer, affine)
    norm.replace_all_uses_with(layer if reader is norm else reader)
    gm.graph.erase_node(norm)
    report.append((norm.name, f"folded into '{layer.name}'"))


def _flattens_rows(node: Node, norm: Node, gm: GraphModule) -> bool:
    """Whether `node` makes the rows (N, L, C) of a linear layer (N * L, C) for `norm`, as LeViT does."""
    op = op_of(node, gm)
    if op is None or op.name != "flatten" or node.op == "call_module" or set(node.users) != {norm}:
        return False
    bound = {**dict(zip(("input", "start_dim", "end_dim"), node.args, strict=False)), **node.kwargs}
    source = bound.get("input")
    before = op_of(source, gm) if isinstance(source, Node) else None
    dims = bound.get("start_dim", 0), bound.get("end_dim", -1)
    return dims in ((0, 1), (0, -2)) and before is not None and before.name == "linear" and bool(node.args)


def _why_not(gm: GraphModule, layer: Any, reader: Node, affine: _Affine, uses: _Uses) -> str | None:
    """Why a BatchNorm cannot be folded into the layer that `reader` (itself or a flatten) takes, or None."""
    if not isinstance(layer, Node) or layer.op in ("placeholder", "get_attr"):
        return "there is no layer before it"
    op = op_of(layer, gm)
    module = module_of(layer, gm) if layer.op == "call_module" else None
    if op is None and isinstance(module, (nn.modules.conv._ConvNd, nn.Linear)):
        return f"'{layer.name}' before it: {_why_unknown(module)}"
    if op is None or op.role is not Role.WEIGHTED or op.name == "convolution":
        return f"'{layer.name}' before it is no convolution or linear layer"
    if "aliased" in layer.meta:
        return f"'{layer.name}' before it: {layer.meta['aliased']}"
    others = [user.name for user in layer.users if user is not reader and not _reads_size_only(user, layer)]
    if others:
        return f"the output of '{layer.name}' is also used by '{others[0]}'"
    reason = _why_not_function(gm, layer) if module is None else _why_not_module(module, layer, uses)
    if reason is None and _channels(gm, layer) != affine.scale.numel():
        return f"it normalises another axis than the channels of '{layer.name}'"
    return reason


def _reads_size_only(node: Node, value: Node) -> bool:
    """Whether a node asks for a shape, rank or dtype of `value`, which folding does not change."""
    op = op_of(node)
    if node.op == "call_method" and node.target in ("reshape_as", "view_as", "expand_as"):
        return node.args[0] is not value
    return op is not None and op.name in ("size", "attribute", "dim", "numel", "len", "is_floating_point")


def _why_not_module(module: nn.Module, layer: Node, uses: _Uses) -> str | None:
    if is_parametrized(module):
        return f"the weight of '{layer.name}' is computed from other parameters"
    again = next((n for n in uses.calls.get(id(module), []) if n is not layer), None)
    if again is not None:
        return f"the layer of '{layer.name}' is called again by '{again.name}'"
    if (reader := uses.reads.get(str(layer.target))) is not None:
        return f"the parameters of '{layer.name}' are read by '{reader.name}'"
    if (writer := uses.written(module.parameters())) is not None:
        return f"the parameters of '{layer.name}' are changed through '{writer.name}'"
    return None


def _why_not_function(gm: GraphModule, layer: Node) -> str | None:
    for parameter in _function_parameters(gm, layer):
        if parameter is not None and (not isinstance(parameter, Node) or parameter.op != "get_attr"):
            return f"the weights of '{layer.name}' are computed in the graph"
        if isinstance(parameter, Node) and "aliased" in parameter.meta:
            return f"the weights of '{layer.name}' are changed in the graph"
    return None


def _function_parameters(gm: GraphModule, layer: Node) -> tuple[Any, Any]:
    bound = bind(layer)
    return bound.get("weight"), bound.get("bias")


def _groups(gm: GraphModule, layer: Node) -> int:
    module: Any = module_of(layer, gm) if layer.op == "call_module" else None
    return getattr(module, "groups", 1) if module is not None else bind(layer).get("groups", 1)


def _weight(gm: GraphModule, layer: Node) -> Tensor:
    module: Any = module_of(layer, gm) if layer.op == "call_module" else None
    return module.weight if module is not None else _attribute(gm, _function_parameters(gm, layer)[0])


def _channels(gm: GraphModule, layer: Node) -> int:
    """Output channels of a layer."""
    op = op_of(layer, gm)
    assert op is not None and op.channel_axis is not None
    return _weight(gm, layer).shape[op.channel_axis] * (_groups(gm, layer) if op.channel_axis == 1 else 1)


def _guard_rank(gm: GraphModule, layer: Node, norm: Node, rows: bool) -> None:
    """BatchNorm works on axis 1, a linear layer on the last one: the same axis only if the tensor has two, or if it has
    three of which the first two are made one between the layers (`rows`).

    For `linear` on (N, L, C) with L == C (or an unbatched `conv1d`) nothing but the rank tells that folding is wrong.
    Where the graph does not prove the rank, it gets a check.
    """
    op = op_of(layer, gm)
    expected = {"linear": 2, "conv1d": 3, "conv_transpose1d": 3}.get(op.name if op else "")
    if rows:
        expected = 3
    if expected is None or infer_ranks(gm).get(layer) == expected:
        return
    graph = gm.graph
    message = f"'{norm.name}' was folded into '{layer.name}' for inputs of {expected} dimensions; this one has others"
    with graph.inserting_before(layer):
        rank = inherit_meta(graph.call_method("dim", (layer.args[0],)), layer)
        fits = inherit_meta(graph.call_function(operator.eq, (rank, expected)), layer)
        inherit_meta(graph.call_function(torch._assert, (fits, message)), layer)


def _folded(gm: GraphModule, layer: Node, bias: Tensor | None, affine: _Affine) -> tuple[Tensor, Tensor]:
    op = op_of(layer, gm)
    assert op is not None
    return fold_batch_norm(
        _weight(gm, layer).detach(),
        bias,
        affine.scale,
        affine.shift,
        _groups(gm, layer),
        transposed=op.channel_axis == 1,
    )


def fold_batch_norm(
    weight: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor, groups: int = 1, *, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """Weight and bias of a layer followed by `y * scale + shift` per output channel.

    Args:
        weight: (out, in / groups, *kernel), or (in, out / groups, *kernel) if `transposed`; any floating dtype.
        bias: (out,) or None.
        scale, shift: (out,), float64.
        groups: of the convolution.
        transposed: whether it is a transposed convolution.

    Returns:
        Both in the dtype and on the device of `weight`, computed in float64.
    """
    wide = weight.double()
    if transposed:
        # Channels of the output run over (group, axis 1); those of the input over (group, rest of axis 0).
        grouped = wide.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
        wide = (grouped * scale.reshape(groups, 1, weight.shape[1], 1)).reshape(weight.shape)
    else:
        wide = wide * scale.reshape(-1, *[1] * (weight.dim() - 1))
    new_bias = shift if bias is None else shift + bias.double() * scale
    return wide.to(weight.dtype), new_bias.to(weight.dtype)


def _fold_into_module(gm: GraphModule, layer: Node, affine: _Affine) -> None:
    module: Any = module_of(layer, gm)
    weight, bias = _folded(gm, layer, None if module.bias is None else module.bias.detach(), affine)
    new: Any = plain_module(module)
    new._parameters["weight"] = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
    new._parameters["bias"] = nn.Parameter(bias, requires_grad=module.weight.requires_grad)
    set_submodule(gm, str(layer.target), new)


def _fold_into_function(gm: GraphModule, layer: Node, affine: _Affine) -> None:
    weight_node, bias_node = _function_parameters(gm, layer)
    old_bias = None if bias_node is None else _attribute(gm, bias_node).detach()
    weight, bias = _folded(gm, layer, old_bias, affine)
    original = _attribute(gm, weight_node)
    new = {}
    with gm.graph.inserting_before(layer):
        for name, tensor in (("weight", weight), ("bias", bias)):
            path = f"{layer.name}_folded.{name}"
            set_buffer(gm, path, nn.Parameter(tensor, requires_grad=original.requires_grad))
            new[name] = inherit_meta(gm.graph.get_attr(path), layer)
    op = op_of(layer, gm)
    assert op is not None and op.weight == 1 and op.bias == 2
    rest = {k: v for k, v in layer.kwargs.items() if k not in ("weight", "bias")}
    first = layer.args[:1]
    layer.args = (*first, new["weight"], new["bias"], *layer.args[3:]) if first else ()
    layer.kwargs = rest if first else {**rest, **new}
