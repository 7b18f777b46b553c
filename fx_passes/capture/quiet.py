"""torch.export, which talks to the terminal about its own internals, made quiet: what matters is an exception.

Only on the thread that asks. Streams, warning filters and loggers belong to the whole process, so none is replaced: a
filter that looks at the thread is put in front of the warnings' and on the handlers of torch's loggers, and taken away.
"""

from __future__ import annotations

import builtins
import importlib
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fx_passes.capture.exclusive import exclusive
from fx_passes.capture.patching import replaced_entry

__all__ = ["quiet_torch"]

_TALKATIVE = ("torch.export", "torch.fx.experimental.symbolic_shapes", "torch.onnx", "torch._subclasses.fake_tensor")
#: Modules of torch that print the half-made program to stderr where it fails.
_PRINTING = ("torch.fx.graph_module", "torch.export._trace")


class _Silence:
    """What one thread does not hear: a pattern to the warnings, a filter to the handlers of loggers."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def match(self, text: str) -> bool:
        """Whether a warning is ignored."""
        return threading.get_ident() == self.thread

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record of a logger is heard."""
        from_torch = any(record.name == name or record.name.startswith(f"{name}.") for name in _TALKATIVE)
        return not from_torch or threading.get_ident() != self.thread

    def print(self, *values: Any, **options: Any) -> None:
        """For `print`."""
        if threading.get_ident() != self.thread:
            builtins.print(*values, **options)


@contextmanager
def quiet_torch(*, stack_traces: bool = False) -> Iterator[None]:
    """Silence its loggers, its warnings, and the half-made program that it prints where it fails, on this thread.

    The thread has its turn (see `exclusive`) while the block runs. May be nested.

    Args:
        stack_traces: whether nodes get the stack trace of the code that made them (an eighth of the time).
    """
    silence = _Silence()
    with exclusive(), ExitStack() as stack:
        stack.enter_context(_without_warnings(silence))
        stack.enter_context(_without_records(silence))
        for name in _PRINTING:
            stack.enter_context(replaced_entry(vars(importlib.import_module(name)), "print", silence.print))
        stack.enter_context(_stack_traces(stack_traces))
        yield


@contextmanager
def _without_warnings(silence: _Silence) -> Iterator[None]:
    """A filter whose message, in place of a regular expression, is this thread."""
    entry: Any = ("ignore", silence, Warning, None, 0)
    filters = warnings.filters
    filters.insert(0, entry)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        # `catch_warnings` of another thread may have put a copy in place since, or have put the list back
        for found in (filters, warnings.filters):
            if entry in found:
                found.remove(entry)  # type: ignore[attr-defined]


@contextmanager
def _without_records(silence: _Silence) -> Iterator[None]:
    """A filter on every handler that records of torch's loggers come to, also of loggers that are made meanwhile."""
    handlers = {logging.lastResort} if logging.lastResort else set()
    for name in _TALKATIVE:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            handlers.update(logger.handlers)
            logger = logger.parent if logger.propagate else None
    for handler in handlers:
        handler.addFilter(silence)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(silence)


@contextmanager
def _stack_traces(wanted: bool) -> Iterator[None]:
    before = getattr(torch.fx.config, "do_not_emit_stack_traces", None)
    if before is None:
        yield
        return
    torch.fx.config.do_not_emit_stack_traces = not wanted
    try:
        yield
    finally:
        torch.fx.config.do_not_emit_stack_traces = before
