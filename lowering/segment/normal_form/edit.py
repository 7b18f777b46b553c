"""Small edits of an aten graph that keep `meta["val"]` and the origin of every node."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

__all__ = [
    "arguments",
    "bypass",
    "expression",
    "inline",
    "insert",
    "is_static",
    "replace_call",
    "same_shape",
    "shape_of",
    "take_origin",
]


_ORIGIN = ("source", "module_path", "fx_node", "nn_module_stack")


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an aten call by the names of its schema, defaults included."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema.arguments}


def take_origin(new: Node, old: Node) -> None:
    """`new` stands for (a part of) `old`: same source line, module path and FX node."""
    for key in _ORIGIN:
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


def inline(node: Node, decomposition: Callable[..., Any]) -> None:
    """Trace `decomposition` on the node's fake inputs and put the result in the node's place."""
    from torch._guards import detect_fake_mode
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = node.all_input_nodes
    position = {n: i for i, n in enumerate(inputs)}

    def call(*values: Any) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[position[n]])
        return decomposition(*args, **kwargs)

    values = [n.meta["val"] for n in inputs]
    with detect_fake_mode(values) or nullcontext():  # what the decomposition makes anew is then fake in the same mode
        traced = make_fx(call)(*values)
    env: dict[Node, Node] = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    graph = node.graph
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "call_function":
                new = graph.node_copy(inner, lambda n: env[n])
                new.meta = {"val": inner.meta["val"]}
                take_origin(new, node)
                env[inner] = new
    result: Any = map_arg(traced.graph.output_node().args[0], lambda n: env[n])
    if isinstance(result, Node):
        bypass(node, result)
        return
    for user in list(node.users):
        assert user.target is operator.getitem, f"{user.format_node()} reads the list of {node.format_node()}"
        bypass(user, result[user.args[1]])
    graph.erase_node(node)
