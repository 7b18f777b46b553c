"""Plain attributes that a forward sets while it is traced: a graph does not set them, so its user is told."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node, Proxy

__all__ = ["AttributeChanges", "written_in_place"]

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_OPERATORS = {getattr(operator, f"i{name}") for name in _ARITHMETIC}


@dataclass
class _Change:
    path: str
    owner: str
    name: str
    before: Any
    after: Any
    line: str

    def is_in_place(self) -> bool:
        """Whether the value is the attribute's own tensor, written to: a graph does that, too."""
        if not isinstance(self.after, Proxy):
            return False
        origin = written_in_place(self.after)
        return origin.op == "get_attr" and origin.target == f"{self.path}.{self.name}".lstrip(".")


class AttributeChanges:
    """What the forwards below a root assign to plain attributes of their modules during one trace.

    Args:
        root: the module that is traced; None for a function.
    """

    def __init__(self, root: nn.Module | None):
        self._paths = {id(module): path for path, module in root.named_modules()} if root is not None else {}
        self._changes: dict[tuple[int, str], _Change] = {}

    def note(self, module: nn.Module, name: str, value: Any, line: str) -> None:
        """Take in the assignment `module.name = value`, before it is made, at the user's `line`."""
        key = (id(module), name)
        if key in self._changes:
            self._changes[key].after = value
        else:
            path, before = self._paths.get(id(module), ""), module.__dict__.get(name)
            self._changes[key] = _Change(path, type(module).__name__, name, before, value, line)

    def warn(self, leaves: Collection[str]) -> None:
        """Name every attribute that ended with another value than it began with.

        Args:
            leaves: paths of the submodules that stay Python, whose attributes go on changing.
        """
        for change in self._changes.values():
            inside = any(change.path == leaf or change.path.startswith(f"{leaf}.") for leaf in leaves)
            if inside or change.is_in_place() or _same(change.before, change.after):
                continue
            owner = f"'{change.path}' ({change.owner})" if change.path else f"'{change.owner}'"
            warnings.warn(
                f"the attribute '{change.name}' of {owner} is changed by forward ({change.line}); the graph keeps the "
                "value it had while tracing, and calls of it change nothing. Register a buffer for what calls carry "
                "on, or wrap() the method that changes it",
                stacklevel=2,
            )


def written_in_place(value: Proxy) -> Node:
    """The node that `value` began as, before in-place operators (`+=`, `add_`) wrote to it."""
    node = value.node
    while _writes_in_place(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _writes_in_place(node: Node) -> bool:
    if not node.args:
        return False
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    return node.op == "call_function" and node.target in _OPERATORS


def _same(before: Any, after: Any) -> bool:
    """Whether two values are one object or equal; traced values are never equal."""
    if before is after:
        return True
    if type(before) is not type(after) or isinstance(after, Proxy):
        return False
    if isinstance(before, torch.Tensor):
        return before.dtype == after.dtype and torch.equal(before, after)
    if isinstance(before, (tuple, list)):
        return len(before) == len(after) and all(map(_same, before, after))
    return isinstance(before, _PLAIN) and bool(before == after)
