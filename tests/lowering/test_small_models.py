"""Whole small models through both backends in every precision, and at sizes other than the example's.

The recommender and the painting actor in their own form, a UNet, and nets over sequences and volumes. A comparison
counts only if all FLOPs are in segments and nothing stays Python.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_passes import convert_fx, prepare_calibration_fx
from lowering import LoweredModule, lower_to_onnx, lower_to_trt
from lowering.compare import sqnr

models = pytest.importorskip("benchmarks.models")


class UNet(nn.Module):
    """Two levels; transposed convolution up, and an interpolation to the skip's size, whatever that is."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.down1, self.down2 = self.block(3, width), self.block(width, 2 * width)
        self.bottom = self.block(2 * width, 2 * width)
        self.up2 = nn.ConvTranspose2d(2 * width, 2 * width, 2, stride=2)
        self.merge2 = self.block(4 * width, width)
        self.up1 = nn.ConvTranspose2d(width, width, 3, stride=2, padding=1, output_padding=1)
        self.head = nn.Conv2d(2 * width, 2, 1)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, image: Tensor) -> Tensor:
        one = self.down1(image)
        two = self.down2(F.max_pool2d(one, 2))
        x = self.up2(self.bottom(F.max_pool2d(two, 2)))
        x = F.interpolate(x, size=two.shape[2:], mode="bilinear", align_corners=False)
        x = self.up1(self.merge2(torch.cat([x, two], 1)))
        x = F.interpolate(x, size=one.shape[2:], mode="nearest")
        return self.head(torch.cat([x, one], 1))


class Sequence(nn.Module):
    """1-D convolutions over (n, channels, length), grouped and dilated, with a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv1d(4, 16, 5, stride=2, padding=2), nn.BatchNorm1d(16), nn.ReLU()),
            *(nn.Conv1d(16, 16, 3, padding=2, dilation=2, groups=4), nn.GroupNorm(4, 16), nn.GELU()),
            *(nn.ConvTranspose1d(16, 8, 4, stride=2, padding=1), nn.AvgPool1d(2)),
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(-1))


class Volume(nn.Module):
    """3-D convolutions and pooling with a residual branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(1, 8, 3, stride=2, padding=1), nn.BatchNorm3d(8), nn.ReLU())
        self.branch = nn.Sequential(nn.Conv3d(8, 8, 3, padding=1), nn.BatchNorm3d(8))
        self.up = nn.ConvTranspose3d(8, 4, 2, stride=2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool3d(self.stem(x), 2)
        x = F.relu(x + self.branch(x))
        return self.head(F.adaptive_avg_pool3d(self.up(x), 1).flatten(1))


def settled(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """In eval mode, with statistics that give a signal."""
    models.settle_batch_norm(model, [torch.randn(4, *shape, generator=torch.Generator().manual_seed(1))])
    return model


def make(name: str) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "recommender":
            return models.DeepRecommender(96, (32, 32, 64)).eval(), torch.rand(4, 96)
        if name == "actor":
            return models.painting_actor(), torch.rand(1, 9, 128, 128)
        if name == "unet":
            return settled(UNet(), (3, 24, 20)), torch.randn(2, 3, 24, 20)
        if name == "sequence":
            return settled(Sequence(), (4, 32)), torch.randn(2, 4, 32)
        return settled(Volume(), (1, 8, 12, 8)), torch.randn(2, 1, 8, 12, 8)


NAMES = ("recommender", "actor", "unet", "sequence", "volume")


def require_lowered(lowered: LoweredModule) -> None:
    report = lowered.report()
    assert report["flops_share"] >= 0.99 and not report["fallbacks"], lowered.summary()


def relative(expected: Tensor, found: Tensor) -> float:
    """The largest difference over the largest value."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    return float((expected - found).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_float(name: str) -> None:
    """fp32 within 1e-4 of eager on both backends, fp16 at 40 dB or more from it."""
    model, x = make(name)
    expected = model(x).detach()
    trt = lower_to_trt(model, x, precision="fp32")
    require_lowered(trt)
    assert relative(expected, trt.simulate(x)) <= 1e-4
    onnx = lower_to_onnx(model, x, precision="fp32")
    require_lowered(onnx)
    assert relative(expected, onnx(x)) <= 1e-4
    half = lower_to_trt(model, x, precision="fp16")
    require_lowered(half)
    assert sqnr(expected, half.simulate(x)) >= 40


@pytest.mark.parametrize("name", NAMES)
def test_int8(name: str) -> None:
    """int8 against int8: 30 dB or more from the converted graph of the same target on both backends."""
    model, x = make(name)
    for target, lower in (("tensorrt-rtx", lower_to_trt), ("onnxruntime", lower_to_onnx)):
        prepared = prepare_calibration_fx(model, x, target=target)
        prepared(x)
        converted = convert_fx(prepared)
        expected = converted(x).detach()
        lowered = lower(converted, x, settings={"float_type": "fp32"})
        require_lowered(lowered)
        found = lowered.simulate(x) if target == "tensorrt-rtx" else lowered(x)
        assert sqnr(expected, found) >= 30
        assert sqnr(model(x).detach(), expected) >= 15  # random weights: that it is the same function, not how good


def test_bfloat16() -> None:
    """Eight bits of mantissa: about 40 dB for one rounding, 25 after a dozen layers."""
    model, x = make("sequence")
    lowered = lower_to_trt(model, x, precision="bf16")
    require_lowered(lowered)
    found = lowered.simulate(x)
    assert found.dtype == torch.float32
    assert sqnr(model(x).detach(), found) >= 25
    mixed = lower_to_trt(model, x, precision="int8", calibration=[x], settings={"float_type": "bf16"})
    require_lowered(mixed)
    assert sqnr(model(x).detach(), mixed.simulate(x)) >= 15


class Adaptive(nn.Module):
    """A CNN that ends in one number per channel, at any size."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.Hardswish())
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.pool(self.body(x)), 1))


