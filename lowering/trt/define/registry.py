"""Which function converts which aten op, how its arguments are bound, and what it says it cannot do."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fx_passes.errors import UnsupportedOpError

__all__ = ["Converter", "bind", "converter_for", "converts"]

# Where or how a result is stored, not what it is. `dtype` is known from the result, and checked against it.
_STORAGE = frozenset(
    {"device", "layout", "pin_memory", "memory_format", "non_blocking", "copy", "generator", "requires_grad", "dtype"}
)
_RENAMED = {"self": "x", "input": "x"}
_REGISTRY: dict[Any, Converter] = {}


@dataclass(frozen=True)
class Converter:
    """One converter.

    Attributes:
        function: ``f(net, **arguments) -> tensor or tuple of tensors``; arguments have the aten op's own names, but
            `self` and `input` are called `x`. Arguments it does not name must have their default value.
        check: like `function` without `net`, on fake tensors; may also take `result`, the fake result. Returns why
            this use cannot be converted, or None.
        targets: the aten overloads or Python functions it converts.
        narrow: whether it takes and gives uint8 and int8 as they are; the others work on int32 in their place.
    """

    function: Callable[..., Any]
    check: Callable[..., str | None] | None
    targets: tuple[Any, ...]
    narrow: bool = False


def converts(
    *targets: Any, check: Callable[..., str | None] | None = None, narrow: bool = False
) -> Callable[[Callable], Callable]:
    """Register the decorated function for aten overloads (or for Python functions on sizes).

    Args:
        targets: such as ``torch.ops.aten.relu.default``.
        check: says why a use cannot be converted, see `Converter`.
        narrow: takes 8-bit integers as they are, see `Converter`.
    """

    def register(function: Callable) -> Callable:
        converter = Converter(function, check, targets, narrow)
        for target in targets:
            if target in _REGISTRY:
                raise ValueError(f"{target} has two converters")
            _REGISTRY[target] = converter
        return function

    return register


@cache
def _load_all() -> None:
    package = importlib.import_module("lowering.trt.define.converters")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def converter_for(target: Any) -> Converter | None:
    """The converter of an aten overload, or None. `permute_copy` and its like are, without aliases, `permute`."""
    _load_all()
    found = _REGISTRY.get(target)
    if found is None and isinstance(target, torch._ops.OpOverload) and target._opname.endswith("_copy"):
        viewing = getattr(torch.ops.aten, target._opname.removesuffix("_copy"), None)
        found = _REGISTRY.get(getattr(viewing, target._overloadname, None))
    return found


def all_converters() -> dict[Any, Converter]:
    """Every registered target and its converter."""
    _load_all()
    return dict(_REGISTRY)


def bind(
    target: Any, function: Callable, args: tuple, kwargs: dict, extra: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Arguments of a node by the names that `function` uses.

    Args:
        target: the node's target; positional arguments are named by its schema, or by order for plain functions.
        function: a converter's function or check.
        args: positional values.
        kwargs: keyword values.
        extra: for a check, further values that it may ask for by name; None for a converter, which must know every
            argument that is not at its default.

    Raises:
        UnsupportedOpError: an argument that the function does not know has another value than its default.
    """
    wanted = {n: p for n, p in inspect.signature(function).parameters.items() if n != "net"}
    if not isinstance(target, torch._ops.OpOverload):
        return {**dict(zip(wanted, args, strict=False)), **kwargs}
    bound: dict[str, Any] = {k: v for k, v in (extra or {}).items() if k in wanted}
    for position, argument in enumerate(target._schema.arguments):
        name = _RENAMED.get(argument.name, argument.name)
        if position < len(args):
            value = args[position]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        elif argument.has_default_value():
            value = argument.default_value
        else:
            continue
        if name in wanted:
            bound[name] = value
        elif (
            extra is None
            and name not in _STORAGE
            and not (argument.has_default_value() and value == argument.default_value)
        ):
            raise UnsupportedOpError(f"{target} with {argument.name}={value!r} has no TensorRT form")
    return bound
