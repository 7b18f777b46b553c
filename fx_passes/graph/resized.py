"""Tensors brought to other sizes, with real values, so that a model sees plausible data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["brought_to"]


def brought_to(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """`tensor` repeated or cut along every dimension to `sizes`."""
    for dim, size in enumerate(sizes):
        if tensor.shape[dim] != size:
            index = torch.arange(size, device=tensor.device) % max(tensor.shape[dim], 1)
            tensor = tensor.index_select(dim, index)
    return tensor