class Patches(nn.Module):
    """A vision transformer of one block: class token, positions, attention through `nn.MultiheadAttention`."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 10, width))
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(n, -1, -1), x], dim=1) + self.position
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head((x + self.mlp(x))[:, 0])


def test_unet_at_other_sizes() -> None:
    """Batch, height and width free; odd halves make both interpolations work."""
    model, _ = make("unet")
    x = torch.randn(2, 3, 24, 20)
    sides = {2: torch.export.Dim("height", min=8, max=40), 3: torch.export.Dim("width", min=8, max=40)}
    free = {"image": {0: torch.export.Dim("n", min=1, max=4), **sides}}
    for precision in ("fp32", "int8"):
        lowered = lower_to_trt(model, x, precision=precision, dynamic_shapes=free, calibration=[x])
        require_lowered(lowered)
        for shape in ((1, 3, 8, 8), (2, 3, 24, 20), (4, 3, 22, 38)):
            image = torch.randn(shape, generator=torch.Generator().manual_seed(3))
            expected, found = model(image).detach(), lowered.simulate(image)
            if precision == "fp32":
                assert relative(expected, found) <= 1e-4
            else:
                assert found.shape == expected.shape and sqnr(expected, found) >= 15


def test_adaptive_pooling_at_other_sizes() -> None:
    model, x = settled(Adaptive(), (3, 16, 16)), torch.randn(2, 3, 16, 16)
    sides = {2: torch.export.Dim("height", min=3, max=33), 3: torch.export.Dim("width", min=3, max=33)}
    lowered = lower_to_trt(model, x, precision="fp32", dynamic_shapes={"x": sides})
    require_lowered(lowered)
    for height, width in ((3, 3), (16, 17), (33, 5)):
        image = torch.randn(2, 3, height, width)
        assert relative(model(image).detach(), lowered.simulate(image)) <= 1e-4


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_transformer_at_other_batches(precision: str) -> None:
    torch.manual_seed(0)
    model, x = Patches().eval(), torch.randn(2, 3, 12, 12)
    settings = {"float_type": "fp32"} if precision == "int8" else None
    lowered = lower_to_trt(model, x, precision=precision, dynamic_batch=(1, 2, 5), calibration=[x], settings=settings)
    require_lowered(lowered)
    for n in (1, 2, 5):
        image = torch.randn(n, 3, 12, 12)
        expected, found = model(image).detach(), lowered.simulate(image)
        if precision == "fp32":
            assert relative(expected, found) <= 1e-4
        else:
            assert found.shape == expected.shape and sqnr(expected, found) >= 15
