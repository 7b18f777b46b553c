"""`dynamic_shapes`: which dimensions are one size and which are independent, in all forms that torch.export takes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, ShapesCollection

from fx_passes import wrap
from fx_passes.errors import InputError
from lowering import lower_to_onnx, lower_to_trt
from lowering.request.inputs import Example, shape_range

BACKENDS = pytest.mark.parametrize("lower", [lower_to_onnx, lower_to_trt], ids=["onnx", "trt"])
HEIGHT, OTHER = Dim("h", min=8, max=32), Dim("k", min=8, max=32)


class Two(nn.Module):
    """Two images that have nothing to do with each other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x, y):
        return self.a(x), self.b(y).mean((2, 3))


@wrap
def in_python(value):
    return value + 0


class Halves(Two):
    """Boundaries between segments whose sizes follow from the one or the other."""

    def forward(self, x, y):
        halves = in_python(F.max_pool2d(self.a(x), 2)), in_python(F.max_pool2d(self.b(y), 2))
        return halves[0] * 2, halves[1].relu()


class Sum(Two):
    def forward(self, x, y):
        return self.a(x) + self.b(y)


class Twice(Two):
    def forward(self, x, y):
        return F.interpolate(self.a(x), scale_factor=2) + self.b(y)


def _images(*heights: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(sum(heights))
    return tuple(torch.randn(2, 3, height, 10, generator=generator) for height in heights)


def _lowered(lower, model, example, dims):
    module = lower(model.eval(), example, precision="fp32", dynamic_shapes=dims)
    return module, module.simulate if lower is lower_to_trt else module


def _check(run, model, inputs) -> None:
    for got, want in zip(run(*inputs), model.eval()(*inputs), strict=True):
        assert torch.allclose(got, want, atol=1e-4)


def _symbols(module) -> list[list[str]]:
    return [[name for s in seg.backend.inputs for name in s.symbols if name] for seg in module.backend_segments()]


@BACKENDS
@pytest.mark.parametrize("model", [Two(), Halves()], ids=["inputs", "boundaries"])
@pytest.mark.parametrize("usual", [(16, 16), (16, 24)], ids=["equal in the example", "unequal in the example"])
def test_two_names_of_one_range_are_two_sizes(lower, model, usual):
    module, run = _lowered(lower, model, _images(*usual), {"x": {2: HEIGHT}, "y": {2: OTHER}})
    for heights in ((8, 24), (32, 9), (16, 16)):
        _check(run, model, _images(*heights))
    for heights in ((7, 8), (8, 33)):
        with pytest.raises(InputError):
            run(*_images(*heights))
    assert _symbols(module)[0] == ["h", "k"]
    assert all(len(set(names)) == 2 for names in _symbols(module))


@BACKENDS
def test_one_name_is_one_size(lower):
    module, run = _lowered(lower, Two(), _images(16, 16), {"x": {2: HEIGHT}, "y": {2: HEIGHT}})
    _check(run, Two(), _images(9, 9))
    with pytest.raises(InputError, match=r"y.shape\[2\] == x.shape\[2\]"):
        run(*_images(8, 24))
    assert _symbols(module) == [["h", "h"]]


@BACKENDS
def test_a_batch_is_one_size_at_every_input(lower):
    module = lower(Two().eval(), _images(16, 8), precision="fp32", dynamic_batch=(1, 2, 4))
    run = module.simulate if lower is lower_to_trt else module
    x, y = _images(16, 8)
    _check(run, Two(), (x[:1], y[:1]))
    with pytest.raises(InputError):
        run(x[:1], y)
    assert _symbols(module) == [["batch", "batch"]]


@BACKENDS
def test_sizes_that_the_model_needs_to_be_equal_are_checked(lower):
    _, run = _lowered(lower, Sum(), _images(16, 16), {"x": {2: HEIGHT}, "y": {2: OTHER}})
    _check(run, Sum(), _images(9, 9))
    with pytest.raises(InputError, match=r"y.shape\[2\] == x.shape\[2\]"):
        run(*_images(8, 24))


@BACKENDS
def test_dimensions_without_names(lower):
    dims = ({2: Dim.AUTO(min=8, max=32), 3: Dim.STATIC}, {2: Dim.DYNAMIC(min=8, max=32), 3: 10})
    _, run = _lowered(lower, Two(), _images(16, 16), dims)
    _check(run, Two(), _images(8, 24))


@BACKENDS
def test_a_size_that_is_twice_another(lower):
    half, example = Dim("h", min=4, max=16), (torch.randn(2, 3, 8, 10), torch.randn(2, 3, 16, 20))
    _, run = _lowered(lower, Twice(), example, {"x": {2: half}, "y": {2: 2 * half}})
    for height in (4, 5, 16):
        inputs = torch.randn(2, 3, height, 10), torch.randn(2, 3, 2 * height, 20)
        assert torch.allclose(run(*inputs), Twice()(*inputs), atol=1e-4)
    with pytest.raises(InputError):
        run(torch.randn(2, 3, 5, 10), torch.randn(2, 3, 12, 20))


def _shapes(dims, *tensors: torch.Tensor):
    sizes = shape_range(Two(), Example(tensors), None, dims)
    return [[tuple(t.shape)[2] for t in call.tensors()] for call in (sizes.min, sizes.opt, sizes.max)]


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        pytest.param({"x": {2: HEIGHT}}, [[8, 16], [16, 16], [32, 16]], id="one argument"),
        pytest.param(({2: HEIGHT}, None), [[8, 16], [16, 16], [32, 16]], id="in order"),
        pytest.param({"x": (None, None, HEIGHT, None)}, [[8, 16], [16, 16], [32, 16]], id="a tuple of dimensions"),
        pytest.param({"x": {-2: HEIGHT}}, [[8, 16], [16, 16], [32, 16]], id="from behind"),
        pytest.param({"x": {2: HEIGHT}, "y": {2: 2 * Dim("q", min=4)}}, "no max", id="a root without an end"),
        pytest.param({"x": {2: Dim("h", max=32)}}, [[1, 16], [16, 16], [32, 16]], id="no lower end"),
        pytest.param({"x": {2: HEIGHT}, "y": {2: Dim("h", min=8, max=30)}}, "as 8 to 30", id="one name, two ranges"),
        pytest.param({"x": {2: Dim("h", min=20, max=30)}}, "is 16 in the example", id="example out of range"),
        pytest.param({"x": {2: "height"}}, "has 'height' for x.shape", id="text"),
        pytest.param({"x": {7: HEIGHT}}, "names x.shape.7", id="a dimension that is not there"),
        pytest.param({"x": {2: 5}}, "says x.shape.2. is 5", id="another size"),
        pytest.param({"x": (None,)}, "1 dimensions for 'x'", id="too few dimensions"),
        pytest.param({"x": HEIGHT}, "a Dim for 'x'", id="no dict"),
        pytest.param({"x": {2: Dim.AUTO}}, "no min", id="no ends"),
        pytest.param((None, None, None), "3 entries", id="too many arguments"),
        pytest.param(3, "is a int", id="a number"),
    ],
)
def test_forms(dims, expected):
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            _shapes(dims, *_images(16, 16))
    else:
        assert _shapes(dims, *_images(16, 16)) == expected


