"""Writes through boolean masks: choices between two values, in one segment, where the value can be computed for all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowering import lower_to_onnx, lower_to_trt


class Program(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x * 1)


def constant(y):
    y[y > 0] = 0.5
    return y


def added_row(y):
    y[y.sum(-1) > 1] += torch.arange(8.0)
    return y


def row_of_one(y):
    y[y.sum(-1) > 0] = torch.ones(1, 8) * 3
    return y


def from_the_selection(y):
    mask = y.sum(-1) > 0
    y[mask] = torch.where(y[mask] > 0, y[mask].exp(), -y[mask])
    return y


def mask_written_twice(y):
    y[y > 0] = y[y > 0] * 2
    return y


def from_another_tensor(y):
    mask, other = y > 0, torch.zeros_like(y)
    other[mask] = y[mask]
    return other


def to_integers(y):
    counts = (y * 10).long()
    counts[counts > 3] = 1.7
    return counts


def scaled_in_place(y):
    y[y < 0] *= -1
    return y


PROGRAMS = (
    *(constant, added_row, row_of_one, from_the_selection, mask_written_twice, from_another_tensor, to_integers),
    scaled_in_place,
)


@pytest.mark.parametrize("batches", [None, (1, 2, 4)], ids=["static", "dynamic"])
@pytest.mark.parametrize("lower", [lower_to_onnx, lower_to_trt], ids=["onnx", "tensorrt"])
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_a_masked_write_is_a_choice(function, lower, batches):
    model = Program(function).eval()
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    lowered = lower(model, x[:2], precision="fp32", dynamic_batch=batches)
    run = lowered if lower is lower_to_onnx else lowered.simulate
    for batch in (2,) if batches is None else (1, 3):
        expected, actual = model(x[:batch]), run(x[:batch])
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected)
    assert (len(lowered.segments), lowered.fallbacks) == (1, [])


def ranked(y):
    mask = y > 0
    y[mask] = y[mask].cumsum(0)  # each value depends on those selected before it
    return y


def other_mask(y):
    y[y > 0] = y[y.flip(0) > 0].mean() + y[y > 0]  # a mean of what another mask selects
    return y


@pytest.mark.parametrize("function", [ranked, other_mask], ids=lambda f: f.__name__)
def test_what_depends_on_the_selection_is_not_rewritten(function):
    model = Program(function).eval()
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    lowered = lower_to_trt(model, x, precision="fp32")
    torch.testing.assert_close(lowered.simulate(x), model(x))
    assert any("depends on the data" in fallback.reason for fallback in lowered.fallbacks)
