"""Small edits of an aten graph that keep `meta["val"]` and the origin of every node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

__all__ = [
    "arguments",
    "bypass",
    "expression",
    "insert",
    "is_static",
    "replace_call",
    "same_shape",
    "shape_of",
    "take_origin",
]


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an aten call by the names of its schema, defaults included."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema.arguments}


def take_origin(new: Node, old: Node) -> None:
    """`new` stands for (a part of) `old`: same source line, module path and FX node."""
    for key in ("source", "module_path", "fx_node"):
        if key in old.meta:
            new.meta.setdefault(key, old.meta[key])


def insert(graph: Graph, before: Node, target: Any, args: Iterable[Any], val: Any = None, **kwargs: Any) -> Node:
    """A call before `before` and on its behalf. `val` None: computed from the arguments' fake values."""
    with graph.inserting_before(before):
        node = graph.call_function(target, tuple(args), kwargs)
    take_origin(node, before)
    if val is None:
        fake_args, fake_kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        val = target(*fake_args, **fake_kwargs)
    node.meta["val"] = val
    return node


def replace_call(node: Node, target: Any, *args: Any, **kwargs: Any) -> None:
    """Make `node` another call that gives the same value."""
    node.target, node.args, node.kwargs = target, args, kwargs


def bypass(node: Node, value: Node) -> None:
    """Let the users of `node` read `value`, and drop `node`."""
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def shape_of(node: Any) -> Sequence[Any]:
    """The shape of a node's value: ints and SymInts."""
    return node.meta["val"].shape


def is_static(size: Any) -> bool:
    """Whether a size is a known number."""
    return not isinstance(size, torch.SymInt) or not size.node.expr.free_symbols


def expression(size: Any) -> Any:
    """A size as int or sympy expression: comparing these adds no guard."""
    if is_static(size):
        return int(size)
    return size.node.expr


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal, without adding a guard."""
    return [expression(s) for s in a] == [expression(s) for s in b]
