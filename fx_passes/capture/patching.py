"""What is replaced while a trace runs, and only then: wrapped callables and tensor factories.

Three means, each of which acts on the tracing thread alone and behaves as the original for every other one:

* a Python function gets a dispatcher as its `__code__`, so that every reference to it is reached, wherever it was
  imported to or stored;
* a builtin or another callable object is replaced in the dictionaries of modules that hold it;
* a tensor factory (`torch.zeros(n, c)` with traced sizes) is replaced on the `torch` module.
"""

from __future__ import annotations

import builtins
import functools
import gc
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch.fx import Proxy

if TYPE_CHECKING:
    from fx_passes.capture.tracer import QuantizationTracer

__all__ = [
    "ClassStandIn",
    "activate",
    "current_tracer",
    "dispatch",
    "entered_library_functions",
    "recording",
    "replaced_code",
    "replaced_entry",
    "replaced_everywhere",
    "replaced_factories",
    "replaced_isinstance",
]

# Recorded with any arguments: their result is written to, or random, so a value made while tracing would be wrong.
_FRESH_FACTORIES = ("zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "normal", "bernoulli")
# Recorded where an argument is traced; else they give the constant that later Python code may read.
_CONSTANT_FACTORIES = ("arange", "range", "linspace", "logspace", "eye", "tensor", "as_tensor", "scalar_tensor")

_thread = threading.local()
_keys = itertools.count()
# Per wrapped function: its key in the dispatcher's code, a clone that runs the original code, and the dispatcher.
_stand_ins: WeakKeyDictionary[types.FunctionType, _StandIn] = WeakKeyDictionary()
_by_key: WeakValueDictionary[int, types.FunctionType] = WeakValueDictionary()


@dataclass
class _StandIn:
    original: types.FunctionType
    dispatcher: types.CodeType
    active: bool = False


def current_tracer() -> QuantizationTracer | None:
    """The tracer that records on this thread, or None."""
    stack = getattr(_thread, "tracers", None)
    return stack[-1] if stack else None


@contextmanager
def activate(tracer: QuantizationTracer | None) -> Iterator[None]:
    """Record on this thread with `tracer`; with None, run plain Python inside a trace."""
    stack = _thread.__dict__.setdefault("tracers", [])
    stack.append(tracer)
    try:
        yield
    finally:
        stack.pop()


def dispatch(key: int, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a wrapped function's replaced code calls."""
    function = _by_key[key]
    original = _stand_ins[function].original
    tracer = current_tracer()
    if tracer is None:
        return original(*args, **kwargs)
    return tracer.call_wrapped(function, original, args, kwargs)


@contextmanager
def replaced_code(functions: Iterable[types.FunctionType]) -> Iterator[None]:
    """Let calls of these functions pass through `dispatch` until the context ends."""
    undo: list[tuple[types.FunctionType, types.CodeType]] = []
    try:
        for function in functions:
            stand_in = _stand_in(function)
            if stand_in.active:
                continue  # a trace inside a trace
            undo.append((function, function.__code__))
            function.__code__, stand_in.active = stand_in.dispatcher, True
        yield
    finally:
        for function, code in undo:
            function.__code__, _stand_ins[function].active = code, False


def _stand_in(function: types.FunctionType) -> _StandIn:
    if function not in _stand_ins:
        key = next(_keys)
        _by_key[key] = function
        _stand_ins[function] = _StandIn(_clone(function), _dispatcher_code(key, function.__code__))
    return _stand_ins[function]


def _clone(function: types.FunctionType) -> types.FunctionType:
    clone = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    clone.__kwdefaults__ = function.__kwdefaults__
    clone.__dict__.update(function.__dict__)
    clone.__qualname__ = function.__qualname__
    return clone


def _dispatcher_code(key: int, code: types.CodeType) -> types.CodeType:
    """Code that can stand in for `code`: Python demands the same free variables."""
    free = ", ".join(code.co_freevars)
    assign = f"    {' = '.join(code.co_freevars)} = None\n" if free else ""
    mention = f"        if 0: {free}\n" if free else ""
    source = (
        "def outer():\n"
        f"{assign}"
        "    def dispatcher(*args, **kwargs):\n"
        f"{mention}"
        "        from fx_passes.capture.patching import dispatch as __dispatch\n"
        f"        return __dispatch({key}, args, kwargs)\n"
        "    return dispatcher\n"
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), namespace)
    return namespace["outer"]().__code__.replace(co_name=code.co_name)


@contextmanager
def replaced_entry(namespace: dict[str, Any], name: str, replacement: Any) -> Iterator[None]:
    """Bind `name` in a module's dictionary to `replacement` until the context ends."""
    missing = object()
    before = namespace.get(name, missing)
    namespace[name] = replacement
    try:
        yield
    finally:
        if before is missing:
            namespace.pop(name, None)
        else:
            namespace[name] = before


def recording(function: Callable[..., Any], *, always: bool = False, python: bool = False) -> Callable[..., Any]:
    """A stand-in for `function` that records its call on the tracing thread."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is None or not (always or tracer.sees((args, kwargs))):
            return function(*args, **kwargs)
        if python:
            return tracer.call_wrapped(function, function, args, kwargs)
        return tracer.create_proxy("call_function", function, args, kwargs)

    stand_in.__name__ = getattr(function, "__name__", "stand_in")
    stand_in.__wrapped__ = function  # type: ignore[attr-defined]
    return stand_in


@contextmanager
def replaced_factories() -> Iterator[None]:
    """Record tensor factories."""
    with ExitStack() as stack:
        for name in _FRESH_FACTORIES + _CONSTANT_FACTORIES:
            function = getattr(torch, name)
            if hasattr(function, "__wrapped__"):
                continue  # a trace inside a trace
            stand_in = recording(function, always=name in _FRESH_FACTORIES)
            stack.enter_context(replaced_entry(torch.__dict__, name, stand_in))
        yield


@contextmanager
def entered_library_functions() -> Iterator[None]:
    """Let the tracer enter the functions that a library marked with `torch.fx.wrap`.

    The mark says that plain symbolic tracing cannot follow them, and no more. What `fx_passes.wrap` marks stays Python.
    """
    marked = torch.fx._symbolic_trace._wrapped_fns_to_patch
    entered = {
        key: space
        for key, space in marked.items()
        # ours are one call in a graph on purpose: how a mask is built depends on ranks, known when it runs
        if isinstance(space.get(key[1]), types.FunctionType) and not str(space.get("__name__")).startswith("fx_passes.")
    }
    with ExitStack() as stack:
        for (_, name), namespace in entered.items():
            stack.enter_context(replaced_entry(namespace, name, _entered(namespace[name])))
        for key in entered:
            del marked[key]
        try:
            yield
        finally:
            marked.update(entered)


def _entered(function: types.FunctionType) -> Callable[..., Any]:
    @functools.wraps(function)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is None or not tracer.sees((args, kwargs)):
            return function(*args, **kwargs)
        return tracer.call_marked(function, args, kwargs)

    return stand_in


@contextmanager
def replaced_isinstance(classes: Iterable[type]) -> Iterator[None]:
    """Let `isinstance(x, torch.Tensor)` hold of a traced tensor in the code of these classes' packages.

    The proxy cannot call itself a tensor: torch's C++ would take it for one. So the name `isinstance` is bound in the
    modules that the user's code is in, and in no other.
    """

    def is_instance(value: Any, kinds: Any) -> bool:
        tracer = current_tracer()
        if isinstance(value, Proxy) and tracer is not None:
            return tracer.is_instance(value, kinds)
        return isinstance(value, kinds)

    packages = {cls.__module__.partition(".")[0] for cls in classes} - {"torch", "builtins", "fx_passes"}
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            namespace = getattr(module, "__dict__", None)
            if name.partition(".")[0] in packages and type(namespace) is dict and "isinstance" not in namespace:
                stack.enter_context(replaced_entry(namespace, "isinstance", is_instance))
        yield


@contextmanager
def replaced_everywhere(target: Any, replacement: Any, more: list[dict[str, Any]]) -> Iterator[None]:
    """Replace a callable object in every loaded module and in the namespaces `more`, whatever its name there.

    A class defined inside a function is known to its neighbours through closure cells, which are replaced as well.
    """
    with ExitStack() as stack:
        loaded = [getattr(module, "__dict__", None) for module in list(sys.modules.values()) if module is not builtins]
        for namespace in (*loaded, *more):
            if type(namespace) is not dict:
                continue
            for key in [k for k, v in list(namespace.items()) if v is target]:
                stack.enter_context(replaced_entry(namespace, key, replacement))
        if "<locals>" in getattr(target, "__qualname__", ""):
            for cell in [r for r in gc.get_referrers(target) if isinstance(r, types.CellType)]:
                stack.enter_context(_replaced_cell(cell, replacement))
        yield


@contextmanager
def _replaced_cell(cell: types.CellType, replacement: Any) -> Iterator[None]:
    before = cell.cell_contents
    cell.cell_contents = replacement
    try:
        yield
    finally:
        cell.cell_contents = before


class ClassStandIn:
    """Stands for a wrapped class while tracing: constructing it from traced values is one node of the graph."""

    def __init__(self, cls: type):
        self.__dict__["_cls"] = cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is None:
            return self._cls(*args, **kwargs)
        return tracer.call_wrapped(self._cls, self._cls, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cls, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._cls, name, value)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._cls)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self._cls)

    def __mro_entries__(self, bases: tuple) -> tuple[type]:
        return (self._cls,)
