"""Inputs as users pass them: examples, calibration data, dynamic sizes, settings."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.export import Dim

from fx_passes import fuse_fx, prepare_calibration_fx
from fx_passes.errors import CalibrationError, InputError
from fx_passes.quantize.calibrate import calibrate
from lowering import lower_to_onnx, lower_to_trt
from lowering.request.inputs import CalibrationData, Example, example_for, shape_range
from lowering.request.settings import Settings, resolve_settings

NO_DATA = CalibrationData(None, 8)


class TwoInputs(nn.Module):
    def forward(self, image, mask=None):
        return image if mask is None else image * mask


@pytest.mark.parametrize(
    ("given", "args", "kwargs"),
    [
        pytest.param(torch.ones(2), 1, [], id="tensor"),
        pytest.param((torch.ones(2), torch.ones(2)), 2, [], id="tuple"),
        pytest.param([torch.ones(2)], 1, [], id="list"),
        pytest.param({"image": torch.ones(2)}, 0, ["image"], id="dict"),
    ],
)
def test_example_forms(given, args, kwargs):
    example = Example.of(given)
    assert len(example.args) == args
    assert list(example.kwargs) == kwargs


def test_example_of_something_else_names_the_type():
    with pytest.raises(InputError, match="ndarray"):
        Example.of(torch.ones(2).numpy())


def test_too_many_arguments_show_the_signature():
    with pytest.raises(InputError, match=r"forward\(image, mask=None\)"):
        example_for(TwoInputs(), (torch.ones(1), torch.ones(1), torch.ones(1)), NO_DATA)


def test_no_example_says_how_to_pass_one():
    with pytest.raises(InputError, match="example_inputs="):
        example_for(TwoInputs(), None, NO_DATA)


def test_declared_input_size_of_a_timm_like_model():
    model = TwoInputs()
    model.default_cfg = {"input_size": (3, 5, 7)}
    assert example_for(model, None, NO_DATA).args[0].shape == (1, 3, 5, 7)


def test_first_calibration_batch_is_the_example():
    batches = iter([torch.zeros(2), torch.ones(2), torch.full((2,), 2.0)])
    data = CalibrationData(batches, 8)
    assert torch.equal(example_for(TwoInputs(), None, data).args[0], torch.zeros(2))
    assert [int(batch[0]) for batch in data] == [0, 1, 2]


def test_one_shot_iterator_keeps_the_first_batches_only():
    data = CalibrationData((torch.full((1,), float(i)) for i in range(5)), 3)
    assert [int(b) for b in data] == [0, 1, 2, 3, 4]
    assert [int(b) for b in data] == [0, 1, 2]


def test_reiterable_is_iterated_in_full_every_time():
    data = CalibrationData([torch.zeros(1)] * 5, 3)
    assert len(list(data)) == len(list(data)) == 5


@pytest.mark.parametrize("empty", [[], iter([])], ids=["list", "iterator"])
def test_empty_calibration(empty):
    with pytest.raises(CalibrationError, match="empty"):
        CalibrationData(empty, 8).first()


def test_a_tensor_is_no_iterable_of_batches():
    with pytest.raises(InputError, match=r"\[tensor\]"):
        CalibrationData(torch.ones(4, 3), 8)


def test_dynamic_batch_changes_only_the_batch():
    example = Example((torch.randn(2, 3), torch.randn(2, 5), torch.randn(7)), {"n": 4})
    sizes = shape_range(TwoInputs(), example, (1, 2, 8), None)
    assert [tuple(t.shape) for t in sizes.max.tensors()] == [(8, 3), (8, 5), (7,)]
    assert sizes.min.tensors()[0].shape[0] == 1
    assert sizes.max.kwargs == {"n": 4}


def test_export_never_sees_a_batch_of_one():
    sizes = shape_range(TwoInputs(), Example((torch.randn(1, 3),)), (1, 1, 8), None)
    assert sizes.export.tensors()[0].shape[0] == 2
    assert sizes.opt.tensors()[0].shape[0] == 1


@pytest.mark.parametrize("bad", [(0, 1, 2), (2, 1, 4), (1, 2), 4, ("a", "b", "c")], ids=str)
def test_bad_dynamic_batch(bad):
    with pytest.raises(InputError, match="min <= opt <= max"):
        shape_range(TwoInputs(), Example((torch.randn(1, 3),)), bad, None)


def test_dynamic_shapes_by_name():
    example = Example((torch.randn(2, 3, 8, 8),))
    sizes = shape_range(TwoInputs(), example, None, {"image": {2: Dim("h", min=4, max=32)}})
    assert [tuple(e.tensors()[0].shape) for e in (sizes.min, sizes.opt, sizes.max)] == [
        (2, 3, 4, 8),
        (2, 3, 8, 8),
        (2, 3, 32, 8),
    ]


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        pytest.param({"picture": {0: Dim("n", min=1, max=4)}}, "the inputs are image", id="unknown-input"),
        pytest.param({"image": {0: Dim.AUTO}}, "no min", id="unbounded"),
    ],
)
def test_bad_dynamic_shapes(dims, message):
    with pytest.raises(InputError, match=message):
        shape_range(TwoInputs(), Example((torch.randn(2, 3),)), None, dims)


def test_batch_given_twice():
    with pytest.raises(InputError, match="both"):
        shape_range(TwoInputs(), Example((torch.randn(2, 3),)), (1, 2, 4), {"image": {0: Dim("n", min=1, max=4)}})


def test_settings_from_a_dict():
    assert resolve_settings({"threads": 2}) == Settings(threads=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"thread": 2}, "the settings are float_type", id="unknown-key"),
        pytest.param({"float_type": "fp8"}, "fp32, fp16, bf16", id="float-type"),
        pytest.param({"threads": 0}, "at least 1", id="threads"),
        pytest.param({"optimization_level": 9}, "0 to 5", id="level"),
        pytest.param("fast", "a dict of its fields", id="type"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(InputError, match=message):
        resolve_settings(settings)


def meta_buffer() -> nn.Module:
    norm = nn.BatchNorm1d(3)
    norm.running_mean = torch.zeros(3, device="meta")
    return nn.Sequential(norm)


@pytest.mark.parametrize("lower", [lower_to_onnx, lower_to_trt])
@pytest.mark.parametrize(
    ("model", "says"),
    [
        pytest.param(nn.Sequential(nn.Linear(3, 3, device="meta")), "'0.weight' is on the meta device", id="meta"),
        pytest.param(meta_buffer(), "'0.running_mean' is on the meta device", id="meta-buffer"),
        pytest.param(nn.Sequential(nn.LazyLinear(3)), "'0.weight' has no shape yet", id="lazy"),
        pytest.param(torch.jit.trace(nn.Linear(3, 3), torch.zeros(1, 3)), "nn.Module it was scripted", id="jit"),
        pytest.param(torch.nn.functional.relu, "model is a function", id="function"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_model_that_cannot_be_lowered_is_refused_by_name(model, says, lower):
    with pytest.raises(InputError, match=says):
        lower(model, torch.zeros(1, 3), precision="fp32")


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, image):
        return self.conv(image)


class Branching(Traced):
    """Its root asks for values and stays Python; its convolution is lowered and calibrated through it."""

    def forward(self, image):
        y = self.conv(image)
        return y if y.sum() > 0 else -y


IMAGE = torch.rand(1, 3, 8, 8)


@pytest.mark.parametrize("make", [Traced, Branching])
@pytest.mark.parametrize("lower", [lower_to_onnx, lower_to_trt])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        pytest.param(IMAGE.double(), "'image' of calibration batch 1 is torch.float64, and torch.float32", id="dtype"),
        pytest.param((IMAGE, torch.zeros(1).long()), r"calibration batch 1: .*forward\(image\)", id="labels"),
        pytest.param({"picture": IMAGE}, r"calibration batch 1: .*forward\(image\)", id="name"),
    ],
)
def test_a_calibration_batch_that_does_not_fit_is_named(make, lower, wrong, says):
    with pytest.raises(InputError, match=says):
        lower(make().eval(), IMAGE, calibration=[IMAGE, wrong])


def test_calibrate_itself_names_the_batch_that_does_not_fit():
    prepared = prepare_calibration_fx(fuse_fx(Traced().eval(), IMAGE), IMAGE, target="onnxruntime")
    with pytest.raises(InputError, match=r"calibration batch 1: .*forward\(image\)"):
        calibrate(prepared, [IMAGE, (IMAGE, IMAGE)])
    with pytest.raises(InputError, match=r"batch 0 is torch.float64"):
        calibrate(prepared, [IMAGE.double()])


@pytest.mark.parametrize("make", [Traced, Branching])
def test_calibration_data_that_is_all_zero_is_warned_of_once(make):
    zero = torch.zeros_like(IMAGE)
    with pytest.warns(UserWarning, match="input 'image' is zero in every calibration batch") as caught:
        lower_to_onnx(make().eval(), IMAGE, calibration=[zero, zero])
    assert sum("is zero in every" in str(warning.message) for warning in caught) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is zero in every")
        lower_to_onnx(make().eval(), IMAGE, calibration=[zero, IMAGE])
