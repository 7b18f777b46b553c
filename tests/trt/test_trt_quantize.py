"""Quantize and dequantize: values against the PyTorch Q/DQ graph, and what the builder makes of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trt_checks import Case, assert_same, aten_program, check, eager, lower

from fx_passes.errors import InputError, UnsupportedOpError
from fx_passes.quantize.decomposed import decomposed
from lowering.trt.builder.build import build_engine
from lowering.trt.define.network import supports
from lowering.trt.reference import read_network

Q = decomposed()
torch.manual_seed(0)


def quantize(x: Tensor, scale: float, low: int = -128) -> Tensor:
    return Q.quantize_per_tensor(x, scale, 0, low, 127, torch.int8)


def fake(x: Tensor, scale: float, low: int = -128, dtype: torch.dtype | None = None) -> Tensor:
    return Q.dequantize_per_tensor(quantize(x, scale, low), scale, 0, low, 127, torch.int8, out_dtype=dtype)


class Weighted(nn.Module):
    """A float layer with int8 weights behind a dequantize node, its input quantized: what `convert_fx` leaves."""

    def __init__(self, layer: nn.Module, axis: int | None = 0, low: int = -128, dtype: torch.dtype | None = None):
        super().__init__()
        weight = layer.weight.detach()
        self.layer, self.axis, self.low, self.dtype = layer, axis, low, dtype
        dims = [d for d in range(weight.dim()) if d != axis] if axis is not None else list(range(weight.dim()))
        scale = weight.abs().amax(dims) / 127
        shape = [-1 if d == axis else 1 for d in range(weight.dim())]
        self.register_buffer("weight", (weight / (scale.view(shape) if axis is not None else scale)).round().char())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", layer.bias.detach().to(dtype or torch.float32))

    def dequantized(self) -> Tensor:
        if self.axis is None:
            return Q.dequantize_per_tensor(
                self.weight, self.scale_value, 0, -127, 127, torch.int8, out_dtype=self.dtype
            )
        return Q.dequantize_per_channel(
            self.weight, self.scale, None, self.axis, -127, 127, torch.int8, out_dtype=self.dtype
        )

    @property
    def scale_value(self) -> float:
        return self._scale_value

    def forward(self, x: Tensor) -> Tensor:
        x = fake(x, 0.05, self.low, self.dtype)
        layer, weight = self.layer, self.dequantized()
        if isinstance(layer, nn.Linear):
            return F.linear(x, weight, self.bias)
        function = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}.get(type(layer))
        if function:
            return function(x, weight, self.bias, layer.stride, layer.padding, layer.dilation, layer.groups)
        return F.conv_transpose2d(x, weight, self.bias, layer.stride, dilation=layer.dilation)


def weighted(layer: nn.Module, **options) -> Weighted:
    module = Weighted(layer, **options)
    module._scale_value = float(module.scale) if module.scale.dim() == 0 else 0.0
    return module


X = torch.randn(2, 8, 9, 9)
ZEROS = torch.zeros(8, dtype=torch.int64)
X1, X3, ROWS = torch.randn(2, 8, 9), torch.randn(2, 8, 4, 5, 5), torch.randn(5, 8)

CASES = [
    Case("lone_pair", lambda x: fake(x, 0.02), (X,)),
    Case("lone_pair_narrow_range", lambda x: fake(x * 9, 0.02, -127), (X,)),
    Case("ties_to_even", lambda x: fake(x, 2.0), (torch.tensor([-5.0, -3.0, -1.0, 1.0, 3.0, 5.0, 1e4, -1e4]),)),
    Case("conv_per_channel", weighted(nn.Conv2d(8, 6, 3)), (X,)),
    Case("conv_per_tensor", weighted(nn.Conv2d(8, 6, 3), axis=None), (X,)),
    Case("conv_narrow_range", weighted(nn.Conv2d(8, 6, 3), low=-127), (X,)),
    Case("conv_depthwise", weighted(nn.Conv2d(8, 8, 3, groups=8)), (X,)),
    Case("conv_strided_dilated", weighted(nn.Conv2d(8, 6, 3, stride=2, padding=2, dilation=2)), (X,)),
    Case("conv1d", weighted(nn.Conv1d(8, 6, 3)), (X1,)),
    Case("conv3d", weighted(nn.Conv3d(8, 6, 2)), (X3,)),
    Case("deconv", weighted(nn.ConvTranspose2d(8, 6, 3, stride=2), axis=1), (X,)),
    Case("deconv_dilated", weighted(nn.ConvTranspose2d(8, 6, 3, stride=2, dilation=2), axis=1), (X,)),
    Case("linear", weighted(nn.Linear(8, 5)), (ROWS,)),
    Case("linear_per_tensor", weighted(nn.Linear(8, 5), axis=None), (ROWS,)),
    Case("linear_axis_1", weighted(nn.Linear(8, 5), axis=1), (ROWS,)),
    Case("conv_half", weighted(nn.Conv2d(8, 6, 3), axis=None, dtype=torch.float16), (X,)),
    Case("linear_half", weighted(nn.Linear(8, 5), dtype=torch.float16), (ROWS,)),
    Case("activations_matmul", lambda x: fake(x, 0.02) @ fake(x.transpose(1, 2), 0.03), (X1,)),
    Case("through_pool_and_cat",
         lambda x: torch.cat([F.max_pool2d(fake(x, 0.02), 3), fake(x, 0.02)[..., ::3, ::3]], 1), (X,)),
    Case("int8_output", lambda x: quantize(x, 0.02), (X,)),
    Case("quantized_channels_runtime",
         lambda x: Q.quantize_per_channel(x, torch.full((8,), 0.03), ZEROS, 1, -128, 127, torch.int8), (X,)),
    Case("dynamic_batch", weighted(nn.Conv2d(8, 6, 3)), (X,), {0: (1, 4)}, ((X[:1],),)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values(case: Case) -> None:
    if "half" not in case.name:
        check(case)
        return
    # float16 weights and bias on the CPU in torch, float32 accumulation rounded once in the executor
    network = lower(case.program, *case.inputs)
    assert_same(read_network(network.definition).run(*case.inputs), eager(case.program, *case.inputs))


@pytest.mark.parametrize(
    ("layer", "x", "axis"),
    [
        (nn.Conv2d(8, 16, 3), X, 0),
        (nn.Conv2d(8, 16, 3), X, None),
        (nn.Conv2d(8, 16, 1), X, 0),
        (nn.Conv2d(8, 16, 3, groups=2), X, 0),
        (nn.Conv1d(8, 16, 3), X1, 0),
        (nn.Conv3d(8, 16, 2), X3, 0),
        (nn.Linear(8, 16), ROWS, 0),
        (nn.Linear(8, 16), ROWS, None),
    ],
    ids=["conv", "conv_per_tensor", "conv_1x1", "grouped", "conv1d", "conv3d", "linear", "linear_per_tensor"],
)
def test_builder_runs_it_in_int8(layer: nn.Module, x: Tensor, axis: int | None) -> None:
    network = lower(weighted(layer, axis=axis), x)
    assert network.quantized
    report = build_engine(network).report
    assert (report.int8_compute, report.float_compute) == (1, 0)


def test_linear_scaled_along_its_inputs_runs_in_float() -> None:
    report = build_engine(lower(weighted(nn.Linear(8, 16), axis=1), ROWS)).report
    assert (report.int8_compute, report.float_compute) == (0, 1)


def test_int8_with_turing_among_others_is_refused() -> None:
    network = lower(weighted(nn.Conv2d(8, 16, 3)), X)
    with pytest.raises(InputError, match="separately"):
        build_engine(network, compute_capabilities=["7.5", "8.9"])
    assert build_engine(network, compute_capabilities=["8.6", "RTX 4090"]).compute_capabilities == ("8.6", "8.9")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda x: Q.quantize_per_tensor(x, 0.1, 3, -128, 127, torch.int8), "zero point is 3"),
        (lambda x: Q.quantize_per_tensor(x, 0.1, 0, 0, 255, torch.uint8), "torch.uint8"),
        (lambda x: Q.quantize_per_tensor(x, 0.1, 0, -8, 7, torch.int8), r"\[-8, 7\]"),
        (lambda x: Q.quantize_per_tensor(x, 0.0, 0, -128, 127, torch.int8), "not a positive finite number"),
        (lambda x: Q.quantize_per_tensor(x, float("nan"), 0, -128, 127, torch.int8), "not a positive finite number"),
    ],
    ids=["zero_point", "uint8", "four_bits", "zero_scale", "nan_scale"],
)
def test_refused_with_the_reason(program, reason: str) -> None:
    with pytest.raises(UnsupportedOpError, match=reason):
        lower(program, X)
    assert len(supports(aten_program(program, X))) == 1
