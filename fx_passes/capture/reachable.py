"""What the code of a model can reach and change: attributes and what stands in them, class attributes, globals.

The walk begins at a model. It follows modules, containers and plain objects, the functions that these hold (hooks, say)
with their closures, the classes of everything found, and from code the globals and methods that it names. What belongs
to torch or to the standard library is not followed.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fx_passes.capture.holders import Holder, SavedTensor, is_dunder, slots_of

__all__ = ["Reachable"]

_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.Generator)
_LRU_CACHE = type(functools.lru_cache(lambda: None))
_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property, functools.partial, _LRU_CACHE)
_PARTS = ("__func__", "fget", "fset", "func", "args", "keywords", "__wrapped__")
_FOREIGN = {*sys.stdlib_module_names, "torch", "numpy", "fx_passes", "lowering"} - {"__main__"}
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_MANY = 10_000  # entries of a container: it is data of a program then, which is compared and not looked into
_LARGE = 1_000_000  # elements of a tensor that only a global names: data, too, of which no copy is made


class Reachable:
    """Everything that a call of a model may write to, as it is now.

    Args:
        root: a model.
        tensors: whether to copy the values of tensors.

    Attributes:
        holders: containers, tables of attributes, classes, closures and globals.
        tensors: the tensors in them, parameters aside.
    """

    def __init__(self, root: nn.Module, tensors: bool = True):
        self._saves_tensors = tensors
        self.holders: list[Holder] = []
        self.tensors: list[SavedTensor] = []
        self._caches: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._seen: dict[int, Any] = {}  # with the object: while it lives, no other has its id
        self._pending = [(module, "", _described(path, module)) for path, module in root.named_modules()][::-1]
        # Names that code mentions, and the classes and modules in which these are looked up.
        self._names, self._new_names = set[str](), {"forward"}
        self._classes: dict[type, None] = {}
        self._modules: list[types.ModuleType] = []
        self._globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
        while self._pending:
            self._walk()
            self._look_up()
        for namespace, names in self._globals.values():
            self.holders.append(Holder(namespace, "", f"the module {namespace.get('__name__')}", frozenset(names)))

    @contextmanager
    def with_empty_caches(self) -> Iterator[None]:
        """Let everything under `functools.lru_cache` have another cache, which ends with the context."""
        with ExitStack() as stack:
            for table, name, value in self._caches.values():
                stack.enter_context(_replaced(table, name, value, _twin(value)))
            yield

    def restore(self) -> None:
        """Put everything back."""
        for holder in self.holders:
            holder.restore()
        for saved in self.tensors:
            saved.restore()

    # -- values --------------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        while self._pending:
            value, name, owner = self._pending.pop()
            if not isinstance(value, _LEAVES) and id(value) not in self._seen:
                self._seen[id(value)] = value
                self._look_into(value, name, owner)

    def _look_into(self, value: Any, name: str, owner: str) -> None:
        if isinstance(value, Tensor):
            if self._saves_tensors and not isinstance(value, nn.Parameter) and _has_values(value):
                self.tensors.append(SavedTensor(value, name, owner))
        elif isinstance(value, nn.Module):
            if not isinstance(value, torch.jit.ScriptModule):
                self._hold(vars(value), "", f"'{name}' ({type(value).__name__})" if name else owner)
                self._class(type(value))
        elif isinstance(value, (dict, list, deque, set)):
            self._hold(value, name, owner)
        elif isinstance(value, (tuple, frozenset)):
            self._pending += [(item, name, owner) for item in value]
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._pending += [(value.__func__, name, owner), (value.__self__, name, owner)]
        elif isinstance(value, _WRAPPERS):
            self._pending += [(getattr(value, part, None), name, owner) for part in _PARTS]
        elif isinstance(value, type):
            self._class(value)
        elif not _is_foreign(type(value).__module__):
            if isinstance(getattr(value, "__dict__", None), dict):
                self._hold(vars(value), f"{name}.", owner)
            if slots_of(type(value)):
                self._hold(value, f"{name}.", owner)
            self._class(type(value))

    def _hold(self, target: Any, name: str, owner: str) -> None:
        """Keep what `target` holds, and look into it; a name that ends in a dot is that of an object."""
        holder = Holder(target, name, owner)
        self.holders.append(holder)
        content = holder.before
        if len(content) > _MANY:
            return
        if isinstance(content, dict):
            for key, value in content.items():
                self._note_cache(target, key, value)
            self._pending += [(value, _entry(name, key), owner) for key, value in content.items()]
        else:
            self._pending += [(value, f"{name}[{i}]" if name else name, owner) for i, value in enumerate(content)]

    # -- code ----------------------------------------------------------------------------------------------------

    def _function(self, function: types.FunctionType) -> None:
        if _is_foreign(function.__module__):
            return
        owner = f"the function '{function.__qualname__}'"
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            holder = Holder(cell, name, owner)
            self.holders.append(holder)
            self._pending += [(value, name, owner) for value in holder.before]
        self._hold(vars(function), "", owner)
        self._pending += [(value, "an argument's default", owner) for value in function.__defaults__ or ()]
        self._pending += [(value, name, owner) for name, value in (function.__kwdefaults__ or {}).items()]
        names = _names_in(function.__code__)
        self._new_names |= names - self._names
        for name in names & function.__globals__.keys():
            self._global(function.__globals__, name)
        for name in _assigned_in(function.__code__) - function.__globals__.keys():
            self._globals.setdefault(id(function.__globals__), (function.__globals__, set()))[1].add(name)

    def _class(self, cls: type) -> None:
        """Keep the attributes of a class of the user's and its bases; its methods are reached by their names."""
        for base in cls.__mro__:
            if base in self._classes or _is_foreign(base.__module__):
                continue
            self._classes[base] = None
            owner = f"the class '{base.__qualname__}'"
            holder = Holder(base, "", owner)
            self.holders.append(holder)
            self._pending += [(v, n, owner) for n, v in holder.before.items() if not _is_code(v)]
            self._pending += [(v, n, owner) for n, v in vars(base).items() if is_dunder(n) and _is_code(v)]
            self._from_class(base, self._names)

    def _look_up(self) -> None:
        """Follow the names that code has mentioned since the last time."""
        new, self._new_names = self._new_names - self._names, set()
        self._names |= new
        for cls in list(self._classes):
            self._from_class(cls, new)
        for module in self._modules:
            for name in vars(module).keys() & new:
                self._global(vars(module), name)

    def _from_class(self, cls: type, names: set[str]) -> None:
        for name in vars(cls).keys() & names:
            value = vars(cls)[name]
            if _is_code(value):
                self._note_cache(cls, name, value)
                self._pending.append((value, name, f"the class '{cls.__qualname__}'"))

    def _global(self, namespace: dict[str, Any], name: str) -> None:
        value = namespace[name]
        if is_dunder(name):
            return
        if isinstance(value, types.ModuleType):
            if not _is_foreign(value.__name__) and value not in self._modules:
                self._modules.append(value)
                for known in vars(value).keys() & self._names:
                    self._global(vars(value), known)
            return
        self._note_cache(namespace, name, value)
        if not _is_code(value) and not isinstance(value, type):
            self._globals.setdefault(id(namespace), (namespace, set()))[1].add(name)
            if isinstance(value, Tensor) and value.numel() > _LARGE:
                return
        self._pending.append((value, name, f"the module {namespace.get('__name__')}"))

    def _note_cache(self, table: Any, name: str, value: Any) -> None:
        if isinstance(getattr(value, "__func__", value), _LRU_CACHE):
            self._caches[id(table), name] = table, name, value


