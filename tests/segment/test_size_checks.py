"""What a program takes for granted about sizes: as data, from torch.export, dropped where it decides nothing."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.fx import Graph, GraphModule

from fx_passes.errors import ArtifactError, ExportError, InputError
from lowering import load, lower_to_onnx, lower_to_trt, merge
from lowering.artifact.schema import check_from_plain, check_to_plain
from lowering.segment.program import SizeCheck, TensorSpec
from lowering.segment.to_aten import to_aten

# -- as data ---------------------------------------------------------------------------------------------------------


CHECK = SizeCheck(("==", ("%", ("size", 1, 3), 4), 0), "y.shape[3] % 4 == 0", "model.py:3: if w % 4:")


def test_a_check_survives_json():
    plain = json.loads(json.dumps(check_to_plain(CHECK)))
    assert check_from_plain(plain, "segment_0", [2, 4]) == CHECK


@pytest.mark.parametrize(
    "condition",
    [
        pytest.param(["system", "rm"], id="unknown operation"),
        pytest.param(["==", 1], id="too few operands"),
        pytest.param(["size", 0, 3], id="a dimension that the input lacks"),
        pytest.param(["size", 2, 0], id="an input that is not there"),
        pytest.param(["size", -1, 0], id="from behind"),
        pytest.param(["not", "x"], id="text"),
        pytest.param([], id="nothing"),
        pytest.param(None, id="none"),
    ],
)
def test_a_damaged_check_is_refused(condition):
    with pytest.raises(ArtifactError):
        check_from_plain({"condition": condition, "text": "", "line": None}, "segment_0", [2, 4])


def test_a_check_nested_without_end_is_refused():
    condition: list = ["not", True]
    for _ in range(500):
        condition = ["not", condition]
    with pytest.raises(ArtifactError):
        check_from_plain({"condition": condition, "text": "", "line": None}, "segment_0", [2])


# -- from torch.export -----------------------------------------------------------------------------------------------


class Inner(nn.Module):
    """A leaf of the segment: its code is followed by torch.export, not by the tracer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def _branch(x):
    return x * 3 if x.shape[3] % 4 else x


def _one(x):
    return x * 3 if x.shape[3] == 1 else x


