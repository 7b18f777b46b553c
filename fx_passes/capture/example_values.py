"""Sizes of traced values for the example inputs, so that code which branches on a size can be traced.

The recorded program is followed on fake tensors, which have shapes and no data: what needs data has no value here, and
neither has what a Python fallback computes. A branch taken by such a value is checked at each call of the graph.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fx_passes.capture.patching import activate
from fx_passes.capture.state import restored_state
from fx_passes.errors import InputError
from fx_passes.graph.copies import deep_copy

__all__ = ["UNKNOWN", "ExampleValues", "check_branch", "noted_branches"]

UNKNOWN = object()

_thread = threading.local()


def check_branch(value: Any, expected: Any, line: str) -> None:
    """Raise unless a condition or length comes out as it did when the model was traced. Runs at each call of the graph.

    Raises:
        InputError: another outcome.
    """
    if (bool(value) if isinstance(expected, bool) else value) != expected:
        noted = getattr(_thread, "noted", None)
        if noted is not None and isinstance(expected, bool):
            noted.append(line)
            return
        raise InputError(
            f"the graph was traced with inputs for which this is {expected}, and now it is not: {line}",
            hint="trace again with example inputs of these sizes",
            other_sizes=True,
        )


torch.fx.node.has_side_effect(check_branch)


@contextmanager
def noted_branches() -> Iterator[list[str]]:
    """Let `check_branch` note the lines at which a condition, not a number, comes out otherwise, and go on."""
    before = getattr(_thread, "noted", None)
    noted: list[str] = []
    _thread.noted = noted
    try:
        yield noted
    finally:
        _thread.noted = before


class ExampleValues:
    """Values of the nodes recorded so far.

    Args:
        root: the traced model.
        graph: the graph that is being recorded.
        inputs: example values by placeholder name.
    """

    def __init__(self, root: nn.Module, graph: Graph, inputs: dict[str, Any]):
        self.root, self.graph, self.inputs = root, graph, inputs
        self._values: dict[Node, Any] = {}
        self._modules: dict[str, Any] = {}
        self._mode: Any = None

    def value(self, node: Node) -> Any:
        """The value of a node: fake tensors, real sizes; UNKNOWN where that is not known."""
        if not self.inputs:
            return UNKNOWN
        if self._mode is None:
            from torch._subclasses.fake_tensor import FakeTensorMode

            self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with activate(None), self._mode, torch.no_grad():
            for pending in self.graph.nodes:  # in their order: a value may have been changed in place
                if pending not in self._values:
                    self._values[pending] = self._run(pending)
        return self._values[node]

    def forget_erased(self) -> None:
        self._values = {node: value for node, value in self._values.items() if not node._erased}

    def _run(self, node: Node) -> Any:
        if node.op == "placeholder":
            return self._fake(self.inputs.get(str(node.target), node.args[0] if node.args else UNKNOWN))
        if node.meta.get("python") or any(self._values[a] is UNKNOWN for a in node.all_input_nodes):
            return UNKNOWN
        args = map_arg(node.args, self._values.__getitem__)
        kwargs = map_arg(node.kwargs, self._values.__getitem__)
        try:
            return self._call(node, args, kwargs)
        except Exception:  # needs data, or is wrong for these inputs: running the graph will say so
            return UNKNOWN

    def _call(self, node: Node, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        if node.op == "get_attr":
            return self._fake(node.meta["constant"] if "constant" in node.meta else self._attribute(target))
        if node.op == "call_module":
            module = self._module(target)
            with restored_state(module, tensors=False):  # a cache of the user's must not keep fake tensors
                return module(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)

    def _attribute(self, path: str) -> Any:
        return operator.attrgetter(path)(self.root)

    def _module(self, path: str) -> nn.Module:
        """A copy of a module with fake tensors: running it writes to nothing real."""
        if path not in self._modules:
            module = self.root.get_submodule(path)
            tensors = (*module.parameters(), *module.buffers())
            memo: dict[int, Any] = {id(t): self._mode.from_tensor(t) for t in tensors}
            self._modules[path] = deep_copy(module, memo)
        return self._modules[path]

    def _fake(self, value: Any) -> Any:
        return torch.utils._pytree.tree_map_only(Tensor, self._mode.from_tensor, value)
