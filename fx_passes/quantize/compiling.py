"""What `torch.compile` is to step over, without loading its compiler where nothing is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["outside_compile"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_compile(function: _Function) -> _Function:
    """`function`, left in Python where a compiled model calls it, for it decides by the values of tensors.

    `torch.compiler.disable` as a decorator does this, too, but loads the whole compiler on import.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
