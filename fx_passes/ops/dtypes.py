"""What a graph alone, without an example input, says about the dtypes of its values."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_passes.ops import Role, module_of, op_of
from fx_passes.ops.effects import makes_fresh_elements

__all__ = ["infer_dtypes"]

_SAME_AS_INPUT = frozenset(
    {
        *(Role.WEIGHTED, Role.MATMUL, Role.NORM, Role.SOFTMAX, Role.ACTIVATION, Role.POOL_MAX, Role.POOL_AVG),
        *(Role.RESHAPE, Role.CONCAT),
        *(Role.ELEMENTWISE_ADD, Role.ELEMENTWISE_MUL),  # a number on the other side does not change a floating dtype
    }
)
_SAME_BY_NAME = frozenset({"mean", "sum", "amax", "amin", "setitem", "write_view"})


def infer_dtypes(gm: GraphModule) -> dict[Node, torch.dtype]:
    """Floating dtypes that follow from parameters: a convolution takes and gives its weight's dtype, and so on.

    Returns:
        A partial map; a node that is missing may have any dtype, or be no tensor. `meta["val"]`, where it is present,
        is taken as it is. Assumes that no autocast is active.
    """
    found: dict[Node, torch.dtype] = {}
    for node in gm.graph.nodes:
        dtype = _from_value(node) or _from_parameters(node, gm)
        if dtype is not None:
            found[node] = dtype
    # Forward and back until nothing new follows: an op that keeps its dtype tells of its input too.
    size = -1
    while size != len(found):
        size = len(found)
        for node in gm.graph.nodes:
            _forward(node, gm, found)
        for node in reversed(gm.graph.nodes):
            _backward(node, gm, found)
    return found


def _from_value(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def _from_parameters(node: Node, gm: GraphModule) -> torch.dtype | None:
    if node.op == "get_attr":
        value: object = gm
        for name in str(node.target).split("."):
            value = getattr(value, name, None)
        return value.dtype if isinstance(value, Tensor) else None
    if node.op == "call_module":
        op, module = op_of(node, gm), module_of(node, gm)
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Module) and op is not None and op.role is Role.WEIGHTED and isinstance(weight, Tensor):
            return weight.dtype
    return None


def _tensor_inputs(node: Node, found: dict[Node, torch.dtype]) -> list[torch.dtype | None]:
    return [found.get(i) for i in node.all_input_nodes if (op := op_of(i)) is None or op.role is not Role.SHAPE]


def _forward(node: Node, gm: GraphModule, found: dict[Node, torch.dtype]) -> None:
    op = op_of(node, gm)
    if node in found or op is None or "dtype" in node.kwargs:
        return
    if (op.role not in _SAME_AS_INPUT and op.name not in _SAME_BY_NAME) or op.name == "view":  # x.view(dtype)
        return
    if makes_fresh_elements(node):  # values and indices
        return
    known = _tensor_inputs(node, found)
    first = known[0] if known else None
    if first is not None and first.is_floating_point and all(d == first for d in known):
        found[node] = first


def _backward(node: Node, gm: GraphModule, found: dict[Node, torch.dtype]) -> None:
    op = op_of(node, gm)
    dtype = found.get(node)
    if op is None or dtype is None or not dtype.is_floating_point or "dtype" in node.kwargs:
        return
    weighted = op.role is Role.WEIGHTED
    single = op.role in (Role.ACTIVATION, Role.POOL_MAX, Role.POOL_AVG) and len(node.all_input_nodes) == 1
    if (weighted or single) and node.args and isinstance(node.args[0], Node):
        found.setdefault(node.args[0], dtype)
