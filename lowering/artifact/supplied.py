"""Python parts that a glue graph names, looked for on the model that the caller hands in; nothing is imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from fx_passes.capture.wrap import is_wrapped, is_wrapped_method
from lowering.artifact.glue_values import is_structure

__all__ = ["class_of", "expression_for", "find_on_model", "may_be_called"]

_LOCAL = "<locals>"


def class_of(function: Any) -> str | None:
    """The qualified name of the class whose class method or static method this is; None for any other callable.

    A class method is told by the class that it is bound to, which may have inherited it.
    """
    if isinstance(function, MethodType):
        return function.__self__.__qualname__ if isinstance(function.__self__, type) else None
    owner = function.__qualname__.rpartition(".")[0] if isinstance(function, FunctionType) else ""
    return owner if owner and not owner.endswith(_LOCAL) else None


def expression_for(name: str, owner: str | None) -> str:
    """How the caller's code may write the function `name` of the class `owner`."""
    return name if owner is None else f"{owner.rpartition(f'{_LOCAL}.')[2]}.{name}"


def find_on_model(model: nn.Module | None, name: str, owner: str | None = None) -> Callable[..., Any] | None:
    """A wrapped function, NamedTuple or dataclass of the caller's model.

    Args:
        model: its class, the classes of its submodules and their bases are looked at, and the source files of their
            `forward`.
        name: what it is called there.
        owner: for a class or static method, the qualified name of its class, which is compared and never resolved.

    Returns:
        What was found; None if nothing was, or if several classes called `owner` have different ones.
    """
    types = {type(module): None for module in model.modules()} if model is not None else {}
    if owner is not None:
        methods: list[Callable[..., Any]] = []
        for cls in {base: None for kind in types for base in kind.__mro__ if base.__qualname__ == owner}:
            if is_wrapped_method(cls, name) and getattr(cls, name) not in methods:
                methods.append(getattr(cls, name))
        if methods:
            return methods[0] if len(methods) == 1 else None
    for kind in types:
        found = getattr(inspect.unwrap(kind.forward), "__globals__", {}).get(name)
        if callable(found) and (is_wrapped(found) or is_structure(found)) and owner in (None, class_of(found)):
            return found
    return None


def may_be_called(receiver: Any, name: str) -> bool:
    """Whether a file may call this method of an object of the caller's: it is wrapped, or its class is."""
    method = getattr(receiver, name, None)
    if method is None or is_wrapped(method):
        return method is not None
    own = inspect.getattr_static(type(receiver), name, None)
    return isinstance(method, MethodType) and method.__func__ is own and is_wrapped_method(type(receiver), name)
