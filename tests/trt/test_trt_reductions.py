"""Converters of reductions, order statistics, matrix products, normalization and attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trt_checks import Case, check

torch.manual_seed(0)
X = torch.randn(2, 3, 4, 5)
P = torch.rand(2, 3, 4) + 0.2
INT = torch.randint(-5, 6, (2, 3, 4))
B = torch.randn(2, 3, 4) > 0
S = torch.tensor(2.5)
V = torch.randn(6)
A, D = torch.randn(2, 4, 6), torch.randn(2, 6, 5)
Q = torch.randn(2, 4, 6, 8)
KEY, VALUE = torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8)

REDUCTIONS = [
    ("sum", lambda x: x.sum(), (X,)),
    ("sum_dims", lambda x: x.sum((1, -1)), (X,)),
    ("sum_keepdim", lambda x: x.sum(2, keepdim=True), (X,)),
    ("sum_bool", lambda x: x.sum(1), (B,)),
    ("sum_int32", lambda x: x.sum(1), (INT.int(),)),
    ("sum_dtype", lambda x: x.sum(1, dtype=torch.float32), (INT,)),
    ("sum_zero_dim", lambda x: x.sum(), (S,)),
    ("mean", lambda x: x.mean(), (X,)),
    ("mean_dims", lambda x: x.mean((-1, -2), keepdim=True), (X,)),
    ("mean_dtype", lambda x: x.mean(1, dtype=torch.float32), (INT,)),
    ("var", lambda x: x.var(), (X,)),
    ("var_biased", lambda x: x.var((1, 2), unbiased=False), (X,)),
    ("var_correction", lambda x: x.var(-1, correction=2, keepdim=True), (X,)),
    ("std", lambda x: x.std(1), (X,)),
    ("var_mean", lambda x: torch.var_mean(x, (2, 3)), (X,)),
    ("std_mean", lambda x: torch.std_mean(x, 1, keepdim=True), (X,)),
    ("amax", lambda x: x.amax((1, 3)), (X,)),
    ("amin_keepdim", lambda x: x.amin(-1, keepdim=True), (X,)),
    ("amax_bool", lambda x: x.amax(1), (B,)),
    ("max", lambda x: x.max(), (X,)),
    ("min_int", lambda x: x.min(), (INT,)),
    ("max_dim", lambda x: x.max(1), (X,)),
    ("min_dim_keepdim", lambda x: x.min(-1, keepdim=True), (X,)),
    ("max_dim_1d", lambda x: x.max(0), (V,)),
    ("aminmax", lambda x: torch.aminmax(x, dim=1), (X,)),
    ("prod", lambda x: x.prod(1), (P,)),
    ("prod_all", lambda x: x.prod(), (P,)),
    ("any", lambda x: x.any(), (B,)),
    ("any_dim", lambda x: x.any(-1, keepdim=True), (INT,)),
    ("all", lambda x: x.all(1), (B,)),
    ("all_float", lambda x: x.all(1), (X.round(),)),
    ("count_nonzero", lambda x: torch.count_nonzero(x, 1), (INT,)),
    ("norm", lambda x: x.norm(), (X,)),
    ("norm_1", lambda x: x.norm(1, dim=1), (X,)),
    ("norm_inf", lambda x: torch.linalg.vector_norm(x, float("inf"), dim=(1, 2), keepdim=True), (X,)),
    ("norm_minus_inf", lambda x: torch.linalg.vector_norm(x, float("-inf"), dim=-1), (X,)),
    ("norm_0", lambda x: torch.linalg.vector_norm(x, 0, dim=-1), (X.round(),)),
    ("norm_3", lambda x: torch.linalg.vector_norm(x, 3, dim=-1), (X,)),
    ("normalize", lambda x: F.normalize(x, dim=1), (X,)),
    ("logsumexp", lambda x: torch.logsumexp(x * 50, (1, 2)), (X,)),
    ("logsumexp_keepdim", lambda x: x.logsumexp(-1, keepdim=True), (X,)),
    ("cumsum", lambda x: x.cumsum(2), (X,)),
    ("cumsum_bool", lambda x: x.cumsum(1), (B,)),
    ("cumsum_int", lambda x: x.cumsum(-1), (INT,)),
    ("topk", lambda x: x.topk(3, 1), (X,)),
    ("topk_smallest", lambda x: x.topk(2, -1, largest=False), (X,)),
    ("topk_1d", lambda x: x.topk(2), (V,)),
    ("sort", lambda x: x.sort(-1), (X,)),
    ("sort_descending", lambda x: x.sort(1, descending=True), (X,)),
    ("argsort", lambda x: x.argsort(2), (X,)),
    ("argmax", lambda x: x.argmax(1), (X,)),
    ("argmax_keepdim", lambda x: x.argmax(1, keepdim=True), (X,)),
    ("argmax_all", lambda x: x.argmax(), (X,)),
    ("argmin", lambda x: x.argmin(-1), (X,)),
    ("argmax_1d", lambda x: x.argmax(0), (V,)),
    ("kthvalue", lambda x: x.kthvalue(2, -1), (X,)),
    ("median", lambda x: x.median(-1, keepdim=True), (X,)),
    ("cosine_similarity", lambda x, y: F.cosine_similarity(x, y), (X, X.flip(0))),
    ("pairwise_distance", lambda x, y: F.pairwise_distance(x, y), (X, X.flip(0))),
]

PRODUCTS = [
    ("linear", nn.Linear(5, 7), (X,)),
    ("linear_no_bias", nn.Linear(6, 7, bias=False), (A,)),
    ("linear_vector", nn.Linear(6, 7), (V,)),
    ("matmul", lambda x, y: x @ y, (A, D)),
    ("matmul_broadcast", lambda x, y: x @ y, (torch.randn(3, 1, 4, 6), D)),
    ("matmul_ranks", lambda x, y: x @ y, (A, D[0])),
    ("matmul_vector_right", lambda x, y: x @ y, (A, V)),
    ("matmul_vector_left", lambda x, y: x @ y, (V, D)),
    ("matmul_vectors", lambda x, y: x @ y, (V, V)),
    ("mm", torch.mm, (A[0], D[0])),
    ("bmm", torch.bmm, (A, D)),
    ("mv", torch.mv, (A[0], V)),
    ("dot", torch.dot, (V, V.flip(0))),
    ("outer", torch.outer, (V, V[:3])),
    ("addmm", lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2), (torch.randn(5), A[0], D[0])),
    ("addmm_beta_zero", lambda b, x, y: torch.addmm(b, x, y, beta=0), (torch.full((5,), float("nan")), A[0], D[0])),
    ("baddbmm", lambda b, x, y: torch.baddbmm(b, x, y, alpha=0.3), (torch.randn(2, 1, 5), A, D)),
    ("addbmm", torch.addbmm, (torch.randn(4, 5), A, D)),
    ("addmv", torch.addmv, (torch.randn(4), A[0], V)),
    ("addr", torch.addr, (torch.randn(6, 3), V, V[:3])),
    ("einsum", lambda x, y: torch.einsum("bij,bjk->bik", x, y), (A, D)),
    ("einsum_upper_implicit", lambda x, y: torch.einsum("Bij, Bjk", x, y), (A, D)),
    ("einsum_ellipsis", lambda x, y: torch.einsum("...ij,...jk->...ik", x, y), (A, D)),
    ("einsum_attention", lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k), (Q, KEY)),
    ("einsum_trace", lambda x: torch.einsum("bii->b", x), (torch.randn(2, 4, 4),)),
    ("bilinear", nn.Bilinear(6, 3, 5), (A, torch.randn(2, 4, 3))),
]


def trained(layer: nn.Module) -> nn.Module:
    """A normalization layer with statistics and parameters that show every mistake."""
    for name, value in [*layer.named_parameters(), *layer.named_buffers()]:
        if value.is_floating_point():
            nn.init.uniform_(value.data, 0.5, 1.5) if "var" in name else nn.init.normal_(value.data)
    return layer


NORMS = [
    ("batch_norm_1d", trained(nn.BatchNorm1d(3)), (X[..., 0],)),
    ("batch_norm_features", trained(nn.BatchNorm1d(3)), (X[..., 0, 0],)),
    ("batch_norm_2d", trained(nn.BatchNorm2d(3)), (X,)),
    ("batch_norm_plain", trained(nn.BatchNorm2d(3, affine=False)), (X,)),
    ("batch_norm_batch_statistics", trained(nn.BatchNorm2d(3, track_running_stats=False)), (X,)),
    ("batch_norm_3d", trained(nn.BatchNorm3d(3)), (X.unsqueeze(2),)),
    ("layer_norm", trained(nn.LayerNorm(5)), (X,)),
    ("layer_norm_two", trained(nn.LayerNorm((4, 5), eps=1e-2)), (X,)),
    ("layer_norm_all", trained(nn.LayerNorm((2, 3, 4, 5))), (X,)),
    ("layer_norm_plain", nn.LayerNorm(5, elementwise_affine=False), (X,)),
    ("layer_norm_no_bias", trained(nn.LayerNorm(5, bias=False)), (X,)),
    ("layer_norm_vector", trained(nn.LayerNorm(6)), (V,)),
    ("group_norm", trained(nn.GroupNorm(2, 6)), (torch.randn(2, 6, 3, 4),)),
    ("group_norm_one_group", trained(nn.GroupNorm(1, 6)), (torch.randn(2, 6, 3, 4),)),
    ("group_norm_features", trained(nn.GroupNorm(3, 6)), (torch.randn(2, 6),)),
    ("group_norm_sequence", trained(nn.GroupNorm(3, 6)), (torch.randn(2, 6, 5),)),
    ("group_norm_volume", trained(nn.GroupNorm(3, 6)), (torch.randn(2, 6, 5, 2, 3),)),
    ("group_norm_plain", nn.GroupNorm(3, 6, affine=False), (torch.randn(2, 6, 5, 2),)),
    ("instance_norm", nn.InstanceNorm2d(3), (X,)),
    ("instance_norm_affine", trained(nn.InstanceNorm2d(3, affine=True)), (X,)),
    ("instance_norm_1d", trained(nn.InstanceNorm1d(3, affine=True)), (X[..., 0],)),
    ("instance_norm_running", trained(nn.InstanceNorm2d(3, affine=True, track_running_stats=True)), (X,)),
    ("rms_norm", trained(nn.RMSNorm(5)), (X,)),
    ("rms_norm_eps", lambda x: F.rms_norm(x, (4, 5), None, 1e-2), (X,)),
    ("local_response_norm", nn.LocalResponseNorm(2), (X,)),
]

ATTENTION = [
    ("attention", F.scaled_dot_product_attention, (Q, KEY, VALUE)),
    ("attention_3d", F.scaled_dot_product_attention, (Q[0], KEY[0], VALUE[0])),
    ("attention_causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (Q, KEY, VALUE)),
    ("attention_scale", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3), (Q, KEY, VALUE)),
    ("attention_float_mask", F.scaled_dot_product_attention, (Q, KEY, VALUE, torch.randn(6, 7))),
    ("attention_bool_mask", F.scaled_dot_product_attention, (Q, KEY, VALUE, torch.rand(2, 1, 6, 7) > 0.4)),
    ("attention_empty_row", F.scaled_dot_product_attention, (Q, KEY, VALUE, torch.arange(6)[:, None].expand(6, 7) > 0)),
    ("attention_grouped", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
     (Q, KEY[:, :2], VALUE[:, :2])),
]  # fmt: skip


class TokenMean(nn.Module):
    """microsoft/onnxruntime #26339: the batch must stay free through attention-like reshapes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(n, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).reshape(n, length, width).mean(1)


