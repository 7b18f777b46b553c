"""Forward hooks: code around a module that is no part of its forward."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from fx_passes.errors import StageError

__all__ = ["has_hooks", "refuse_hooks", "share_hooks", "without_hooks"]

M = TypeVar("M", bound=nn.Module)

_HOOKS = {"_forward_pre_hooks": "forward pre-hook", "_forward_hooks": "forward hook"}
_TABLES = tuple(name for name in vars(nn.Module()) if "_hooks" in name and "ward_" in name)


def has_hooks(module: nn.Module) -> bool:
    """Whether code of the user runs before or after the forward of a module."""
    return any(getattr(module, table) for table in _HOOKS)


def without_hooks(module: M) -> M:
    """The module itself, a copy made for this, without hooks of its own; those of its submodules stay."""
    for table in _TABLES:
        vars(module)[table] = type(vars(module)[table])()
    return module


def share_hooks(module: M, other: nn.Module) -> M:
    """The module itself, a copy of `other`, with the same hooks in tables of its own."""
    for table in _TABLES:
        vars(module)[table] = vars(other)[table].copy()
    return module


def refuse_hooks(graph: nn.Module) -> None:
    """Refuse hooks on a graph module: a pass rewrites the graph, and would lose what is around it.

    Raises:
        StageError: there is one; the message names it.
    """
    for table, kind in _HOOKS.items():
        for hook in getattr(graph, table).values():
            if getattr(hook, "__module__", None) == "fx_passes.quantize.insertion":
                continue  # records the first inputs
            name = getattr(hook, "__name__", type(hook).__name__)
            raise StageError(
                f"the {kind} '{name}' is registered on a graph of {type(graph).__name__}, which has no node for it",
                hint="register it on the model before that is traced, or take it off the graph: handle.remove()",
            )
