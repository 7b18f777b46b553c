"""From the graph that torch.export gives to the normal form that `lowering.aten` promises, one small rewrite each.

A rewrite edits the graph of the freshly exported program, which nobody else holds. It keeps `meta`: a node made in
place of another one takes over its meta, so `val` stays right without running the graph again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from lowering.aten_state import LiftedState

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from lowering.aten import AtenProgram, TensorSpec

__all__ = ["normalize"]

aten = torch.ops.aten


def normalize(exported: ExportedProgram, inputs: list[TensorSpec], segment: GraphModule) -> AtenProgram:
    """Bring an exported, functional program into normal form and describe its interface."""
    state = LiftedState(exported)
    graph = state.gm.graph
    _complete_meta(graph)
    _remove_assertions(state.gm)
    _expand_composites(state.gm)
    for rewrite in (
        _normalize_casts,
        _remove_identities,
        _normalize_reshapes,
        _normalize_axis_orders,
        _simplify_sizes,
        _remove_identities,
        _normalize_adaptive_pooling,
    ):
        rewrite(graph)
    _affine_batch_norms(state)
    state.merge_equal_constants()
    graph.eliminate_dead_code()
    return state.finish(inputs, segment)


# ----------------------------------------------------------------------------------------------------------------- meta


def _complete_meta(graph: Graph) -> None:
    """`source`, `module_path` and `fx_node` from `custom`; a node without them takes its first user's or input's."""
    nodes = list(graph.nodes)
    for node in nodes:
        node.meta.update(node.meta.pop("custom", None) or {})
        node.meta.pop("stack_trace", None)  # absolute paths, and frames inside torch
    for node in nodes:
        if node.op != "call_function" or "fx_node" in node.meta:
            continue
        for other in (*node.all_input_nodes, *node.users):
            if other.op == "call_function" and "fx_node" in other.meta:
                _take_origin(node, other)
                break


def _take_origin(new: Node, old: Node) -> None:
    for key in ("source", "module_path", "fx_node"):
        if key in old.meta:
            new.meta.setdefault(key, old.meta[key])


def _insert(graph: Graph, before: Node, target: Any, args: tuple, val: Any = None, kwargs: dict | None = None) -> Node:
    """A call before `before`, on its behalf. `val` None: computed from the inputs' fake values."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs or {})
    _take_origin(node, before)
    if val is None:
        fake_args, fake_kwargs = map_arg((args, kwargs or {}), lambda n: n.meta["val"])
        val = target(*fake_args, **fake_kwargs)
    node.meta["val"] = val
    return node


def _replace(node: Node, target: Any, args: tuple, kwargs: dict | None = None) -> None:
    """Make `node` another call with the same value."""
    node.target, node.args, node.kwargs = target, args, kwargs or {}


def _bypass(node: Node, value: Node) -> None:
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def _shape(node: Node) -> Sequence[Any]:
    return node.meta["val"].shape


def _static(size: Any) -> bool:
    return not isinstance(size, torch.SymInt) or not size.node.expr.free_symbols


def _same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal, without adding a guard."""
    if len(a) != len(b):
        return False
    return all(
        (int(x) == int(y)) if _static(x) and _static(y) else _expr(x) == _expr(y) for x, y in zip(a, b, strict=True)
    )


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


# ------------------------------------------------------------------------------------------------------------- removals

_ASSERTIONS = {
    aten._assert_tensor_metadata.default,
    aten._assert_async.msg,
    aten._assert_async.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}


def _remove_assertions(gm: GraphModule) -> None:
    """Checks of metadata, ranges and guards: what they check is the caller's business (`TensorSpec`)."""
    for node in reversed(gm.graph.nodes):
        guards = node.op == "call_module" and str(node.target) == "_guards_fn"
        if guards or (node.op == "call_function" and node.target in _ASSERTIONS):
            gm.graph.erase_node(node)


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
    aten.native_dropout.default,
}


