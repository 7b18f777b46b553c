"""Quantization-aware training: what is validated is what is converted, and training works as for the float model."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reported_cases import image
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fx_passes import convert_fx, fuse_fx, prepare_calibration_fx, prepare_qat_fx, trace
from fx_passes.errors import InputError, QuantizationError, StageError
from fx_passes.quantize.accuracy.structure import strip_quantization
from fx_passes.quantize.calibrate import calibrate
from fx_passes.quantize.decomposed import decomposed
from fx_passes.quantize.qat.prepare import float_state_dict, freeze_batch_norm, freeze_ranges, set_qat_state
from fx_passes.quantize.ranges.fake_quant import fake_quantize
from fx_passes.quantize.scheme import SCHEMES

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("error")
TARGETS = ("tensorrt", "tensorrt-rtx", "onnxruntime")


class Functional(nn.Module):
    """Layers written as functions, one with a BatchNorm module and padding of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3) * 0.3)
        self.bn, self.conv = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.conv(F.relu(self.bn(F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, stride=2))))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.b1, self.c2, self.b2 = (
            nn.Conv2d(3, 4, 1),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 4, 1),
            nn.BatchNorm2d(4),
        )
        self.short, self.last, self.relu = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.b2(self.c2(self.relu(self.b1(self.c1(x)))))
        y += self.short(x)
        return self.last(self.relu(y))


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.relu, self.scale = nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Parameter(torch.tensor(10.0))

    def forward(self, x):
        return self.conv(self.relu(self.conv(x)) * self.scale)


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc, self.drop = nn.Conv2d(3, 4, 3), nn.Linear(4, 5), nn.Dropout(0.5)

    def forward(self, x):
        return self.fc(self.drop(self.conv(x).amax((2, 3))))


def sequence(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


MODELS: dict[str, Any] = {
    "conv_bn_relu": lambda: sequence(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)),
    "depthwise": lambda: sequence(nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6), nn.ReLU6(), nn.Conv2d(6, 4, 1)),
    "deconv": lambda: sequence(nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)),
    "linear": lambda: sequence(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)),
    "padding_mode": lambda: sequence(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(4)),
    "momentum_none": lambda: sequence(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None, eps=1e-2, affine=False)),
    "pooled": lambda: sequence(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1)),
    "functional": Functional,
    "residual": Residual,
    "called_twice": CalledTwice,
    "dropped": Dropped,
}


