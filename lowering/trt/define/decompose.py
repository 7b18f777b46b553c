"""torch's own decomposition of an op that has no converter."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fx_passes.capture.export import open_sizes
from lowering.trt.define.registry import converter_for

__all__ = ["decomposed"]

_ORIGIN = ("source", "module_path", "fx_node")


def decomposed(node: Node) -> GraphModule | None:
    """The computation of `node` in other ops, or None.

    Ops that torch defines by others (composite ones) are taken apart by torch itself, the rest by its table of
    decompositions, down to ops that have converters where the table goes that far.

    Args:
        node: a call of an aten op with fake values in `meta["val"]`.

    Returns:
        A functional graph whose placeholders are `node.all_input_nodes` and whose nodes have `meta["val"]` and the
        origin of `node`; None if torch has no decomposition, or if it would settle a size that is free here.
    """
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    inputs = node.all_input_nodes
    position = {n: i for i, n in enumerate(inputs)}

    def call(*values: Any) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[position[n]])
        return target(*args, **kwargs)

    before = _guards(node)
    try:
        with open_sizes():
            traced = make_fx(dispatch_functionalize(call), decomposition_table=_table())
            parts = traced(*(n.meta["val"] for n in inputs))
    except (RuntimeError, NotImplementedError, TypeError, AssertionError):
        return None  # the decomposition asks for values, or has effects
    parts.graph.eliminate_dead_code()
    calls = [inner for inner in parts.graph.nodes if inner.op == "call_function"]
    if any(inner.target is target for inner in calls) or _guards(node) != before:
        return None
    for inner in calls:
        for key in _ORIGIN:
            if key in node.meta:
                inner.meta[key] = node.meta[key]
    return parts


@cache
def _table() -> dict[Any, Callable]:
    """torch's decompositions into core ops, of ops without a converter."""
    from torch._decomp import core_aten_decompositions

    return {op: function for op, function in core_aten_decompositions().items() if converter_for(op) is None}


def _guards(node: Node) -> int:
    """How many facts about free sizes have been settled so far."""
    for n in (*node.all_input_nodes, node):
        for value in torch.utils._pytree.tree_leaves(n.meta.get("val")):
            sizes = [value, *value.shape] if isinstance(value, torch.Tensor) else [value]
            for size in sizes:
                if isinstance(size, torch.SymInt) and size.node.shape_env is not None:
                    return len(size.node.shape_env.guards)
    return 0
