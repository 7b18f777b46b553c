"""torch.export, which talks to the terminal about its own internals, made quiet: what matters is an exception."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import torch

__all__ = ["quiet_torch"]

_TALKATIVE = ("torch.export", "torch.fx.experimental.symbolic_shapes", "torch.onnx", "torch._subclasses.fake_tensor")


@contextmanager
def quiet_torch(*, stack_traces: bool = False) -> Iterator[None]:
    """Silence its loggers, its warnings, and the half-made program that it prints where it fails.

    Args:
        stack_traces: whether nodes get the stack trace of the code that made them (an eighth of the time).
    """
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    before = [logger.level for logger in loggers]
    traces = getattr(torch.fx.config, "do_not_emit_stack_traces", None)
    try:
        if traces is not None:
            torch.fx.config.do_not_emit_stack_traces = not stack_traces
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
        if traces is not None:
            torch.fx.config.do_not_emit_stack_traces = traces
