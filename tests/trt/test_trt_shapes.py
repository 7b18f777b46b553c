"""Converters that move data: views, joins, slices, gathers, scatters, masks, factories, casts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trt_checks import Case, check

torch.manual_seed(0)
X = torch.randn(2, 3, 4, 5)
M = torch.randn(4, 6)
INT = torch.randint(-9, 10, (2, 3, 4))
B = torch.randn(2, 3, 4) > 0
S = torch.tensor(2.5)
IDX = torch.tensor([[2, 0, -1], [1, 1, -3]])
B4 = {0: (1, 5)}
BHW = {0: (1, 4), 2: (2, 9), 3: (2, 9)}
ONE = torch.randn(1, 3, 4, 5)
BIG = torch.randn(4, 3, 7, 9)


def dyn(name, program, inputs=(X,), free=B4, more=((ONE,),)) -> Case:
    return Case(name, program, inputs, free, more)


def nine_dimensions(x: Tensor) -> Tensor:
    return x.view(2, 3, 4, 5, 1, 1, 1, 1, 1)


VIEWS = [
    ("view", lambda x: x.view(2, -1), (X,)),
    ("reshape_zero_dim", lambda x: x.reshape(1, 1), (S,)),
    ("reshape_to_zero_dim", lambda x: x[:1, :1, :1, :1].reshape(()), (X,)),
    ("flatten", lambda x: x.flatten(1, 2), (X,)),
    ("flatten_zero_dim", lambda x: x.flatten(), (S,)),
    ("unflatten", lambda x: x.unflatten(3, (5, 1)), (X,)),
    ("permute", lambda x: x.permute(0, 3, 1, 2), (X,)),
    ("transpose", lambda x: x.transpose(1, -1), (X,)),
    ("t", lambda x: x.t(), (M,)),
    ("mT", lambda x: x.mT, (X,)),
    ("movedim", lambda x: x.movedim((0, 2), (2, 0)), (X,)),
    ("unsqueeze", lambda x: x.unsqueeze(-1).unsqueeze(0), (X,)),
    ("squeeze", lambda x: x[:1].squeeze(0), (X,)),
    ("squeeze_all", lambda x: x[:1, :, :1].squeeze(), (X,)),
    ("squeeze_not_one", lambda x: x.squeeze(1), (X,)),
    ("expand", lambda x: x[:, :1].expand(2, 3, -1, 5), (X,)),
    ("expand_new_dimension", lambda x: x.expand(7, -1, -1, -1), (INT,)),
    ("expand_zero_dim", lambda x: x.expand(2, 3), (S,)),
    ("repeat", lambda x: x.repeat(2, 1, 3), (INT,)),
    ("repeat_new_dimension", lambda x: x.repeat(2, 1, 3, 1), (INT,)),
    ("repeat_rank_5", lambda x: x.unsqueeze(0).repeat(2, 2, 2, 2, 2), (X,)),
    ("tile", lambda x: x.tile((3,)), (INT,)),
    ("repeat_interleave", lambda x: x.repeat_interleave(3, dim=1), (X,)),
    ("flip", lambda x: x.flip(0, -1), (X,)),
    ("flip_bool", lambda x: x.flip(1), (B,)),
    ("roll", lambda x: x.roll((1, -2), (1, 3)), (X,)),
    ("roll_flat", lambda x: x.roll(3), (M,)),
    ("rot90", lambda x: x.rot90(1, (2, 3)), (X,)),
    ("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (torch.randn(2, 8, 3, 4),)),
    ("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (torch.randn(2, 3, 4, 6),)),
    ("channel_shuffle", lambda x: F.channel_shuffle(x, 3), (torch.randn(2, 6, 3, 4),)),
    ("unfold_heads", lambda x: x.view(2, 3, 2, 2, 5).permute(2, 0, 3, 1, 4), (X,)),
]

JOINS = [
    ("cat", lambda x, y: torch.cat([x, y, x], 1), (X, X[:, :1])),
    ("cat_mixed_types", lambda x, y: torch.cat([x, y], 0), (INT, INT.float())),
    ("cat_empty", lambda x: torch.cat([x, x[:0]], 0), (X,)),
    ("cat_bool", lambda x: torch.cat([x, ~x], -1), (B,)),
    ("stack", lambda x, y: torch.stack([x, y], -1), (X, X * 2)),
    ("split", lambda x: torch.split(x, 2, 3), (X,)),
    ("split_sizes", lambda x: torch.split(x, [1, 3, 1], -1), (X,)),
    ("chunk", lambda x: torch.chunk(x, 2, 1), (X,)),
    ("unbind", lambda x: x.unbind(1), (X,)),
    ("tensor_split", lambda x: torch.tensor_split(x, 3, dim=3), (X,)),
    ("qkv", lambda x: x.reshape(4, 3, 2).permute(1, 0, 2).unbind(0), (M,)),
]

SLICES = [
    ("slice", lambda x: x[:, 1:, ::2, -3:-1], (X,)),
    ("slice_far_bounds", lambda x: x[:, -100:100], (X,)),
    ("slice_empty", lambda x: x[:, 3:2] * 1, (X,)),
    ("slice_int", lambda x: x[..., 1:3], (INT,)),
    ("slice_bool", lambda x: x[:, 1:], (B,)),
    ("select", lambda x: x[:, -1, 2], (X,)),
    ("select_all", lambda x: x[0, 1, 2, 3], (X,)),
    ("narrow", lambda x: x.narrow(2, 1, 2), (X,)),
    ("ellipsis_none", lambda x: x[None, ..., 1], (X,)),
    ("slice_scatter", lambda x, y: torch.slice_scatter(x, y, 1, 1, 3), (X, X[:, :2])),
    ("slice_scatter_step", lambda x, y: torch.slice_scatter(x, y, 3, 0, 5, 2), (X, X[..., :3])),
    ("slice_scatter_whole", lambda x, y: torch.slice_scatter(x, y, 1), (X, X * 2)),
    ("select_scatter", lambda x, y: torch.select_scatter(x, y, 2, -1), (X, X[:, :, 0])),
    ("diagonal", lambda x: x.diagonal(), (M,)),
    ("diagonal_offset", lambda x: torch.diagonal(x, 1, 2, 3), (X,)),
    ("diagonal_below", lambda x: torch.diagonal(x, -2), (M,)),
]

GATHERS = [
    ("index_select", lambda x, i: x.index_select(2, i), (X, torch.tensor([3, 0, 3]))),
    ("gather", lambda x, i: x.gather(2, i), (INT, torch.randint(0, 4, (2, 3, 6)))),
    ("gather_smaller", lambda x, i: x.gather(0, i), (INT, torch.randint(0, 2, (1, 2, 3)))),
    ("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), (M, torch.randint(0, 6, (4, 2)))),
    ("take_along_broadcast", lambda x, i: torch.take_along_dim(x, i, 1), (M, torch.randint(0, 6, (1, 2)))),
    ("take", torch.take, (M, torch.tensor([0, 5, -1, 7]))),
    ("embedding", nn.Embedding(10, 6), (torch.randint(0, 10, (2, 3)),)),
    ("embedding_int32", nn.Embedding(10, 6, padding_idx=1), (torch.randint(0, 10, (2, 3)).int(),)),
    ("index_one", lambda x, i: x[i], (X[0], IDX)),
    ("index_later", lambda x, i: x[:, :, i], (X, IDX)),
    ("index_two_neighbours", lambda x, i, j: x[:, i, j], (X, IDX, IDX)),
    ("index_two_apart", lambda x, i, j: x[:, i, :, j], (X, IDX, IDX)),
    ("index_broadcast", lambda x, i, j: x[i[:, None], j], (X[0], torch.tensor([0, -1]), torch.tensor([1, 2, 3]))),
    ("index_constant", lambda x: x[:, [2, 0]], (X,)),
    ("index_list_pair", lambda x: x[[0, 1], [2, 0]], (X,)),
]

SCATTERS = [
    ("scatter", lambda x, i, s: x.scatter(1, i, s), (M, torch.tensor([[0, 3], [1, 2]]), torch.randn(2, 2))),
    ("scatter_value", lambda x, i: x.scatter(1, i, 9.0), (M, torch.tensor([[0, 3], [1, 2]]))),
    ("scatter_larger_source", lambda x, i, s: x.scatter(0, i, s), (M, torch.tensor([[0, 3, 1]]), torch.randn(4, 6))),
    ("scatter_add", lambda x, i, s: x.scatter_add(0, i, s), (M[0], torch.tensor([1, 4, 1]), torch.randn(3))),
    ("index_put", lambda x, i, v: x.index_put((i,), v), (M, torch.tensor([2, -1]), torch.randn(2, 6))),
    ("index_put_broadcast", lambda x, i: x.index_put((i,), torch.tensor(5.0)), (M, torch.tensor([2, 0]))),
    ("index_put_pair", lambda x, i, j, v: x.index_put((i, j), v),
     (M, torch.tensor([2, 0]), torch.tensor([5, 1]), torch.randn(2))),
    ("index_put_later", lambda x, i, v: torch.ops.aten.index_put(x, [None, i], v),
     (X, torch.tensor([2, 0]), torch.randn(2, 2, 4, 5))),
    ("one_hot", lambda x: F.one_hot(x, 5), (torch.tensor([[0, 4], [2, 1]]),)),
    ("tril", torch.tril, (X,)),
    ("triu_offset", lambda x: x.triu(-1), (M,)),
    ("tril_bool", torch.tril, (B,)),
]  # fmt: skip

FACTORIES = [
    ("arange", lambda x: x + torch.arange(5), (X,)),
    ("arange_float_step", lambda x: x + torch.arange(0, 1, 0.2), (X,)),
    ("full", lambda x: x * torch.full((4, 5), 3), (X,)),
    ("zeros_like", lambda x: torch.zeros_like(x), (X,)),
    ("ones_like_int", lambda x: torch.ones_like(x, dtype=torch.int32), (X,)),
    ("full_like", lambda x: torch.full_like(x, 7), (INT,)),
    ("new_zeros", lambda x: x + x.new_zeros(5), (X,)),
    ("new_full_bool", lambda x: x.new_full((2, 2), True), (B,)),
    ("copy", lambda x, y: torch.ops.aten.copy(x, y), (X, torch.arange(5))),
    ("linspace", lambda x: x * torch.linspace(-1, 1, 5), (X,)),
    ("eye", lambda x: x @ torch.eye(5), (X,)),
    ("constant_result", lambda x: (x, torch.ones(2, 3)), (X,)),
    ("input_is_output", lambda x: (x, x.flatten(1), x), (X,)),
    ("one_result_twice", lambda x: (x * 2,) * 2, (X,)),
]

CASTS = [
    (f"{source}_to_{target}".replace("torch.", ""), lambda x, target=target: x.to(target), (value.to(source),))
    for source, value in (
        (torch.float32, torch.tensor([-2.7, 0.0, 0.5, 3.0])),
        (torch.float16, torch.tensor([-2.7, 0.0, 0.5, 3.0])),
        (torch.bfloat16, torch.tensor([-2.7, 0.0, 0.5, 3.0])),
        (torch.int64, torch.tensor([-2, 0, 1, 3])),
        (torch.int32, torch.tensor([-2, 0, 1, 3])),
        (torch.bool, torch.tensor([True, False])),
        (torch.uint8, torch.tensor([0, 1, 200])),
        (torch.int8, torch.tensor([-7, 0, 100])),
    )
    for target in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
    if source != target
] + [("int64_to_uint8", lambda x: x.to(torch.uint8), (torch.tensor([0, 1, 255]),))]


class ShapeDependentFactories(nn.Module):
    """pytorch/pytorch #51803"""

    def forward(self, x: Tensor) -> Tensor:
        n, c, _, w = x.shape
        ramp = torch.arange(w, dtype=x.dtype).view(1, 1, 1, -1)
        return (x + ramp + torch.zeros(n, c, 1, 1) + 0.5).reshape(n, -1) / x.shape[2]


