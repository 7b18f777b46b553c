"""Cross-layer equalization: the float model stays, ranges become alike, and what must not be scaled is not."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_passes import convert_fx, fuse_fx, prepare_calibration_fx
from fx_passes.quantize.calibrate import calibrate
from fx_passes.quantize.channels.equalize import equalize_fx
from fx_passes.quantize.weights.layer import Layer, layer_of

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("error")


class Residual(nn.Module):
    """A block whose three convolutions write to one sum."""

    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b, self.down = (nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 8, 8))
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = F.relu(x + self.b(F.relu(self.a(x))))
        return self.head(F.max_pool2d(F.leaky_relu(self.down(x) - x), 2))


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 3, 3, 3)), nn.Parameter(torch.randn(6))
        self.last = nn.Parameter(torch.randn(2, 6))

    def forward(self, x):
        x = F.adaptive_avg_pool2d(F.conv2d(x, weight=self.weight, bias=self.bias).relu(), 1)
        return F.linear(x.flatten(1), self.last)


def mobile() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU6()]
    return nn.Sequential(*layers, nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


MODELS = {
    "chain": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 1)),
    "residual": Residual,
    "mobile": mobile,
    "functional": Functional,
    "flatten_many": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)),
    "grouped": lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.PReLU(8), nn.Conv2d(8, 6, 3, groups=2), nn.Conv2d(6, 2, 1)),
    "transposed": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ConvTranspose2d(6, 4, 3, groups=2), nn.Hardtanh(0.0, 0.5), nn.Conv2d(4, 2, 1)
    ),
    "padded": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect")
    ),
    "upsampled": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(4, 2, 1)
    ),
    "no_bias": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 2, 1, bias=False)),
}


def uneven(model: nn.Module) -> nn.Module:
    """Weights whose output channels differ by a factor of up to 100, one of them dead."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            factor = 10 ** (2 * torch.rand(parameter.shape[0], generator=generator) - 1)
            factor[0] = 0.0
            parameter.data *= factor.reshape(-1, *[1] * (parameter.dim() - 1))
    return model.eval()


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return uneven(MODELS[name]())


def image() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def equalized_layers(gm) -> set[str]:
    return {what for _, what in gm.meta["equalize_report"] if what.startswith("equalized")}


@pytest.mark.parametrize("name", MODELS)
def test_model_stays_the_same(name):
    model = build(name)
    before = copy.deepcopy(model.state_dict())
    gm = equalize_fx(model)
    expected, found = model(image()), gm(image())
    assert equalized_layers(gm), gm.meta["equalize_report"]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["chain", "residual", "mobile", "grouped", "transposed"])
def test_ranges_meet(name):
    """Every scaled channel has the same largest weight on both sides: nothing moves when equalized again."""
    gm = equalize_fx(build(name), takes_part=lambda node: True)
    again = equalize_fx(gm)
    for node in gm.graph.nodes:
        a, b = layer_of(gm, node), layer_of(again, next(n for n in again.graph.nodes if n.name == node.name))
        if isinstance(a, Layer):
            assert isinstance(b, Layer)
            torch.testing.assert_close(a.weight, b.weight, rtol=0.05, atol=0)


class Twice(nn.Module):
    """One layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.a(F.relu(self.a(x)))


class ReadElsewhere(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.a(x)
        return self.b(x), x.softmax(1)


UNTOUCHED = {
    "silu": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU(), nn.Conv2d(4, 2, 1)),
    "hardtanh_below_zero": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Hardtanh(), nn.Conv2d(4, 2, 1)),
    "called_twice": Twice,
    "read_elsewhere": ReadElsewhere,
    "linear_on_the_last_axis": lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Linear(8, 2)),
    "single": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_must_not_fire(name):
    torch.manual_seed(0)
    model = UNTOUCHED[name]().eval()
    gm = equalize_fx(model)
    assert not equalized_layers(gm)
    float_layers = dict(fuse_fx(model).named_parameters())
    assert all(torch.equal(float_layers[key], value) for key, value in gm.named_parameters())


def test_relu6_is_left_alone_where_it_may_not_become_a_clip_by_channel():
    gm = equalize_fx(build("mobile"), clips=False)
    assert gm.meta["equalize_report"][0][1] == "'_2' reads them and is not scaled along"
    assert not any(node.target is torch.minimum for node in gm.graph.nodes)


def sqnr(expected: Tensor, found: Tensor) -> float:
    return float(10 * torch.log10(expected.detach().square().sum() / (expected - found).detach().square().sum()))


@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime"])
def test_a_net_with_unequal_channels_is_recovered(target):
    """Channels that differ by 100 between two layers, undone by the second: per-tensor weights lose them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    for first, second in ((0, 2), (2, 4)):
        factor = 10 ** (2 * torch.rand(model[first].out_channels))
        model[first].weight.data *= factor.reshape(-1, 1, 1, 1)
        model[first].bias.data *= factor
        model[second].weight.data /= factor.reshape(1, -1, 1, 1)
    noise = {}
    for equalize in (False, True):
        config = {"": {"weight": "per_tensor", "equalize": equalize, "bias_correction": False}}
        prepared = prepare_calibration_fx(model, target=target, qconfig=config)
        calibrate(prepared, [image()])
        noise[equalize] = sqnr(model(image()), convert_fx(prepared)(image()))
    assert noise[True] > noise[False] + 6, noise
    assert noise[True] > 25, noise


def test_configuration_says_which_layers_take_part():
    model = build("residual")
    prepared = prepare_calibration_fx(model, qconfig={"": {"equalize": True}, "head": {"equalize": False}})
    assert torch.equal(prepared.get_parameter("head.weight"), model.head.weight)
    assert not torch.equal(prepared.get_parameter("a.weight"), model.a.weight)
