"""What running or tracing a forward may change on a model, and how it is put back or recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy
from torch.fx.proxy import TraceError

from fx_passes.capture.attributes import written_in_place
from fx_passes.capture.patching import current_tracer
from fx_passes.capture.sources import user_line

__all__ = ["recorded_buffer_assignment", "restored_state"]


@contextmanager
def restored_state(root: nn.Module) -> Iterator[None]:
    """Give every module its attributes and small state back: forward may set them, and a trace is no call."""
    modules = list(root.modules())
    user_root = root.__dict__.get("_self")
    if isinstance(user_root, nn.Module):
        modules += list(user_root.modules())
    tables = ("_parameters", "_buffers", "_modules")
    attributes = [(m, dict(m.__dict__), {t: dict(m.__dict__[t]) for t in tables}) for m in modules]
    tensors = [t for m in modules for t in (*m._buffers.values(), *m.__dict__.values()) if isinstance(t, torch.Tensor)]
    saved = [(t, None if t.is_inference() else t._version, t.detach().clone()) for t in tensors]
    try:
        yield
    finally:
        for module, before, entries in attributes:
            module.__dict__.clear()
            module.__dict__.update(before)
            for table, content in entries.items():
                module.__dict__[table].clear()
                module.__dict__[table].update(content)
        with torch.no_grad():
            for tensor, version, value in saved:
                # Not by version alone: batch_norm updates its statistics without counting.
                counted = version is not None and tensor._version != version
                if counted or not torch.equal(tensor, value):
                    with torch.inference_mode(tensor.is_inference()):
                        tensor.copy_(value)


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