DYNAMIC = [
    dyn("shape_dependent_factories", ShapeDependentFactories(), free=BHW, more=((BIG,), (ONE,))),
    dyn("view_batch", lambda x: x.view(x.shape[0], -1)),
    dyn("view_three_free", lambda x: x.view(x.shape[0], 3, x.shape[2] * x.shape[3]), free=BHW, more=((BIG,),)),
    dyn("flatten_all", lambda x: x.flatten(), free=BHW, more=((BIG,),)),
    dyn("merge_batch", lambda x: x.reshape(x.shape[0] * 3, 4, 5)),
    dyn("split_batch", lambda x: x.reshape(x.shape[0] * 3, 20).view(-1, 3, 20)),
    dyn("repeat_batch", lambda x: torch.ones(1, 1, 5).repeat(x.shape[0], 2, 1) * x[:, :2, 0]),
    dyn("expand_batch", lambda x: torch.cat([x.new_ones(1, 1, 4, 5).expand(x.shape[0], -1, -1, -1), x], 1)),
    dyn("permute_free", lambda x: x.permute(0, 2, 3, 1).flatten(1, 2), free=BHW, more=((BIG,),)),
    dyn("slice_half", lambda x: x[:, :, : x.shape[2] // 2], free=BHW, more=((BIG,),)),
    dyn("slice_negative", lambda x: x[:, :, -2:], free=BHW, more=((BIG,),)),
    dyn("slice_far", lambda x: x[:, :, 1:100], free=BHW, more=((BIG,),)),
    dyn("slice_step", lambda x: x[:, :, 1::2], free=BHW, more=((BIG,),)),
    dyn("select_last", lambda x: x[:, :, -1], free=BHW, more=((BIG,),)),
    dyn("flip_free", lambda x: x.flip(2, 3), free=BHW, more=((BIG,),)),
    dyn("roll_free", lambda x: x.roll((1, -1), (2, 3)), free=BHW, more=((BIG,),)),
    dyn("pixel_unshuffle_batch", lambda x: F.pixel_unshuffle(x[..., :4], 2)),
    dyn("unsqueeze_squeeze", lambda x: x.unsqueeze(2).transpose(1, 2).squeeze(1), free=BHW, more=((BIG,),)),
    dyn("arange_batch", lambda x: x + torch.arange(x.shape[0]).view(-1, 1, 1, 1)),
    dyn("full_like_free", lambda x: torch.full_like(x, 2.5) * x, free=BHW, more=((BIG,),)),
    dyn("size_in_arithmetic", lambda x: x * x.shape[2] + x.shape[3] / 2, free=BHW, more=((BIG,),)),
    dyn("tril_free", lambda x: torch.tril(x), free=BHW, more=((BIG,),)),
    dyn("index_batch", lambda x, i: x[:, i], (X, torch.tensor([2, 0])), B4, ((ONE, torch.tensor([1])),)),
    dyn("stack_batch", lambda x: torch.stack([x, x * 2], 1)),
    dyn("slice_scatter_batch", lambda x: torch.slice_scatter(x, x[:, :1] * 2, 1, 2, 3)),
    dyn("diagonal_free", lambda x: x.diagonal(0, 2, 3), free=BHW, more=((BIG,),)),
    dyn("broadcast_two_ranks", lambda x, y: x[:, :, :, 0] + y, (X, torch.randn(2)[:, None, None]), B4, ()),
    dyn("input_is_output_batch", lambda x: (x, x.flatten(1).t())),
]  # fmt: skip

CASES = [Case(*row) for row in VIEWS + JOINS + SLICES + GATHERS + SCATTERS + FACTORIES + CASTS] + DYNAMIC


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_shapes(case: Case) -> None:
    check(case)
