"""Writes through a boolean mask as choices between two values of full size.

`x[mask] = value` and `x[mask] += value` compute with as many elements as the mask holds, which depends on data. Where
the value is one for all of them, or follows element by element from what was selected with the same mask, computing it
everywhere and choosing gives the same: `where(mask, value, x)`. Every backend takes that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from lowering.segment.normal_form.edit import bypass, expression, insert, same_shape, shape_of

__all__ = ["choose_by_masks"]

aten = torch.ops.aten


def choose_by_masks(graph: Graph) -> None:
    """Rewrite every write through one boolean mask whose value can be computed for all elements."""
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        written, indices, value, *accumulate = node.args
        mask = _only_mask(written, indices)
        if mask is None or any(accumulate) or node.kwargs.get("accumulate"):
            continue
        full = _everywhere(graph, node, value, written, mask)
        if full is None or not _fits(shape_of(full), shape_of(written)):
            continue
        trailing = len(shape_of(written)) - len(shape_of(mask))
        wide = mask
        for _ in range(trailing):
            wide = insert(graph, node, aten.unsqueeze.default, (wide, -1))
        if full.meta["val"].dtype != written.meta["val"].dtype:
            full = insert(graph, node, aten._to_copy.default, (full,), dtype=written.meta["val"].dtype)
        bypass(node, insert(graph, node, aten.where.self, (wide, full, written)))


def _only_mask(value: Any, indices: Any) -> Node | None:
    """The mask, where the index is one boolean mask over the first dimensions of `value`."""
    mask = indices[0] if len(indices) == 1 else None
    if not isinstance(mask, Node) or mask.meta["val"].dtype is not torch.bool:
        return None
    return mask if same_shape(shape_of(mask), shape_of(value)[: mask.meta["val"].dim()]) else None


def _everywhere(graph: Graph, before: Node, value: Any, written: Node, mask: Node) -> Node | None:
    """`value`, which is computed for the selected elements, computed for all of them; None where that is not the same.

    What was selected with the same mask is what it was selected from; a pointwise op of such values and of values that
    are one for all selected elements is that op of their full counterparts.
    """
    if not isinstance(value, Node):
        return None
    leading, trailing = mask.meta["val"].dim(), written.meta["val"].dim() - mask.meta["val"].dim()
    indices: Any = value.args[1] if value.target is aten.index.Tensor else ()
    if len(indices) == 1 and _same_value(indices[0], mask):
        source: Any = value.args[0]
        same = same_shape(shape_of(source)[:leading], shape_of(mask)) and source.meta["val"].dim() == leading + trailing
        return source if same else None
    shape = shape_of(value)
    if len(shape) <= trailing:
        return value
    if len(shape) == trailing + 1 and expression(shape[0]) == 1:
        return insert(graph, before, aten.squeeze.dim, (value, 0))
    if torch.Tag.pointwise not in getattr(value.target, "tags", ()):
        return None
    args = [_everywhere(graph, before, a, written, mask) if isinstance(a, Node) else a for a in value.args]
    if any(new is None and old is not None for new, old in zip(args, value.args, strict=True)):
        return None
    return insert(graph, before, value.target, args, **value.kwargs)


def _same_value(a: Any, b: Any, depth: int = 4) -> bool:
    """Whether two nodes compute the same of the same: the program is functional, so they have one value."""
    if a is b or not isinstance(a, Node) or not isinstance(b, Node):
        return a is b or (not isinstance(a, Node) and not isinstance(b, Node) and bool(a == b))
    random = torch.Tag.nondeterministic_seeded in getattr(a.target, "tags", ())
    if depth == 0 or a.op != "call_function" or a.target is not b.target or random or a.kwargs != b.kwargs:
        return False
    return len(a.args) == len(b.args) and all(_same_value(x, y, depth - 1) for x, y in zip(a.args, b.args, strict=True))


def _fits(shape: Any, target: Any) -> bool:
    """Whether a value of this shape broadcasts to the other without changing it."""
    aligned = list(target)[len(target) - len(shape) :]
    return len(shape) <= len(target) and all(
        expression(n) in (1, expression(m)) for n, m in zip(shape, aligned, strict=True)
    )
