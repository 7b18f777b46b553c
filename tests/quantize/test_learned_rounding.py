"""Learned rounding: a layer's output changes less, at the same scales, within what the target's kernels can add up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_passes import convert_fx, fuse_fx, prepare_calibration_fx
from fx_passes.errors import CalibrationError, InputError, StageError
from fx_passes.quantize.accuracy.lockstep import SteppedRun, batches_that_fit
from fx_passes.quantize.accuracy.partial import run
from fx_passes.quantize.accuracy.structure import strip_quantization
from fx_passes.quantize.calibrate import calibrate
from fx_passes.quantize.calibrated import float_reference
from fx_passes.quantize.weights.layer import Layer, layer_of
from fx_passes.quantize.weights.samples import bias_free_targets, input_rows, output_places, weight_of_rows, weight_rows
from fx_passes.quantize.weights.saturation import fits_pairs
from lowering import lower_to_onnx
from lowering.compare import sqnr

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("error")
LEARNED = {"": {"rounding": "learned"}}

LAYERS = {
    "conv": nn.Conv2d(6, 4, 3, stride=2, padding=1),
    "conv_dilated": nn.Conv2d(6, 4, (3, 2), padding=(2, 1), dilation=(2, 1)),
    "conv_same": nn.Conv2d(6, 4, (5, 3), padding="same", dilation=(1, 2)),
    "conv_reflect": nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"),
    "conv1d": nn.Conv1d(6, 4, 3, bias=False),
    "conv3d": nn.Conv3d(6, 4, 2),
    "grouped": nn.Conv2d(6, 8, 3, groups=2),
    "depthwise": nn.Conv2d(6, 6, 3, padding=1, groups=6),
    "transposed": nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1),
    "transposed_grouped": nn.ConvTranspose2d(6, 4, (3, 4), stride=(1, 3), groups=2, dilation=(2, 1)),
    "linear": nn.Linear(7, 4),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rows_times_weight_are_the_output_at_the_places(name):
    module = LAYERS[name]
    generator = torch.Generator().manual_seed(0)
    dimensions = {nn.Conv1d: 1, nn.Conv3d: 3}.get(type(module), 2)
    x = torch.randn(3, 6, *(7,) * dimensions, generator=generator)
    gm = fuse_fx(nn.Sequential(module).eval())
    layer = layer_of(gm, next(node for node in gm.graph.nodes if node.op == "call_module"))
    assert isinstance(layer, Layer)
    y = module(x).detach()
    places = output_places(layer, y, 200, generator)
    rows, weight = input_rows(layer, x, places), weight_rows(layer, layer.weight)
    torch.testing.assert_close(rows @ weight.transpose(1, 2), bias_free_targets(layer, y, places), rtol=0, atol=1e-5)
    assert torch.equal(weight_of_rows(layer, weight), layer.weight)


class Net(nn.Module):
    """A convolution of every kind, a residual addition, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.depthwise, self.point = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 16, 1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = F.relu(x + self.point(F.relu6(self.depthwise(x))))
        return self.head(self.up(x).mean((2, 3)))


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def images(count: int = 4, seed: int = 1) -> list[Tensor]:
    """Neighbouring pixels are alike, as in photographs: of independent inputs the nearest rounding is the best."""
    generator = torch.Generator().manual_seed(seed)
    coarse = [torch.rand(4, 3, 4, 4, generator=generator) for _ in range(count)]
    return [F.interpolate(x, size=(10, 10), mode="bilinear") for x in coarse]


def calibrated(model: nn.Module, target: str, config: dict[Any, Any] = LEARNED, batches: Any = None):
    prepared = prepare_calibration_fx(model, target=target, qconfig=config)
    calibrate(prepared, images() if batches is None else batches)
    return prepared


@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime"])
def test_every_layer_loses_less_or_keeps_the_nearest(target):
    prepared = calibrated(net(), target)
    converted = convert_fx(prepared, images())
    report = converted.meta["rounding_report"]
    expected = {"tensorrt": ["stem", "point", "up", "head"], "onnxruntime": ["stem", "depthwise", "point", "head"]}
    assert [item.name for item in report] == expected[target]
    for item in report:
        assert item.learned <= item.nearest
        assert (item.changed > 0) == (item.learned < item.nearest)
    assert sum(item.learned < item.nearest for item in report) >= 3


@pytest.mark.parametrize(("target", "levels"), [("tensorrt", 127), ("onnxruntime", 255)])
def test_layers_are_closer_to_float_on_data_that_was_not_learned_on(target, levels):
    """Of images that are integers already, so that only the weight's error is seen."""
    learned_on, others = ([(x / x.max() * levels).round() / levels for x in images(4, seed)] for seed in (1, 2))
    noise = {}
    for rounding in ("nearest", "learned"):
        config = {"": {"weight": "per_tensor", "rounding": rounding}}
        prepared = calibrated(net(), target, config, learned_on)
        converted = convert_fx(prepared, learned_on)
        expected, found = (run(gm, torch.cat(others), "stem")[1] for gm in (float_reference(prepared), converted))
        noise[rounding] = float((found - expected).square().sum())
    assert noise["learned"] < 0.7 * noise["nearest"], noise


