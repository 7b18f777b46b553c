"""What a tracer answers when the program asks for the truth, the length or the number behind a traced value."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.fx import Graph, Proxy, Tracer
from torch.fx.proxy import TraceError

from fx_passes.capture.arguments import ArgumentPlan
from fx_passes.capture.example_values import UNKNOWN, ExampleValues, check_branch
from fx_passes.capture.sources import user_line
from fx_passes.ops import is_size

__all__ = ["AnsweringTracer"]

_SOME_TENSOR = torch.empty(0)


class AnsweringTracer(Tracer):
    """Answers from the sizes of the example inputs; each answer is checked at each call of the graph."""

    graph: Graph
    outermost: types.CodeType  # frames further out are not the model's
    _plan: ArgumentPlan
    _values: ExampleValues | None

    def to_bool(self, obj: Proxy) -> bool:
        """The truth of a value that follows from sizes, checked at each call of the graph; else a TraceError."""
        value = self._examples().value(obj.node)
        if not isinstance(value, (bool, int, float, str, tuple)):
            return super().to_bool(obj)
        self.create_proxy("call_function", check_branch, (obj, bool(value), user_line(self.outermost)), {})
        return bool(value)

    def asserted(self, obj: Proxy) -> None:
        """Record that the model asserts a condition: on sizes it is a branch like others, of which one side raises."""
        if isinstance(self._examples().value(obj.node), bool):
            self.create_proxy("call_function", check_branch, (obj, True, user_line(self.outermost)), {})
        else:
            message = "an assertion of the model failed"
            self.create_proxy("call_function", torch._assert, (obj, message), {})

    def iter(self, obj: Any) -> Any:
        """The items of a shape, or of a tuple of tensors whose length follows from sizes; else a TraceError."""
        value = self._examples().value(obj.node)
        if not isinstance(value, (tuple, list)):
            raise TraceError("a loop runs over a traced value, whose length is not known")
        return iter([obj[i] for i in range(self.length(obj))])

    def length(self, obj: Proxy) -> int:
        """The length of a shape or of a tuple of tensors, checked at each call of the graph."""
        value = self._examples().value(obj.node)
        if not isinstance(value, (tuple, list)):
            raise TraceError("the length of a traced value is not known while tracing")
        length = self.create_proxy("call_function", len, (obj,), {})
        self.create_proxy("call_function", check_branch, (length, len(value), user_line(self.outermost)), {})
        return len(value)

    def number(self, obj: Proxy) -> Any:
        """The value of a size as a number, checked at each call of the graph; only where nothing else helps."""
        value = self._examples().value(obj.node) if self._plan.freezes_sizes else UNKNOWN
        if not isinstance(value, (int, float)):
            raise TraceError("a traced value is used as a Python number")
        self.create_proxy("call_function", check_branch, (obj, value, user_line(self.outermost)), {})
        return value

    def is_instance(self, obj: Proxy, kinds: Any) -> bool:
        """What `isinstance(value, kinds)` would be; a value that no example tells of is taken for a tensor."""
        if isinstance(obj, kinds):
            return True
        value = self._examples().value(obj.node)
        if value is not UNKNOWN:
            return isinstance(value, kinds)
        if self._plan.examples or obj.node.meta.get("python") or is_size(obj.node):
            return False
        return isinstance(_SOME_TENSOR, kinds)

    def _examples(self) -> ExampleValues:
        if self._values is None or self._values.graph is not self.graph:
            self._values = ExampleValues(self.root, self.graph, self._plan.examples)
        return self._values