def test_one_name_for_two_sizes_of_the_example():
    with pytest.raises(InputError, match="Dims of different names"):
        _shapes({"x": {2: HEIGHT}, "y": {2: HEIGHT}}, *_images(16, 24))


def test_a_collection_of_shapes():
    x, y = _images(16, 16)
    collection = ShapesCollection()
    collection[x] = {2: HEIGHT}
    assert _shapes(collection, x, y) == [[8, 16], [16, 16], [32, 16]]


def test_structures_of_arguments():
    class Nested(nn.Module):
        def forward(self, pair, *, named):
            return pair[0] + pair[1], named["a"]

    example = Example(((torch.ones(2, 8), torch.ones(2, 8)),), {"named": {"a": torch.ones(3, 8), "b": torch.ones(1)}})
    sizes = shape_range(Nested(), example, None, {"pair": ({1: HEIGHT}, {1: HEIGHT}), "named": {"a": {1: OTHER}}})
    assert [t.shape for t in sizes.max.tensors()] == [(2, 32), (2, 32), (3, 32), (1,)]
    assert [t.shape for t in sizes.apart[0].tensors()] == [(2, 8), (2, 8), (3, 32), (1,)]
    with pytest.raises(InputError, match="structure of the argument"):
        shape_range(Nested(), example, None, {"pair": ({1: HEIGHT},)})
