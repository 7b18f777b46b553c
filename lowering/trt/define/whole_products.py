"""Keeps the projection of an attention whole: TensorRT-RTX would cut it where its result is sliced.

Queries, keys and values often come from one linear layer, whose result is sliced into three. The compiler moves the
slices across the layer, into its weight, and multiplies with the three parts side by side, which is one kernel as
before; but bias, reshape and transposition are then three kernels, each of which reads a part. An operation that a
slice does not commute with keeps it from that, and these become one kernel. The cheapest is a maximum with the lowest
finite number, which changes no finite value. Slices of the last axis need to be picks from an axis of their own, too.

Read from layer listings (TensorRT-RTX 1.7.1): ViT-B/16 in fp16 has 125 kernels without and 101 with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from lowering.segment.normal_form.edit import arguments, insert, is_static, shape_of, take_origin
from lowering.segment.normal_form.state import rebuild
from lowering.segment.program import AtenProgram

__all__ = ["keep_products_whole"]

aten = torch.ops.aten
_PRODUCTS = frozenset({aten.linear.default, aten.addmm.default})
_SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})
_SLICES = _SPLITS | {aten.slice.Tensor, aten.select.int}
_VIEWS = frozenset(
    {aten.reshape.default, aten.permute.default, aten.squeeze.dims, aten.squeeze.dim, aten.unsqueeze.default}
)
_PASSED = _VIEWS | {aten.mul.Tensor, aten.mul.Scalar, aten.expand.default, aten.clone.default, aten.transpose.int}
_READERS = frozenset({aten.scaled_dot_product_attention.default, aten.matmul.default, aten.bmm.default})
_QUANTIZE = "quantized_decomposed"


def keep_products_whole(program: AtenProgram) -> AtenProgram:
    """`program` with the results of linear layers that attention slices bounded below by the lowest finite number.

    Args:
        program: in normal form; it stays as it is.

    Returns:
        A new program, or `program` itself if it has no such layer.
    """
    if not any(_is_sliced_for_attention(node) for node in program.call_nodes()):
        return program
    graph = Graph()
    copies: dict[Node, Node] = {}
    result = graph.graph_copy(program.graph, copies)
    graph.output(result).meta.update(program.graph.output_node().meta)
    for node in [copies[old] for old in program.call_nodes() if _is_sliced_for_attention(old)]:
        with graph.inserting_after(node):
            bounded = graph.call_function(aten.clamp.default, (node, torch.finfo(node.meta["val"].dtype).min))
        take_origin(bounded, node)
        bounded.meta["val"] = node.meta["val"]
        for user in [user for user in node.users if user is not bounded]:
            user.replace_input_with(node, bounded)
        _pick_parts(graph, bounded)
    gm = GraphModule(program.exported.graph_module, graph)
    named = {node: program.constants[node.name] for node in gm.graph.nodes if node.name in program.constants}
    return AtenProgram(
        rebuild(gm, named, program.exported),
        list(program.inputs),
        list(program.outputs),
        list(program.writebacks),
        list(program.buffer_inputs),
        dict(program.constants),
    )


def _is_sliced_for_attention(node: Node) -> bool:
    """Whether `node` is a linear layer of whose result attention multiplies several slices."""
    if node.target not in _PRODUCTS or not node.meta["val"].dtype.is_floating_point:
        return False
    direct = [user for user in node.users if user.target in _SLICES]
    if direct and _equal_parts(node) is None:
        return False
    slices = list(_slices(node))
    return len(slices) > 1 and any(_reaches_attention(part) for part in slices)


def _slices(node: Node) -> Iterator[Node]:
    """The slices of a value, also those of views of it."""
    for user in node.users:
        if user.target in _SPLITS:
            yield from user.users
        elif user.target in _SLICES:
            yield user
        elif user.target in _VIEWS:
            yield from _slices(user)


def _reaches_attention(node: Node, depth: int = 8) -> bool:
    """Whether a value gets to an attention, or a product of two activations, through views, scalings and casts."""
    for user in node.users:
        if user.target in _READERS:
            return True
        moved = user.target in _PASSED or _QUANTIZE in str(user.target)
        if moved and depth and _reaches_attention(user, depth - 1):
            return True
    return False


def _equal_parts(node: Node) -> list[tuple[Node, int]] | None:
    """The slices of a value along its last axis with their places, if they are of one length and nothing else reads it;
    None otherwise.
    """
    shape = shape_of(node)
    last, total = len(shape) - 1, shape[-1]
    starts: list[tuple[Node, int, int]] = []
    for user in node.users:
        given = arguments(user) if user.target in _SLICES else {"dim": None}
        if given["dim"] is None or given["dim"] % len(shape) != last:
            return None
        if user.target is aten.slice.Tensor and given["step"] == 1:
            starts.append((user, given["start"] or 0, shape_of(user)[-1]))
        elif user.target in (aten.split.Tensor, aten.split_with_sizes.default):
            sizes = [value.shape[-1] for value in user.meta["val"]]
            places: list[tuple[Node, Any]] = [(part, part.args[1]) for part in user.users]
            starts += [(part, sum(sizes[:place]), sizes[place]) for part, place in places]
        else:
            return None
    lengths = {length for _, _, length in starts}
    if len(lengths) != 1 or not is_static(total) or sum(not is_static(size) for size in shape) > 1:
        return None
    (length,) = lengths
    if total % length or any(start % length for _, start, _ in starts):
        return None
    return [(part, start // length) for part, start, _ in starts]


def _pick_parts(graph: Graph, value: Node) -> None:
    """Slices of the last axis as picks from an axis of parts."""
    parts = _equal_parts(value)
    if not parts:
        return
    shape = [int(size) if is_static(size) else -1 for size in shape_of(value)]
    length = shape_of(parts[0][0])[-1]
    sizes = [*shape[:-1], shape[-1] // length, length]
    with graph.inserting_after(value):
        sides = graph.call_function(aten.reshape.default, (value, sizes))
    take_origin(sides, value)
    sides.meta["val"] = aten.reshape.default(value.meta["val"], sizes)
    for part, place in parts:
        picked = insert(graph, part, aten.select.int, (sides, len(shape) - 1, place))
        part.replace_all_uses_with(picked)
    graph.eliminate_dead_code()
