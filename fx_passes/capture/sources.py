"""The user's line: of a node while it is made, of an error once it is caught."""

from __future__ import annotations

import linecache
import os
import re
import sys
import traceback
import types

import torch
from torch.fx.proxy import TraceError

from fx_passes.errors import LoweringError

__all__ = ["failure_line", "failure_reason", "is_user_file", "line_text", "traced_source", "user_frame", "user_line"]

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PACKAGE_DIRS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.join(_ROOT, "fx_passes") + os.sep,
    os.path.join(_ROOT, "lowering") + os.sep,
)


def is_user_file(name: str) -> bool:
    """Whether a file is code outside torch and this package."""
    return not name.startswith((*_PACKAGE_DIRS, "<"))


def line_text(name: str, line: int) -> str:
    """A line of code for messages: "model.py:12: if h != w:"."""
    return f"{os.path.basename(name)}:{line}: {linecache.getline(name, line).strip()}"


def user_frame(stop: types.CodeType) -> tuple[str, int] | None:
    """File and line of the last frame outside torch and this package, no further out than the code `stop`."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not stop:
        if is_user_file(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def user_line(stop: types.CodeType) -> str:
    """The user's line that runs, for messages: "model.py:12: if h != w:"."""
    found = user_frame(stop)
    return "a condition in torch" if found is None else line_text(*found)


def traced_source(stack_trace: str | None) -> tuple[str, int] | None:
    """File and line of the last frame outside torch and this package in the text that torch keeps on a node."""
    for name, line in reversed(re.findall(r'File "([^"]+)", line (\d+)', stack_trace or "")):
        if os.path.isabs(name) and not name.startswith(_PACKAGE_DIRS):
            return name, int(line)
    return None


def failure_reason(error: BaseException) -> str:
    """What failed, with the user's line: the last one of the traceback outside torch and this package."""
    message = str(error).strip().split("\n")[0] or type(error).__name__
    if not isinstance(error, (TraceError, LoweringError)):
        message = f"{type(error).__name__}: {message}"
    found = _failing_frame(error)
    if found is None:
        return message
    return f"{message} ({line_text(*found)})"


def failure_line(error: BaseException) -> str | None:
    """The user's line at which it failed, as "file.py:12"."""
    found = _failing_frame(error)
    return f"{os.path.basename(found[0])}:{found[1]}" if found is not None else None


def _failing_frame(error: BaseException) -> tuple[str, int] | None:
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [(name, line) for name, line in frames if is_user_file(name)]
    layers = [(name, line) for name, line in frames if f"torch{os.sep}nn{os.sep}" in name]
    return next(iter((users or layers)[-1:]), None)