def made(name: str, training: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().train(training)


def steps(model: nn.Module, count: int = 3, seed: int = 1) -> None:
    """A few steps of training towards a fixed output."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for i in range(count):
        torch.manual_seed(seed + i)
        loss = (model(image(4, seed=seed + i)) - 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("learned_step", [False, True], ids=["ranges", "learned"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MODELS)
def test_conversion_gives_the_validated_numbers(name, target, learned_step):
    qat = prepare_qat_fx(made(name), target=target, learned_step=learned_step)
    steps(qat)
    x = image(3, seed=9)
    with torch.no_grad():
        validated = qat.eval()(x)
        converted = convert_fx(qat)
        assert torch.equal(converted(x), validated)
    assert any(t.dtype == torch.int8 for t in converted.buffers())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MODELS)
def test_conversion_is_the_trained_float_model_plus_quantization(name, target):
    qat = prepare_qat_fx(made(name), target=target)
    steps(qat)
    trained = made(name, training=False)
    trained.load_state_dict(float_state_dict(qat))
    x = image(3, seed=9)
    with torch.no_grad():
        stripped = strip_quantization(convert_fx(qat.eval()), fuse_fx(trained))
        assert (stripped(x) - trained(x)).abs().max() <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_trained(name):
    qat = prepare_qat_fx(made(name), learned_step=True)
    qat(image(4))  # takes the first ranges
    qat(image(4)).square().sum().backward()
    missing = [n for n, p in qat.named_parameters() if p.grad is None or not bool(p.grad.isfinite().all())]
    assert not missing


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_load_both_ways(name):
    model = made(name)
    qat = prepare_qat_fx(model)
    steps(qat)
    fresh = made(name)
    fresh.load_state_dict(float_state_dict(qat))  # strict
    qat.load_state_dict(model.state_dict())  # strict
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in float_state_dict(qat).items())


def test_own_checkpoint_restores_the_ranges():
    qat = prepare_qat_fx(made("residual"), learned_step=True)
    steps(qat)
    other = prepare_qat_fx(made("residual"), learned_step=True)
    other.load_state_dict(qat.state_dict())
    assert torch.equal(other.eval()(image()), qat.eval()(image()))


def test_model_given_is_not_trained():
    model = made("residual")
    before = copy.deepcopy(model.state_dict())
    steps(prepare_qat_fx(model))
    assert model.training and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    x, labels = image(32), torch.arange(32) % 4
    model = sequence(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    for learned_step in (False, True):
        qat = prepare_qat_fx(model, target="onnxruntime", learned_step=learned_step)
        optimizer = torch.optim.Adam(qat.parameters(), lr=1e-2)
        losses = []
        for _ in range(25):
            losses.append(F.cross_entropy(qat(x), labels))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        assert losses[-1] < 0.2 * losses[0]
        assert (convert_fx(qat.eval())(x).argmax(1) == labels).float().mean() > 0.9


# ---- arithmetic


@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime"])
def test_fake_quantization_rounds_as_the_converted_graph_does(target):
    s, ops = SCHEMES[target].activation, decomposed()
    scale, zero_point = float(torch.tensor(0.013)), 0 if s.symmetric else 97
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 2
    x[:400] = (torch.arange(400) - 200) * scale / 2  # ties
    args = (scale, zero_point, s.quant_min, s.quant_max, s.dtype)
    expected = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *args), *args)
    assert torch.equal(fake_quantize(x, torch.tensor(scale), zero_point, s), expected)


def reference_fake_quantize(x: Tensor, scale: Tensor, zero_point: int, low: int, high: int) -> Tensor:
    """The same by autograd: rounding passes gradients through, clamping stops them (LSQ, eq. 1 and 3)."""
    v = x / scale + zero_point
    clamped = v.clamp(low, high)
    return (clamped + (clamped.round() - clamped).detach() - zero_point) * scale


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("zero_point", [0, 100])
def test_gradients(per_channel, zero_point):
    s = SCHEMES["tensorrt" if zero_point == 0 else "onnxruntime"].activation
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 50, generator=generator, dtype=torch.float64)
    scale = torch.rand(6, 1, generator=generator, dtype=torch.float64) * 0.01 + 0.005
    scale = scale if per_channel else scale.mean()
    upstream = torch.randn(6, 50, generator=generator, dtype=torch.float64)
    grads = []
    for function in (
        lambda a, b: fake_quantize(a, b, zero_point, s),
        lambda a, b: reference_fake_quantize(a, b, zero_point, s.quant_min, s.quant_max),
    ):
        a, b = x.clone().requires_grad_(), scale.clone().requires_grad_()
        (function(a, b) * upstream).sum().backward()
        grads.append((a.grad, b.grad))
    weight = 1 / (x.numel() / scale.numel() * (s.quant_max - zero_point)) ** 0.5
    assert torch.allclose(grads[0][0], grads[1][0])
    assert torch.allclose(grads[0][1], grads[1][1] * weight)
    assert bool((grads[0][0] == 0).any()), "the case must hold clipped values"


def test_batch_norm_trains_as_the_float_model_does():
    """Statistics of the batch, running statistics and their number: on weights that rounding does not change."""
    model = made("conv_bn_relu")
    with torch.no_grad():
        model[0].weight.copy_(torch.randint(-127, 128, model[0].weight.shape) / 127.0)
        model[0].weight[:, 0, 0, 0] = 1.0
    qat = prepare_qat_fx(model, target="tensorrt", qconfig={"2": None, "3": None})
    set_qat_state(qat, "calibrate")
    qat(image())
    set_qat_state(qat, "train")
    model(image(4, seed=5)), qat(image(4, seed=5))
    for key in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        # The input is rounded to int8 in one of them.
        assert torch.allclose(qat.state_dict()[key].float(), model.state_dict()[key].float(), atol=1e-2), key
    assert qat.state_dict()["1.num_batches_tracked"] == 1


def test_frozen_batch_norm_keeps_its_statistics():
    qat = prepare_qat_fx(made("conv_bn_relu"))
    steps(qat, 1)
    freeze_batch_norm(qat)
    before = qat.state_dict()["1.running_mean"].clone()
    steps(qat, 1, seed=5)
    assert torch.equal(qat.state_dict()["1.running_mean"], before)
    freeze_batch_norm(qat, False)
    steps(qat, 1, seed=6)
    assert not torch.equal(qat.state_dict()["1.running_mean"], before)


def test_frozen_ranges_stay():
    qat = prepare_qat_fx(made("conv_bn_relu"))
    steps(qat, 1)
    freeze_ranges(qat)
    before = qat.fake_quantizers.input_1.scale.clone()
    qat(image() * 100)
    assert torch.equal(qat.fake_quantizers.input_1.scale, before)
    freeze_ranges(qat, False)
    qat(image() * 100)
    assert qat.fake_quantizers.input_1.scale > before


def test_channel_whose_batch_norm_weight_is_zero():
    model = made("conv_bn_relu")
    nn.init.zeros_(model[1].weight)  # as torchvision's zero_init_residual does
    qat = prepare_qat_fx(model)
    qat(image(4)).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in qat.parameters() if p.grad is not None)
    assert bool(qat.eval()(image()).isfinite().all())


# ---- states


def test_calibration_rounds_nothing():
    model = made("residual", training=False)
    qat = prepare_qat_fx(model)
    set_qat_state(qat, "calibrate")
    assert not qat.training
    assert torch.allclose(qat(image()), model(image()), atol=1e-6)
    set_qat_state(qat, "validate")
    assert not torch.allclose(qat(image()), model(image()), atol=1e-6)


def test_calibrated_only_equals_post_training_quantization():
    model = made("residual", training=False)
    config = {"": {"observer": "minmax", "bias_correction": False}}
    qat = prepare_qat_fx(model, target="tensorrt", qconfig=config)
    set_qat_state(qat, "calibrate")
    qat(image())
    prepared = prepare_calibration_fx(model, target="tensorrt", qconfig=config)
    calibrate(prepared, [image()])
    assert torch.equal(convert_fx(qat)(image(seed=3)), convert_fx(prepared)(image(seed=3)))


def in_state(state: str, training: bool) -> nn.Module:
    qat = prepare_qat_fx(made("residual"))
    steps(qat, 1)
    set_qat_state(qat, state)
    return qat.train(training)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        x = self.conv(x)
        return x if self.training else x.softmax(1)


def kept_norm(training: bool) -> nn.Module:
    """A QAT module whose BatchNorm is folded into nothing, after a step."""
    qat = prepare_qat_fx(sequence(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1)))
    steps(qat, 1)
    return qat.train(training)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "convert_in_train_mode": (lambda: convert_fx(kept_norm(True)), StageError, "other values in eval mode"),
    **{
        f"asks_to_{option}": (
            lambda option=option, value=value: prepare_qat_fx(made("residual"), qconfig={"": {option: value}}),
            InputError,
            f"asks for '{option}'",
        )
        for option, value in {"equalize": True, "smooth": 0.5, "rounding": "learned"}.items()
    },
    "calibrate_in_train_mode": (lambda: in_state("calibrate", True)(image()), StageError, "state is 'calibrate'"),
    "validate_in_train_mode": (lambda: in_state("validate", True)(image()), StageError, "state is 'validate'"),
    "validate_before_data": (lambda: prepare_qat_fx(made("residual")).eval()(image()), StageError, "node 'x'"),
    "convert_before_data": (lambda: convert_fx(prepare_qat_fx(made("residual"))), StageError, "never observed"),
    "unknown_state": (lambda: set_qat_state(prepare_qat_fx(made("residual")), "test"), InputError, "calibrate, train"),
    "state_of_a_float_model": (lambda: set_qat_state(made("residual"), "train"), StageError, "prepare_qat_fx"),
    "other_eval_path": (lambda: prepare_qat_fx(Branching()), StageError, "softmax"),
    "traced_in_train_mode": (lambda: prepare_qat_fx(trace(made("dropped"))), StageError, "train mode"),
    "prepared_already": (lambda: prepare_qat_fx(prepare_qat_fx(made("dropped"))), StageError, "prepared_qat"),
    "calibrate_call": (
        lambda: calibrate(prepare_qat_fx(made("dropped")), [image()]),
        StageError,
        "prepare_calibration",
    ),
    "folded_at_another_rank": (
        lambda: prepare_qat_fx(sequence(nn.Linear(4, 4), nn.BatchNorm1d(4)))(torch.rand(2, 4, 4)),
        QuantizationError,
        "3 dimensions",
    ),
    "parametrized": (
        lambda: prepare_qat_fx(sequence(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 1)))),
        QuantizationError,
        "remove_parametrizations",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    attempt, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        attempt()


def test_graph_traced_in_eval_mode_is_trained():
    qat = prepare_qat_fx(trace(made("residual", training=False)))
    steps(qat)
    assert torch.equal(convert_fx(qat.eval())(image()), qat(image()))


def test_copies_are_independent():
    """An exponential moving average of the weights is a deepcopy."""
    qat = prepare_qat_fx(made("residual"), learned_step=True)
    steps(qat, 1)
    other = copy.deepcopy(qat)
    before = other.eval()(image())
    steps(qat, 2)
    assert torch.equal(other(image()), before)
    assert torch.equal(convert_fx(other)(image()), before)
    assert not torch.equal(qat.eval()(image()), before)


@pytest.mark.parametrize("buffers", [True, False], ids=["averaged_buffers", "copied_buffers"])
def test_averaged_model_converts_to_what_it_computes(buffers):
    qat = prepare_qat_fx(made("residual"))
    steps(qat, 1)
    average = AveragedModel(qat, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=buffers)
    for _ in range(2):
        steps(qat, 1)
        average.update_parameters(qat)
    average.eval()
    assert torch.equal(convert_fx(average.module)(image()), average(image()))
    assert not torch.equal(average(image()), qat.eval()(image()))


def test_compiled_training_gives_the_numbers_of_eager():
    """`aot_eager` traces forward and backward as every backend does, and generates no code."""
    qat = prepare_qat_fx(sequence(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)))
    steps(qat, 1)
    plain = copy.deepcopy(qat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an error would be an internal one of the compiler
        steps(torch.compile(qat, backend="aot_eager"), 2)
    steps(plain, 2)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(qat.state_dict()[key], value, rtol=0, atol=1e-6)
    assert torch.equal(convert_fx(qat.eval())(image()), qat(image()))


def test_converted_norm_that_was_kept_gives_the_validated_numbers():
    qat = kept_norm(training=False)
    assert torch.equal(convert_fx(qat)(image()), qat(image()))


def test_autocast():
    qat = prepare_qat_fx(made("residual"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        qat(image(4)).float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and bool(p.grad.isfinite().all()) for p in qat.parameters())


def test_example_inputs_are_recorded():
    qat = prepare_qat_fx(made("residual"))
    steps(qat, 1)
    assert convert_fx(qat).meta["example_inputs"][0].shape == (4, 3, 8, 8)


def test_a_fused_graph_is_trained_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Conv2d(4, 2, 1)).eval()
    images = torch.randn(4, 3, 8, 8)
    fused = fuse_fx(model)
    before = {name: value.clone() for name, value in fused.state_dict().items()}
    qat = prepare_qat_fx(fused, images, target="onnxruntime")
    set_qat_state(qat, "train")
    qat(images).sum().backward()
    assert qat.get_parameter("0.weight").grad.abs().sum() > 0
    assert all(torch.equal(value, before[name]) for name, value in fused.state_dict().items())
    set_qat_state(qat, "validate")
    with torch.no_grad():
        assert torch.equal(convert_fx(qat)(images), qat(images))
