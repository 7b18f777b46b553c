"""Operators at their edges, on both backends: broadcasting, negative dimensions, rank 0, signed zeros, infinities."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowering import lower_to_onnx, lower_to_trt


def t(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


inf, nan = math.inf, math.nan
zeros = torch.tensor([0.0, -0.0, 0.0, -0.0, 1.0, -1.0, inf, -inf])
signs = torch.tensor([-1.0, -1.0, -0.0, 0.0, -0.0, 0.0, -inf, inf])
CASES = {
    "cosine, negative dim": (lambda a, b: F.cosine_similarity(a, b, dim=-2), t(2, 3, 4), t(3, 1)),
    "cosine, dim of the broadcast shape": (lambda a, b: F.cosine_similarity(a, b, dim=0), t(4), t(2, 3, 4)),
    "cosine of zero": (lambda a, b: F.cosine_similarity(a * 0, b, dim=-1), t(2, 4), t(2, 4)),
    "circular pad, one side negative": (lambda x: F.pad(x, (2, -1), mode="circular"), t(2, 3, 8)),
    "circular pad, of two dimensions": (lambda x: F.pad(x, (-1, 2, 1, -2), mode="circular"), t(2, 3, 8, 8)),
    "circular pad": (lambda x: F.pad(x, (3, 2), mode="circular"), t(2, 3, 8)),
    "reflect pad, one side negative": (lambda x: F.pad(x, (-1, 2), mode="reflect"), t(2, 3, 8)),
    "logit, eps above a half": (lambda x: torch.logit(x.sigmoid(), eps=0.7), t(2, 3)),
    "logit, eps below a half": (lambda x: torch.logit(x.sigmoid(), eps=0.2), t(2, 3)),
    "argmax of all, keepdim": (lambda x: (x + 1).argmax(keepdim=True), t(2, 3, 4)),
    "argmin of all, keepdim": (lambda x: (x + 1).argmin(keepdim=True), t(2, 3, 4)),
    "argmax of all": (lambda x: (x + 1).argmax(), t(2, 3, 4)),
    "mean of all, keepdim": (lambda x: (x * 1).mean(dim=None, keepdim=True), t(2, 3, 4)),
    "mean of no listed dim": (lambda x: (x * 1).mean(dim=(), keepdim=True), t(2, 3, 4)),
    "var of all, keepdim": (lambda x: (x * 1).var(dim=None, keepdim=True), t(2, 3, 4)),
    "atan2 of signed zeros": (torch.atan2, zeros, signs),
    "atan2 of integers": (torch.atan2, torch.tensor([0, 1, -1, 0, 2, -3]), torch.tensor([-1, 0, 0, 1, -2, -1])),
    "atan2, broadcast": (torch.atan2, t(3, 1), t(1, 4)),
    "hypot": (torch.hypot, torch.tensor([inf, 1e30, 0.0, 3.0, -inf]), torch.tensor([1.0, 1e30, 0.0, 4.0, nan])),
    "copysign": (torch.copysign, torch.tensor([1.0, -2.0, -1.0]), torch.tensor([-0.0, 1.0, -1.0])),
    "signbit": (torch.signbit, torch.tensor([0.0, -0.0, -1.0, 2.0])),
    "prelu of one number": (lambda x: F.prelu(x, torch.tensor(0.2)), t(2, 3)),
    "pdist": (F.pdist, t(4, 3)),
    "cdist, broadcast": (lambda a, b: torch.cdist(a, b, p=1), t(2, 4, 3), t(1, 5, 3)),
    "as_strided": (lambda x: (x * 1).as_strided((2, 2), (1, 2), 1), t(4, 3)),
    "median along a dim": (lambda x: tuple(x.median(-2)), t(2, 3, 4)),
    "median of rank 0": (lambda x: x.sum().median(), t(2, 3)),
    "native_batch_norm in eval": (
        lambda x: torch.native_batch_norm(x, None, None, torch.zeros(3), torch.ones(3), False, 0.1, 1e-5)[0],
        t(2, 3, 4),
    ),
    "cumsum, negative dim": (lambda x: x.cumsum(-2), t(2, 3, 4)),
    "roll, negative dim": (lambda x: x.roll((1, -2), (-1, 0)), t(2, 3, 4)),
    "scatter, negative dim": (lambda x: x.scatter(-1, torch.zeros(2, 3, 1, dtype=torch.long), 5.0), t(2, 3, 4)),
    "gather of rank 0": (lambda x: torch.gather(x.sum(), 0, torch.tensor(0)), t(2, 3)),
}


class Program(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def test_median_with_nan_in_onnx():
    """TensorRT does not say where its TopK puts NaN."""
    x = torch.tensor([[1.0, nan, 0.0], [3.0, 1.0, 2.0]])
    lowered = lower_to_onnx(Program(lambda x: x.median(-1).values).eval(), x, precision="fp32")
    torch.testing.assert_close(lowered(x), x.median(-1).values, equal_nan=True)


@pytest.mark.parametrize("lower", [lower_to_onnx, lower_to_trt], ids=["onnx", "tensorrt"])
@pytest.mark.parametrize("function", [lambda x: (x * 1).squeeze(), lambda x: (x * 1).squeeze(0)], ids=["all", "batch"])
def test_a_rank_that_follows_a_size_is_not_lowered(function, lower):
    x = torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(0))
    lowered = lower(Program(function).eval(), x[:2], precision="fp32", dynamic_batch=(1, 2, 4))
    run = lowered if lower is lower_to_onnx else lowered.simulate
    for batch in (1, 2, 3):
        torch.testing.assert_close(run(x[:batch]), function(x[:batch]))
    assert ["the rank of its result follows a size" in f.reason for f in lowered.fallbacks] == [True]


@pytest.mark.parametrize("lower", [lower_to_onnx, lower_to_trt], ids=["onnx", "tensorrt"])
def test_a_squeeze_of_what_is_one_is_lowered(lower):
    lowered = lower(Program(lambda x: x.squeeze(1) + 1).eval(), t(2, 1, 4), precision="fp32", dynamic_batch=(1, 2, 4))
    assert (len(lowered.segments), lowered.fallbacks) == (1, [])


@pytest.mark.parametrize("lower", [lower_to_onnx, lower_to_trt], ids=["onnx", "tensorrt"])
@pytest.mark.parametrize("name", CASES)
def test_as_in_eager(name, lower):
    function, *inputs = CASES[name]
    model = Program(function).eval()
    lowered = lower(model, tuple(inputs), precision="fp32")
    run = lowered if lower is lower_to_onnx else lowered.simulate
    expected, actual = model(*inputs), run(*inputs)
    if isinstance(expected, torch.Tensor):
        expected, actual = (expected,), (actual,)
    for e, a in zip(expected, actual, strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert (len(lowered.segments), lowered.fallbacks) == (1, [])
