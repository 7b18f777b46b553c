"""Cards, joined layers and sums of the report page."""

from __future__ import annotations

import pytest
import torch
from test_report import ENGINE, report
from torch import nn

from lowering import lower_to_onnx
from lowering.command.report import Lowering, render_report
from lowering.command.report_charts import roofline_chart
from lowering.command.report_facts import cards, kept_float, layers, module_bytes
from lowering.compare import Agreement

MEASURED = {
    "winner": "int8", "measured": True, "int8": (2.0, 2.0), "floating": (7.0, 7.4), "unit": "ms", "device": "this CPU",
    "sentence": "int8 takes 2 ms", "advice": "",
}  # fmt: skip
FLOOR = {
    **MEASURED, "winner": "float", "measured": False, "int8": (70.0, 250.0), "floating": (56.0, 166.0),
    "advice": "a larger batch",
}  # fmt: skip
SENSITIVITY = "fx_passes.sensitivity names the layers that cost most"


def card(title: str, accuracy: Agreement | None = None, **changes):
    return next(found for found in cards(report(**changes), accuracy) if found.title == title)


@pytest.mark.parametrize(
    ("found", "state", "figure", "step"),
    [
        (card("Lowered"), "good", "100%", "see what stays in Python below"),
        (card("Lowered", fallbacks=[]), "good", "100%", ""),
        (card("Lowered", flops_share=0.93, fallbacks=[]), "warn", "93%", ""),
        (card("Lowered", flops_share=0.2), "bad", "20%", "see what stays in Python below"),
        (card("Speed"), "unknown", "not compared", ""),
        (card("Speed", verdict=MEASURED), "good", "3.50x", ""),
        (card("Speed", verdict=FLOOR), "bad", "0.66-0.80x", "a larger batch"),
        (card("Speed", verdict={**FLOOR, "winner": "undecided"}), "warn", "undecided", "a larger batch"),
        (card("Accuracy"), "unknown", "not measured", "fxtrt compare MODEL, or fxtrt evaluate on labelled images"),
        (card("Accuracy", Agreement(64, 31.2, 0.999, 0.1, 0.99)), "good", "31.2 dB", ""),
        (card("Accuracy", Agreement(64, 31.2, 0.999, 0.1, 0.9)), "warn", "31.2 dB", SENSITIVITY),
        (card("Accuracy", Agreement(64, 9.0, 0.9, 0.1, None)), "warn", "9.0 dB", SENSITIVITY),
        (card("Size"), "unknown", "not known", ""),
    ],
)
def test_cards(found, state, figure, step):
    assert (found.state, found.figure, found.step) == (state, figure, step)


def test_the_size_is_that_of_the_weights_against_float32():
    images = torch.randn(1, 3, 16, 16)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3)).eval()
    found = lower_to_onnx(model, images, calibration=[images]).report()
    size = next(c for c in cards(found, None) if c.title == "Size")
    weights = sum(p.numel() for p in model.parameters())
    (stored,) = [segment["weights"] for segment in found["segments"]]
    assert weights < stored["stored"] < 2 * weights
    assert "x smaller than float32" in size.text


def test_layers_are_joined_with_their_kernels():
    rows = [
        {**ENGINE["rows"][0], "modules": ["conv1", "relu1"], "bytes": 100},
        {**ENGINE["rows"][0], "modules": ["conv1"], "bytes": 30},
    ]
    segment = {**report()["segments"][0], "engines": [{**ENGINE, "rows": rows}]}
    found = {row["node"]: (row["kernels"], row["bytes"]) for row in layers(segment)}
    assert found == {"conv1": (2, 80.0), "dw": (0, 0.0)}
    session = {**segment, "engines": [{"ops": {"Conv": 1}}]}
    assert [row["kernels"] for row in layers(session)] == [None, None]


def test_bytes_add_up_by_module():
    rows = [
        {"modules": [f"layer{i}.0.conv1"], "bytes": 100 - i, "int8": i % 2 == 0, "name": "k"} for i in range(20)
    ] + [{"modules": [], "bytes": 7, "int8": False, "name": "k"}]
    found = module_bytes({"rows": rows}, limit=5)
    assert [name for name, *_ in found] == ["layer0.0", "layer1.0", "layer2.0", "layer3.0", "17 others"]
    assert sum(a + b for _, a, b in found) == sum(row["bytes"] for row in rows)


def test_float_operators_are_counted_with_their_reason():
    assert kept_float(report()["segments"][0]) == [(1, "conv2d", "depthwise <costs> more")]


def test_a_roofline_needs_bytes_and_escapes_names():
    row = {
        **ENGINE["rows"][0], "operations": 10**6, "reads": [["x", 480]], "constants": [], "writes": [["y", 80]],
        "modules": ["<b>"],
    }  # fmt: skip
    assert roofline_chart(ENGINE) is None
    chart = roofline_chart({**ENGINE, "rows": [row]})
    assert chart.count("<circle") == 1 and "&lt;b&gt;" in chart and "<b>" not in chart


def test_the_runtimes_that_were_measured_are_a_chart():
    choice = {
        "kept": "OpenVINO", "reason": "it is faster on the example", "clock": "CPU time", "rounds": 7,
        "milliseconds": {"ONNX Runtime": {"cpu": 2.0, "wall": 3.0}, "OpenVINO": {"cpu": 1.5, "wall": 9.0}},
        "ratios": {"OpenVINO": {"median": 0.75, "low": 0.7, "high": 0.8}},
    }  # fmt: skip
    segment = {**report()["segments"][0], "engines": [{"ops": {"Conv": 1}}], "choice": choice}
    page = render_report([Lowering("net", "s", report(segments=[segment], threads=1))], title="t")
    assert "int8 in OpenVINO (kept)" in page and "1.5 ms" in page
    assert "CPU time of one call on the example, 1 thread, 7 rounds interleaved" in page
