"""What a call of a model runs: its class's forward, one put on the instance, hooks, a `__call__` of its class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from fx_passes.errors import InputError
from fx_passes.graph.hooks import has_hooks

__all__ = ["arguments_of", "call_signature", "has_own_call", "runs_more_than_forward"]


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the call that example inputs, or a calibration batch, stand for.

    Raises:
        InputError: no tensor, tuple or list (positional arguments) or dict (keyword arguments).
    """
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, dict):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    raise InputError(
        f"the inputs are a {type(inputs).__name__}",
        hint="pass a tensor, a tuple of the model's positional arguments, or a dict of its keyword arguments",
    )


def runs_more_than_forward(model: nn.Module) -> bool:
    """Whether `model(...)` is more than, or other than, a call of its class's forward."""
    return "forward" in vars(model) or has_own_call(type(model)) or has_hooks(model)


def has_own_call(cls: type) -> bool:
    """Whether a class, or a base of it that is not torch's, has a `__call__`."""
    return not issubclass(cls, GraphModule) and not _of_torch(_owner(cls, "__call__"))


def call_signature(model: nn.Module, args: tuple = (), kwargs: dict[str, Any] | None = None) -> inspect.Signature:
    """The parameters of `model(...)`.

    A decorator may leave `*args, **kwargs` and nothing else of them: then they are those of the class's forward, which
    it is there for, unless the call `model(*args, **kwargs)` does not fit them.
    """
    found = [_signature(function) for function in _functions(model)]
    told = next((signature for signature in found if not _is_open(signature)), found[0])
    return told if _is_open(found[0]) and _fits(told, args, kwargs or {}) else found[0]


def _functions(model: nn.Module) -> Iterator[Callable[..., Any]]:
    """The functions that a call of `model` runs one inside the other, as bound to it."""
    if has_own_call(type(model)):
        yield model.__call__
    yield model.forward
    if "forward" in vars(model):
        yield type(model).forward.__get__(model)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a builtin that does not tell
        return inspect.signature(lambda *args, **kwargs: None)


def _is_open(signature: inspect.Signature) -> bool:
    return all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values())


def _fits(signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> bool:
    if not args and not kwargs:
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _owner(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if name in vars(base))


def _of_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"
