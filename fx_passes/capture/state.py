"""What running or tracing a forward may change on a model, and how it is put back or recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.fx import Proxy
from torch.fx.proxy import TraceError

from fx_passes.capture.attributes import written_in_place
from fx_passes.capture.patching import current_tracer
from fx_passes.capture.reachable import Reachable
from fx_passes.capture.sources import user_line

__all__ = ["recorded_buffer_assignment", "restored_state"]


@contextmanager
def restored_state(root: nn.Module, *, tensors: bool = True) -> Iterator[Reachable]:
    """Undo what the code of a model does to anything but its results: a trace is no call of the caller's.

    Attributes, what stands in them, class attributes and the globals that code names are as before when the context
    ends, however it ends; so are tensors that are no parameters. Functions under `functools.lru_cache` have an empty
    cache until then.

    Args:
        root: the model.
        tensors: whether to restore the values of tensors. Not those of fake ones, which have none.
    """
    reachable = Reachable(root, tensors)
    try:
        with reachable.with_empty_caches():
            yield reachable
    finally:
        reachable.restore()


@contextmanager
def recorded_buffer_assignment() -> Iterator[None]:
    """Record `self.buffer = value` as a copy into the buffer; leave `self.buffer += value` the in-place op it is."""
    plain = nn.Module.__setattr__

    def assign(module: nn.Module, name: str, value: Any) -> None:
        tracer = current_tracer()
        buffers = module.__dict__.get("_buffers", {})
        if tracer is not None and name not in buffers:
            tracer.changes.note(module, name, value, user_line(tracer.outermost))
        if tracer is None or not isinstance(value, Proxy) or name not in buffers:
            plain(module, name, value)
            return
        path = tracer._tensor_paths.get(id(buffers[name]))
        if path is None:
            raise TraceError(f"a traced value is assigned to the buffer '{name}', which holds nothing yet")
        node = written_in_place(value)
        if node.op == "get_attr" and node.target == path:
            return
        tracer.rebind_buffer(path, value)

    nn.Module.__setattr__ = assign  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.__setattr__ = plain  # type: ignore[method-assign]