@contextmanager
def _replaced(table: Any, name: str, value: Any, by: Any) -> Iterator[None]:
    """Let a class or a dict hold something else until the context ends."""
    put = functools.partial(setattr, table) if isinstance(table, type) else table.__setitem__
    put(name, by)
    try:
        yield
    finally:
        put(name, value)


def _twin(cached: Any) -> Any:
    """The same function under a cache of its own, which is empty."""
    if isinstance(cached, (staticmethod, classmethod)):
        return type(cached)(_twin(cached.__func__))
    return functools.lru_cache(**cached.cache_parameters())(cached.__wrapped__)


def _described(path: str, module: nn.Module) -> str:
    return f"'{path}' ({type(module).__name__})" if path else f"'{type(module).__name__}'"


def _entry(name: str, key: Any) -> str:
    """The name of what a table called `name` holds at `key`."""
    return f"{name}{key}" if not name or name.endswith(".") else f"{name}[{key!r}]"


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.layout is torch.strided


def _is_code(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, types.MethodType, *_WRAPPERS))


def _is_foreign(module: Any) -> bool:
    """Whether the module of this name is torch's, Python's or this package's."""
    return not isinstance(module, str) or module.partition(".")[0] in _FOREIGN


def _assigned_in(code: types.CodeType) -> set[str]:
    """The globals that code assigns."""
    assigned: set[str] = set()
    if _STORE_GLOBAL in code.co_code[::2]:
        assigned = {str(i.argval) for i in dis.get_instructions(code) if i.opcode == _STORE_GLOBAL}
    return assigned.union(*map(_assigned_in, _inner(code)))


def _names_in(code: types.CodeType) -> set[str]:
    """The globals and attributes that code mentions."""
    return set(code.co_names).union(*map(_names_in, _inner(code)))


def _inner(code: types.CodeType) -> list[types.CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
