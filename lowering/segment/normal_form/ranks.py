"""Operators whose result has another rank at another size, which no network of fixed ranks computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from fx_passes.errors import ExportError
from lowering.segment.normal_form.edit import arguments, is_static, shape_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from lowering.segment.program import TensorSpec

__all__ = ["refuse_ranks_by_size"]

aten = torch.ops.aten


def refuse_ranks_by_size(graph: Graph, exported: ExportedProgram, inputs: list[TensorSpec]) -> None:
    """Refuse a squeeze of a dimension that varies and is 1 at the smallest sizes: torch.export takes it for larger.

    Raises:
        ExportError: naming the node.
    """
    if not any(spec.dynamic for spec in inputs):
        return
    smallest = _smallest(exported, inputs)
    for node in graph.nodes:
        if node.target not in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
            continue
        given, shape = arguments(node), shape_of(node.args[0])
        dims = given.get("dim", range(len(shape)))
        for dim in [dims] if isinstance(dims, int) else dims:
            size = shape[dim]
            if not is_static(size) and size.node.expr.subs(smallest) == 1:
                raise ExportError(
                    f"the rank of its result follows a size: dimension {dim} of its input may be 1",
                    node=node,
                    hint="name a dimension that is always 1, as in squeeze(1), or give a range that begins above 1",
                )


def _smallest(exported: ExportedProgram, inputs: list[TensorSpec]) -> dict[Any, int]:
    """The smallest size that each symbol stands for."""
    placeholders: dict[str, Node] = {n.name: n for n in exported.graph.find_nodes(op="placeholder")}
    found: dict[Any, int] = {}
    for spec, name in zip(inputs, exported.graph_signature.user_inputs, strict=True):
        for size, least in zip(shape_of(placeholders[str(name)]), spec.min, strict=True):
            if not is_static(size) and size.node.expr.is_symbol:
                found[size.node.expr] = least
    return found
