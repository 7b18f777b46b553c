"""Things that hold values, with what they held: dicts, lists, sets, classes, cells, globals, and tensors."""

from __future__ import annotations

import types
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["MISSING", "Holder", "SavedTensor", "is_dunder", "same_bits", "slots_of"]

MISSING = object()


@dataclass
class Holder:
    """A container of values, and what was in it.

    Attributes:
        target: a dict, list, deque, set, class, closure cell, or an object with slots.
        name, owner: what it is to its user: "states", of "'child' (Child)".
        keys: the keys of a dict that are looked at. None: all.
        before: what it held: by key, or in order.
    """

    target: Any
    name: str
    owner: str
    keys: frozenset[str] | None = None
    before: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.before = self.content()

    def content(self) -> Any:
        """What it holds now: a dict, a list or a frozenset."""
        target = self.target
        if isinstance(target, dict):
            return dict(target) if self.keys is None else {key: target.get(key, MISSING) for key in self.keys}
        if isinstance(target, (list, deque)):
            return list(target)
        if isinstance(target, set):
            return frozenset(target)
        if isinstance(target, types.CellType):
            return _inside(target)
        if isinstance(target, type):
            return {name: value for name, value in vars(target).items() if not is_dunder(name)}
        return {name: getattr(target, name) for name in slots_of(type(target)) if hasattr(target, name)}

    def changed(self) -> bool:
        """Whether it holds other objects than it did."""
        now, before = self.content(), self.before
        if isinstance(before, dict):
            return now.keys() != before.keys() or any(now[key] is not value for key, value in before.items())
        if isinstance(before, list):
            return len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True))
        return bool(now != before)

    def restore(self) -> None:
        """Put back what it held, if it holds anything else."""
        if not self.changed():
            return
        target, before = self.target, self.before
        if self.keys is not None:
            for key, value in before.items():
                _set_global(target, key, value)
        elif isinstance(target, (dict, set)):
            target.clear()
            target.update(before)
        elif isinstance(target, list):
            target[:] = before
        elif isinstance(target, deque):
            target.clear()
            target.extend(before)
        elif isinstance(target, types.CellType):
            _fill_cell(target, before)
        else:
            now = self.content()
            for name in now.keys() - before.keys():
                delattr(target, name)
            for name, value in before.items():
                # a property is computed anew each time it is asked for, and has nothing to be put back
                if now.get(name, MISSING) is not value and not isinstance(getattr(type(target), name, None), property):
                    setattr(target, name, value)


@dataclass
class SavedTensor:
    """A tensor, and the value that it had."""

    tensor: Tensor
    name: str
    owner: str
    value: Tensor = field(init=False, repr=False)
    version: int | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.value, self.version = self.tensor.detach().clone(), self._version()

    def _version(self) -> int | None:
        return None if self.tensor.is_inference() else self.tensor._version

    def changed(self) -> bool:
        """Whether it was written to."""
        # Not by version alone: batch_norm updates its statistics without counting.
        return self._version() != self.version or not same_bits(self.tensor, self.value)

    def restore(self) -> None:
        """Give it its value back, if it was written to."""
        if self.changed():
            with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
                if self.tensor.shape != self.value.shape:
                    self.tensor.resize_(self.value.shape)
                self.tensor.copy_(self.value)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one type hold the same values, NaN among them."""
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()))


def _inside(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _fill_cell(cell: types.CellType, content: list[Any]) -> None:
    if content:
        cell.cell_contents = content[0]
    else:
        del cell.cell_contents


def _set_global(namespace: dict[str, Any], key: str, value: Any) -> None:
    """Put a global back. A module, function or class that was loaded meanwhile is not loaded again: it stays."""
    now = namespace.get(key, MISSING)
    if now is value or isinstance(now, (types.ModuleType, types.FunctionType, type)):
        return
    if value is MISSING:
        del namespace[key]
    else:
        namespace[key] = value


def is_dunder(name: str) -> bool:
    """Whether a name is one of Python's own, like `__init__`."""
    return name.startswith("__") and name.endswith("__")


def slots_of(cls: type) -> list[str]:
    """The attributes of instances of `cls` that are kept in slots."""
    slots = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    names = [name for some in slots for name in ((some,) if isinstance(some, str) else some)]
    return [name for name in names if not is_dunder(name)]
