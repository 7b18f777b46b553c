"""SmoothQuant: exact in float, a gain in accuracy, and everything else left alone with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fx_passes import convert_fx, fuse_fx, prepare_calibration_fx
from fx_passes.errors import InputError
from fx_passes.quantize.accuracy.structure import strip_quantization
from fx_passes.quantize.calibrate import calibrate
from fx_passes.quantize.calibrated import float_reference

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("error")
TARGETS = ("tensorrt", "tensorrt-rtx", "onnxruntime")


class Block(nn.Module):
    """A pre-norm transformer layer, two channels of whose norms are far larger than the others."""

    def __init__(self, size: int = 32):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention = nn.MultiheadAttention(size, 4, batch_first=True)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.norm1.weight.data[3] = 30.0
        self.norm2.weight.data[5] = 50.0

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class PostNorm(nn.Module):
    """The residual reads the norm's output as well."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        y = self.norm(x)
        return y + self.linear(y)


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).eval()


def tokens(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 10, 32, generator=generator) for _ in range(count)]


def prepared_for(model: nn.Module, target: str, qconfig, batches=None):
    prepared = prepare_calibration_fx(model, target=target, qconfig=qconfig)
    calibrate(prepared, tokens() if batches is None else batches)
    return prepared


def sqnr(expected: Tensor, found: Tensor) -> float:
    return float(10 * torch.log10(expected.detach().square().sum() / (expected - found).detach().square().sum()))


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("target", TARGETS)
def test_float_model_stays_the_same(target, strength):
    model = block()
    prepared = prepared_for(model, target, {"": {"smooth": strength}})
    smoothed = float_reference(prepared)
    expected = model(tokens()[0])
    assert (smoothed(tokens()[0]) - expected).abs().max() <= 1e-5 * expected.abs().max()
    stripped = strip_quantization(convert_fx(prepared), smoothed)
    assert (stripped(tokens()[0]) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("target", TARGETS)
def test_large_channels_no_longer_cost(target):
    model, x = block(), tokens()[0]
    plain, smoothed = (
        sqnr(model(x), convert_fx(prepared_for(model, target, config))(x)) for config in ({}, {"": {"smooth": 0.5}})
    )
    assert smoothed > plain + 6, (plain, smoothed)


def test_range_is_that_of_the_smoothed_value():
    model, batches = block(), tokens()
    prepared = prepared_for(model, "tensorrt", {nn.Linear: {"smooth": 0.5}})
    smoothed, converted = float_reference(prepared), convert_fx(prepared)
    values = []
    smoothed.get_submodule("0.norm2").register_forward_hook(lambda m, args, y: values.append(y.detach().abs().max()))
    for batch in batches:
        smoothed(batch)
    (quantize,) = [n for n in converted.graph.nodes if n.name == "_0_norm2_quantize"]
    assert quantize.args[1] == pytest.approx(float(max(values)) / 127, rel=1e-5)


def test_report_says_what_was_folded_into_what():
    converted = convert_fx(prepared_for(block(), "tensorrt", {"0": {"smooth": 0.5}}))
    assert converted.meta["smooth_report"] == [
        ("_0_norm1", "smoothed for 'linear'"),
        ("_0_norm2", "smoothed for '_0_up'"),
        ("_0_up", "smoothed for '_0_down'"),
    ]


MUST_NOT_FIRE = {
    "post_norm": (PostNorm, "'output' reads them and is not scaled along"),
    "no_affine": (lambda: nn.Sequential(nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, 4)), None),
    "gelu": (
        lambda: nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4)),
        None,
    ),
}


@pytest.mark.parametrize("name", MUST_NOT_FIRE)
def test_must_not_fire(name):
    torch.manual_seed(0)
    model = MUST_NOT_FIRE[name][0]().eval()
    batches = [torch.randn(2, 3, 16)]
    prepared = prepared_for(model, "tensorrt", {"": {"smooth": 0.5}}, batches)
    report = convert_fx(prepared).meta["smooth_report"]
    assert [what for _, what in report] == ([MUST_NOT_FIRE[name][1]] if MUST_NOT_FIRE[name][1] else [])
    plain = dict(fuse_fx(model).named_parameters())
    assert all(torch.equal(plain[key], value) for key, value in float_reference(prepared).named_parameters())


def test_other_observer_is_refused():
    with pytest.raises(InputError, match="leave one of the two out"):
        prepare_calibration_fx(block(), qconfig={"": {"smooth": 0.5, "observer": "mse"}})
