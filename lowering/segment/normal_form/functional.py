"""In-place ops that torch.export leaves in a graph, made ordinary ones where no second trace is needed for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

__all__ = ["functionalize_fresh", "is_functional"]

aten = torch.ops.aten


def is_functional(gm: GraphModule) -> bool:
    """Whether no op of the graph writes to an argument and no op holds a graph of its own."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return False
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            return False
    return True


def functionalize_fresh(graph: Graph) -> None:
    """Make in-place ops on values that nothing else shares memory with out-of-place ops.

    Such a value comes from an op that returns new memory, and no op that returns a view reads it, so that the mutation
    can be seen through this value alone: its later users read the new one. Anything else stays for
    `run_decompositions`. (`nn.ReLU(inplace=True)` inside a module that tracing did not enter is the usual case.)
    Writing into a part of such a value (``mask[:, 2:] = 1``) is a scatter into it.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function" or _writes_a_part(node, position) or (twin := _out_of_place(node)) is None:
            continue
        value = node.args[0]
        later = [user for user in value.users if position[user] > position[node]]
        node.target = twin
        for user in later:
            user.replace_input_with(value, node)


_SCATTERS: dict[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}
_WRITES: dict[Any, Any] = {
    aten.copy_.default: aten.copy.default,
    aten.fill_.Scalar: aten.fill.Scalar,
    aten.fill_.Tensor: aten.fill.Tensor,
    aten.zero_.default: aten.zeros_like.default,
}

_IDENTITIES_IN_EVAL = {aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default}


def _writes_a_part(node: Node, position: dict[Node, int]) -> bool:
    """Make a write into slices of a fresh value scatters, if nothing else that shares its memory is read later."""
    if node.target not in _WRITES or not isinstance(node.args[0], Node):
        return False
    views, base = [], node.args[0]
    while base.op == "call_function" and base.target in _SCATTERS:
        views.append(base)
        base = base.args[0]  # type: ignore[assignment]
    if not views or base.op != "call_function" or _aliases(base.target):
        return False
    now = position[node]
    others = [v for v in _views_of(base) if position[v] < now]
    if any(position[user] > now for view in others for user in view.users):
        return False
    graph, later = node.graph, [user for user in base.users if position[user] > now]
    written: Node = node
    node.target = _WRITES[node.target]
    for view in views:
        with graph.inserting_after(written):
            scatter = graph.call_function(_SCATTERS[view.target], (view.args[0], written, *view.args[1:]), view.kwargs)
        scatter.meta = dict(node.meta) | {"val": view.args[0].meta["val"]}  # type: ignore[union-attr]
        position[scatter] = now
        written = scatter
    for user in later:
        user.replace_input_with(base, written)
    return True


def _views_of(node: Node) -> list[Node]:
    """Everything that may share memory with `node` and was made from it."""
    found = []
    for user in node.users:
        if user.op == "call_function" and (_aliases(user.target) or user.target in _WRITES):
            found += [user, *_views_of(user)]
    return found


def _aliases(op: Any) -> bool:
    """Whether the result may share memory with an argument; anything but an op of torch may."""
    if not isinstance(op, torch._ops.OpOverload) or op in _IDENTITIES_IN_EVAL:
        return True
    return any(a.alias_info is not None for a in op._schema.arguments)


def _out_of_place(node: Node) -> torch._ops.OpOverload | None:
    """The out-of-place twin of an in-place op on a value of its own, or None."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.is_mutable or op.namespace != "aten":
        return None
    name = op._schema.name.split("::")[1]
    twin = getattr(getattr(torch.ops.aten, name[:-1], None), op._overloadname, None) if name.endswith("_") else None
    value: Any = node.args[0]
    if twin is None or not isinstance(value, Node) or not (_is_fresh(value) and _is_fresh(node)):
        return None
    if value.target._schema.is_mutable:  # type: ignore[union-attr]
        return None  # it was left in place, since its memory is shared: with an input, a buffer or what it is a view of
    dtypes = {n.meta["val"].dtype for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)}
    return twin if len(dtypes) == 1 else None  # in place keeps the dtype, out of place would promote


def _is_fresh(node: Node) -> bool:
    """Whether the node's memory is new (or its in-place op's input's was) and no view of it is taken."""
    ops = [node.target, *(user.target for user in node.users if user.op != "output")]
    return node.op == "call_function" and not any(
        not isinstance(op, torch._ops.OpOverload)
        or any(a.alias_info is not None and not a.alias_info.is_write for a in op._schema.arguments)
        for op in ops
    )
