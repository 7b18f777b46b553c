"""Weights that a forward computes from parameters alone (weight standardization, a learned gain) as parameters."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fx_passes.graph.module import set_buffer
from fx_passes.graph.node_meta import inherit_meta
from fx_passes.ops import Role, bind, op_of
from fx_passes.ops.effects import has_effects

__all__ = ["fold_computed_weights"]


def fold_computed_weights(gm: GraphModule, report: list[tuple[str, str]]) -> None:
    """Evaluate what convolutions and linear layers of `gm` take as weight or bias, where no input has a part in it.

    Args:
        gm: functional, in eval mode, and the caller's own; tensors that it shares are not changed. A computed weight
            becomes the parameter `<module path>.weight`, or `.computed_weight` where the graph still reads a tensor of
            the first name.
        report: gets (node name, what was done).
    """
    constants = _Constants(gm)
    made: dict[Node, Node] = {}
    for node in list(gm.graph.nodes):
        op = op_of(node, gm)
        if op is None or op.role is not Role.WEIGHTED or node.op == "call_module":
            continue
        for argument in ("weight", "bias"):
            source = bind(node).get(argument)
            if not isinstance(source, Node) or source.op == "get_attr" or not constants.holds(source):
                continue
            if source not in made:
                made[source] = constants.materialize(source, node, argument)
            node.replace_input_with(source, made[source])
            report.append(
                (node.name, f"its {argument}, which was computed from other parameters, was made a parameter")
            )


class _Constants:
    """The nodes of a graph that depend on its tensors alone, and their values."""

    def __init__(self, gm: GraphModule):
        self.gm = gm
        self._known: dict[Node, bool] = {}
        self._values: dict[Node, Any] = {}

    def holds(self, node: Node) -> bool:
        """Whether `node` has the same value in every call. Nodes come in order, so that no recursion is deep."""
        if node not in self._known:
            if node.op == "get_attr":
                self._known[node] = "aliased" not in node.meta and isinstance(self._attribute(node), Tensor)
            else:
                understood = node.op in ("call_function", "call_method") and not node.meta.get("python")
                understood = understood and op_of(node, self.gm) is not None and not has_effects(node, self.gm)
                self._known[node] = understood and all(self.holds(n) for n in node.all_input_nodes)
        return self._known[node]

    def value(self, node: Node) -> Any:
        """The value of a node that `holds`."""
        if node not in self._values:
            if node.op == "get_attr":
                self._values[node] = self._attribute(node)
            else:
                args, kwargs = map_arg((node.args, node.kwargs), self.value)
                with torch.no_grad():
                    if node.op == "call_method":
                        self._values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                    else:
                        self._values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self._values[node]

    def materialize(self, source: Node, reader: Node, argument: str) -> Node:
        """A new parameter with the value of `source`, read just before `reader`."""
        path = str(reader.meta.get("module_path") or "")
        prefix = f"{path}." if path else ""
        target = f"{prefix}{argument}"
        if self._is_read(target) or (not path and hasattr(self.gm, target)):
            target = f"{prefix}computed_{argument}"
            while self._is_read(target):
                target += "_"
        set_buffer(self.gm, target, nn.Parameter(self.value(source).detach().clone()))
        with self.gm.graph.inserting_before(reader):
            new = self.gm.graph.create_node("get_attr", target)
        inherit_meta(new, reader)
        return new

    def _is_read(self, target: str) -> bool:
        """Whether anything but the computation of a constant reads the tensor `target`."""
        readers = (n for n in self.gm.graph.nodes if n.op == "get_attr" and n.target == target)
        return any(not self.holds(user) for reader in readers for user in reader.users)

    def _attribute(self, node: Node) -> Any:
        return operator.attrgetter(str(node.target))(self.gm)
