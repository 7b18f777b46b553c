"""Other inputs of the same sizes: what differs in size inside the model follows from data, not from sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lowering.inputs import Example

__all__ = ["HEADROOM", "alike"]

# A size that follows from data (a number of boxes) was seen for a few inputs only: others may give more.
HEADROOM = 2
_BATCHES = 4


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
