"""Normal forms of what moves data: reshape, permute, squeeze, expand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from lowering.segment.normal_form.edit import arguments, expression, insert, is_static, replace_call, shape_of

__all__ = ["AXIS_ORDERS", "RESHAPES", "normalize_axis_orders", "normalize_reshapes", "simplify_expands"]

aten = torch.ops.aten

RESHAPES = {
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


def normalize_reshapes(graph: Graph) -> None:
    """Everything that keeps the elements' order is `reshape(x, sizes)`: a `view` may not fit once copies are gone."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in RESHAPES:
            replace_call(node, aten.reshape.default, node.args[0], _target_sizes(node))


def _target_sizes(node: Node) -> list[Any]:
    """Ints where known, one -1 where a single size is free, else the sizes as nodes."""
    shape = shape_of(node)
    free = [i for i, size in enumerate(shape) if not is_static(size)]
    sizes: list[Any] = [int(size) if is_static(size) else -1 for size in shape]
    if len(free) <= 1:
        return sizes
    arg = arguments(node)
    given = arg.get("size", arg.get("shape"))
    given = _sizes_from_inputs(node) if given is None else list(given)
    return [given[i] if i in free else sizes[i] for i in range(len(shape))]


def _sizes_from_inputs(node: Node) -> list[Any]:
    """Every free size of the result as a node that reads it from an input that has it; at most one is left as -1."""
    known: dict[Any, tuple[Node, int]] = {}
    for source in node.all_input_nodes:
        if isinstance(source.meta["val"], torch.Tensor):
            for i, size in enumerate(shape_of(source)):
                known.setdefault(expression(size), (source, i))
    sizes: list[Any] = []
    for size in shape_of(node):
        if is_static(size):
            sizes.append(int(size))
        elif (found := known.get(expression(size))) is not None:
            sizes.append(insert(node.graph, node, aten.sym_size.int, found, size))
        else:
            sizes.append(-1)
    if sizes.count(-1) > 1:
        raise AssertionError(f"{node.format_node()}: more than one size of {tuple(shape_of(node))} is not its input's")
    return sizes


def normalize_axis_orders(graph: Graph) -> None:
    """transpose, t, T, mT, movedim, swapaxes are `permute(x, order)`; squeezes are `squeeze.dims`."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        x: Any = node.args[0] if node.args else None
        if node.target in AXIS_ORDERS:
            order = AXIS_ORDERS[node.target](len(shape_of(x)), *node.args[1:])
            replace_call(node, aten.permute.default, x, order)
        elif node.target in (aten.squeeze.dim, aten.squeeze.default) and len(shape_of(node)) < len(shape_of(x)):
            replace_call(node, aten.squeeze.dims, x, _squeezed(node, shape_of(x)))


def _squeezed(node: Node, shape: Sequence[Any]) -> list[int]:
    if node.target is aten.squeeze.dim:
        return [arguments(node)["dim"] % len(shape)]
    return [i for i, size in enumerate(shape) if is_static(size) and int(size) == 1]


def _swapped(rank: int, a: int, b: int) -> list[int]:
    order = list(range(rank))
    if rank:
        order[a % rank], order[b % rank] = order[b % rank], order[a % rank]
    return order


def _moved(rank: int, source: int | Sequence[int], destination: int | Sequence[int]) -> list[int]:
    sources = [s % rank for s in ([source] if isinstance(source, int) else source)]
    places = [d % rank for d in ([destination] if isinstance(destination, int) else destination)]
    order = [-1] * rank
    for s, d in zip(sources, places, strict=True):
        order[d] = s
    rest = iter(i for i in range(rank) if i not in sources)
    return [next(rest) if i < 0 else i for i in order]


def _last_two(rank: int) -> list[int]:
    return _swapped(rank, -1, -2) if rank > 1 else list(range(rank))


AXIS_ORDERS: dict[Any, Callable[..., list[int]]] = {
    aten.permute.default: lambda rank, dims: [d % rank for d in dims],
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


def simplify_expands(graph: Graph) -> None:
    """`expand` says -1 where it keeps a size; `expand_as` is `expand`."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in (aten.expand.default, aten.expand_as.default):
            continue
        x: Any = node.args[0]
        sizes = _sizes_from_inputs(node) if node.target is aten.expand_as.default else list(arguments(node)["size"])
        old, new = shape_of(x), shape_of(node)
        lead = len(new) - len(old)
        for i, size in enumerate(new):
            if i >= lead and expression(old[i - lead]) == expression(size):
                sizes[i] = -1
            elif is_static(size):
                sizes[i] = int(size)
        replace_call(node, aten.expand.default, x, sizes)