def _whole_slice(x):
    return x[..., : x.shape[3] // 2 * 2].reshape(2, 3, 8, -1, 2)


def _frozen(x):
    return x * int(x.shape[3] * 0.5)


def _operator(x):
    y = F.max_pool2d(x, 2)
    return y * torch.hann_window(y.shape[3])


def _program(function, *shapes, low=2, high=64):
    graph = Graph()
    placeholders = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    graph.output((graph.call_module("inner", tuple(placeholders)),))
    segment = GraphModule({"inner": Inner(function)}, graph)
    specs = []
    for i, shape in enumerate(shapes):
        least, most, names = (*shape[:3], low), (*shape[:3], high), (None, None, None, f"w{i}")
        specs.append(TensorSpec(f"x{i}", torch.float32, least, shape, most, symbols=names))
    return to_aten(segment, specs, tuple(torch.randn(shape) for shape in shapes))


@pytest.mark.parametrize(
    ("function", "checks"),
    [
        pytest.param(_branch, ["(x0.shape[3] % 4) == 0"], id="a branch"),
        pytest.param(lambda x: x * 2 if x.shape[3] > 1 else x, [], id="implied by the range"),
        pytest.param(lambda x: x * 2 if x.shape[3] // 2 <= 32 else x, [], id="implied after a division"),
        pytest.param(_whole_slice, [], id="only the layout in memory"),
        pytest.param(lambda x: F.interpolate(x, size=(x.shape[2] // 2, x.shape[3] // 2)), [], id="sizes that may be 1"),
    ],
)
def test_the_checks_of_a_program(function, checks):
    program = _program(function, (2, 3, 8, 20))
    assert [check.text for check in program.checks] == checks
    assert all(check.line and "test_size_checks.py" in check.line for check in program.checks)


def test_a_size_of_one_is_a_size_like_others():
    assert [c.text for c in _program(_one, (2, 3, 8, 20), low=1).checks] == ["x0.shape[3] != 1"]
    assert _program(_one, (2, 3, 8, 20), low=2).checks == []


def test_two_inputs_that_must_be_equal():
    program = _program(lambda x, y: x + y, (2, 3, 8, 20), (2, 3, 8, 20))
    assert [check.text for check in program.checks] == ["x1.shape[3] == x0.shape[3]"]


def test_inputs_that_need_not_be_equal_are_not_checked():
    assert _program(lambda x, y: x.mean() + y, (2, 3, 8, 20), (2, 3, 8, 20)).checks == []


@pytest.mark.parametrize(
    ("function", "says"),
    [
        pytest.param(_frozen, r"int\(\(0.5 \* float\(x0.shape\[3\]\)\)\) == 10", id="a number"),
        pytest.param(_operator, r"x0.shape\[3\] // 2\) == 10", id="an operator that takes no symbol"),
    ],
)
def test_what_works_for_the_example_only_is_refused_at_its_node(function, says):
    with pytest.raises(ExportError, match=says) as caught:
        _program(function, (2, 3, 8, 20))
    assert caught.value.node is not None and caught.value.node.name == "inner"


# -- at a call -------------------------------------------------------------------------------------------------------


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        y = self.conv(x)
        if y.shape[3] % 4:
            y = y * 3 + 1
        return y


EXAMPLE = torch.randn(2, 3, 8, 20, generator=torch.Generator().manual_seed(0))
WIDTH = {"x": {3: Dim("width", min=8, max=64)}}


def _image(width: int) -> torch.Tensor:
    return torch.randn(2, 3, 8, width, generator=torch.Generator().manual_seed(width))


@pytest.fixture(scope="module", params=[lower_to_onnx, lower_to_trt], ids=["onnx", "trt"])
def lowered(request):
    module = request.param(Branch().eval(), EXAMPLE, precision="fp32", dynamic_shapes=WIDTH)
    return module, module.simulate if request.param is lower_to_trt else module


def _check_calls(run) -> None:
    model = Branch().eval()
    for width in (8, 12, 40, 64, 12):
        assert torch.allclose(run(_image(width)), model(_image(width)), atol=1e-4)
    for width in (9, 21, 63):
        with pytest.raises(InputError, match=r"\(x.shape\[3\] % 4\) == 0 .*if y.shape\[3\] % 4:") as caught:
            run(_image(width))
        assert caught.value.other_sizes
    with pytest.raises(InputError):
        run(_image(65))


def test_each_call_is_checked(lowered):
    module, run = lowered
    _check_calls(run)
    assert "(x.shape[3] % 4) == 0" in module.summary()
    assert "(x.shape[3] % 4) == 0" in module.report()["segments"][0]["checks"][0]


def test_a_loaded_artifact_checks_as_well(lowered, tmp_path):
    module, run = lowered
    loaded = load(module.save(tmp_path / "artifact"))
    _check_calls(loaded.simulate if run != module else loaded)


def test_artifacts_of_other_checks_are_not_merged(tmp_path):
    class Other(Branch):
        def forward(self, x):
            y = self.conv(x)
            return y * 3 if y.shape[3] % 2 else y

    for name, model in (("a", Branch()), ("b", Other())):
        lower_to_trt(model.eval(), EXAMPLE, precision="fp32", dynamic_shapes=WIDTH).save(tmp_path / name)
    with pytest.raises(ArtifactError, match="differ in"):
        merge(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("lower", [lower_to_onnx, lower_to_trt], ids=["onnx", "trt"])
def test_ends_of_the_range_that_take_another_branch_are_warned_of(lower):
    dims = {"x": {3: Dim("width", min=9, max=64)}}
    with pytest.warns(UserWarning, match=r"calls with such sizes are refused: .*if y.shape\[3\] % 4"):
        module = lower(Branch().eval(), EXAMPLE, precision="fp32", dynamic_shapes=dims)
    run = module.simulate if lower is lower_to_trt else module
    assert torch.allclose(run(_image(12)), Branch().eval()(_image(12)), atol=1e-4)
    with pytest.raises(InputError):
        run(_image(9))


def test_no_warning_where_the_ends_take_the_same_branch():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower_to_onnx(Branch().eval(), EXAMPLE, precision="fp32", dynamic_shapes=WIDTH)
