"""Converters beyond the usual: torch ops against the executed network, and the reason of what has no TensorRT form.

Ops without a converter of their own go through torch's decomposition. Engines are built only where the builder is
known to refuse what a definition accepts; the other converter tests build all.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trt_checks import Case, check, lower

from fx_passes.errors import LoweringError, UnsupportedOpError

torch.manual_seed(0)
X = torch.randn(2, 3, 4, 5)
V = torch.randn(6)
M = torch.randn(4, 6)
SQUARE = torch.randn(3, 4, 4)
INT = torch.randint(-9, 10, (2, 3, 4))
J = torch.randint(1, 6, (3, 4))
B = torch.randn(2, 3, 4) > 0
TIES = torch.randint(0, 3, (2, 3, 6))
NANS = torch.tensor([[1.0, float("nan"), -2.0, 1.0], [float("nan"), 3.0, float("nan"), 0.0]])
BYTES = torch.randint(0, 255, (2, 3, 4, 4), dtype=torch.uint8)
EMPTY = torch.randn(0, 3)
ZERO_DIM = torch.tensor(2.5)
PICK = torch.tensor([[0, 3, 3], [1, 2, 1]])
SRC = torch.randn(2, 3)


class Recurrent(nn.Module):
    """The outputs, and the last states, of a recurrent layer."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, state = self.layer(x)
        return (y, *state) if isinstance(state, tuple) else (y, state)


INTEGERS = [
    ("and", lambda x: x & 6, (INT,)),
    ("and_negative", lambda x: x & -4, (INT,)),
    ("and_int32", lambda x: x & 0b1011, (INT.int(),)),
    ("or", lambda x: x | 5, (INT,)),
    ("xor", lambda x: x ^ -3, (INT,)),
    ("not", lambda x: ~x, (INT.int(),)),
    ("shift_left", lambda x, y: x << y, (INT, J)),
    ("shift_right", lambda x, y: x >> y, (INT, J)),
    ("scalar_shift", lambda y: 2**y, (J,)),
    ("matmul", lambda x: x @ x.mT, (INT,)),
    ("mv", lambda x: x[0] @ x[0, 0], (INT,)),
    ("bmm", torch.bmm, (INT, INT.mT.contiguous())),
    ("dot", lambda x: torch.dot(x, x), (INT[0, 0],)),
    ("pow", lambda x, y: x**y, (INT, J)),
    ("prod", lambda x: x.prod(1), (INT,)),
]

RUNNING = [
    ("cumprod", lambda x: x.cumprod(1), (X,)),
    ("cumprod_int", lambda x: x.cumprod(-1), (INT,)),
    ("cumprod_zero_dim", lambda x: x.cumprod(0), (ZERO_DIM,)),
    ("cummax", lambda x: x.cummax(-1), (X,)),
    ("cummax_ties", lambda x: x.cummax(2), (TIES,)),
    ("cummin_bool", lambda x: x.cummin(1), (B,)),
    ("cummin", lambda x: x.cummin(0), (X,)),
    ("logcumsumexp", lambda x: x.logcumsumexp(2), (X * 30,)),
    ("cumsum_empty", lambda x: x.cumsum(1), (EMPTY,)),
    ("diff", lambda x: x.diff(dim=1), (X,)),
    ("trapezoid", torch.trapezoid, (X,)),
]

ORDER = [
    ("stable_sort", lambda x: torch.sort(x, dim=-1, stable=True), (TIES,)),
    ("stable_sort_descending", lambda x: torch.sort(x, dim=1, descending=True, stable=True), (TIES,)),
    ("stable_sort_nan", lambda x: torch.sort(x, dim=-1, stable=True), (NANS,)),
    ("stable_sort_nan_descending", lambda x: torch.sort(x, stable=True, descending=True), (NANS,)),
    ("stable_argsort", lambda x: torch.argsort(x, dim=0, stable=True), (TIES,)),
    ("sort_bool", lambda x: torch.sort(x, dim=1, stable=True), (B,)),
    ("sort_zero_dim", lambda x: x.sort(), (ZERO_DIM,)),
    ("median", torch.median, (X,)),
    ("median_dim", lambda x: x.median(1), (X,)),
    ("kthvalue", lambda x: x.kthvalue(2, 1), (X,)),
    ("bucketize", torch.bucketize, (X, V.sort()[0])),
    ("bucketize_right", lambda x, b: torch.bucketize(x, b, right=True, out_int32=True),
     (TIES, torch.tensor([0, 1, 1]))),
    ("searchsorted", torch.searchsorted, (M.sort()[0], torch.randn(4, 3))),
    ("isin", lambda x: torch.isin(x, torch.tensor([1, 2])), (INT,)),
]  # fmt: skip

