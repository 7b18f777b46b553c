"""Rebuilding the user's own structures at run time, where their constructors do not take all that they hold."""

from __future__ import annotations

from typing import Any

__all__ = ["make_instance"]


def make_instance(cls: type, values: dict[str, Any]) -> Any:
    """An instance of a dataclass with these attributes; no constructor runs, for fields need not be its arguments."""
    instance: Any = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance
