"""prepare -> calibrate -> convert: structure first, then numbers, then everything that must be refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reported_cases import CASES, image
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fx_passes import convert_fx, fuse_fx, prepare_calibration_fx, trace
from fx_passes.errors import CalibrationError, InputError, QuantizationError, StageError
from fx_passes.quantize.accuracy.structure import strip_quantization
from fx_passes.quantize.annotation import annotation_of
from fx_passes.quantize.calibrate import calibrate
from fx_passes.quantize.decomposed import is_dequantize, is_quantize
from fx_passes.quantize.prepare import observers_of
from fx_passes.quantize.scheme import SCHEMES
from fx_passes.quantize.weights.saturation import pair_scale
from fx_passes.quantize.weights.scales import quantize_weight, weight_scale

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("error")
TARGETS = ("tensorrt", "tensorrt-rtx", "onnxruntime")
BY_NAME = {case.name: case for case in CASES}
NOTHING_TO_QUANTIZE = {"ShapeDependentFactories", "CeilModePooling"}
QUANTIZABLE = sorted(BY_NAME.keys() - NOTHING_TO_QUANTIZE - {"WrappedLoopPostProcess", "NanInCalibration"})


def tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def assert_close(found: Any, expected: Any, atol: float) -> None:
    for i, (a, b) in enumerate(zip(tensors(found), tensors(expected), strict=True)):
        assert a.shape == b.shape
        worst = (a - b).abs().max().item() if a.numel() else 0.0
        assert worst <= atol, f"output {i} differs by {worst} > {atol}"


def cosine(found: Any, expected: Any) -> float:
    a, b = (torch.cat([t.flatten().double() for t in tensors(o)]) for o in (found, expected))
    return float(torch.cosine_similarity(a, b, 0))


def converted_for(model: nn.Module, target: str, batches: list[Any], **options: Any):
    prepared = prepare_calibration_fx(model, target=target, **options)
    calibrate(prepared, batches)
    return convert_fx(prepared)


def small_net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(72, 5)).eval()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", QUANTIZABLE)
def test_reported_case(name, target):
    """The converted graph is the fused graph plus quantization, and as near to float as the case asks."""
    case = BY_NAME[name]
    model, inputs = case.model(), case.inputs()
    with torch.no_grad():
        expected = model(*inputs)
        converted = converted_for(model, target, [inputs])
        found = converted(*inputs)
        assert_close(strip_quantization(converted, fuse_fx(model))(*inputs), expected, atol=1e-5)
    assert all(bool(t.isfinite().all()) for t in tensors(found))
    assert any(is_dequantize(node) for node in converted.graph.nodes)
    assert cosine(found, expected) >= max(case.min_cosine, 0.999)


@pytest.mark.parametrize("target", TARGETS)
def test_prepared_module_computes_what_the_float_model_does(target):
    model, x = small_net(), image()
    prepared = prepare_calibration_fx(model, target=target)
    with torch.no_grad():
        assert_close(prepared(x), model(x), atol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
def test_state_of_a_converted_module(target):
    converted = converted_for(small_net(), target, [image()])
    state = converted.state_dict()
    assert state["0.weight"].dtype == torch.int8 and state["6.weight"].dtype == torch.int8
    assert state["0.weight_scale"].dtype == torch.float32
    assert state["0.bias"].dtype == (torch.int32 if target == "onnxruntime" else torch.float32)
    assert not any(t.is_floating_point() and t.dim() > 1 for t in state.values()), "a float weight is left"
    assert not list(converted.parameters()), "a float parameter is left"


def test_quantize_nodes_are_named_after_their_producer():
    names = {n.name for n in converted_for(small_net(), "onnxruntime", [image()]).graph.nodes}
    assert {"_2_quantize", "_2_dequantize"} <= names, names


def test_weights_of_both_signs_are_symmetric():
    state = converted_for(small_net(), "tensorrt", [image()]).state_dict()
    assert state["6.weight"].abs().max() == 127


@pytest.mark.parametrize("target", TARGETS)
def test_activations(target):
    converted = converted_for(small_net(), target, [image()])
    for node in converted.graph.nodes:
        if is_quantize(node):
            _, scale, zero_point, low, high, dtype = node.args
            assert scale > 0
            if target == "onnxruntime":
                assert (low, high, dtype) == (0, 255, torch.uint8)
                assert zero_point == 0 or node.args[0].name == "input_1"
            else:
                assert (zero_point, low, high, dtype) == (0, -128, 127, torch.int8)


def test_relu6_never_ends_above_six():
    """ONNX Runtime drops a Clip only if the integers cannot go beyond it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU6(), nn.Conv2d(4, 4, 1)).eval()
    converted = converted_for(model, "onnxruntime", [image() * 50])
    (node,) = (n for n in converted.graph.nodes if is_quantize(n) and n.args[0].name == "_1")
    top = torch.tensor(255.0) * torch.tensor(node.args[1])
    assert 5.99 < top <= 6.0


# ---- parameters


def pair_sums(weight: Tensor, highest: Tensor, groups: int) -> Tensor:
    """Largest 16-bit sums of each output channel: neighbours along the input channels, then along the window."""
    inputs = weight.shape[1]
    rows = []
    for out, kernel in enumerate(weight.long()):
        group = out // (weight.shape[0] // groups)
        reach = highest[group * inputs : (group + 1) * inputs].long()
        products = (kernel.movedim(0, -1) * reach).flatten()
        pairs = products[: len(products) // 2 * 2].reshape(-1, 2)
        rows.append(torch.maximum(pairs.clamp_min(0).sum(1), -pairs.clamp_max(0).sum(1)).max())
    return torch.stack(rows)


PAIRED = {
    "conv": (nn.Conv2d(16, 8, 3), 1),
    "odd_channels": (nn.Conv2d(3, 8, 3), 1),
    "grouped": (nn.Conv2d(12, 8, 3, groups=2), 2),
    "pointwise": (nn.Conv2d(16, 8, 1), 1),
    "linear": (nn.Linear(16, 8), 1),
}


@pytest.mark.parametrize("known", [False, True], ids=["up_to_255", "as_observed"])
@pytest.mark.parametrize("name", PAIRED)
def test_pairs_of_products_fit_sixteen_bits(name, known):
    """Without VNNI, ONNX Runtime adds two neighbouring products in 16 saturating bits."""
    layer, groups = PAIRED[name]
    weight = layer.weight.detach()
    generator = torch.Generator().manual_seed(0)
    highest = torch.randint(1, 256, (weight.shape[1] * groups,), generator=generator).float()
    reach = highest if known else torch.full_like(highest, 255.0)
    least = pair_scale(weight, groups, highest if known else None)
    usual = weight_scale(weight, SCHEMES["onnxruntime"].weight, 0)
    scale = torch.maximum(usual, least)
    assert pair_sums(quantize_weight(weight, scale, SCHEMES["onnxruntime"].weight, 0), reach, groups).max() <= 32767
    raised = scale > usual
    assert bool(raised.any()), "the case must need the rule"
    tight = pair_sums(torch.round(weight / least.reshape(-1, *[1] * (weight.dim() - 1))), reach, groups)[raised]
    assert tight.min() > 32767 * 0.97, "the scale is higher than it must be"


def test_scales_are_raised_for_onnxruntime_alone():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(16, 8, 1, bias=False), nn.Conv2d(8, 4, 1)).eval(), image(c=16)
    raised, free = (converted_for(model, t, [x]).get_buffer("0.weight_scale") for t in ("onnxruntime", "tensorrt"))
    assert bool((raised >= free).all()) and bool((raised > free * 1.01).any())


def mean_error(converted: nn.Module, model: nn.Module, x: Tensor) -> Tensor:
    return (converted(x) - model(x)).mean((0, 2, 3)).abs()


CORRECTED = {
    "conv": nn.Conv2d(8, 6, 3),
    "grouped": nn.Conv2d(8, 6, 3, groups=2),
    "depthwise": nn.Conv2d(8, 8, 3, groups=8),
}


@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime"])
@pytest.mark.parametrize("name", CORRECTED)
def test_bias_takes_back_the_mean_error_of_the_weight(name, target):
    torch.manual_seed(0)
    # Inputs on the grid of their scale: what is left is the error of the weight alone.
    steps = 255 if target == "onnxruntime" else 127
    x = torch.randint(0, steps + 1, (8, 8, 24, 24)) / steps
    model = nn.Sequential(copy.deepcopy(CORRECTED[name])).eval()
    config = {"": {"dtype": "int8"}}
    with torch.no_grad():
        errors = []
        for correct in (True, False):
            config[""]["bias_correction"] = correct
            converted = converted_for(model, target, [x[:3], x[3:]], qconfig=config)
            if target == "onnxruntime":  # its output is quantized, too
                converted = without_last_pair(converted)
            errors.append(mean_error(converted, model, x).max())
    assert errors[0] < errors[1] / 5


def without_last_pair(converted: Any) -> Any:
    (output,) = (n for n in converted.graph.nodes if n.op == "output")
    dequantize = output.args[0]
    dequantize.replace_all_uses_with(dequantize.args[0].args[0])
    converted.recompile()
    return converted


def test_layer_without_bias_gets_none():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False)).eval()
    assert "0.bias" not in converted_for(model, "tensorrt", [image()]).state_dict()


def test_integer_bias_never_overflows():
    """microsoft/onnxruntime #22020."""
    case = BY_NAME["TinyWeightsLargeBias"]
    model = case.model()
    converted = converted_for(model, "onnxruntime", [case.inputs()])
    bias = converted.get_buffer("conv.bias").double() * converted.get_buffer("conv.bias_scale").double()
    assert_close(bias, model.conv.bias.double(), atol=1e-6)
    products = model.conv.weight[0].numel()
    assert converted.get_buffer("conv.bias").abs().max() <= 2**31 - 1 - 255 * 127 * products


@pytest.mark.parametrize("target", TARGETS)
def test_dead_channels_have_finite_positive_scales(target):
    case = BY_NAME["DeadChannels"]
    converted = converted_for(case.model(), target, [case.inputs()])
    for name, tensor in converted.state_dict().items():
        if name.endswith("scale"):
            assert bool((tensor.isfinite() & (tensor >= torch.finfo(torch.float32).tiny)).all()), name
    for node in converted.graph.nodes:
        if is_quantize(node):
            assert 0 < node.args[1] < float("inf"), node


@pytest.mark.parametrize("target", TARGETS)
def test_layer_called_twice_stores_its_weight_once(target):
    converted = converted_for(BY_NAME["ReusedConvOneBatchNorm"].model(), target, [(image(), image(seed=2) * 3)])
    assert sorted(n for n in converted.state_dict() if n.endswith("weight")) == ["bn.weight", "conv.weight"]
    reads = [n for n in converted.graph.nodes if n.op == "get_attr" and n.target == "conv.weight"]
    assert sum(len(n.users) for n in reads) == 2
    if target == "onnxruntime":  # the unit of an integer bias follows from the input's scale
        assert not torch.equal(converted.get_buffer("conv.bias_scale"), converted.get_buffer("conv.bias_2_scale"))


def test_tied_weights_are_stored_once():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).eval()
    model[2].weight = model[0].weight
    converted = converted_for(model, "tensorrt", [torch.randn(4, 6)])
    assert converted.get_buffer("0.weight").data_ptr() == converted.get_buffer("2.weight").data_ptr()


def test_parameter_read_elsewhere_stays_float():
    case = BY_NAME["ParameterReadElsewhere"]
    model = case.model()
    converted = converted_for(model, "tensorrt", [case.inputs()])
    assert torch.equal(converted.conv.weight, model.conv.weight)
    assert any(t.dtype == torch.int8 for t in converted.buffers())


class FunctionalParameters(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.kernel, self.weight = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return F.linear(F.conv2d(x, self.kernel, padding="same").mean((2, 3)), self.weight)


@pytest.mark.parametrize("target", TARGETS)
def test_functional_layers(target):
    model, x = FunctionalParameters().eval(), image()
    with torch.no_grad():
        converted = converted_for(model, target, [x])
        assert_close(strip_quantization(converted, fuse_fx(model))(x), model(x), atol=1e-5)
        assert cosine(converted(x), model(x)) > 0.999
    assert sum(t.dtype == torch.int8 and t.dim() > 1 for t in converted.buffers()) == 2


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "zeros"])
@pytest.mark.parametrize("target", TARGETS)
def test_padding_modes(target, mode):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode=mode), nn.ReLU()).eval(), image()
    with torch.no_grad():
        converted = converted_for(model, target, [x])
        assert_close(strip_quantization(converted, fuse_fx(model))(x), model(x), atol=1e-5)
        assert cosine(converted(x), model(x)) > 0.999


DECONVOLUTIONS = {
    "plain": nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1),
    "grouped": nn.ConvTranspose2d(4, 6, 3, groups=2, dilation=2),
    "depthwise": nn.ConvTranspose2d(4, 4, 2, groups=4, bias=False),
    "1d": nn.ConvTranspose1d(4, 6, 3, padding=1),
}


