"""What TensorRT's compiler writes to stderr past its logger goes to `logging`; anything else is passed on."""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

__all__ = ["quiet_stderr", "terminal"]

_log = logging.getLogger("lowering.tensorrt")
_STDERR = 2
# "Internal Error: MyelinCheckException: graph_jit.cpp:278: CHECK(...) failed." (TensorRT-RTX 1.7)
_NATIVE = re.compile(rb"Internal Error|Myelin|\[TRT\]")
_lock = threading.Lock()
_users = 0
_saved: int | None = None  # the real stderr, while it is replaced
_caught: IO[bytes] | None = None


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Keep the compiler's own lines off the terminal while the block runs.

    The descriptor belongs to the whole process: what other threads write meanwhile is written out at the end of the
    block. Blocks may overlap.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


@contextmanager
def terminal() -> Iterator[IO[str]]:
    """A file to the real stderr, for a progress bar that is drawn inside `quiet_stderr`."""
    with _lock:
        replaced = _saved is not None and _is_stderr(sys.stderr)
        copy = os.dup(_saved) if replaced and _saved is not None else None
    if copy is None:
        yield sys.stderr
        return
    with os.fdopen(copy, "w", encoding=sys.stderr.encoding, errors="replace") as file:
        yield file


def _is_stderr(file: IO[str]) -> bool:
    try:
        return file.fileno() == _STDERR
    except (OSError, ValueError, AttributeError):  # no descriptor behind it, as in a notebook
        return False


def _enter() -> None:
    global _users, _saved, _caught
    with _lock:
        _users += 1
        if _users > 1:
            return
        try:
            _saved = os.dup(_STDERR)
        except OSError:  # a process without stderr has nothing to keep quiet
            return
        if sys.stderr is not None:
            sys.stderr.flush()
        _caught = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `_leave`)
        os.dup2(_caught.fileno(), _STDERR)


def _leave() -> None:
    global _users, _saved, _caught
    with _lock:
        _users -= 1
        if _users or _saved is None or _caught is None:
            return
        if sys.stderr is not None:
            sys.stderr.flush()
        os.dup2(_saved, _STDERR)
        os.close(_saved)
        _caught.seek(0)
        lines = _caught.readlines()
        _caught.close()
        _saved = _caught = None
    for line in lines:
        if _NATIVE.search(line):
            _log.debug("%s", line.decode(errors="replace").rstrip())
        else:
            os.write(_STDERR, line)
