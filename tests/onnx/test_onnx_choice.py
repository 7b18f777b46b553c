"""The runtime that runs a file fastest, kept by measurement: what rounds say, what is asked of another runtime."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from fx_passes.errors import LoweringError
from lowering import load, lower_to_onnx
from lowering.onnx import choice
from lowering.onnx.choice import FLOAT, ONNXRUNTIME, OPENVINO, choose_runtime, decided
from lowering.onnx.float_form import float_form
from lowering.onnx.session import OnnxSession
from lowering.timing import Round

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def net(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5)).eval()


def lowered_session(model: nn.Module | None = None, **options) -> OnnxSession:
    lowered = lower_to_onnx(model or net(), IMAGES, calibration=[IMAGES], runtime="onnxruntime", **options)
    (segment,) = lowered.backend_segments()
    return segment.backend


def rounds(wall: list[float], cpu: list[float] | None = None) -> list[Round]:
    return [Round(w, c) for w, c in zip(wall, cpu or wall, strict=True)]


SEVEN = [10.0, 10.2, 9.9, 10.1, 10.0, 10.3, 9.8]


@pytest.mark.parametrize(
    ("openvino", "threads", "kept", "reason"),
    [
        (rounds([9.0] * 7), 1, OPENVINO, "it is faster on the example"),
        (rounds([11.0] * 7), 1, ONNXRUNTIME, "OpenVINO is slower on the example"),
        (rounds([8.0, 12.0, 9.0, 11.0, 10.0, 12.0, 8.0]), 1, ONNXRUNTIME, "undecided: the intervals overlap"),
        (rounds([9.9] * 7), 1, ONNXRUNTIME, "undecided: the intervals overlap"),  # not worth another runtime
        (rounds([30.0] * 7, [9.0] * 7), 1, OPENVINO, "it is faster on the example"),  # the machine was busy
        (rounds([9.0] * 7, [30.0] * 7), 2, OPENVINO, "it is faster on the example"),  # threads that spin
    ],
    ids=["faster", "slower", "noise", "hardly faster", "CPU time of one thread", "wall time of two threads"],
)
def test_what_the_rounds_say(openvino, threads, kept, reason):
    found = decided({ONNXRUNTIME: rounds(SEVEN), OPENVINO: openvino}, threads)
    assert (found.kept, found.reason) == (kept, reason)
    assert found.clock == ("CPU time" if threads == 1 else "wall time")
    assert found.rounds == 7


def test_the_float_form_computes_the_same_in_float():
    session = lowered_session()
    form = OnnxSession(float_form(session.file), session.inputs, session.outputs, target="tensorrt")
    assert not [op for op in form.optimized_ops() if op.startswith(("Quantize", "Dequantize", "QLinear"))]
    error = (form(IMAGES)[0] - net()(IMAGES)).abs().max()
    assert 0 < error < 0.05 * net()(IMAGES).abs().max()  # the weights are those of the int8 file


def test_a_result_that_is_dequantized_keeps_its_name():
    model = net()[:3]
    session = lowered_session(model)
    form = OnnxSession(float_form(session.file), session.inputs, session.outputs, target="tensorrt")
    torch.testing.assert_close(form(IMAGES)[0], model(IMAGES), rtol=0, atol=0.05)


def test_short_calls_stay_in_onnx_runtime(monkeypatch):
    session = lowered_session()
    monkeypatch.setattr(choice, "SHORT_MS", 1e9)
    kept, found = choose_runtime(session, (IMAGES,), quantized=True)
    assert kept is session and found.kept == ONNXRUNTIME and not found.milliseconds


def test_without_openvino_the_summary_says_how_to_try_it(monkeypatch):
    monkeypatch.setattr(choice, "SHORT_MS", 0.0)
    monkeypatch.setattr(choice, "is_installed", lambda: False)
    lowered = lower_to_onnx(net(), IMAGES, calibration=[IMAGES])
    assert "runtime: ONNX Runtime (OpenVINO is not installed (pip install" in lowered.summary()
    assert set(lowered.report()["segments"][0]["choice"]["milliseconds"]) == {ONNXRUNTIME, FLOAT}


def openvino_wins(monkeypatch) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is an optional runtime and is not installed")
    monkeypatch.setattr(choice, "SHORT_MS", 0.0)
    monkeypatch.setattr(choice, "WORTH", 1e9)


def test_the_kept_runtime_is_in_summary_report_and_artifact(monkeypatch, tmp_path):
    openvino_wins(monkeypatch)
    lowered = lower_to_onnx(net(), IMAGES, calibration=[IMAGES])
    (segment,) = lowered.report()["segments"]
    assert segment["backend"].startswith("openvino ") and segment["choice"]["kept"] == OPENVINO
    assert "runtime: OpenVINO" in lowered.summary()
    loaded = load(lowered.save(tmp_path / "artifact"))
    assert loaded.backend_segments()[0].backend.runtime == "openvino"
    assert loaded.report()["segments"][0]["choice"] == segment["choice"]
    torch.testing.assert_close(loaded(IMAGES), lowered(IMAGES))


def test_an_artifact_runs_where_the_chosen_runtime_is_missing_and_says_so(monkeypatch, tmp_path):
    openvino_wins(monkeypatch)
    chosen = lower_to_onnx(net(), IMAGES, calibration=[IMAGES]).save(tmp_path / "chosen")
    asked = lower_to_onnx(net(), IMAGES, calibration=[IMAGES], runtime="openvino").save(tmp_path / "asked")
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.setattr("lowering.onnx.openvino.is_installed", lambda: False)
    with pytest.warns(UserWarning, match="OpenVINO was the fastest runtime where this was lowered"):
        loaded = load(chosen)
    assert loaded.backend_segments()[0].backend.runtime == "onnxruntime"
    assert loaded(IMAGES).shape == (2, 5)
    with pytest.raises(LoweringError, match="OpenVINO cannot be imported"):
        load(asked)


@pytest.mark.parametrize(
    ("options", "model", "reason"),
    [
        ({"dynamic_batch": (1, 2, 4)}, net(), "the sizes are free"),
        ({"precision": "fp32"}, net().double(), "64-bit types"),
    ],
    ids=["free sizes", "float64"],
)
def test_what_is_not_tried_in_openvino(monkeypatch, options, model, reason):
    openvino_wins(monkeypatch)
    images = IMAGES.to(next(model.parameters()).dtype)
    options = options if "precision" in options else {**options, "calibration": [images]}
    found = lower_to_onnx(model, images, **options).report()["segments"][0]["choice"]
    assert found["kept"] == ONNXRUNTIME and reason in found["reason"]


def test_a_runtime_with_worse_results_is_not_taken(monkeypatch):
    openvino_wins(monkeypatch)

    class Wrong(choice.OpenVinoSession):
        def forward(self, *inputs):
            return tuple(value + value.abs().max() for value in super().forward(*inputs))

    monkeypatch.setattr(choice, "OpenVinoSession", Wrong)
    found = lower_to_onnx(net(), IMAGES, calibration=[IMAGES]).report()["segments"][0]["choice"]
    assert found["kept"] == ONNXRUNTIME
    assert found["reason"].startswith("OpenVINO's results on the example are further from float")
