"""Artifacts on NumPy arrays: the same results as `load`, without torch, and a reason where that cannot be."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import wrap
from fx_passes.errors import ArtifactError, InputError
from lowering import load, lower_to_onnx, lower_to_trt
from lowering.command.cli import main
from lowering.onnx.arrays import load_arrays

IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A nested result with a constant of the model in it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)
        self.register_buffer("anchors", torch.arange(3))

    def forward(self, x, scale):
        features = F.relu(self.stem(x))
        return {"pair": (self.head(features.mean((2, 3))) * scale, features > 1), "more": (self.anchors, [x], 7)}


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += 1
        return x + self.count


@wrap
def best(scores):
    return int(scores.argmax())


class Wrapped(nn.Module):
    def forward(self, x):
        return best(x * 2)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    lowered = lower_to_onnx(Net().eval(), (IMAGES, torch.ones(1)), precision="fp32", dynamic_batch=None)
    return lowered.save(tmp_path_factory.mktemp("arrays") / "net")


def test_results_are_those_of_the_whole_module(artifact):
    wanted = load(artifact)(IMAGES, torch.full((1,), 2.0))
    model = load_arrays(artifact)
    assert model.inputs == ["x", "scale"]
    found = model(IMAGES.numpy(), scale=np.full(1, 2.0, np.float32))
    assert isinstance(found["pair"], tuple) and found["more"][2] == 7
    for ours, theirs in zip(found["pair"], wanted["pair"], strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)
    np.testing.assert_array_equal(found["more"][0], [0, 1, 2])
    assert isinstance(found["more"][1], list) and found["more"][1][0].dtype == np.float32


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ([IMAGES.numpy()], {}, "the model takes x, scale; 1 positional"),
        ([IMAGES.numpy()] * 3, {}, "the model takes x, scale; 3 positional"),
        ([IMAGES.numpy()], {"x": 1, "scale": 1}, "the model takes x, scale"),
        ([IMAGES.double().numpy(), np.ones(1, np.float32)], {}, "'x' is float64, this takes float32"),
        ([IMAGES.numpy()[:1], np.ones(1, np.float32)], {}, r"shape \(1, 3, 12, 12\), this takes from \(2, 3, 12, 12\)"),
        ([IMAGES, np.ones(1, np.float32)], {}, "'x' is a Tensor, not a NumPy array"),
    ],
    ids=["missing", "too many", "twice", "type", "size", "tensor"],
)
def test_wrong_arguments_are_named(artifact, args, kwargs, message):
    with pytest.raises(InputError, match=message):
        load_arrays(artifact)(*args, **kwargs)


@pytest.mark.parametrize(
    ("lower", "model", "message"),
    [
        (lower_to_onnx, Wrapped(), "'best' is Python of the caller"),
        (lower_to_onnx, Counting(), "changes buffers or inputs"),
        (lower_to_trt, nn.Conv2d(3, 4, 3), "is an engine"),
    ],
    ids=["wrapped", "buffer", "engine"],
)
def test_what_takes_torch_is_refused_with_the_way_out(lower, model, message, tmp_path):
    folder = lower(model.eval(), IMAGES, precision="fp32").save(tmp_path / "artifact")
    with pytest.raises(ArtifactError, match=f"{message}.*\n.*lowering.load"):
        load_arrays(folder)


def test_altered_files_are_refused(artifact, tmp_path):
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(artifact, folder)
    file = folder / "segment_0.onnx"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(ArtifactError, match="is not the file that was saved"):
        load_arrays(folder)


def test_neither_the_model_nor_the_command_loads_torch(artifact, tmp_path):
    for name, value in (("x", IMAGES.numpy()), ("scale", np.ones(1, np.float32))):
        np.save(tmp_path / f"{name}.npy", value)
    arrays = ["--input", str(tmp_path / "x.npy"), "--input", f"scale={tmp_path / 'scale.npy'}"]
    arguments = ["run", str(artifact), *arrays, "--out", str(tmp_path / "results.npz")]
    code = f"""
import sys
from lowering.command.cli import app
app({arguments!r}, standalone_mode=False)
assert "torch" not in sys.modules and "onnx" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "output.pair.0: float32 2x4" in ran.stdout
    assert sorted(np.load(tmp_path / "results.npz")) == [
        "output.more.0", "output.more.1.0", "output.more.2", "output.pair.0", "output.pair.1",
    ]  # fmt: skip


def test_the_command_names_a_file_that_is_no_array(artifact, tmp_path, capsys):
    (tmp_path / "x.npy").write_bytes(b"no array")
    with pytest.raises(SystemExit) as ended:
        main(["run", str(artifact), "--input", str(tmp_path / "x.npy")])
    assert ended.value.code == 1
    assert "cannot be read as an array" in capsys.readouterr().err