@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
@pytest.mark.parametrize("name", DECONVOLUTIONS)
def test_transposed_convolutions(name, granularity):
    layer = DECONVOLUTIONS[name].eval()
    x = torch.randn(2, 4, *[7] * (layer.weight.dim() - 2), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model = nn.Sequential(layer)
        for target in TARGETS:
            config = {"": {"dtype": "int8", "weight": granularity}}
            converted = converted_for(model, target, [x], qconfig=config)
            assert cosine(converted(x), model(x)) > 0.999, target
            scales = 1 if granularity == "per_tensor" else layer.weight.shape[1]
            assert converted.get_buffer("0.weight_scale").numel() == scales


# ---- data


def batches_of(kind: str) -> tuple[Any, Any]:
    """Batches of one kind, and what they hold as one tensor."""
    x = [image(2, seed=1), image(1, seed=2)]
    made = {
        "tensors": x,
        "tuples": [(t,) for t in x],
        "lists": [[t] for t in x],
        "dicts": [{"input": t} for t in x],
        "generator": (t for t in x),
    }
    return made[kind], torch.cat(x)


@pytest.mark.parametrize("kind", ["tensors", "tuples", "lists", "dicts", "generator"])
def test_kinds_of_batches(kind):
    batches, everything = batches_of(kind)
    model = nn.Sequential(nn.Conv2d(3, 4, 1)).eval()
    prepared = prepare_calibration_fx(model, target="onnxruntime")
    (name,) = (n.name for n in prepared.graph.nodes if n.op == "placeholder")
    assert calibrate(prepared, batches) == 2
    low, high = observers_of(prepared)[name].range()
    assert (low, high) == (everything.min(), everything.max())


BAD_DATA: dict[str, tuple[Any, type[Exception], str]] = {
    "empty": ([], CalibrationError, "no calibration batches"),
    "exhausted": (iter(()), CalibrationError, "exhausted generator"),
    "text": (["image.png"], InputError, "str"),
    "nan": ([image().fill_(float("nan"))], CalibrationError, "NaN in the value of node 'input_1'"),
    "infinity": ([image() / 0], CalibrationError, "infinity"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_calibration_data(name):
    batches, error, text = BAD_DATA[name]
    prepared = prepare_calibration_fx(small_net())
    with pytest.raises(error, match=text):
        calibrate(prepared, batches)


def test_nan_in_one_batch_names_the_tensor():
    """NVIDIA/TensorRT #2628."""
    case = BY_NAME["NanInCalibration"]
    with pytest.raises(CalibrationError, match="node 'x'"):
        calibrate(prepare_calibration_fx(case.model()), case.calibration())


@pytest.mark.parametrize("given", ["tensor", "list", "tuple", "dict", "first_call"])
def test_example_inputs_are_recorded(given):
    x, first = image(seed=1), image(seed=2)
    examples = {"tensor": x, "list": [x], "tuple": (x,), "dict": {"input": x}, "first_call": None}
    prepared = prepare_calibration_fx(small_net(), examples[given])
    calibrate(prepared, [first, image(seed=3)])
    recorded = convert_fx(prepared).meta["example_inputs"]
    value = recorded["input"] if given == "dict" else recorded[0]
    assert torch.equal(value, first if given == "first_call" else x)


def test_integer_value_stays_float_with_the_reason():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x, offset):
            return self.conv(x) + offset

    converted = converted_for(Model().eval(), "tensorrt", [(image(), torch.ones(1, dtype=torch.int64))])
    (add,) = (n for n in converted.graph.nodes if n.name == "add")
    assert not any(is_dequantize(i) for i in add.all_input_nodes)
    assert "int64" in annotation_of(add).reason


# ---- stages and what must stay as it is


def test_everything_given_stays_as_it_was():
    model = small_net().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    prepared = prepare_calibration_fx(model)
    code = prepared.code
    calibrate(prepared, [image()])
    convert_fx(prepared)
    assert model.training and all(m.training for m in model.modules())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert prepared.code == code and prepared.meta["stage"] == "prepared"
    convert_fx(prepared)  # and can be converted again


def test_prepared_module_shares_what_fusing_does_not_change():
    model = small_net()
    prepared = prepare_calibration_fx(model)
    assert prepared.get_parameter("6.weight").data_ptr() == model[6].weight.data_ptr()


def test_stages_skip_what_was_done():
    model, x = small_net(), image()
    expected = converted_for(model, "onnxruntime", [x])(x)
    for stage in (trace(model), fuse_fx(model)):
        assert torch.equal(converted_for(stage, "onnxruntime", [x])(x), expected)


REFUSED = {
    "traced_in_train_mode": (lambda: prepare_calibration_fx(trace(small_net().train())), "train mode"),
    "prepared_twice": (lambda: prepare_calibration_fx(prepare_calibration_fx(small_net())), "already prepared"),
    "never_calibrated": (lambda: convert_fx(prepare_calibration_fx(small_net())), "never observed"),
    "not_prepared": (lambda: convert_fx(fuse_fx(small_net())), "prepare_calibration_fx"),
    "converted_twice": (lambda: convert_fx(converted_for(small_net(), "tensorrt", [image()])), "converted"),
    "calibrate_a_fused_graph": (lambda: calibrate(fuse_fx(small_net()), [image()]), "prepare_calibration_fx"),
    "calibrate_in_train_mode": (
        lambda: calibrate(prepare_calibration_fx(small_net()).train(), [image()]),
        "prepared.eval",
    ),
    "strip_a_fused_graph": (lambda: strip_quantization(fuse_fx(small_net()), fuse_fx(small_net())), "not converted"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_stage_is_refused(name):
    attempt, text = REFUSED[name]
    with pytest.raises(StageError, match=text):
        attempt()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", sorted(NOTHING_TO_QUANTIZE))
def test_conversion_that_quantizes_nothing_is_an_error(name, target):
    case = BY_NAME[name]
    prepared = prepare_calibration_fx(case.model(), target=target)
    calibrate(prepared, [case.inputs()])
    with pytest.raises(QuantizationError, match="nothing in this model can be quantized"):
        convert_fx(prepared)


def test_nan_in_a_weight_names_the_layer():
    model = small_net()
    with torch.no_grad():
        model[6].weight[0, 0] = float("nan")
    prepared = prepare_calibration_fx(model, target="onnxruntime")
    with pytest.raises((QuantizationError, CalibrationError), match="_6"):
        calibrate(prepared, [image()])
        convert_fx(prepared)


def test_copies_are_independent():
    prepared = prepare_calibration_fx(small_net())
    other = copy.deepcopy(prepared)
    calibrate(other, [image()])
    with pytest.raises(StageError, match="never observed"):
        convert_fx(prepared)
    convert_fx(other)
