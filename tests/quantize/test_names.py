"""Values and submodules may have any name: those of torch's own methods, and those that this package gives parts."""

from __future__ import annotations

import keyword

import pytest
import torch
from torch import nn

from fx_passes import convert_fx, prepare_calibration_fx, prepare_qat_fx
from fx_passes.quantize.insertion import place_of, placed_for
from fx_passes.quantize.qat.prepare import float_state_dict
from lowering import lower_to_onnx, lower_to_trt

BACKENDS = {"trt": lower_to_trt, "onnx": lower_to_onnx}
# What a container of modules has, and a dictionary of them.
TAKEN = [n for n in sorted({*dir(nn.Module()), *dir(nn.ModuleDict()), "observers"}) if not keyword.iskeyword(n)]


def taking(name: str) -> nn.Module:
    """A model whose input has this name."""
    namespace: dict = {"nn": nn}
    exec(
        "class Model(nn.Module):\n"
        "    def __init__(this):\n"
        "        super().__init__()\n"
        "        this.conv, this.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)\n"
        f"    def forward(this, {name}):\n"
        f"        return this.norm(this.conv({name}))\n",
        namespace,
    )
    torch.manual_seed(0)
    return namespace["Model"]()


def close(actual, expected):
    """Within what rounding to int8 does to a layer."""
    assert (actual - expected).abs().max() < 0.05 * expected.abs().max()


def test_a_value_of_any_name_is_calibrated():
    x = torch.rand(2, 3, 4, 4)
    for name in TAKEN:
        model = taking(name).eval()
        prepared = prepare_calibration_fx(model, x)
        prepared(x)
        close(convert_fx(prepared)(x), model(x))


def test_a_value_of_any_name_is_trained():
    x = torch.rand(2, 3, 4, 4)
    for name in TAKEN:
        qat = prepare_qat_fx(taking(name), x).train()
        qat(x).sum().backward()
        assert torch.equal(convert_fx(qat.eval())(x), qat(x))


@pytest.mark.parametrize("name", ["to", "training", "forward", "keys", "x"])
def test_a_checkpoint_of_training_loads_whatever_the_name(name):
    x = torch.rand(2, 3, 4, 4)
    trained, fresh = (prepare_qat_fx(taking(name), x) for _ in range(2))
    trained.train()(x)
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(fresh.eval()(x), trained.eval()(x))


def test_the_names_of_checkpoints_are_those_of_the_nodes():
    qat = prepare_qat_fx(taking("image"))
    qat(torch.rand(2, 3, 4, 4))
    assert "fake_quantizers.image.scale" in qat.state_dict()


@pytest.mark.parametrize("name", ["x", "value", "to", "to_value", "to_value_value", "x_value", "_value", "half"])
def test_the_place_of_a_value_tells_its_name(name):
    gm = prepare_calibration_fx(taking("x"))
    path = place_of(gm, "observers", name)
    assert placed_for(gm, "observers", torch.fx.Graph().call_module(path)) == name
    assert not hasattr(nn.Module(), path.partition(".")[2])
    places = {place_of(gm, "observers", other) for other in ("x", "to", "to_value", "to_value_value", "x_value")}
    assert len(places) == 5


class OwnPart(nn.Module):
    """A submodule of the name under which this package keeps its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.ModuleDict({"conv": nn.Conv2d(4, 4, 1)}))
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return self.get_submodule(self.name)["conv"](self.conv(x))


class OwnMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def observers(self):
        raise AssertionError

    fake_quantizers = qat_layers = property(observers)

    def forward(self, x):
        return self.conv(x)


OWN = {name: lambda name=name: OwnPart(name) for name in ("observers", "fake_quantizers", "qat_layers")}
OWN["methods"] = OwnMethod


@pytest.mark.parametrize("which", OWN)
def test_a_model_may_have_parts_of_these_names_itself(which):
    torch.manual_seed(0)
    model, x = OWN[which]().eval(), torch.rand(2, 3, 4, 4)
    prepared = prepare_calibration_fx(model, x)
    prepared(x)
    close(convert_fx(prepared)(x), model(x))
    qat = prepare_qat_fx(model, x).train()
    qat(x).sum().backward()
    close(convert_fx(qat.eval())(x), model(x))
    assert float_state_dict(qat).keys() == model.state_dict().keys()


class Casting(nn.Module):
    """Values named after the methods that give them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.a(x.to(self.a.weight.dtype))
        x = self.b(x.float().type(torch.float32))
        return self.c(x.cpu())


@pytest.mark.parametrize("backend", BACKENDS)
def test_methods_that_torch_modules_have_too_are_lowered_in_int8(backend):
    torch.manual_seed(0)
    model, x = Casting().eval(), torch.rand(4, 8)
    lowered = BACKENDS[backend](model, x, calibration=[x])
    assert len(lowered.report()["segments"]) == 1 and not lowered.fallbacks
    close((lowered.simulate if backend == "trt" else lowered)(x), model(x))