ADDING = [
    ("scatter_add", lambda x, i, s: x.scatter_add(1, i, s), (M, PICK, SRC)),
    ("scatter_add_rows", lambda x, i, s: x.scatter_add(0, i, s), (M, PICK, SRC)),
    ("scatter_add_int", lambda x, i, s: x.scatter_add(0, i, s), (torch.zeros(6, dtype=torch.long), PICK[0], PICK[1])),
    ("scatter_amax", lambda x, i, s: x.scatter_reduce(1, i, s, "amax"), (M, PICK, SRC)),
    ("scatter_amin_new", lambda x, i, s: x.scatter_reduce(1, i, s, "amin", include_self=False), (M, PICK, SRC)),
    ("scatter_prod", lambda x, i, s: x.scatter_reduce(0, i, s, "prod"), (M, PICK, SRC)),
    ("index_add", lambda x, i, s: x.index_add(1, i, s), (M, torch.tensor([0, 2, 0]), torch.randn(4, 3))),
    ("index_put_adding", lambda x, i, v: x.index_put((i,), v, accumulate=True),
     (M, torch.tensor([2, -2]), torch.randn(2, 6))),
    ("index_put_pair_adding", lambda x, i, j, v: x.index_put((i, j), v, accumulate=True),
     (INT, torch.tensor([1, 1]), torch.tensor([2, 2]), torch.tensor([[3, 4, 5, 6]]))),
    ("index_put_mask", lambda x, m: x.index_put((m,), torch.tensor(7)), (INT, B)),
    ("index_put_leading_mask", lambda x, m: x.index_put((m,), torch.tensor(7.0)), (X, B[:, :, 0])),
    ("index_copy", lambda x, i, s: x.index_copy(0, i, s), (M, torch.tensor([0, 2]), torch.randn(2, 6))),
    ("index_fill", lambda x, i: x.index_fill(0, i, 3.0), (M, torch.tensor([0, 2]))),
    ("fold", lambda x: F.fold(x, (4, 5), 2, stride=1), (torch.randn(2, 12, 12),)),
    ("fold_strided", lambda x: F.fold(x, (4, 5), 2, stride=2, padding=1), (torch.randn(1, 12, 9),)),
]  # fmt: skip

WINDOWS = [
    ("unfold", lambda x: F.unfold(x, 2), (X,)),
    ("unfold_all_arguments", lambda x: F.unfold(x, (2, 3), dilation=2, padding=(1, 2), stride=(2, 1)), (X,)),
    ("tensor_unfold", lambda x: x.unfold(2, 3, 1).unfold(3, 2, 2), (X,)),
    ("max_places", lambda x: F.max_pool2d_with_indices(x, 3, 2, 1), (X,)),
    ("max_places_of_relu", lambda x: F.max_pool2d_with_indices(x.relu(), 2, 2, ceil_mode=True), (X,)),
    ("max_places_dilated", lambda x: F.max_pool2d_with_indices(x, 2, 1, dilation=2), (X[0],)),
    ("max_places_3d", lambda x: F.max_pool3d_with_indices(x, 2), (torch.randn(1, 2, 4, 4, 5),)),
    ("unpool", lambda x: F.max_unpool2d(*[F.max_pool2d_with_indices(x, 2)[i] for i in (0, 1)], 2), (X[..., :4],)),
    ("lp_pool_3d", nn.LPPool3d(2, 2), (torch.randn(1, 2, 4, 4, 4),)),
    ("area", lambda x: F.interpolate(x, size=(2, 3), mode="area"), (X,)),
]

