"""Functions that a module holds, a replaced forward or a hook, made to mean the module's copy where they name it."""

from __future__ import annotations

import functools
import types
from typing import Any
from weakref import WeakSet

from torch import nn

__all__ = ["KNOWN_BY_IDENTITY", "rebind_functions"]

# Functions that are something else than their code to somebody (`wrap`): a copy would not be.
KNOWN_BY_IDENTITY: WeakSet[types.FunctionType] = WeakSet()

_TABLES = ("_forward_hooks", "_forward_pre_hooks")


def rebind_functions(new: nn.Module, old: nn.Module) -> None:
    """Let the functions that a deep copy of a module holds call the copy.

    A deep copy shares functions. One that knows the model by a variable (`model.forward = lambda x: model.stem(x)`, a
    hook inside a function, a decorator around the old forward) would run the parts of the original.

    Args:
        new: a deep copy of `old`, whose functions are replaced by copies where they know a module of `old`.
        old: it stays as it is.
    """
    copies = {id(theirs): ours for ours, theirs in zip(new.modules(), old.modules(), strict=True)}
    rebinder = _Rebinder(copies)
    for module in new.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, _FUNCTIONS):
                vars(module)[key] = rebinder.rebound(value)
        for table in _TABLES:
            for key, hook in vars(module)[table].items():
                vars(module)[table][key] = rebinder.rebound(hook)


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


class _Rebinder:
    """Finds what stands for an object of the original in the copy.

    Args:
        copies: of its modules, by the id of the original.
    """

    def __init__(self, copies: dict[int, nn.Module]):
        self.copies = copies
        self.found: dict[int, Any] = {}

    def rebound(self, value: Any) -> Any:
        """`value` itself if it knows no module of the original; else a copy that knows the copies."""
        if isinstance(value, nn.Module):
            return self.copies.get(id(value), value)
        if isinstance(value, types.MethodType):
            owner, function = self.rebound(value.__self__), self.rebound(value.__func__)
            same = owner is value.__self__ and function is value.__func__
            return value if same else types.MethodType(function, owner)
        if isinstance(value, functools.partial):
            return self._partial(value)
        if isinstance(value, types.FunctionType) and value not in KNOWN_BY_IDENTITY:
            if id(value) not in self.found:
                self.found[id(value)] = value  # functions may know each other in a circle
                self.found[id(value)] = self._function(value)
            return self.found[id(value)]
        return value

    def _partial(self, value: functools.partial[Any]) -> functools.partial[Any]:
        parts = (value.func, *value.args, *value.keywords.values())
        new = [self.rebound(part) for part in parts]
        if all(a is b for a, b in zip(parts, new, strict=True)):
            return value
        function, *args = new[: 1 + len(value.args)]
        made = functools.partial(function, *args, **dict(zip(value.keywords, new[1 + len(value.args) :], strict=True)))
        made.__dict__.update(value.__dict__)
        return made

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        cells = function.__closure__ or ()
        held = [_content(cell) for cell in cells]
        new_held = [self.rebound(value) for value in held]
        names = {
            name: new
            for name in _names(function.__code__)
            if name in function.__globals__
            and (new := self._global(function.__globals__[name])) is not function.__globals__[name]
        }
        if not names and all(a is b for a, b in zip(held, new_held, strict=True)):
            return function
        closure = tuple(cell if a is b else types.CellType(b) for cell, a, b in zip(cells, held, new_held, strict=True))
        space = _Namespace(function.__globals__, names) if names else function.__globals__
        code = function.__code__.replace()  # its own: the interpreter caches look-ups of globals in the code
        made = types.FunctionType(code, space, function.__name__, function.__defaults__, closure)
        made.__kwdefaults__ = function.__kwdefaults__
        for name in functools.WRAPPER_ASSIGNMENTS:
            setattr(made, name, getattr(function, name))
        made.__dict__.update(function.__dict__)
        return made

    def _global(self, value: Any) -> Any:
        """A global is looked at alone: the functions of a whole program would be reached from it."""
        return self.rebound(value) if isinstance(value, (nn.Module, types.MethodType)) else value


class _Namespace(dict):
    """The globals of a function, but for a few names that mean something else to it."""

    def __init__(self, real: dict[str, Any], names: dict[str, Any]):
        super().__init__(real, **names)  # for what reads it as a plain dict
        self.real, self.names = real, names

    def __getitem__(self, name: str) -> Any:
        return self.names[name] if name in self.names else self.real[name]


def _names(code: types.CodeType) -> set[str]:
    """The names that code looks up, in the functions inside it too."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
