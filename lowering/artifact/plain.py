"""Plain data of a manifest, looked at before it is used. Nothing here needs torch."""

from __future__ import annotations

import math
from typing import Any

from fx_passes.errors import ArtifactError

__all__ = ["checked", "lists", "shape_from_plain"]

_LARGEST = 2**48  # elements; the addresses of a process end there


def lists(value: Any) -> Any:
    """`value` as JSON gives it back: tuples as lists."""
    if isinstance(value, dict):
        return {key: lists(item) for key, item in value.items()}
    return [lists(item) for item in value] if isinstance(value, list | tuple) else value


def shape_from_plain(value: Any, name: str) -> tuple[int, ...]:
    """Sizes of the input `name`.

    Raises:
        ArtifactError: they are none.
    """
    sizes = tuple(checked(size, int, f"a size of '{name}'") for size in checked(value, list, f"the sizes of '{name}'"))
    if any(size < 0 for size in sizes) or math.prod(max(size, 1) for size in sizes) > _LARGEST:
        raise ArtifactError(f"input '{name}' has an impossible size")
    return sizes


def checked(value: Any, kind: Any, what: str) -> Any:
    """`value`, which has to be of a type; a bool is no int here.

    Raises:
        ArtifactError: it is of another one; the text begins with `what`.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        wanted = getattr(kind, "__name__", str(kind))
        raise ArtifactError(
            f"{what} in the manifest is a {type(value).__name__}, not a {wanted}", hint="save the lowered module again"
        )
    return value
