"""Automatic mixed precision: the layers that hurt are found, and no others; the result can be used again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fx_passes import convert_fx, prepare_calibration_fx, search_mixed_precision
from fx_passes.errors import InputError, QuantizationError
from fx_passes.quantize.accuracy.partial import errors, run
from fx_passes.quantize.calibrate import calibrate
from fx_passes.quantize.qconfig import QConfig

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("error")
TARGETS = ("tensorrt", "tensorrt-rtx", "onnxruntime")


class TwoHardLayers(nn.Module):
    """Five convolutions; the inputs of `b` and of `d` have one channel far larger than the rest."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d, self.e = (nn.Conv2d(8 if i else 4, 8, 1) for i in range(5))
        with torch.no_grad():
            for writer, reader, factor in ((self.a, self.b, 3000.0), (self.c, self.d, 300.0)):
                writer.weight[0] *= factor
                reader.weight[:, 0] /= factor

    def forward(self, x):
        x = torch.tanh(self.b(self.a(x)))
        return self.e(torch.tanh(self.d(self.c(x))))


def batches() -> list[torch.Tensor]:
    return [torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(i)) for i in range(2)]


def reached(model: nn.Module, target: str, qconfig) -> float:
    prepared = prepare_calibration_fx(model, target=target, qconfig=qconfig)
    calibrate(prepared, batches())
    converted = convert_fx(prepared)
    expected = [model.eval()(batch).double().flatten().detach() for batch in batches()]
    return errors(expected, [run(converted, batch)[0] for batch in batches()]).sqnr_db


@pytest.mark.parametrize("target", TARGETS)
def test_the_hard_layers_are_turned_back(target):
    model = TwoHardLayers()
    found = search_mixed_precision(model, batches(), target=target, min_sqnr=25.0)
    # For ONNX Runtime a convolution writes integers, too: what writes the uneven channels must not do that either.
    assert set(found.floats) == ({"a", "b", "c", "d"} if target == "onnxruntime" else {"b", "d"})
    assert found.value >= 25.0 > found.value_int8
    assert found.value == pytest.approx(reached(model, target, found.qconfig), abs=1e-6)
    assert 0.3 < found.flops_share < 0.9 and 0 < found.time_share < 1


def test_only_the_hardest_where_that_is_enough():
    found = search_mixed_precision(TwoHardLayers(), batches(), min_sqnr=18.0)
    assert found.floats == ("b",)


def test_nothing_where_int8_is_enough():
    found = search_mixed_precision(TwoHardLayers(), batches(), min_cosine=0.1)
    assert found.floats == () and found.qconfig.as_dict() == {} and found.flops_share == 0


def test_a_metric_of_the_user():
    """Share of places whose largest channel is the float model's; called with models only."""
    model = TwoHardLayers().eval()
    expected = [model(batch).argmax(1) for batch in batches()]
    calls = []

    def metric(candidate: nn.Module) -> float:
        calls.append(candidate)
        found = [candidate(batch).argmax(1) for batch in batches()]
        return float(
            torch.cat([(a == b).float().mean().reshape(1) for a, b in zip(found, expected, strict=True)]).mean()
        )

    found = search_mixed_precision(model, batches(), max_accuracy_drop=0.02, metric=metric)
    assert found.value_float == 1.0 and found.value >= 0.98 > found.value_int8
    assert "b" in found.floats and len(found.floats) < 5
    assert len(calls) <= 12


def test_configuration_is_kept_and_used_again(tmp_path):
    model = TwoHardLayers()
    found = search_mixed_precision(model, batches(), min_sqnr=25.0, qconfig={"": {"observer": "mse"}})
    found.qconfig.to_file(tmp_path / "mixed.toml")
    assert QConfig.from_file(tmp_path / "mixed.toml")[""] == {"observer": "mse"}
    assert reached(model, "tensorrt-rtx", str(tmp_path / "mixed.toml")) == pytest.approx(found.value, abs=1e-6)


def test_layers_that_the_configuration_keeps_in_float_stay_so():
    found = search_mixed_precision(TwoHardLayers(), batches(), min_sqnr=25.0, qconfig={"b": None})
    assert found.floats == ("d",)
    assert found.qconfig["b"] is None


def test_text():
    found = search_mixed_precision(TwoHardLayers(), batches(), min_sqnr=25.0)
    assert "SQNR of at least 25 dB" in str(found) and "with b, d in float" in str(found)
    assert found.as_dict()["qconfig"]["b"] == {"dtype": "float"}


def test_every_layer_in_float_is_always_enough_for_a_similarity():
    found = search_mixed_precision(TwoHardLayers(), batches(), min_sqnr=1000.0)
    assert set(found.floats) == {"a", "b", "c", "d", "e"}


def test_unreachable():
    values = iter([1.0] + [0.0] * 50)
    with pytest.raises(QuantizationError, match="even with all layers in float"):
        search_mixed_precision(TwoHardLayers(), batches(), max_accuracy_drop=0.1, metric=lambda model: next(values))


REFUSED = {
    "none": {},
    "two": {"min_sqnr": 1.0, "min_cosine": 0.5},
    "no_metric": {"max_accuracy_drop": 0.1},
    "metric_alone": {"min_sqnr": 1.0, "metric": lambda model: 1.0},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with pytest.raises(InputError):
        search_mixed_precision(TwoHardLayers(), batches(), **REFUSED[name])
