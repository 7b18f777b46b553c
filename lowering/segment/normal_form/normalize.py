"""From the graph that torch.export gives to the normal form that `to_aten` promises, one small rewrite each.

A rewrite edits the graph of the freshly exported program, which nobody else holds. It keeps `meta`: a call that is
replaced in place keeps its value, so `val` stays right without running the graph again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from lowering.segment.normal_form.edit import (
    arguments,
    bypass,
    inline,
    insert,
    is_static,
    replace_call,
    same_shape,
    shape_of,
    take_origin,
)
from lowering.segment.normal_form.masks import choose_by_masks
from lowering.segment.normal_form.ranks import refuse_ranks_by_size
from lowering.segment.normal_form.shapes import (
    AXIS_ORDERS,
    RESHAPES,
    normalize_axis_orders,
    normalize_reshapes,
    simplify_expands,
)
from lowering.segment.normal_form.state import LiftedState
from lowering.segment.normal_form.written_out import written_out

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from lowering.segment.program import AtenProgram, TensorSpec

__all__ = ["normalize"]

aten = torch.ops.aten


def normalize(exported: ExportedProgram, inputs: list[TensorSpec], segment: GraphModule) -> AtenProgram:
    """Bring an exported, functional program into normal form and describe its interface."""
    state = LiftedState(exported)
    graph = state.gm.graph
    _complete_meta(graph)
    _last_states_like_first(graph)
    _remove_assertions(graph)
    refuse_ranks_by_size(graph, exported, inputs)
    _expand_composites(graph)
    choose_by_masks(graph)
    for rewrite in (
        _normalize_casts,
        _remove_identities,
        normalize_reshapes,
        normalize_axis_orders,
        simplify_expands,
        _remove_identities,
        _normalize_adaptive_pooling,
    ):
        rewrite(graph)
    _affine_batch_norms(state)
    state.merge_equal_constants()
    graph.eliminate_dead_code()
    return state.finish(inputs, segment)


def _complete_meta(graph: Graph) -> None:
    """`source`, `module_path` and `fx_node` from `custom`; a node without them takes an input's or a user's."""
    nodes = list(graph.nodes)
    for node in nodes:
        node.meta.update(node.meta.pop("custom", None) or {})
        node.meta.pop("stack_trace", None)  # absolute paths, and frames inside torch
    for node in nodes:
        if node.op != "call_function" or "fx_node" in node.meta:
            continue
        for other in (*node.all_input_nodes, *node.users):
            if other.op == "call_function" and "fx_node" in other.meta:
                take_origin(node, other)
                break


_RECURRENT = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


def _last_states_like_first(graph: Graph) -> None:
    """Last states have the shape of the first ones; of a free length torch's fake kernels give another batch."""
    for target in _RECURRENT:
        for node in graph.find_nodes(op="call_function", target=target):
            first = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
            states = [state.meta["val"] for state in first]
            node.meta["val"] = (node.meta["val"][0], *states)
            for user in node.users:
                if user.target is operator.getitem and user.args[1] > 0:
                    user.meta["val"] = states[user.args[1] - 1]


_ASSERTIONS = {
    aten._assert_tensor_metadata.default,
    aten._assert_async.msg,
    aten._assert_async.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}


def _remove_assertions(graph: Graph) -> None:
    """Checks of metadata, ranges and guards: what they check is the caller's business (`TensorSpec`)."""
    for node in reversed(graph.nodes):
        guards = node.op == "call_module" and node.target == "_guards_fn"
        if guards or (node.op == "call_function" and node.target in _ASSERTIONS):
            graph.erase_node(node)


_COPIES = {
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.positive.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
}
_DROPOUTS = {
    aten.dropout.default,
    aten.alpha_dropout.default,
    aten.feature_dropout.default,
    aten.feature_alpha_dropout.default,
}


def _remove_identities(graph: Graph) -> None:
    """Copies, dropout in eval, and whatever gives its input: full slices, expand, permute and reshape to the same."""
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and _is_identity(node):
            bypass(node, node.args[0])


def _is_identity(node: Node) -> bool:
    target = node.target
    if target in _COPIES:
        return True
    if target in _DROPOUTS:
        arg = arguments(node)
        return not arg["train"] or arg["p"] == 0
    if target in (aten.expand.default, aten.reshape.default):
        return same_shape(shape_of(node), shape_of(node.args[0]))
    if target is aten.permute.default:
        order = arguments(node)["dims"]
        return list(order) == list(range(len(order)))
    if target is aten.slice.Tensor:
        return arguments(node)["step"] == 1 and same_shape(shape_of(node), shape_of(node.args[0]))
    if target in (aten.squeeze.dims, aten.squeeze.dim, aten.squeeze.default):
        return len(shape_of(node)) == len(shape_of(node.args[0]))
    return False


_CASTS = {
    aten._to_copy.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.to.prim_dtype,
    aten.type_as.default,
}


