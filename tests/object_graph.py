"""An image of everything that can be reached from a model: attributes, containers, closures, classes, globals, caches.

It follows more than the package does, by other means: every global of the modules that the model's classes come from.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy

__all__ = ["difference", "image_of"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
# What Python itself notes down: warnings that were shown, how to copy a class.
_OF_PYTHON = ("__builtins__", "__warningregistry__", "__slotnames__", "__dict__", "__weakref__")
_CACHE = type(functools.lru_cache(lambda: None))


@dataclass(frozen=True, eq=False)
class _This:
    """One object, which stays alive with the image."""

    value: object

    def __eq__(self, other):
        return isinstance(other, _This) and self.value is other.value


def image_of(model: nn.Module) -> dict[str, object]:
    """What stands at every path; two images are equal if nothing was replaced, added, taken away or written to."""
    found: dict[str, object] = {}
    seen: set[int] = set()
    kept = []
    names = {c.__module__ for m in model.modules() for c in type(m).__mro__ if not c.__module__.startswith("torch")}
    pending = [("model", model), *((name, vars(sys.modules[name])) for name in names - {"builtins"})]
    while pending:
        path, value = pending.pop()
        assert not isinstance(value, (Proxy, FakeTensor, torch.SymInt)), f"{path} is left behind"
        if isinstance(value, _PLAIN):
            found[path] = (type(value), repr(value))
            continue
        found[path] = type(value) if isinstance(value, tuple) else _This(value)
        if isinstance(value, torch.Tensor):
            found[f"{path} value"] = (
                value.dtype,
                value.requires_grad,
                value.shape,
                repr(value.grad_fn),
                _content(value),
            )
        if id(value) not in seen:
            seen.add(id(value))
            kept.append(value)
            pending += [(f"{path}{name}", item) for name, item in _parts(value)]
    return found


def difference(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """The paths at which two images differ."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path, "") != after.get(path, ""))


def _content(tensor: torch.Tensor) -> str:
    return repr(tensor.detach().tolist())  # the memory of an array would not be resized any more


def _parts(value):
    if isinstance(value, nn.Module):
        return [*_parts(vars(value)), (".__class__", type(value))]
    if isinstance(value, dict):
        content = {k: v for k, v in value.items() if k not in _OF_PYTHON}
        return [(" keys", tuple(map(repr, content))), *((f"[{k!r}]", v) for k, v in content.items())]
    if isinstance(value, (list, tuple, deque)):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [(" items", tuple(sorted(map(repr, value))))]
    if isinstance(value, types.FunctionType):
        cells = [c.cell_contents for c in value.__closure__ or () if c != types.CellType()]
        return [(" code", value.__code__), (" closure", tuple(cells)), (" attributes", vars(value))]
    if isinstance(value, _CACHE):
        return [(" entries", value.cache_info().currsize), (" function", value.__wrapped__)]
    if isinstance(value, (types.MethodType, staticmethod, classmethod)):
        return [(" function", value.__func__)]
    if isinstance(value, type):
        ours = not value.__module__.startswith(("torch", "builtins", "_"))
        return [(f".{n}", v) for n, v in vars(value).items() if n not in _OF_PYTHON] if ours else []
    if isinstance(value, types.ModuleType) or type(value).__module__.startswith(("torch", "builtins", "_")):
        return []
    return [(f".{n}", v) for n, v in getattr(value, "__dict__", {}).items()]
