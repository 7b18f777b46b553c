"""Where a placement's accuracy is measured: at the tensors that quantized layers lead to, before any Python call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from fx_passes.quantize.annotation import annotation_of
from fx_passes.quantize.calibrate import call_with_batch

__all__ = ["GraphRun", "float_leaves", "measured_nodes", "measured_values"]


def measured_nodes(graph: Graph) -> list[str]:
    """Names of the nodes whose values tell how good int8 is.

    They are what the graph returns and what calls that stay Python read, as far as it depends on a quantized layer.
    What comes after such a call is none: post-processing may threshold, sort and return no tensors.

    Args:
        graph: annotated by placement.
    """
    reached: set[Node] = set()  # depends on a quantized layer
    after: set[Node] = set()  # ... through Python
    found: dict[str, None] = {}
    for node in graph.nodes:
        annotation = annotation_of(node)
        inputs = node.all_input_nodes
        if node.meta.get("python") or node.op == "output":
            found.update(dict.fromkeys(i.name for i in inputs if i in reached and i not in after))
        if any(i in after for i in inputs) or (node.meta.get("python") and any(i in reached for i in inputs)):
            after.add(node)
        if any(i in reached for i in inputs) or (annotation is not None and annotation.quantized):
            reached.add(node)
    return list(found)


def measured_values(gm: GraphModule, batch: Any, nodes: list[str]) -> Tensor:
    """All floating point numbers of these nodes' values in one call, as one flat float64 tensor."""
    run = GraphRun(gm, nodes)
    with torch.no_grad():
        call_with_batch(run, batch)  # type: ignore[arg-type]
    return torch.cat([leaf.double().flatten() for leaf in float_leaves(run.values[name] for name in nodes)])


def float_leaves(values: Any) -> list[Tensor]:
    """The floating point tensors in any structure of values."""
    leaves = pytree.tree_leaves(list(values))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


class GraphRun(Interpreter):
    """A graph, called like the module it is of, that keeps the values of some nodes.

    Attributes:
        values: by node name, after a call.
    """

    def __init__(self, gm: GraphModule, nodes: list[str]):
        super().__init__(gm)
        self.values: dict[str, Any] = {}
        self._kept = frozenset(nodes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        placeholders = self.graph.find_nodes(op="placeholder")
        given = dict(zip((str(p.target) for p in placeholders), args, strict=False)) | kwargs
        values = [given[str(p.target)] if str(p.target) in given else p.args[0] for p in placeholders]
        return self.run(*self.prepared(values), enable_io_processing=False)

    def prepared(self, values: list[Any]) -> list[Any]:
        """The arguments as the graph gets them."""
        return values

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.name in self._kept:
            self.values[n.name] = result
        return result
