"""Ops that torch's ONNX exporter has no form for, or a wrong one: in ONNX Runtime, against eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trt_checks import Case, assert_same, aten_program, eager

from fx_passes.errors import ExportError
from lowering import lower_to_onnx
from lowering.onnx.export import export_onnx
from lowering.onnx.session import OnnxSession

torch.manual_seed(0)
X = torch.randn(2, 3, 7, 6)
VOLUME = torch.randn(1, 2, 5, 6, 7)
INT = torch.randint(-9, 10, (2, 3, 4))
SHIFT = torch.randint(0, 5, (3, 4))
BITS = torch.randn(2, 3, 4) > 0
TIES = torch.randint(0, 3, (2, 3, 9))
Q, K, V = torch.randn(6, 5, 4), torch.randn(6, 7, 4), torch.randn(6, 7, 4)

CASES = [
    Case("divisor", lambda x: F.avg_pool2d(x, 3, 2, divisor_override=5), (X,)),
    Case("divisor_padded", lambda x: F.avg_pool2d(x, (3, 2), 2, 1, divisor_override=2), (X,)),
    Case("divisor_ceil", lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=7), (X,)),
    Case("divisor_ceil_short", lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True, divisor_override=3), (X,)),
    Case("divisor_cut", lambda x: F.avg_pool2d(x, 2, 4, divisor_override=3), (X,)),
    Case("divisor_3d", lambda x: F.avg_pool3d(x, 2, 2, (0, 1, 1), divisor_override=3), (VOLUME,)),
    Case("adaptive_max", lambda x: F.adaptive_max_pool2d(x, (4, 5)), (X,)),
    Case("adaptive_max_3d", lambda x: F.adaptive_max_pool3d(x, 2), (VOLUME,)),
    Case("adaptive_avg_3d", lambda x: F.adaptive_avg_pool3d(x, 4), (VOLUME,)),
    Case("adaptive_max_batch", lambda x: F.adaptive_max_pool2d(x, 5), (X,), {0: (2, 5)}, ((torch.randn(5, 3, 7, 6),),)),
    Case("mean_of_integers", lambda x: x.mean(1, dtype=torch.float32), (INT,)),
    Case("mean_of_all_integers", lambda x: x.mean(dtype=torch.float32), (INT,)),
    Case("mean_of_bools", lambda x: x.mean((0, 2), keepdim=True, dtype=torch.float32), (BITS,)),
    Case("any_of_nothing", lambda x: x[:, :0].any(), (BITS,)),
    Case("any_of_nothing_along", lambda x: x[:, :0].any(1), (BITS,)),
    Case("floor_of_integers", torch.floor, (INT,)),
    Case("round_of_integers", torch.round, (INT,)),
    Case("add_bools", lambda x, y: x + y, (BITS, BITS.flip(0))),
    Case("attention_3d", F.scaled_dot_product_attention, (Q, K, V)),
    Case("attention_3d_mask", F.scaled_dot_product_attention, (Q, K, V, torch.randn(6, 5, 7))),
    Case("attention_3d_causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (Q, K, V)),
    Case("attention_5d", lambda q: F.scaled_dot_product_attention(q, q, q), (torch.randn(2, 3, 2, 5, 4),)),
    Case("attention_3d_bools", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, k[0, :, 0] < 9), (Q, K, V)),
    Case("rrelu", nn.RReLU(), (X,)),
    Case("log_sigmoid", F.logsigmoid, (torch.tensor([-200.0, -90.0, -1.0, 0.0, 2.0, 200.0]),)),
    Case("stable_sort", lambda x: torch.sort(x, dim=-1, stable=True), (TIES,)),
    Case("stable_sort_down", lambda x: torch.sort(x, dim=1, descending=True, stable=True), (TIES,)),
    Case("left_shift", lambda x, y: x << y, (INT, SHIFT)),
    Case("left_shift_number", lambda x: x << 3, (INT,)),
    Case("right_shift", lambda x, y: x >> y, (INT, SHIFT)),
    Case("right_shift_number", lambda x: torch.bitwise_right_shift(x, 2), (INT,)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_onnx_runtime_agrees_with_eager(case: Case) -> None:
    program = aten_program(case.program, *case.inputs, dynamic=case.dynamic)
    session = OnnxSession(export_onnx(program), program.inputs, program.outputs, threads=1)
    for inputs in (case.inputs, *case.more):
        assert_same(session(*inputs), eager(case.program, *inputs))


def test_what_is_exported_wrongly_is_refused_by_name() -> None:
    program = aten_program(lambda x: x.logcumsumexp(2), X)
    with pytest.raises(ExportError, match="overflows"):
        export_onnx(program)


def test_a_free_size_under_a_divisor_stays_in_python() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return F.avg_pool2d(self.conv(x), 2, divisor_override=3)

    model = Net().eval()
    size = torch.export.Dim("size", min=8, max=32)
    image = torch.randn(2, 3, 16, 16)
    lowered = lower_to_onnx(model, image, precision="fp32", dynamic_shapes=({2: size},))
    assert [f.node for f in lowered.fallbacks] == ["avg_pool2d"]
    assert "divisor_override" in lowered.fallbacks[0].reason
    other = torch.randn(2, 3, 30, 16)
    torch.testing.assert_close(lowered(other), model(other), rtol=1e-4, atol=1e-5)
