"""What a graph alone, without an example input, says about the number of dimensions of its values."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_passes.ops import Role, bind, is_size, module_of, op_of
from fx_passes.ops.effects import returns_container

__all__ = ["infer_ranks"]

_SAME_RANK = frozenset(
    {Role.WEIGHTED, Role.ACTIVATION, Role.POOL_MAX, Role.POOL_AVG, Role.SOFTMAX, Role.NORM, Role.CAST}
)
_SAME_BY_NAME = frozenset(
    {"dropout", "stochastic_depth", "identity", "contiguous", "permute", "transpose", "clone", "t"}
)
_NORMS = {nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}


def infer_ranks(gm: GraphModule) -> dict[Node, int]:
    """Ranks that follow from the ops: `flatten(1)` gives two dimensions, `BatchNorm2d` takes and gives four.

    Returns:
        A partial map; a node that is missing may have any rank, or be no tensor.
    """
    ranks: dict[Node, int] = {}
    for node in gm.graph.nodes:
        rank = _own_rank(node, gm)
        if rank is not None:
            ranks[node] = rank
    size = -1
    while size != len(ranks):
        size = len(ranks)
        for node in gm.graph.nodes:
            _forward(node, gm, ranks)
        for node in reversed(gm.graph.nodes):
            _backward(node, gm, ranks)
    return ranks


def _own_rank(node: Node, gm: GraphModule) -> int | None:
    """The rank that an op gives whatever its input."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return value.dim()
    op = op_of(node, gm)
    if op is None:
        return None
    if node.op == "call_module":
        module: Any = module_of(node, gm)
        if op.name == "flatten":
            return 2 if (module.start_dim, module.end_dim) == (1, -1) else None
        return _NORMS.get(type(module))
    if op.name == "flatten":
        bound = {**dict(zip(("input", "start_dim", "end_dim"), node.args, strict=False)), **node.kwargs}
        return 2 if (bound.get("start_dim"), bound.get("end_dim", -1)) == (1, -1) else None
    if op.name in ("view", "reshape") and len(node.args) > 1:
        shape = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        return len(shape) if all(isinstance(s, int) or (isinstance(s, Node) and is_size(s)) for s in shape) else None
    return None


def _keeps_rank(node: Node, gm: GraphModule) -> bool:
    op = op_of(node, gm)
    if op is None or returns_container(node) or not node.args or not isinstance(node.args[0], Node):
        return False
    return op.role in _SAME_RANK or op.name in _SAME_BY_NAME


def _forward(node: Node, gm: GraphModule, ranks: dict[Node, int]) -> None:
    if node in ranks or not node.args or not isinstance(node.args[0], Node):
        return
    rank = ranks.get(node.args[0])
    if _keeps_rank(node, gm):
        if rank is not None:
            ranks[node] = rank
        return
    op = op_of(node, gm)
    if op is None:
        return
    if op.role in (Role.ELEMENTWISE_ADD, Role.ELEMENTWISE_MUL):
        operands = [ranks.get(i) for i in node.all_input_nodes if not is_size(i)]
        if operands and all(r is not None for r in operands):
            ranks[node] = max(r for r in operands if r is not None)
    elif op.role is Role.REDUCTION and rank is not None and node.op != "call_module":
        bound = bind(node)
        dims = bound.get("dim")
        if op.name in ("mean", "sum", "amax", "amin") and dims is not None:
            count = len(dims) if isinstance(dims, (tuple, list)) else 1
            ranks[node] = rank if bound.get("keepdim") else rank - count


def _backward(node: Node, gm: GraphModule, ranks: dict[Node, int]) -> None:
    rank = ranks.get(node)
    if rank is not None and _keeps_rank(node, gm):
        ranks.setdefault(node.args[0], rank)  # type: ignore[arg-type]