ALGEBRA = [
    ("tensordot", lambda x, y: torch.tensordot(x, y, dims=2), (X, torch.randn(4, 5, 2))),
    ("cross", lambda x, y: torch.cross(x, y, dim=1), (X, X.flip(1))),
    ("kron", torch.kron, (M, M)),
    ("multi_dot", lambda a, b: torch.linalg.multi_dot([a, b.t(), a]), (M, M)),
    ("cdist", torch.cdist, (M, M * 2)),
    ("cdist_1", lambda x, y: torch.cdist(x, y, p=1), (SQUARE, SQUARE * 2)),
    ("matrix_norm", torch.linalg.matrix_norm, (X,)),
    ("matrix_norm_1", lambda x: torch.linalg.matrix_norm(x, 1), (X,)),
    ("renorm", lambda x: x.renorm(2, 0, 1.0), (X,)),
    ("trace", torch.trace, (SQUARE[0],)),
    ("diag", torch.diag, (V,)),
    ("diag_embed", torch.diag_embed, (M,)),
    ("vander", torch.vander, (V,)),
    ("nanmean", lambda x: x.nanmean(1), (NANS,)),
    ("nansum", lambda x: x.nansum(1), (NANS,)),
    ("isclose", lambda x: torch.isclose(x, x + 1e-9), (X,)),
    ("copysign", torch.copysign, (X, X.flip(0))),
    ("fmax", torch.fmax, (NANS, NANS.flip(0))),
    ("fmin", torch.fmin, (NANS, NANS.flip(0))),
    ("ldexp", torch.ldexp, (X, torch.tensor(3))),
    ("hstack", lambda x: torch.hstack([x, x]), (X,)),
    ("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), (V, V[:3])),
    ("special_softmax", lambda x: torch.special.softmax(x, 1), (X,)),
    ("ndtr", torch.special.ndtr, (V,)),
    ("mse", F.mse_loss, (X, X * 2)),
    ("cross_entropy", F.cross_entropy, (M, torch.tensor([0, 1, 2, 3]))),
    ("kl_div", lambda x, y: F.kl_div(x, y, reduction="batchmean"), (X, X.softmax(1))),
]

RECURRENT = [
    ("lstm", Recurrent(nn.LSTM(6, 5, batch_first=True)), (torch.randn(2, 4, 6),)),
    ("lstm_two_ways", Recurrent(nn.LSTM(6, 5, 2, bidirectional=True)), (torch.randn(3, 2, 6),)),
    ("lstm_projected", Recurrent(nn.LSTM(6, 5, proj_size=3)), (torch.randn(3, 2, 6),)),
    ("gru", Recurrent(nn.GRU(6, 5, bias=False)), (torch.randn(4, 2, 6),)),
    ("rnn", Recurrent(nn.RNN(6, 5, nonlinearity="relu")), (torch.randn(4, 2, 6),)),
    ("lstm_cell", nn.LSTMCell(6, 5), (torch.randn(2, 6),)),
    ("gru_cell", nn.GRUCell(6, 5), (torch.randn(2, 6),)),
    ("transformer", nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (torch.randn(2, 5, 8),)),
]

BYTE = [
    ("normalize", lambda x: x.permute(0, 3, 1, 2).float() / 255, (BYTES,)),
    ("slice", lambda x: x[:, 1:, ::2], (BYTES,)),
    ("wraps", lambda x: x + 200, (BYTES,)),
    ("cat", lambda x: torch.cat([x, x.flip(1)], 2), (BYTES,)),
    ("gather", lambda x: x[:, [2, 0]], (BYTES,)),
    ("nearest", lambda x: F.interpolate(x, scale_factor=2), (BYTES,)),
    ("compare", lambda x: x > 100, (BYTES,)),
    ("pad", lambda x: F.pad(x, (1, 2), value=9), (BYTES,)),
    ("signed", lambda x: -x * 2, (INT.char(),)),
    ("where", lambda x: torch.where(x > 50, x, 0), (BYTES,)),
    ("sum", lambda x: x.sum(1), (BYTES,)),
    ("bytes_from_float", lambda x: (x.float() * 0.7).to(torch.uint8) + 1, (BYTES,)),
    ("bytes_through", lambda x: (x, x.permute(0, 2, 3, 1), x[:, 0]), (BYTES,)),
    ("signed_moved", lambda x: torch.cat([x, x.flip(0)], 1).transpose(1, 2), (INT.char(),)),
]

SMALL = [
    ("empty_add", lambda x: x + 1, (EMPTY,)),
    ("empty_sum", lambda x: x.sum(0), (EMPTY,)),
    ("empty_mean", lambda x: x.mean(1), (EMPTY,)),
    ("empty_cat", lambda x: torch.cat([x, torch.ones(2, 3)]), (EMPTY,)),
    ("empty_matmul", lambda x: x.t() @ x, (EMPTY,)),
    ("empty_softmax", lambda x: x.softmax(1), (EMPTY,)),
    ("empty_batch", nn.Conv2d(3, 4, 1), (torch.randn(0, 3, 4, 4),)),
    ("empty_all", lambda x: (x > 0).all(), (EMPTY,)),
    ("empty_any", lambda x: (x > 0).any(), (EMPTY,)),
    ("empty_prod", lambda x: x.prod(), (EMPTY,)),
    ("empty_gather", lambda x: x[torch.zeros(0, dtype=torch.long)], (M,)),
    ("empty_layer_norm", nn.LayerNorm(3), (EMPTY,)),
    ("zero_dim_softmax", lambda x: x.softmax(0), (ZERO_DIM,)),
    ("zero_dim_cumsum", lambda x: x.cumsum(0), (ZERO_DIM,)),
    ("zero_dim_topk", lambda x: x.topk(1), (ZERO_DIM,)),
    ("zero_dim_flip", lambda x: x.flip(0), (ZERO_DIM,)),
    ("zero_dim_where", lambda x, s: torch.where(s > 0, x, -x), (X, ZERO_DIM)),
    ("zero_dim_cast", lambda x: x.long(), (ZERO_DIM,)),
    ("zero_dim_stack", lambda x: torch.stack([x, x]), (ZERO_DIM,)),
    ("zero_dim_masked_fill", lambda x: x.masked_fill(x > 0, 1.0), (ZERO_DIM,)),
]

FREE = {0: (1, 5), 1: (1, 9)}
DYNAMIC = [
    Case("tensor_unfold_free", lambda x: x.unfold(1, 2, 1), (M,), {1: (2, 9)}, ((torch.randn(4, 2),),), build=False),
    Case("cummax_batch", lambda x: x.cummax(1), (M,), {0: (1, 5)}, ((M[:1],),), build=False),
    Case("lstm_batch", Recurrent(nn.LSTM(6, 5, batch_first=True)), (torch.randn(2, 4, 6),), {0: (1, 4)},
         ((torch.randn(1, 4, 6),), (torch.randn(4, 4, 6),)), build=False),
    Case("diff_free", lambda x: x.diff(dim=1), (M,), {0: (1, 5), 1: (2, 9)}, ((torch.randn(1, 9),),), build=False),
    Case("bytes_free", lambda x: x[:, 1:].float() / 255, (BYTES,), {0: (1, 4), 2: (1, 9), 3: (1, 9)},
         ((BYTES[:1, :, :3],),)),
]  # fmt: skip

GROUPS = (INTEGERS, RUNNING, ORDER, ADDING, WINDOWS, ALGEBRA, RECURRENT, BYTE, SMALL)
CASES = [Case(*row, build=group is BYTE) for group in GROUPS for row in group] + DYNAMIC


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_converters(case: Case) -> None:
    check(case)


REFUSED = [
    ("mask_selection", lambda x, m: x[m], (INT, B), "boolean-mask selection depends on the data"),
    ("two_integers", lambda x, y: x & y, (INT, J), "bool only"),
    ("masked_values", lambda x, m, v: x.index_put((m,), v), (V, V > 0, V[V > 0]), "depends on the data"),
    ("inner_op", lambda x: torch.linalg.det(x), (SQUARE,), "which torch computes with aten._linalg_det"),
    ("random", lambda x: torch.bernoulli(x), (X.sigmoid(),), "aten.rand"),
    ("large_adding", lambda x, i, s: x.scatter_add(0, i, s),
     (torch.zeros(5000), torch.zeros(5000, dtype=torch.long), torch.ones(5000)), "too many targets"),
    ("double", lambda x: x.double() * 2, (X,), "no float64 tensors"),
    ("adaptive_places", lambda x: F.adaptive_max_pool2d_with_indices(x, 2), (X,), "result 1 of aten.adaptive_max"),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED, ids=[row[0] for row in REFUSED])
def test_what_has_no_form_says_so(row) -> None:
    _, program, inputs, reason = row
    with pytest.raises(UnsupportedOpError, match=reason):
        lower(program, *inputs)


def test_a_decomposition_that_fixes_a_free_length_is_refused() -> None:
    """Unrolled over the example's steps the network would be wrong at any other length."""
    with pytest.raises(LoweringError, match=r"dynamic|size"):
        lower(Recurrent(nn.LSTM(6, 5)), torch.randn(4, 2, 6), dynamic={0: (2, 9)})


def test_a_decomposition_carries_the_module() -> None:
    """What a recurrent layer becomes is called as the layer is."""
    network = lower(Recurrent(nn.GRU(6, 5)), torch.randn(4, 2, 6))
    names = [network.definition.get_layer(i).name for i in range(network.definition.num_layers)]
    assert sum(name.startswith("layer") for name in names) > 0.9 * len(names)