def _remove_identities(graph: Graph) -> None:
    """Copies, dropout in eval, and calls that give their input: full slices, expand, permute and reshape to the same."""
    for node in graph.nodes:
        if node.op == "call_function" and _is_identity(node):
            _bypass(node, node.args[0])


def _is_identity(node: Node) -> bool:
    target, args = node.target, node.args
    if target in _COPIES:
        return True
    if target in _DROPOUTS:
        return not args[2] or args[1] == 0
    if target in (aten.expand.default, aten.reshape.default):
        return _same_shape(_shape(node), _shape(args[0]))
    if target is aten.permute.default:
        return list(args[1]) == list(range(len(args[1])))
    if target is aten.slice.Tensor:
        step = args[4] if len(args) > 4 else node.kwargs.get("step", 1)
        return step == 1 and _same_shape(_shape(node), _shape(args[0]))
    if target in (aten.squeeze.dims, aten.squeeze.dim, aten.squeeze.default):
        return len(_shape(node)) == len(_shape(args[0]))
    return False


# ---------------------------------------------------------------------------------------------------------------- casts

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
        x = node.args[0]
        dtype = node.meta["val"].dtype
        if x.meta["val"].dtype == dtype:
            _bypass(node, x)
        else:
            _replace(node, aten._to_copy.default, (x,), {"dtype": dtype})


# --------------------------------------------------------------------------------------------------------------- shapes

_RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_copy.default,
    aten.view_copy.default,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
}


def _normalize_reshapes(graph: Graph) -> None:
    """Everything that keeps the elements' order is `reshape(x, sizes)`: a `view` may not fit once copies are gone."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _RESHAPES:
            sizes = _target_sizes(node)
            _replace(node, aten.reshape.default, (node.args[0], sizes))


def _target_sizes(node: Node) -> list[Any]:
    """Ints where known, one -1 where a single size is free, else the sizes as nodes."""
    shape = _shape(node)
    free = [i for i, size in enumerate(shape) if not _static(size)]
    sizes: list[Any] = [int(size) if _static(size) else -1 for size in shape]
    if len(free) <= 1:
        return sizes
    if (
        isinstance(node.args[1] if len(node.args) > 1 else None, (list, tuple))
        and node.target is not aten.unflatten.int
    ):
        given = list(node.args[1])
    else:
        given = _sizes_of(node)
    return [given[i] if i in free else sizes[i] for i in range(len(shape))]


def _sizes_of(node: Node) -> list[Any]:
    """The sizes of a flatten, unflatten, view_as as nodes: read from a tensor that has them, at most one is -1."""
    x, *rest = node.args
    source = rest[0] if rest and isinstance(rest[0], Node) else x
    available = {_expr(size): i for i, size in reversed(list(enumerate(_shape(source))))}
    sizes: list[Any] = []
    for size in _shape(node):
        if _static(size):
            sizes.append(int(size))
        elif _expr(size) in available:
            index = available[_expr(size)]
            sizes.append(_insert(node.graph, node, aten.sym_size.int, (source, index), size))
        else:
            sizes.append(-1)
    if sizes.count(-1) > 1:
        raise AssertionError(f"{node.format_node()}: more than one size of {tuple(_shape(node))} is not its input's")
    return sizes


def _normalize_axis_orders(graph: Graph) -> None:
    """transpose, t, T, mT, movedim, swapaxes are `permute(x, order)`; squeezes are `squeeze.dims`."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if (order := _axis_order(node)) is not None:
            _replace(node, aten.permute.default, (node.args[0], order))
        elif node.target in (aten.squeeze.dim, aten.squeeze.default) and len(_shape(node)) < len(_shape(node.args[0])):
            _replace(node, aten.squeeze.dims, (node.args[0], _squeezed(node)))


