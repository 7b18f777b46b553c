"""Arguments of the nodes of a glue graph as JSON: nodes, atoms, and structures that the caller names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node

from fx_passes.errors import ArtifactError

__all__ = ["is_structure", "structures_named", "value_from_plain", "value_to_plain"]

_ATOMS = (torch.dtype, torch.device, torch.memory_format, torch.layout)


def is_structure(value: Any) -> bool:
    """Whether it is a class of the user that only holds values: a NamedTuple or a dataclass."""
    if not isinstance(value, type):
        return False
    return dataclasses.is_dataclass(value) or (issubclass(value, tuple) and hasattr(value, "_fields"))


def structures_named(plain: Any) -> Iterator[str]:
    """The names of classes in plain arguments."""
    if isinstance(plain, dict):
        if isinstance(plain.get("named"), str):
            yield plain["named"]
        plain = list(plain.values())
    if isinstance(plain, list):
        for item in plain:
            yield from structures_named(item)


def value_to_plain(node: Node, value: Any) -> Any:
    """An argument of `node` as JSON can hold it.

    Raises:
        ArtifactError: JSON cannot.
    """
    if isinstance(value, Node):
        return {"node": value.name}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else {"float": str(value)}
    if isinstance(value, _ATOMS):
        return {"torch": str(value).removeprefix("torch."), "kind": type(value).__name__}
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, slice):
        return {"slice": [value_to_plain(node, v) for v in (value.start, value.stop, value.step)]}
    if type(value).__name__ in ("immutable_list", "list"):
        return [value_to_plain(node, v) for v in value]
    if type(value) in (tuple, torch.Size):
        return {"tuple": [value_to_plain(node, v) for v in value]}
    if type(value).__name__ in ("immutable_dict", "dict") and all(isinstance(key, str) for key in value):
        return {"dict": {key: value_to_plain(node, v) for key, v in value.items()}}
    if is_structure(type(value)) and isinstance(value, tuple):
        fields = {name: value_to_plain(node, item) for name, item in value._asdict().items()}  # type: ignore[attr-defined]
        return {"named": type(value).__name__, "fields": fields}
    raise ArtifactError(
        f"a {type(value).__name__} in the graph cannot be saved",
        node=node,
        hint="return tensors in tuples, lists and dicts with string keys, or build the object in a wrapped function",
    )


def value_from_plain(value: Any, made: dict[str, Node], find_class: Callable[[str], type]) -> Any:
    """The argument that `value_to_plain` wrote.

    Args:
        value: plain data.
        made: the nodes so far, by name.
        find_class: the caller's class of that name.

    Raises:
        ArtifactError: a part of it is unknown here.
    """
    if isinstance(value, list):
        return [value_from_plain(v, made, find_class) for v in value]
    if not isinstance(value, dict):
        return value
    (kind, content), *_ = value.items()
    if kind == "node":
        return made[content]
    if kind == "float":
        return float(content)
    if kind == "torch":
        return torch.device(content) if value["kind"] == "device" else _torch_atom(content)
    if kind == "ellipsis":
        return Ellipsis
    if kind == "slice":
        return slice(*(value_from_plain(v, made, find_class) for v in content))
    if kind == "tuple":
        return tuple(value_from_plain(v, made, find_class) for v in content)
    if kind == "dict":
        return {key: value_from_plain(v, made, find_class) for key, v in content.items()}
    if kind == "named":
        cls: Any = find_class(content)
        fields = {name: value_from_plain(item, made, find_class) for name, item in value["fields"].items()}
        if list(fields) != list(getattr(cls, "_fields", ())):
            raise ArtifactError(f"'{content}' has other fields than the lowered one: {', '.join(fields)}")
        return cls(**fields)
    raise ArtifactError(f"the manifest holds a value of the unknown kind {kind!r}", hint="update fx-trt-lowering")


def _torch_atom(name: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, _ATOMS):
        raise ArtifactError(
            f"'{name}' is no torch dtype, layout or memory format", hint="save the lowered module again"
        )
    return found
