"""Iterating over parts, indexing with tensors, handing inputs on: one segment, no fallback, eager's numbers."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowering import lower_to_onnx, lower_to_trt


class Layers(nn.Module):
    def __init__(self, forward):
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.small, self.same = nn.Conv2d(3, 8, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.program = forward

    def forward(self, x):
        return self.program(self, x)


PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


# -- the first operation indexes the input ---------------------------------------------------------------------------


@program
def index_with_none(m, x):
    return m.wide(x[:, :, None][:, :, 0])


@program
def index_the_batch(m, x):
    return m.wide(x[None][0])


@program
def focus_stem(m, x):
    parts = [x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]]
    return m.wide(torch.cat(parts, 1)[:, :3])


# -- parts -----------------------------------------------------------------------------------------------------------


@program
def list_of_chunks_extended(m, x):
    parts = list(m.wide(x).chunk(2, 1))
    parts.extend(F.silu(m.small(parts[-1])) for _ in range(2))
    return torch.cat(parts, 1)


@program
def tuple_of_split(m, x):
    parts = tuple(m.wide(x).split(4, 1))
    return m.small(parts[0]) + parts[1]


@program
def star_target(m, x):
    first, *rest = m.wide(x).split(4, 1)
    return m.small(first) + rest[0]


@program
def star_argument(m, x):
    return torch.stack([*m.wide(x).unbind(1)], 1)


@program
def zip_of_two(m, x):
    y = m.wide(x)
    return sum(m.small(a) * b for a, b in zip(y.chunk(2, 1), m.same(y).chunk(2, 1), strict=True))


@program
def enumerated(m, x):
    return torch.stack([i * part for i, part in enumerate(m.wide(x).unbind(1))], 1)


@program
def mapped(m, x):
    return torch.cat(list(map(m.small, m.wide(x).chunk(2, 1))), 1)


@program
def reduced(m, x):
    return reduce(torch.add, m.wide(x).chunk(4, 1))


@program
def summed_and_counted(m, x):
    parts = m.wide(x).chunk(2, 1)
    return sum(list(parts)) * len(parts)


@program
def popped(m, x):
    parts = list(m.wide(x).chunk(2, 1))
    return m.small(parts.pop()) + parts.pop()


@program
def backwards(m, x):
    return torch.cat(list(reversed(m.wide(x).chunk(2, 1))), 1) + torch.cat(m.wide(x).chunk(2, 1)[::-1], 1)


@program
def tensor_split(m, x):
    return torch.cat([m.small(part) for part in torch.tensor_split(m.wide(x), 2, 1)], 1)


@program
def list_of_meshgrid(m, x):
    y = m.wide(x)
    rows, columns = list(torch.meshgrid(torch.arange(y.shape[2]), torch.arange(y.shape[3]), indexing="ij"))
    return y + rows * columns


@program
def added_to_a_list(m, x):
    parts = []
    parts += m.wide(x).chunk(2, 1)
    parts += [m.small(parts[0])]
    return torch.cat(parts, 1)


@program
def named_results(m, x):
    best, pooled = m.wide(x).max(1), F.max_pool2d(m.wide(x), 2, return_indices=True)
    return best.values + best.indices, pooled[0] + pooled[1]


@program
def parts_as_the_result(m, x):
    return m.wide(x).chunk(2, 1)


@program
def a_list_as_the_result(m, x):
    return list(m.wide(x).chunk(2, 1))


# -- an index that is a tensor of no dimensions ----------------------------------------------------------------------


@program
def channel_of_the_best(m, x):
    y = m.wide(x)
    return y[:, y.mean((0, 2, 3)).argmax()]


@program
def row_of_a_table(m, x):
    return m.wide(x) * torch.arange(3.0)[x.sum().long() % 3]


@program
def among_other_indices(m, x):
    y = m.wide(x)
    best = y.mean((0, 2, 3)).argmax()
    return y[0, best, ..., None, best - 1], y[..., best, 1:3]


# -- what is handed on ------------------------------------------------------------------------------------------------


@program
def inputs_and_doubles(m, x):
    y = m.wide(x)
    return x.float(), y, y, torch.ones(2), x


@program
def nothing_concatenated(m, x):
    return m.wide(torch.cat([torch.empty(x.shape[0], 0, 8, 8), x], 1))


def image(batch):
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(batch))


def check(lowered, run, model, inputs, tolerance):
    expected, actual = model(inputs), run(inputs)
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        expected, actual = [expected], [actual]
    for e, a in zip(expected, actual, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)
    assert (len(lowered.segments), lowered.fallbacks) == (1, [])


@pytest.mark.parametrize("batches", [None, (1, 2, 4)], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_segment_in_onnx(name, batches):
    model = Layers(PROGRAMS[name]).eval()
    lowered = lower_to_onnx(model, image(2), precision="fp32", dynamic_batch=batches)
    for batch in (2,) if batches is None else (1, 2, 3):
        check(lowered, lowered, model, image(batch), 1e-4)


@pytest.mark.parametrize("batches", [None, (1, 2, 4)], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_segment_in_tensorrt(name, batches):
    model = Layers(PROGRAMS[name]).eval()
    lowered = lower_to_trt(model, image(2), precision="fp32", dynamic_batch=batches)
    for batch in (2,) if batches is None else (1, 2, 3):
        check(lowered, lowered.simulate, model, image(batch), 1e-4)


@pytest.mark.parametrize("lower", [lower_to_onnx, lower_to_trt], ids=["onnx", "tensorrt"])
@pytest.mark.parametrize("name", ["focus_stem", "list_of_chunks_extended", "zip_of_two", "added_to_a_list"])
def test_int8_reaches_the_layers_between(name, lower):
    model = Layers(PROGRAMS[name]).eval()
    lowered = lower(model, image(2), calibration=[image(2), image(3)[:2]])
    assert (len(lowered.segments), lowered.fallbacks) == (1, [])
    convolutions = [row for row in lowered.segments[0].ops if row.op == "conv2d"]
    assert convolutions and all(row.int8 for row in convolutions)


@pytest.mark.parametrize("lower", [lower_to_onnx, lower_to_trt], ids=["onnx", "tensorrt"])
def test_a_model_that_hands_its_input_on(lower):
    lowered = lower(Layers(lambda m, x: x.contiguous()).eval(), image(2), precision="fp32")
    run = lowered if lower is lower_to_onnx else lowered.simulate
    assert torch.equal(run(image(2)), image(2))
    assert (lowered.segments, lowered.fallbacks) == ([], [])
