"""Going back to before a submodule, when tracing it has failed half way through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fx_passes.capture.tracer import QuantizationTracer

__all__ = ["Checkpoint"]


class Checkpoint:
    """What a tracer had recorded, and what the arguments of a module held, before the module was entered.

    Attributes of modules that the half-run forward has set stay until the trace ends: what they hold is erased, and
    using it is an error.
    """

    def __init__(self, tracer: QuantizationTracer, args: tuple, kwargs: dict[str, Any]):
        self.tracer = tracer
        self.rebinds = tracer._rebinds
        self.last = next(iter(reversed(tracer.graph.nodes)), None)
        self.depth = len(tracer.module_stack)
        self.containers: list[tuple[Any, Any]] = []
        self._keep((args, kwargs))

    def _keep(self, value: Any) -> None:
        if isinstance(value, (list, dict)):
            self.containers.append((value, value.copy()))
        if isinstance(value, (list, tuple)):
            for item in value:
                self._keep(item)
        elif isinstance(value, dict):
            for item in value.values():
                self._keep(item)

    def restore(self) -> None:
        """Erase the nodes made since, and give lists and dicts among the arguments their content back."""
        tracer = self.tracer
        for node in list(reversed(tracer.graph.nodes)):
            if node is self.last:
                break
            tracer.graph.erase_node(node)
        tracer._attributes = {path: read for path, read in tracer._attributes.items() if not read.node._erased}
        for attribute in tracer.lazy_attributes:
            if attribute._node is not None and attribute._node._erased:
                attribute._node = None
        if tracer._values is not None:
            tracer._values.forget_erased()
        while len(tracer.module_stack) > self.depth:
            tracer.module_stack.popitem()
        for container, content in self.containers:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
