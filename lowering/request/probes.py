"""Other inputs: of the same sizes, which show what follows from data, and of other sizes, which show what varies."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lowering.request.inputs import Example

__all__ = ["HEADROOM", "alike", "of_other_sizes"]

# A size that follows from data (a number of boxes) was seen for a few inputs only: others may give more.
HEADROOM = 2
_BATCHES = 4
_SIZES = 16


def alike(example: Example, batches: Iterable[Any] = ()) -> Iterator[Example]:
    """The example with the elements of its floating point tensors shuffled, then zeros, then calibration batches.

    Args:
        example: one call of the model.
        batches: calibration batches, of which the first few are used that have the sizes of the example.
    """
    generator = torch.Generator().manual_seed(0)

    def shuffled(tensor: Tensor) -> Tensor:
        return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].reshape(tensor.shape)

    yield example.map(lambda t: shuffled(t) if t.is_floating_point() else t)
    yield example.map(lambda t: torch.zeros_like(t) if t.is_floating_point() else t)
    shapes = [t.shape for t in example.tensors()]
    for batch in itertools.islice(batches, _BATCHES):
        other = Example.of(batch)
        if [t.shape for t in other.tensors()] == shapes:
            yield other


def of_other_sizes(example: Example, batches: Iterable[Any]) -> Iterator[Example]:
    """Calibration batches of as many tensors as the example, of the same batch size and other sizes (images)."""
    shapes = [t.shape for t in example.tensors()]
    for batch in itertools.islice(batches, _SIZES):
        other = Example.of(batch)
        found = [t.shape for t in other.tensors()]
        if found != shapes and [_fixed_part(shape) for shape in found] == [_fixed_part(shape) for shape in shapes]:
            yield other


def _fixed_part(shape: torch.Size) -> tuple[int, ...]:
    """Rank, and batch size and channels of a batch of images (N, C, H, W), or channels of one image (C, H, W)."""
    return len(shape), *(shape[:2] if len(shape) > 3 else shape[:1])