def _squeezed(node: Node) -> list[int]:
    shape = _shape(node.args[0])
    if node.target is aten.squeeze.dim:
        return [int(node.args[1]) % len(shape)]
    return [i for i, size in enumerate(shape) if _static(size) and int(size) == 1]


def _axis_order(node: Node) -> list[int] | None:
    target, args = node.target, node.args
    if target not in _AXIS_ORDERS:
        return None
    rank = len(_shape(args[0]))
    return _AXIS_ORDERS[target](rank, *args[1:])


def _swapped(rank: int, a: int, b: int) -> list[int]:
    order = list(range(rank))
    order[a % rank], order[b % rank] = order[b % rank], order[a % rank]
    return order


def _moved(rank: int, source: int | Sequence[int], destination: int | Sequence[int]) -> list[int]:
    sources = [s % rank for s in ([source] if isinstance(source, int) else source)]
    places = [d % rank for d in ([destination] if isinstance(destination, int) else destination)]
    order: list[int] = [-1] * rank
    for s, d in zip(sources, places, strict=True):
        order[d] = s
    rest = iter(i for i in range(rank) if i not in sources)
    return [next(rest) if i < 0 else i for i in order]


def _last_two(rank: int) -> list[int]:
    return _swapped(rank, -1, -2) if rank > 1 else list(range(rank))


_AXIS_ORDERS: dict[Any, Callable[..., list[int]]] = {
    aten.permute.default: lambda rank, dims: [d % rank for d in dims] if rank else [],
    aten.transpose.int: _swapped,
    aten.swapaxes.default: _swapped,
    aten.swapdims.default: _swapped,
    aten.movedim.int: _moved,
    aten.movedim.intlist: _moved,
    aten.moveaxis.int: _moved,
    aten.moveaxis.intlist: _moved,
    aten.t.default: _last_two,
    aten.mT.default: _last_two,
    aten.numpy_T.default: lambda rank: list(reversed(range(rank))),
}


def _simplify_sizes(graph: Graph) -> None:
    """`expand` says -1 where it keeps a size; `sym_size` of a known size is a number."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is aten.expand_as.default:
            _replace(node, aten.expand.default, (node.args[0], _sizes_of(node)))
        if node.target is aten.expand.default:
            old, new = list(_shape(node.args[0])), list(_shape(node))
            lead = len(new) - len(old)
            sizes = list(node.args[1])
            for i, size in enumerate(new):
                if i >= lead and _expr(old[i - lead]) == _expr(size):
                    sizes[i] = -1
                elif _static(size):
                    sizes[i] = int(size)
            _replace(node, aten.expand.default, (node.args[0], sizes))


# ------------------------------------------------------------------------------------------------------- decompositions


def _expand_composites(gm: GraphModule) -> None:
    """Replace composite view ops (chunk, narrow, ...) and batch statistics by torch's own decomposition, node by node.

    The composites are those that `run_decompositions({})` takes apart too: an op that is CompositeImplicit and whose
    result aliases its argument. The others (linear, layer_norm, hardswish ...) stay whole.
    """
    whole = _RESHAPES | _CASTS | _COPIES | set(_AXIS_ORDERS) | {aten.expand_as.default}
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or node.target in whole:
            continue
        if (decomposition := _decomposition(node)) is not None:
            _inline(node, decomposition)


def _decomposition(node: Node) -> Callable[..., Any] | None:
    op = node.target
    if op is aten.batch_norm.default and (node.args[5] or node.args[3] is None):
        return _batch_statistics
    aliases = any(a.alias_info is not None for a in op._schema.arguments)
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    return op.decompose if aliases and composite else None


def _batch_statistics(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Tensor:
    """batch_norm over the batch's own statistics, as `torch.nn.functional.batch_norm` defines it (biased variance)."""
    axes = [0, *range(2, x.dim())]
    shape = [1, -1] + [1] * (x.dim() - 2)
    centred = x - x.mean(axes, keepdim=True)
    y = centred * torch.rsqrt((centred * centred).mean(axes, keepdim=True) + eps)
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def _inline(node: Node, decomposition: Callable[..., Any]) -> None:
    """Trace `decomposition` on the node's fake inputs and put the result in the node's place."""
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = node.all_input_nodes
    position = {n: i for i, n in enumerate(inputs)}

    def call(*values: Any) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[position[n]])
        return decomposition(*args, **kwargs)

    traced = make_fx(call)(*(n.meta["val"] for n in inputs))
    env = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    graph = node.graph
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "call_function":
                new = graph.node_copy(inner, lambda n: env[n])
                new.meta = {"val": inner.meta["val"]}
                _take_origin(new, node)
                env[inner] = new
    result = map_arg(traced.graph.output_node().args[0], lambda n: env[n])
    if isinstance(result, Node):
        _bypass(node, result)
        return
    for user in list(node.users):  # a list result: its users are getitems
        assert user.target is operator.getitem
        _bypass(user, result[user.args[1]])
    graph.erase_node(node)


