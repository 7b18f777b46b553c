"""`wrap`: calls that stay whole in the graph and run as plain Python."""

from __future__ import annotations

import builtins
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

from torch import nn
from torch.fx import GraphModule

from fx_passes.capture.patching import ClassStandIn, recording, replaced_code, replaced_entry, replaced_everywhere
from fx_passes.errors import InputError
from fx_passes.graph.functions import KNOWN_BY_IDENTITY

__all__ = ["is_wrapped", "is_wrapped_method", "is_wrapped_module", "records", "wrap", "wrapped_calls"]

T = TypeVar("T")

_functions = KNOWN_BY_IDENTITY
_classes: WeakSet[type] = WeakSet()
_builtins: dict[int, tuple[Callable[..., Any], list[dict[str, Any]]]] = {}  # with the globals of those who asked
_names: dict[tuple[int, str], dict[str, Any]] = {}  # (id of globals, name) -> globals
_BUILTIN_TYPES = (types.BuiltinFunctionType, types.BuiltinMethodType, types.MethodDescriptorType)


def wrap(target: T) -> T:
    """Keep calls of `target` whole in traced graphs; they run as the plain Python they are.

    Use it as a decorator or as a call, before or after the model is made. Outside a trace nothing is changed, and a
    call that gets no traced value runs as normal Python while tracing too.

    Args:
        target: one of
            a function or a builtin: a `call_function` node;
            a method (plain, static or class method): a `call_method` node on the object itself, which is the original
            model, whatever is fused or quantized later;
            an `nn.Module` class: its instances are leaves, and so are its other methods;
            any other class: constructing it from traced values, and its methods;
            a string: the name of a function, class or builtin (such as "len") as the calling module knows it.

    Returns:
        `target` itself.

    Raises:
        InputError: `target` is none of these.

    Example:
        >>> @wrap
        ... def top_scores(scores, k):
        ...     return [row.topk(min(k, len(row))).values for row in scores]
    """
    namespace = sys._getframe(1).f_globals
    if isinstance(target, str):
        _names[id(namespace), target] = namespace
    elif isinstance(target, (staticmethod, classmethod, types.MethodType)):
        wrap(target.__func__)
    elif isinstance(target, types.FunctionType):
        _functions.add(target)
    elif isinstance(target, type):
        _classes.add(target)
    elif isinstance(target, _BUILTIN_TYPES):
        _builtins.setdefault(id(target), (target, []))[1].append(namespace)
    else:
        raise InputError(
            f"cannot wrap {target!r} of type {type(target).__name__}",
            hint="wrap the function that it calls, its class, or a module-level name given as a string",
        )
    return target


def is_wrapped(target: Any) -> bool:
    """Whether `wrap` was called on this function, method, builtin or class (or on a base class of it)."""
    if isinstance(target, (staticmethod, classmethod, types.MethodType)):
        target = target.__func__
    if isinstance(target, type):
        return any(base in _classes for base in target.__mro__)
    if isinstance(target, types.FunctionType):
        return target in _functions or any(_resolve(space, name) is target for (_, name), space in _names.items())
    return id(target) in _builtins


def is_wrapped_method(cls: type, name: str) -> bool:
    """Whether `cls` has a method of this name that is wrapped, by itself or with `cls` or a base of it."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    function = _method(name, vars(owner)[name]) if owner is not None else None
    if owner is None or function is None:
        return False
    return is_wrapped(function) or (is_wrapped(cls) and not _of_torch(owner))


def is_wrapped_module(module: nn.Module) -> bool:
    """Whether the module's class, or a base of it, is wrapped: such a module is a leaf."""
    return is_wrapped(type(module))


def records(function: Any, args: tuple) -> bool:
    """Whether a call of `function`, whose code is replaced, is one that `wrap` asked for.

    The methods that a wrapped class inherits are replaced as well, and other classes may inherit them too.
    """
    if not isinstance(function, types.FunctionType) or is_wrapped(function):
        return True
    if args and is_wrapped(args[0] if isinstance(args[0], type) else type(args[0])):
        return True
    found = (vars(cls).get(function.__name__) for cls in _classes)
    return any(isinstance(value, staticmethod) and value.__func__ is function for value in found)


@contextmanager
def wrapped_calls(root: Any) -> Iterator[None]:
    """Let calls of everything wrapped reach the tracer of this thread until the context ends.

    Args:
        root: what is traced. The code of graph modules in it has namespaces of its own.
    """
    modules = root.modules() if isinstance(root, nn.Module) else ()
    generated = [type(m).forward.__globals__ for m in modules if isinstance(m, GraphModule)]
    functions, classes = set(_functions), set(_classes)
    with ExitStack() as stack:
        for (_, name), namespace in list(_names.items()):
            found = _resolve(namespace, name)
            if isinstance(found, types.FunctionType):
                functions.add(found)
            elif isinstance(found, type) and "." not in name:
                classes.add(found)
            elif callable(found) and "." not in name:
                for space in (namespace, *generated):
                    if _resolve(space, name) is found:
                        stack.enter_context(replaced_entry(space, name, recording(found, python=True)))
            else:
                warnings.warn(f"wrap('{name}'): {namespace.get('__name__')} has no such function", stacklevel=2)
        for function, namespaces in list(_builtins.values()):
            stand_in = recording(function, python=True)
            stack.enter_context(replaced_everywhere(function, stand_in, generated))
            for namespace in (*namespaces, *generated):
                if getattr(builtins, function.__name__, None) is function:
                    stack.enter_context(replaced_entry(namespace, function.__name__, stand_in))
        for cls in classes:
            functions.update(_methods(cls))
            if not issubclass(cls, nn.Module):
                stack.enter_context(replaced_everywhere(cls, ClassStandIn(cls), generated))
        stack.enter_context(replaced_code(functions))
        yield


def _resolve(namespace: dict[str, Any], name: str) -> Any:
    first, *rest = name.split(".")
    found = namespace.get(first, getattr(builtins, first, None))
    for part in rest:
        found = getattr(found, part, None)
    return found


def _methods(cls: type) -> Iterator[types.FunctionType]:
    """The functions that instances of `cls` and of its subclasses may be asked for, torch's own aside."""
    subclasses: list[type] = [cls]
    for known in subclasses:
        found: list[type] = type.__subclasses__(known)
        subclasses += [new for new in found if new not in subclasses]
    bases = [base for base in cls.__mro__[1:] if not _of_torch(base)]
    for owner in subclasses + bases:
        for name, value in vars(owner).items():
            function = _method(name, value)
            if function is not None:
                yield function


def _method(name: str, value: Any) -> types.FunctionType | None:
    """The function of a class's attribute, if it is a method that a model may call by its name."""
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    hidden = name.startswith("__") and name.endswith("__") and name != "__call__"
    return function if isinstance(function, types.FunctionType) and not hidden else None


def _of_torch(cls: type) -> bool:
    return cls.__module__.startswith(("torch.", "builtins"))