FREE = {0: (1, 4), 1: (1, 9)}
TOKENS, TOKEN, MANY = torch.randn(2, 5, 8), torch.randn(1, 5, 8), torch.randn(4, 9, 8)
DYNAMIC = [
    Case("var_free", lambda x: x.var((0, 1)), (TOKENS,), FREE, ((TOKEN,), (MANY,))),
    Case("mean_free", lambda x: x.mean((0, 2)), (TOKENS,), FREE, ((TOKEN,), (MANY,))),
    Case("argmax_free", lambda x: x.argmax(1), (TOKENS,), FREE, ((TOKEN,), (MANY,))),
    Case("cumsum_free", lambda x: x.cumsum(1), (TOKENS,), FREE, ((TOKEN,), (MANY,))),
    Case("softmax_free", lambda x: x.softmax(1), (TOKENS,), FREE, ((TOKEN,), (MANY,))),
    Case("linear_free", nn.Linear(8, 3), (TOKENS,), FREE, ((TOKEN,), (MANY,))),
    Case("matmul_free", lambda x: x @ x.transpose(1, 2), (TOKENS,), FREE, ((TOKEN,), (MANY,))),
    Case("layer_norm_free", trained(nn.LayerNorm(8)), (TOKENS,), FREE, ((TOKEN,), (MANY,))),
    Case("group_norm_free", trained(nn.GroupNorm(2, 4)), (torch.randn(2, 4, 3, 5),), {0: (1, 4), 2: (1, 9), 3: (1, 9)},
         ((torch.randn(1, 4, 9, 2),),)),
    Case("instance_norm_free", nn.InstanceNorm2d(4), (torch.randn(2, 4, 3, 5),), {0: (1, 4), 2: (2, 9), 3: (2, 9)},
         ((torch.randn(1, 4, 9, 2),),)),
    Case("causal_free", lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), (TOKENS,), FREE,
         ((TOKEN,), (MANY,))),
    Case("tokens_batch", TokenMean(), (TOKENS,), {0: (1, 4)}, ((TOKEN,), (torch.randn(4, 5, 8),))),
    Case("tokens_batch_and_length", TokenMean(), (TOKENS,), FREE, ((TOKEN,), (MANY,))),
]  # fmt: skip

CASES = [Case(*row) for row in REDUCTIONS + PRODUCTS + NORMS + ATTENTION] + DYNAMIC


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reductions(case: Case) -> None:
    check(case)