def test_integers_move_by_one_step_at_most_and_scales_stay():
    prepared, plain = calibrated(net(), "tensorrt"), calibrated(net(), "tensorrt", {})
    learned, nearest = convert_fx(prepared, images()), convert_fx(plain)
    a, b = learned.state_dict(), nearest.state_dict()
    assert a.keys() == b.keys()
    for key in a:
        if key.endswith(".weight"):
            assert (a[key].int() - b[key].int()).abs().max() <= 1
        elif key.endswith("_scale"):
            assert torch.equal(a[key], b[key])


def test_structure_is_that_of_the_float_model():
    prepared = calibrated(net(), "onnxruntime")
    x = images()[0]
    stripped = strip_quantization(convert_fx(prepared, images()), float_reference(prepared))
    assert (stripped(x) - net()(x)).abs().max() <= 1e-5


def test_pairs_of_products_still_fit_sixteen_bits():
    """Large weights of one sign on inputs that reach 255: one step more would overflow somewhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    model[2].weight.data.abs_()
    prepared = calibrated(model, "onnxruntime")
    converted = convert_fx(prepared, images())
    assert (
        converted.get_buffer("2.weight").int()
        != convert_fx(calibrated(model, "onnxruntime", {})).get_buffer("2.weight").int()
    ).any()
    (quantize,) = [n for n in converted.graph.nodes if n.name == "_1_quantize"]
    observed = prepared.observers.get_submodule("_1")
    highest = (torch.ceil(observed.channel_high * (1.25 / quantize.args[1])) + quantize.args[2]).clamp(max=255)
    assert fits_pairs(converted.get_buffer("2.weight"), 1, highest).all()


def test_result_is_the_same_on_every_run_and_global_state_stays():
    prepared = calibrated(net(), "tensorrt")
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = convert_fx(prepared, images()).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    second = convert_fx(prepared, images()).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_model_and_prepared_module_stay_as_they_were():
    model = net()
    before = copy.deepcopy(model.state_dict())
    prepared = calibrated(model, "tensorrt")
    state = copy.deepcopy(prepared.state_dict())
    convert_fx(prepared, images())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(torch.equal(state[key], value) for key, value in prepared.state_dict().items())


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.twice, self.once = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.once(self.twice(F.relu(self.twice(x))))


def test_weight_of_several_calls_keeps_the_nearest_rounding():
    converted = convert_fx(calibrated(Shared().eval(), "tensorrt"), images())
    assert [item.name for item in converted.meta["rounding_report"]] == ["once"]


def test_values_without_a_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(0), nn.Linear(8, 4)).eval()
    alone = [image[0] for image in images()]
    converted = convert_fx(calibrated(model, "tensorrt", batches=alone), alone)
    assert [item.name for item in converted.meta["rounding_report"]] == ["_0", "_4"]
    assert (converted(alone[0]) - model(alone[0])).abs().max() < 0.02


def test_batches_that_hold_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    some = [images()[0][:0], *images()]
    prepared = calibrated(model, "tensorrt", batches=some)
    assert len(convert_fx(prepared, some).meta["rounding_report"]) == 2
    assert convert_fx(prepared, some[:1]).meta["rounding_report"] == []


def test_configuration_says_which_layers_learn():
    converted = convert_fx(calibrated(net(), "tensorrt", {nn.Linear: {"rounding": "learned"}}), images())
    assert [item.name for item in converted.meta["rounding_report"]] == ["head"]


def test_refused_without_batches():
    prepared = calibrated(net(), "tensorrt")
    with pytest.raises(StageError, match=r"convert_fx\(prepared, batches\)"):
        convert_fx(prepared)
    with pytest.raises(CalibrationError, match="no calibration batches"):
        convert_fx(prepared, iter([]))


def test_memory_bounds_the_number_of_batches():
    gm = fuse_fx(net())
    one = 4 * 16 * 10 * 10 * 4  # bytes of the stem's output
    assert len(batches_that_fit(gm, images(6), 2, 20 * one)) < 6
    assert len(batches_that_fit(gm, images(6), 2, 1)) == 1
    assert len(batches_that_fit(gm, images(6), 2, 1 << 30)) == 6


def test_stepped_run_gives_what_the_graph_gives_and_frees_values():
    gm, batches = fuse_fx(net()), images(2)
    run = SteppedRun(gm, batches)
    (output,) = [node for node in gm.graph.nodes if node.op == "output"]
    run.advance(output)
    for found, batch in zip(run.values(output.args[0]), batches, strict=True):
        assert torch.equal(found, gm(batch))
    assert run.live_bytes() == 2 * 4 * 5 * 4


def test_lowering_learns_on_its_calibration_batches():
    """Also on those of an iterator that can be gone through once."""
    model, x = net(), images(1, seed=2)[0]
    lowered = lower_to_onnx(model, x, calibration=iter(images()), qconfig=LEARNED)
    assert lowered.report()["flops_share"] >= 0.99 and not lowered.fallbacks
    expected = convert_fx(calibrated(model, "onnxruntime"), images())
    assert sqnr(expected(x).detach(), lowered(x)) >= 40


class Looping(nn.Module):
    """A root that stays Python: it decides by a value."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        for _ in range(int(x.sum() > 0)):
            x = x + 1
        return self.net(x)


def test_refused_where_a_model_is_lowered_child_by_child():
    with pytest.raises(InputError, match="child by child"):
        lower_to_onnx(Looping().eval(), images()[0], calibration=images(), qconfig=LEARNED)