def _normalize_casts(graph: Graph) -> None:
    """Every conversion is `_to_copy(x, dtype=...)`, and only where the dtype changes."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _CASTS:
            continue
        x, dtype = node.args[0], node.meta["val"].dtype
        if x.meta["val"].dtype == dtype:
            bypass(node, x)
        else:
            replace_call(node, aten._to_copy.default, x, dtype=dtype)


def _expand_composites(graph: Graph) -> None:
    """Replace composite view ops (chunk, narrow, ...) and batch statistics by torch's own decomposition, node by node.

    The composites are those that `run_decompositions({})` takes apart too: an op that is CompositeImplicit and whose
    result aliases its argument. The others (linear, layer_norm, hardswish ...) stay whole.
    """
    whole = RESHAPES | _CASTS | _COPIES | set(AXIS_ORDERS) | {aten.expand_as.default}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or node.target in whole:
            continue
        if (decomposition := _decomposition(node, node.target)) is not None:
            inline(node, decomposition)


def _decomposition(node: Node, op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    if (function := written_out(node)) is not None:
        return function
    if op is aten.batch_norm.default:
        arg = arguments(node)
        return _batch_statistics if arg["training"] or arg["running_mean"] is None else None
    aliases = any(a.alias_info is not None for a in op._schema.arguments)
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    return op.decompose if aliases and composite else None


def _batch_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any, eps: float = 1e-5, **_: Any
) -> Tensor:
    """batch_norm over the batch's own statistics, as `torch.nn.functional.batch_norm` defines it (biased variance)."""
    eps = rest[4] if len(rest) > 4 else eps
    axes = [0, *range(2, x.dim())]
    shape = [1, -1] + [1] * (x.dim() - 2)
    centred = x - x.mean(axes, keepdim=True)
    y = centred * torch.rsqrt((centred * centred).mean(axes, keepdim=True) + eps)
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


_ADAPTIVE_POOLS = {
    aten.adaptive_avg_pool1d.default: (1, aten.avg_pool1d.default),
    aten.adaptive_avg_pool2d.default: (2, aten.avg_pool2d.default),
    aten._adaptive_avg_pool2d.default: (2, aten.avg_pool2d.default),
    aten.adaptive_avg_pool3d.default: (3, aten.avg_pool3d.default),
    aten._adaptive_avg_pool3d.default: (3, aten.avg_pool3d.default),
}


def _normalize_adaptive_pooling(graph: Graph) -> None:
    """Adaptive average pooling whose windows are equal is `avg_pool`; to one element of a free size, it is `mean`."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _ADAPTIVE_POOLS:
            continue
        spatial, pool = _ADAPTIVE_POOLS[node.target]
        x = node.args[0]
        before, after = shape_of(x)[-spatial:], shape_of(node)[-spatial:]
        if same_shape(before, after):
            bypass(node, x)
        elif all(is_static(b) and b % a == 0 for b, a in zip(before, after, strict=True)):
            kernel = [int(b) // int(a) for b, a in zip(before, after, strict=True)]
            replace_call(node, pool, x, kernel, kernel)
        elif all(is_static(a) and a == 1 for a in after):
            replace_call(node, aten.mean.dim, x, list(range(-spatial, 0)), True)


def _affine_batch_norms(state: LiftedState) -> None:
    """batch_norm with fixed statistics is `x * scale + shift`, the two computed now (as torch's CPU kernel does)."""
    graph = state.gm.graph
    for node in list(graph.nodes):
        if node.target not in (aten.batch_norm.default, aten._native_batch_norm_legit_no_training.default):
            continue
        arg = arguments(node)
        sources = [arg[key] for key in ("weight", "bias", "running_mean", "running_var")]
        if any(source is not None and state.value(source) is None for source in sources):
            continue  # statistics computed by the model itself, or changed from call to call
        weight, bias, mean, var = (None if source is None else state.value(source) for source in sources)
        assert mean is not None and var is not None  # batch statistics are expanded before
        scale = torch.rsqrt(var + arg["eps"])
        scale = scale if weight is None else scale * weight
        shift = -mean * scale
        shift = shift if bias is None else shift + bias
        shape = [-1] + [1] * (len(shape_of(arg["input"])) - 2)
        base = state.name(sources[2]).rpartition(".")[0] or state.name(sources[2])
        scale_node = state.add(f"{base}.affine_scale", scale.reshape(shape))
        shift_node = state.add(f"{base}.affine_shift", shift.reshape(shape))
        scaled = insert(graph, node, aten.mul.Tensor, (arg["input"], scale_node))
        if node.target is aten.batch_norm.default:
            replace_call(node, aten.add.Tensor, scaled, shift_node)
            continue
        shifted = insert(graph, node, aten.add.Tensor, (scaled, shift_node))
        for user in list(node.users):  # (output, empty, empty)
            bypass(user, shifted)
        graph.erase_node(node)