def _normalize_adaptive_pooling(graph: Graph) -> None:
    """Adaptive average pooling whose windows are equal is `avg_pool`; to one element of a free size, it is `mean`."""
    pools = {
        aten.adaptive_avg_pool1d.default: (1, aten.avg_pool1d.default),
        aten.adaptive_avg_pool2d.default: (2, aten.avg_pool2d.default),
        aten._adaptive_avg_pool2d.default: (2, aten.avg_pool2d.default),
        aten.adaptive_avg_pool3d.default: (3, aten.avg_pool3d.default),
        aten._adaptive_avg_pool3d.default: (3, aten.avg_pool3d.default),
    }
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in pools:
            continue
        spatial, pool = pools[node.target]
        x = node.args[0]
        before, after = _shape(x)[-spatial:], _shape(node)[-spatial:]
        if _same_shape(before, after):
            _bypass(node, x)
        elif all(map(_static, (*before, *after))) and all(
            int(b) % int(a) == 0 for b, a in zip(before, after, strict=True)
        ):
            kernel = [int(b) // int(a) for b, a in zip(before, after, strict=True)]
            _replace(node, pool, (x, kernel, kernel))
        elif prod(int(a) if _static(a) else 0 for a in after) == 1:
            _replace(node, aten.mean.dim, (x, list(range(-spatial, 0)), True))


def _affine_batch_norms(state: LiftedState) -> None:
    """batch_norm with fixed statistics is `x * scale + shift`, the two computed now (as torch's CPU kernel does)."""
    graph = state.gm.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.batch_norm.default:
            x, weight, bias, mean, var, _, _, eps, *_ = node.args
        elif node.target is aten._native_batch_norm_legit_no_training.default:
            x, weight, bias, mean, var, _, eps = node.args
        else:
            continue
        values = [state.value(n) if n is not None else None for n in (weight, bias, mean, var)]
        if any(v is None for v, n in zip(values, (weight, bias, mean, var), strict=True) if n is not None):
            continue  # statistics computed by the model itself
        scale, shift = _affine(*values, eps)
        shape = [-1] + [1] * (len(_shape(x)) - 2)
        base = state.name(mean).rpartition(".")[0] or state.name(mean)
        scale_node = state.add(f"{base}.affine_scale", scale.reshape(shape))
        shift_node = state.add(f"{base}.affine_shift", shift.reshape(shape))
        scaled = _insert(graph, node, aten.mul.Tensor, (x, scale_node))
        if node.target is aten.batch_norm.default:
            _replace(node, aten.add.Tensor, (scaled, shift_node))
        else:
            shifted = _insert(graph, node, aten.add.Tensor, (scaled, shift_node))
            for user in list(node.users):
                _bypass(user, shifted)
            graph.erase_node(node)


def _affine(weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(var + eps)
    scale = scale if weight is None else scale * weight
    shift = -mean * scale
    return scale, shift if bias is None else shift + bias
