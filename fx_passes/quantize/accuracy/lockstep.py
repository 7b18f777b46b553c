"""Graphs executed node by node over several batches, values freed after their last use: so that two can go in step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from fx_passes.entry.ambient import as_caller
from fx_passes.entry.call import arguments_of
from fx_passes.partition.recording import bind_inputs, tensors_in

__all__ = ["SteppedRun", "batches_that_fit"]


class SteppedRun:
    """One graph on its way through some batches.

    Args:
        gm: the graph; it is read as it is when a node is executed, so later weights may still be replaced.
        batches: as `calibrate` takes them.
    """

    def __init__(self, gm: GraphModule, batches: Iterable[Any]):
        self._nodes = list(gm.graph.nodes)
        self._next = 0
        self._runs = []
        for batch in batches:
            run = Interpreter(gm)
            run.env = dict(bind_inputs(gm, *arguments_of(batch)))
            self._runs.append(run)
        last: dict[Node, Node] = {}
        for node in self._nodes:
            last.update(dict.fromkeys(node.all_input_nodes, node))
        self._freed: dict[Node, list[Node]] = {}
        for value, reader in last.items():
            self._freed.setdefault(reader, []).append(value)

    def advance(self, node: Node) -> None:
        """Execute everything before `node`."""
        while self._nodes[self._next] is not node:
            self.step()

    def step(self) -> bool:
        """Execute the next node; False where that was the last."""
        node = self._nodes[self._next]
        self._next += 1
        with torch.no_grad():
            for run in self._runs:
                if node.op != "placeholder":
                    run.env[node] = run.run_node(node)
                for value in self._freed.get(node, ()):
                    run.env.pop(value, None)
        return self._next < len(self._nodes)

    def values(self, node: Node) -> list[Any]:
        """The value of `node`, executed and still needed, for every batch."""
        return [run.env[node] for run in self._runs]

    def renew(self, node: Node) -> None:
        """Read the constants that `node` is computed from once more, and compute it again."""
        with torch.no_grad():
            for run in self._runs:
                for constant in (*node.all_input_nodes, node):
                    run.env[constant] = run.run_node(constant)

    def live_bytes(self) -> int:
        """Bytes of the values that are held; memory that two of them share counts once."""
        found = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for run in self._runs
            for node, value in run.env.items()
            if node.op != "get_attr"
            for t in tensors_in(value)
        }
        return sum(found.values())


def batches_that_fit(gm: GraphModule, batches: Iterable[Any], copies: int, limit: int) -> list[Any]:
    """As many of the first batches as `copies` graphs like `gm` can be executed on in `limit` bytes, at least one.

    Only the batches that are returned are read.
    """
    kept: list[Any] = []
    needed = 0
    for batch in as_caller(batches):
        if not kept:
            run, most = SteppedRun(gm, [batch]), 0
            while run.step():
                most = max(most, run.live_bytes())
            needed = max(1, copies * most)
        kept.append(batch)
        if (len(kept) + 1) * needed > limit:
            break
    return kept
