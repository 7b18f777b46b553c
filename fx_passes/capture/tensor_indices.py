"""Indices that are tensors of no dimensions, kept tensors while `torch.export` traces a program.

`y[:, scores.argmax()]` is a selection at a place that is known when the program runs. `torch.export` makes a Python
number of the index, which no backend can compute; as a tensor of one element it is an ordinary gather.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["TensorIndices", "taken"]


class TensorIndices(TorchFunctionMode):
    """While it is active, `value[index]` is `taken(value, index)`.

    It must be entered inside the forward that is exported: torch's own mode would make a number of the index first.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return taken(*args)
        return func(*args, **(kwargs or {}))


def taken(value: Any, index: Any) -> Any:
    """`value[index]`, an integer tensor of no dimensions in the index being gathered as a tensor of one element.

    What Python takes for a number there is a selection in torch: the dimension is gone, whatever the other indices are.
    Hence two steps: the gather of one element, then the rest of the index with 0 in its place.
    """
    items = index if isinstance(index, tuple) else (index,)
    if not isinstance(value, Tensor) or not any(map(_is_selection, items)):
        return value[index]
    rest: list[Any] = []
    for item, dim in zip(items, _dimensions(value, items), strict=True):
        if _is_selection(item):
            value = value[(slice(None),) * dim + (item.reshape(1),)]
        rest.append(0 if _is_selection(item) else item)
    return value[tuple(rest)]


def _is_selection(item: Any) -> bool:
    integral = isinstance(item, Tensor) and not item.is_floating_point() and not item.is_complex()
    return integral and item.dim() == 0 and item.dtype is not torch.bool


def _dimensions(value: Tensor, items: tuple[Any, ...]) -> Iterator[int]:
    """The first dimension of `value` that each item of the index is about."""
    taken = sum(_count(item) for item in items)
    dim = 0
    for item in items:
        yield dim
        dim += value.dim() - taken if item is Ellipsis else _count(item)


def _count(item: Any) -> int:
    """How many dimensions an item takes; an ellipsis takes what is left."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1
