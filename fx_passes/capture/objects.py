"""Where a model holds the objects that its forward passes on: modules, and plain objects of the user's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fx_passes.capture.proxy import contains_traced
from fx_passes.graph.module import GraphModuleWithAttr

__all__ = ["holds_traced", "object_paths"]


def object_paths(root: nn.Module) -> dict[int, str]:
    """The dotted path below `_self` of every module and plain object that `root` holds, by the object's id.

    Plain objects are followed three attributes deep; what stands in lists and dicts has no such path.
    """
    paths = {id(root): "_self"}
    for name, module in root.named_modules(remove_duplicate=False):
        prefix = f"_self.{name}" if name else "_self"
        paths.setdefault(id(module), prefix)
        _collect_objects(module, prefix, paths, depth=3)
        if isinstance(module, GraphModuleWithAttr):
            for path, inner in module._self.named_modules():
                paths.setdefault(id(inner), f"{prefix}._self.{path}" if path else f"{prefix}._self")
    return paths


_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.Tensor, nn.Module, torch.dtype, torch.device, type)


def _collect_objects(holder: Any, prefix: str, paths: dict[int, str], depth: int) -> None:
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        if isinstance(value, (*_PLAIN, dict, list, tuple, set)) or not name.isidentifier() or id(value) in paths:
            continue
        if name.startswith("_") and isinstance(holder, nn.Module) and name in nn.Module().__dict__:
            continue
        paths[id(value)] = f"{prefix}.{name}"
        if depth > 1:
            _collect_objects(value, f"{prefix}.{name}", paths, depth - 1)


def holds_traced(value: Any) -> bool:
    held = getattr(value, "__dict__", {})
    return contains_traced(dict(held)) if isinstance(held, dict) else False
