"""The user's own structures around tensors: rebuilt past their constructors, mapped leaf by leaf."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["make_instance", "mapped"]


def make_instance(cls: type, values: dict[str, Any]) -> Any:
    """An instance of a dataclass with these attributes; no constructor runs, for fields need not be its arguments."""
    instance: Any = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance


def mapped(value: Any, is_leaf: Callable[[Any], bool], function: Callable[[Any], Any]) -> Any:
    """The same structure with `function` applied to its leaves, in order; what is no leaf stays as it is.

    Entered are tuples, lists, dicts and their subclasses, NamedTuples and dataclasses; any other object is kept.
    """

    def inside(item: Any) -> Any:
        return mapped(item, is_leaf, function)

    if is_leaf(value):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(inside, value))
    if type(value).__module__ == "torch.return_types":
        return type(value)([inside(item) for item in value])
    if isinstance(value, (tuple, list)):
        items = [inside(item) for item in value]
        return tuple(items) if isinstance(value, torch.Size) else type(value)(items)
    fields = getattr(value, "__dataclass_fields__", None) if not isinstance(value, type) else None
    if isinstance(value, dict):
        return _mapped_dict(value, inside, fields)
    if fields is not None:
        return make_instance(type(value), {name: inside(item) for name, item in vars(value).items()})
    return value


def _mapped_dict(value: dict[Any, Any], inside: Callable[[Any], Any], fields: Any) -> Any:
    items = {key: inside(item) for key, item in value.items()}
    if fields is not None:  # such as the outputs of transformers: what is None is no item of theirs
        return type(value)(**items)
    if type(value) in (dict, OrderedDict):
        return type(value)(items)
    new = copy.copy(value)
    for key, item in items.items():
        new[key] = item
    return new
