"""The arguments of a call by name, flat, and as one call again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree

from lowering.request.inputs import Example

__all__ = ["as_example", "bound_arguments", "leaves_of", "signature_of"]


def bound_arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults filled in.

    Raises:
        TypeError: they do not fit the signature.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def leaves_of(arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    """Everything in nested arguments that is no list, tuple or dict, each with where it is: "features[0]"."""
    found = pytree.tree_flatten_with_path(arguments)[0]
    return [(f"{path[0].key}{pytree.keystr(path[1:])}", leaf) for path, leaf in found]  # type: ignore[attr-defined]


def as_example(signature: inspect.Signature, arguments: dict[str, Any]) -> Example:
    """Arguments by name as one call: positional where that says all, else by keyword."""
    call = inspect.BoundArguments(signature, arguments)  # type: ignore[arg-type]
    if not call.kwargs:
        return Example(call.args)
    kinds = {p.name: p.kind for p in signature.parameters.values()}
    named: dict[str, Any] = {}
    for name, value in arguments.items():
        if kinds[name] is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif kinds[name] in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            named[name] = value
    return Example((), named)


def signature_of(function: Callable[..., Any]) -> str:
    """Parameter names and defaults, without annotations (which may print differently from run to run)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    return "(" + ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters) + ")"
