"""What a backend cannot take stays Python, by name and with the reason; everything around it is lowered."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowering import lower_to_onnx, lower_to_trt


class Precise(nn.Module):
    """A mean in float64, between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        y = self.conv1(x)
        centre = (y.double().mean((2, 3), keepdim=True) * 1.5).float()
        return self.conv2(y - centre)


class ManyDimensions(nn.Module):
    """Windows within windows: nine dimensions for a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        y = self.conv1(x)
        n, c, h, w = y.shape
        y = y.reshape(n, c, 2, 2, h // 4, 2, 2, w // 4, 1).flip(2).permute(0, 1, 5, 3, 4, 2, 6, 7, 8)
        return self.conv2(y.reshape(n, c, h, w))


@pytest.mark.parametrize(
    ("make", "kept", "reason"),
    [(Precise, {"double", "mean", "mul", "float_1"}, "float64"), (ManyDimensions, None, "dimensions")],
)
def test_tensors_that_tensorrt_does_not_have(make, kept, reason):
    torch.manual_seed(0)
    model = make().eval()
    image = torch.randn(2, 3, 8, 8)
    lowered = lower_to_trt(model, image, precision="fp32")
    torch.testing.assert_close(lowered.simulate(image), model(image), rtol=1e-4, atol=1e-4)
    assert lowered.report()["flops_share"] > 0.9
    assert kept is None or {f.node for f in lowered.fallbacks} == kept
    assert any(reason in f.reason for f in lowered.fallbacks)


def test_onnx_runtime_has_them():
    torch.manual_seed(0)
    model = Precise().eval()
    image = torch.randn(2, 3, 8, 8)
    lowered = lower_to_onnx(model, image, precision="fp32")
    assert lowered.fallbacks == []
    torch.testing.assert_close(lowered(image), model(image), rtol=1e-4, atol=1e-4)


class PrecisePool(nn.Module):
    """An average pool in float64, for which ONNX Runtime has no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        return self.conv2(nn.functional.avg_pool2d(self.conv1(x).double(), 2, 1).float())


def test_what_onnx_runtime_refuses_stays_in_python():
    torch.manual_seed(0)
    model = PrecisePool().eval()
    image = torch.randn(2, 3, 8, 8)
    lowered = lower_to_onnx(model, image, precision="fp32")
    assert [f.node for f in lowered.fallbacks] == ["avg_pool2d"]
    assert "ONNX Runtime refuses" in lowered.fallbacks[0].reason
    assert (lowered.fallbacks[0].source or "").startswith("test_fallbacks.py:")
    assert lowered.report()["flops_share"] > 0.9
    torch.testing.assert_close(lowered(image), model(image), rtol=1e-4, atol=1e-4)


class Moments(nn.Module):
    def forward(self, x):
        return torch.var_mean(x, 1), torch.std_mean(x), x.topk(2, 1)


@pytest.mark.parametrize("lower", [lower_to_onnx, lower_to_trt])
def test_pairs_that_a_model_hands_out_whole_are_lowered(lower):
    model, image = Moments(), torch.randn(2, 3, 8, 8)
    lowered = lower(model, image, precision="fp32")
    assert lowered.fallbacks == []
    found, expected = (lowered if lower is lower_to_onnx else lowered.simulate)(image), model(image)
    assert [type(part) for part in found] == [type(part) for part in expected]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
