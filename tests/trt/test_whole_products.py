"""Attention's projection stays whole: the values, the kernels, and where it must not be touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trt_checks import aten_program

from lowering.segment.to_aten import cast_float_part
from lowering.trt.builder.build import build_engine
from lowering.trt.define.network import build_network
from lowering.trt.define.whole_products import keep_products_whole

HEADS, WIDTH = 4, 64
X = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(0))


def heads(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)


def timms(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.reshape(x.shape[0], x.shape[1], 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def chunks(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(heads(part) for part in x.chunk(3, dim=-1))


def slices(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(heads(x[..., i * WIDTH : (i + 1) * WIDTH]) for i in range(3))


class Attention(nn.Module):
    """One projection, cut by `cut`."""

    def __init__(self, cut: Callable[[Tensor], tuple[Tensor, ...]], outputs: int = 3 * WIDTH):
        super().__init__()
        torch.manual_seed(0)
        self.cut, self.qkv, self.out = cut, nn.Linear(WIDTH, outputs), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.cut(self.qkv(x))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


def clamps(program) -> int:
    return sum(node.target is torch.ops.aten.clamp.default for node in program.call_nodes())


@pytest.mark.parametrize("cut", [timms, chunks, slices])
@pytest.mark.parametrize("dynamic", [None, {0: (1, 8)}], ids=["static", "dynamic"])
def test_the_values_stay_and_the_kernels_get_fewer(cut, dynamic) -> None:
    program = aten_program(Attention(cut), X, dynamic=dynamic)
    whole = keep_products_whole(program)
    assert clamps(whole) == 1
    torch.testing.assert_close(whole(X)[0], program(X)[0], rtol=1e-6, atol=1e-6)
    if dynamic is None:
        kernels = [
            build_engine(build_network(cast_float_part(p, torch.float16), name="n")).report.kernels
            for p in (program, whole)
        ]
        assert kernels[1] <= kernels[0] - 2


def unequal(x: Tensor) -> tuple[Tensor, ...]:
    q, k, v = x.split([WIDTH, WIDTH, 2 * WIDTH], dim=-1)
    return heads(q), heads(k), heads(v[..., :WIDTH])


class Gate(nn.Module):
    """Slices that no attention reads."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(x).chunk(2, dim=-1)
        return a * torch.sigmoid(b)


@pytest.mark.parametrize("model", [Attention(unequal, 4 * WIDTH), Gate(), nn.Linear(WIDTH, 8)])
def test_other_layers_are_left_alone(model: nn.Module) -> None:
    program = aten_program(model, X)
    assert keep_products_whole(program) is program


def test_a_projection_that_something_else_reads_too_is_left_alone() -> None:
    class Tapped(Attention):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.qkv(x)
            q, k, v = chunks(y)
            return F.scaled_dot_product_attention(q, k, v), y.sum()

    program = aten_program(Tapped(chunks), X)
    assert keep_products_whole(program) is program
