"""The first line of a summary: whether int8 pays, by measurement or by floors, and what to try where not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowering import lower_to_onnx, lower_to_trt
from lowering.records import Described, SegmentInfo
from lowering.summary import report_data, summary_text
from lowering.verdict import verdict_of

DETAILS = {
    "target": "onnxruntime", "precision": "int8", "flops_share": 1.0, "flops": 1, "threads": 1, "versions": {},
    "settings": {"float_type": "fp16"},
}  # fmt: skip


def on_cpu(int8: float, low: float, high: float, kept: str = "ONNX Runtime") -> SegmentInfo:
    """A segment that takes `int8` ms where it was kept, 10 ms in ONNX Runtime, and in float that times low to high."""
    times = {"ONNX Runtime": 10.0, kept: int8, "float in ONNX Runtime": 10.0 * (low + high) / 2}
    choice = {
        "kept": kept,
        "reason": "",
        "clock": "CPU time",
        "rounds": 7,
        "milliseconds": {name: {"cpu": ms, "wall": 99.0} for name, ms in times.items()},
        "ratios": {"float in ONNX Runtime": {"median": (low + high) / 2, "low": low, "high": high}},
    }
    return SegmentInfo("segment_0", "onnxruntime", "int8 + fp32", 1, 1, choice=choice)


def kernel(kind: str, size: int, int8: bool = False) -> dict:
    return {
        "inputs": [f"{kind}[1,8]"], "int8": int8, "operations": 0, "reads": [["x", size]], "constants": [],
        "writes": [["y", 0]],
    }  # fmt: skip


def engine(kernels: int, megabytes: float, **more) -> dict:
    """A report of an engine that moves `megabytes` in each of its kernels."""
    rows = [kernel("Half", int(megabytes * 1e6)) for _ in range(kernels)]
    return {
        "rows": rows, "compute_capabilities": ["8.9"], "kernels": kernels, "int8_compute": 0, "float_compute": 0,
        "activation_bytes": 0, "weight_bytes": 0, "engine_bytes": 0, **more,
    }  # fmt: skip


def on_gpu(ours: dict, floats: dict) -> SegmentInfo:
    twin = {"precision": "fp16", **floats}
    return SegmentInfo("segment_0", "tensorrt-rtx", "int8 + fp16", 1, 1, engines=[ours], float_twin=twin)


@pytest.mark.parametrize(
    ("segment", "winner", "words"),
    [
        (on_cpu(10.0, 3.4, 3.6), "int8", "3.40x faster, measured on the example"),
        (on_cpu(8.0, 3.4, 3.6, kept="OpenVINO"), "int8", "int8 takes 8 ms of CPU time a call against 35 ms"),
        (on_cpu(10.0, 0.7, 0.8), "float", "int8 is slower than float here: 10 ms of CPU time a call against 7.5 ms"),
        (on_cpu(10.0, 0.9, 1.1), "undecided", "gains nothing that could be measured"),
        (on_gpu(engine(20, 1.0), engine(20, 2.0)), "int8", "int8 wins by the roofline floor on"),
        (on_gpu(engine(20, 2.0), engine(20, 1.0)), "float", "fp16 wins by the roofline floor on"),
        (on_gpu(engine(20, 1.0), engine(20, 1.0)), "undecided", "the two hardly differ"),
        (on_gpu(engine(20, 0.01), engine(10, 2.0)), "undecided", "what starting a kernel costs decides"),
    ],
    ids=[
        "faster",
        "faster elsewhere",
        "slower",
        "equal",
        "fewer bytes",
        "more bytes",
        "the same kernels",
        "more and smaller kernels",
    ],
)
def test_the_first_line_says_who_wins(segment, winner, words):
    lowered = Described(DETAILS, [segment], [])
    found = verdict_of(lowered.segments, DETAILS)
    assert found is not None and found.winner == winner
    assert bool(found.advice) == (winner != "int8")
    first = summary_text(lowered).splitlines()[0]
    assert words in first and first.startswith("Verdict: " if winner == "int8" else "WARNING: ")
    assert report_data(lowered)["verdict"]["winner"] == winner


def test_segments_add_up():
    lost, won = on_cpu(10.0, 0.5, 0.5), on_cpu(10.0, 3.0, 3.0)
    assert verdict_of([lost], DETAILS).winner == "float"
    found = verdict_of([lost, won], DETAILS)
    assert (found.winner, found.int8, found.floating) == ("int8", (20.0, 20.0), (35.0, 35.0))


def test_nothing_to_compare_gives_no_verdict():
    images = torch.randn(1, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    for lowered in (
        lower_to_onnx(model, images, precision="fp32"),
        lower_to_trt(model, images, precision="fp16"),
        lower_to_trt(model, images, calibration=[images], dry_run=True),
    ):
        assert lowered.report()["verdict"] is None
        assert lowered.summary().startswith("Lowered for ")


def test_an_engine_of_int8_has_a_verdict_in_its_first_line():
    torch.manual_seed(0)
    images = torch.randn(1, 3, 16, 16)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    lowered = lower_to_trt(model, images, calibration=[images])
    assert "roofline floor on" in lowered.summary().splitlines()[0]
