"""What an artifact for TensorRT brings for Polygraphy, read and run by Polygraphy itself."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lowering import load, lower_to_onnx
from lowering.onnx.expected import expect
from lowering.segment.program import TensorSpec

IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    lowered = lower_to_onnx(net(), IMAGES, calibration=[IMAGES], runtime="tensorrt", dynamic_batch=(1, 2, 4))
    return lowered.save(tmp_path_factory.mktemp("saved") / "a")


def test_polygraphy_reads_the_inputs_and_outputs(saved):
    from polygraphy.comparator import RunResults
    from polygraphy.json import load_json

    (inputs,) = load_json(str(saved / "segment_0.inputs.json"))
    (name,) = inputs
    assert np.array_equal(inputs[name], IMAGES.numpy())
    results = RunResults.load(str(saved / "segment_0.outputs.json"))
    (iteration,) = results["onnxruntime"]
    lowered = load(saved)
    (output,) = lowered.backend_segments()[0].backend.outputs
    assert np.array_equal(iteration[output], lowered(IMAGES).numpy())


def _line(folder: Path) -> list[str]:
    return shlex.split((folder / "segment_0.polygraphy.txt").read_text())


def _polygraphy(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from polygraphy.tools import main; main()", *words[1:]]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def test_polygraphy_takes_the_line(saved, tmp_path):
    """It writes the program that it would run on a GPU, without running it."""
    done = _polygraphy([*_line(saved), "--gen-script", str(tmp_path / "run.py")], saved)
    assert done.returncode == 0, done.stdout + done.stderr
    script = (tmp_path / "run.py").read_text()
    assert "min=[1, 3, 12, 12], opt=[2, 3, 12, 12], max=[4, 3, 12, 12]" in script
    assert "strongly_typed=True" in script
    assert "segment_0.outputs.json" in script


def test_several_profiles_in_both_lines(tmp_path):
    ranges = [(1, 1, 2), (4, 8, 16)]
    lowered = lower_to_onnx(net(), IMAGES, precision="fp32", runtime="tensorrt", dynamic_batch=ranges)
    folder = lowered.save(tmp_path / "a")
    line = shlex.split((folder / "segment_0.trtexec.txt").read_text())
    shapes = [f"input_1:{batch}x3x12x12" for profile in ranges for batch in profile]
    options = [f"--{option}Shapes={shape}" for option, shape in zip(["min", "opt", "max"] * 2, shapes, strict=True)]
    assert line[line.index("--profile=0") :] == ["--profile=0", *options[:3], "--profile=1", *options[3:]]
    done = _polygraphy([*_line(folder), "--gen-script", str(tmp_path / "run.py")], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    script = (tmp_path / "run.py").read_text()
    assert "min=[1, 3, 12, 12], opt=[1, 3, 12, 12], max=[2, 3, 12, 12]" in script
    assert "min=[4, 3, 12, 12], opt=[8, 3, 12, 12], max=[16, 3, 12, 12]" in script


def test_polygraphy_compares_another_runtime_with_them(saved):
    """The same line with ONNX Runtime in place of TensorRT, which needs a GPU: the comparison is the real one."""
    words = _line(saved)
    start, end = words.index("--trt"), words.index("--load-inputs")
    done = _polygraphy([*words[:start], "--onnxrt", *words[end:]], saved)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Passed: 1/1" in done.stdout


def test_a_loaded_artifact_can_be_saved_with_them(saved, tmp_path):
    load(saved).save(tmp_path / "b")
    for name in ("segment_0.inputs.json", "segment_0.outputs.json", "segment_0.polygraphy.txt"):
        assert (tmp_path / "b" / name).read_bytes() == (saved / name).read_bytes()


def test_files_for_the_cpu_bring_none(tmp_path):
    lower_to_onnx(net(), IMAGES, precision="fp32").save(tmp_path)
    assert not [path for path in tmp_path.iterdir() if "polygraphy" in path.name or "puts.json" in path.name]


X = TensorSpec("x", torch.float32, (1, 2), (1, 2), (8, 2))
SPLIT = replace(X, profiles=(((1, 2), (1, 2), (1, 2)), ((4, 2), (8, 2), (8, 2))))


def test_the_tolerance_follows_the_output_and_the_precision():
    outputs = [torch.full((2, 2), -4.0)]
    strict, loose = (expect([X], ["y"], [torch.zeros(2, 2)], outputs, precision) for precision in ("fp32", "int8"))
    assert strict is not None and strict.tolerances == {"y": pytest.approx(0.004)}
    assert loose is not None and loose.tolerances == {"y": pytest.approx(0.2)}


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        (replace(X, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.bfloat16)),
        (TensorSpec.static("x", torch.zeros(1)), torch.zeros(20_000_000)),
        (SPLIT, torch.zeros(2, 2)),
    ],
    ids=["type", "size", "between-profiles"],
)
def test_what_does_not_fit_is_left_out(spec, value):
    assert expect([spec], ["y"], [value], [torch.zeros(1)], "fp16") is None


def test_what_one_of_several_profiles_has_is_kept():
    assert expect([SPLIT], ["y"], [torch.zeros(4, 2)], [torch.zeros(1)], "fp16") is not None
