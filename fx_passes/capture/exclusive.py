"""One thread at a time: torch keeps what its tracing and its export are doing in globals of the process.

`torch.export` refuses or breaks a second one that begins meanwhile (`ProxyTorchDispatchMode slot already occupied`),
`torch.fx` replaces `nn.Module.__call__`, and a decomposition switches a library off. So whatever captures, exports or
defines a network takes its turn; running what was lowered does not.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

__all__ = ["exclusive", "in_turn", "let_others"]

_lock = threading.RLock()
P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def exclusive() -> Iterator[None]:
    """Wait for this thread's turn, and keep it while the block runs. Re-entrant."""
    with _lock:
        yield


def in_turn(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, which waits for this thread's turn and keeps it until it returns."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with _lock:
            return function(*args, **kwargs)

    return call


@contextmanager
def let_others() -> Iterator[None]:
    """Give the turn away while the block runs, if this thread has it, and wait for it again at the end.

    For what takes long and needs none of those globals, such as building an engine. Nothing that is to be put back in
    order (a random state, a replaced function) may be open around it.
    """
    if not _lock._is_owned():  # type: ignore[attr-defined]
        yield
        return
    # as threading.Condition does it around a wait: however often the lock was taken, and not torn apart by Ctrl-C
    taken = _lock._release_save()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _lock._acquire_restore(taken)  # type: ignore[attr-defined]
