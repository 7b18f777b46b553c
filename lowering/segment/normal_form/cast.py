"""The float part of an aten program in another precision: the policy of `fx_passes.amp` on lifted programs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fx_passes.amp import autocast_graph
from lowering.segment.normal_form.state import rebuild
from lowering.segment.program import AtenProgram

__all__ = ["cast_program"]


def cast_program(program: AtenProgram, dtype: torch.dtype, keep: Iterable[str] = ()) -> AtenProgram:
    """See `lowering.segment.to_aten.cast_float_part`."""
    host = _AtenHost(program, dtype)
    graph = autocast_graph(program.graph, dtype, keep, host)
    gm = GraphModule(program.exported.graph_module, graph)
    state = host.state()
    exported = rebuild(gm, state, program.exported)
    return AtenProgram(
        exported,
        list(program.inputs),
        list(program.outputs),
        list(program.writebacks),
        list(program.buffer_inputs),
        {node.name: entry for node, entry in state.items()},
    )


class _AtenHost:
    """Constants are placeholders before the inputs, casts are `aten._to_copy`."""

    def __init__(self, program: AtenProgram, dtype: torch.dtype):
        self.program, self.dtype = program, dtype
        self._made: dict[Node, tuple[str, Tensor, bool]] = {}  # new placeholder -> FQN, value, whether it was cast
        self._last: Node | None = None

    def constant(self, node: Node) -> Tensor | None:
        return self.program.constant(node)

    def put_constant(self, graph: Graph, node: Node, value: Tensor | None) -> Node:
        with graph.inserting_after(self._last or graph._root):
            new = graph.placeholder(node.name if value is None else f"{node.name}_low")
        self._last = new
        new.meta = dict(node.meta)
        fqn, original = self.program.constants[node.name]
        if value is None:
            self._made[new] = (fqn, original, False)
        else:
            new.meta["val"] = node.meta["val"].to(self.dtype)
            self._made[new] = (fqn, value, True)
        return new

    def cast(self, graph: Graph, node: Node, dtype: torch.dtype) -> Node:
        return graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})

    def lower_module(self, node: Node) -> str:
        raise AssertionError(f"an aten graph holds no module: {node.format_node()}")

    def state(self) -> dict[Node, tuple[str, Tensor]]:
        """What the new placeholders stand for. A cast weight keeps its name unless the original is in use as well."""
        originals = {fqn for fqn, _, was_cast in self._made.values() if not was_cast}
        suffix = str(self.dtype).removeprefix("torch.")
        return {
            node: (f"{fqn}.{suffix}" if was_cast and fqn in originals else fqn, value)
            for node, (fqn, value, was_cast) in self._made.items()
        }
