"""Whatever a lowering does, and however it ends, all that can be reached from the model is as before."""

from __future__ import annotations

import contextlib

import pytest
import torch
from object_graph import difference, image_of
from stateful_models import BY_PRODUCTS, CACHES, CARRYING
from torch import nn

from fx_passes import trace
from fx_passes.errors import BuildError, CalibrationError, LoweringError
from lowering import lower_to_trt
from lowering.trt.backend import TensorRTBackend

# One of each place that a forward may write to.
PLACES = (
    "ClassDefaults", "GrowingBuffer", "ModuleCache", "ClassCache", "CachedMethod", "ObjectCache",
    "ClosedOver", "Named", "GlobalCounter",
)  # fmt: skip
MODELS = {**CACHES, **BY_PRODUCTS, **{name: make for name, (make, _) in CARRYING.items()}}


def image(n=2, h=8, w=8):
    return torch.randn(n, 3, h, w, generator=torch.Generator().manual_seed(0))


def warm(model, how):
    """The model after a call, or before any."""
    if how == "after a call":
        model(image())  # with gradients
    elif how == "after a call of another size":
        with torch.no_grad():
            model(image(1, 4, 12))
    elif how == "after inference mode":
        with torch.inference_mode():
            model(image())
    return model


STATES = ["fresh", "after a call", "after a call of another size", "after inference mode"]


@pytest.mark.parametrize("how", STATES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_a_trace_leaves_nothing(name, how):
    model = warm(MODELS[name]().eval(), how)
    before = image_of(model)
    with contextlib.suppress(LoweringError):
        trace(model, image())
    assert difference(before, image_of(model)) == []


class Branching(nn.Module):
    """A root that asks for values: it stays Python, and its child is lowered."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x):
        y = self.child(x)
        return y if y.sum() > -1e6 else -y


class Refused(Branching):
    """No part of it can be captured: the child asks for a value in the middle, at every call of a submodule."""

    def forward(self, x):
        y = self.child(x)
        return y * float(y.sum().item() > 0 and len(str(y.sum())) > 0)


class Failing(Branching):
    """It raises once the child has left what it leaves."""

    def forward(self, x):
        self.child(x)
        raise RuntimeError("as asked")


class BesideAnother(nn.Module):
    """Its child stays Python, with its own child lowered, beside what is traced."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.inner, self.conv = Branching(child), nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return torch.relu(self.inner(self.conv(x)))


def in_one(child):
    return child


def fails_to_build(*args, **kwargs):
    raise BuildError("as asked")


ROUTES = {"whole": in_one, "children": Branching, "leaf": BesideAnother}
# How a lowering ends: what is different about it, and the error that it ends with.
ENDS = {
    "built": ({"precision": "int8"}, None),
    "NaN in calibration": ({"precision": "int8", "calibration": [image() * float("nan")]}, CalibrationError),
    "no builder": ({"precision": "fp32"}, BuildError),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.filterwarnings("ignore")
def test_a_lowering_leaves_nothing(name, route, end, monkeypatch):
    options, error = ENDS[end]
    model = warm(ROUTES[route](MODELS[name]()).eval(), "after a call")
    if error is BuildError:
        monkeypatch.setattr(TensorRTBackend, "lower", fails_to_build)
    before = image_of(model)
    with pytest.raises(error) if error else contextlib.nullcontext():
        lower_to_trt(model, image(), **options)
    assert difference(before, image_of(model)) == []


@pytest.mark.parametrize("make", [Refused, Failing])
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.filterwarnings("ignore")
def test_a_lowering_that_is_refused_leaves_nothing(name, make):
    model = make(MODELS[name]()).eval()
    before = image_of(model)
    with pytest.raises(LoweringError):
        lower_to_trt(model, image(), precision="fp32", settings={"require_full_lowering": True})
    assert difference(before, image_of(model)) == []
