"""The command `fxtrt`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowering.command.cli import main

Image = pytest.importorskip("PIL.Image")
ROOT = Path(__file__).resolve().parents[2]

NET = """
import torch

class Net(torch.nn.Module):
    pretrained_cfg = {"input_size": (3, 16, 16), "mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.fc = torch.nn.Linear(8, 5)

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x)).mean((2, 3)))

def make():
    torch.manual_seed(0)
    return Net()

class Bare(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(6, 5)

    def forward(self, x):
        return self.fc(x)
"""

WRAPPED = """
from fx_passes import wrap

class Boxes(Net):
    def forward(self, x):
        return self.boxes(super().forward(x))

    @wrap
    def boxes(self, scores):
        return [row[row > 0] for row in scores]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a model and a few images."""
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "photos").mkdir()
    generator = torch.Generator().manual_seed(0)
    for index in range(4):
        pixels = torch.randint(0, 256, (20, 24, 3), generator=generator, dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{index}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fxtrt(capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error)."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    captured = capsys.readouterr()
    return stop.value.code or 0, captured.out, captured.err


BACKENDS = {"trt": "segment_0.engine", "onnxruntime": "segment_0.onnx", "tensorrt-onnx": "segment_0.onnx"}


@pytest.mark.parametrize(("backend", "file"), BACKENDS.items(), ids=BACKENDS)
def test_lower_writes_an_artifact_and_inspect_reads_it(folder, capsys, backend, file):
    arguments = ("lower", "net.py:make", "--out", "out", "--calibration", "photos", "--backend", backend)
    status, out, err = fxtrt(capsys, *arguments)
    assert status == 0, err
    assert "segment_0" in out
    assert file in out
    assert (folder / "out" / file).stat().st_size > 100
    assert (folder / "out" / "manifest.json").is_file()

    status, out, err = fxtrt(capsys, "inspect", "out", "--layers", "--kernels")
    assert status == 0, err
    assert "segment_0: operators" in out
    assert ("segment_0: kernels" in out) == (backend == "trt")


def test_inspect_checks_the_files_and_needs_neither_model_nor_runtime(folder, capsys, monkeypatch):
    (folder / "boxes.py").write_text(NET + WRAPPED)
    monkeypatch.syspath_prepend(folder)
    arguments = ("lower", "boxes.py:Boxes", "--out", "out", "--calibration", "photos", "--backend", "onnxruntime")
    status, _, err = fxtrt(capsys, *arguments)
    assert status == 0, err
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    status, out, err = fxtrt(capsys, "inspect", "out")
    assert status == 0, err
    assert "boxes" in out  # what stays Python
    with (folder / "out" / "segment_0.onnx").open("ab") as file:
        file.write(b"!")
    status, _, err = fxtrt(capsys, "inspect", "out")
    assert status == 1
    assert "segment_0.onnx has" in err


def test_an_artifact_gives_what_lowering_in_python_gives(folder, capsys):
    from lowering import load, lower_to_onnx
    from lowering.command.loading import load_model
    from lowering.request.images import ImageBatches

    assert (
        fxtrt(capsys, "lower", "net.py:make", "--out", "out", "--calibration", "photos", "--backend", "onnxruntime")[0]
        == 0
    )
    model, spec = load_model("net.py:make")
    batches = ImageBatches("photos", spec)
    example = next(iter(batches))[:1]
    expected = lower_to_onnx(model, example, calibration=batches)
    assert torch.equal(load("out")(example), expected(example))


def test_a_trtexec_line_comes_with_the_file_for_tensorrt(folder, capsys):
    assert fxtrt(capsys, "lower", "net.py:make", "--out", "out", "--backend", "tensorrt-onnx")[0] == 0
    texts = [path.read_text() for path in (folder / "out").iterdir() if path.suffix in (".txt", ".json", ".sh")]
    assert any("trtexec --onnx=segment_0.onnx" in text for text in texts)


def test_no_network_makes_the_artifact_smaller(folder, capsys):
    assert fxtrt(capsys, "lower", "net.py:make", "--out", "a", "--calibration", "photos")[0] == 0
    assert fxtrt(capsys, "lower", "net.py:make", "--out", "b", "--calibration", "photos", "--no-network")[0] == 0
    assert any("network" in path.name for path in (folder / "a").iterdir())
    assert not any("network" in path.name for path in (folder / "b").iterdir())


def test_a_model_without_declared_input_takes_shapes(folder, capsys):
    status, _, err = fxtrt(
        capsys,
        "lower",
        "net.py:Bare",
        "--out",
        "out",
        "--input",
        "2x6",
        "--backend",
        "onnxruntime",
        "--precision",
        "fp32",
    )
    assert status == 0, err
    from lowering import load

    assert load("out")(torch.zeros(2, 6)).shape == (2, 5)


def test_dynamic_batch_and_options_reach_the_lowering(folder, capsys):
    from lowering import load

    status, _, err = fxtrt(
        capsys, "lower", "net.py:make", "--out", "out", "--backend", "onnxruntime", "--calibration", "photos",
        "--dynamic-batch", "1,2,4", "--threads", "1", "--float-type", "fp32", "--batch", "3", "--images", "3",
    )  # fmt: skip
    assert status == 0, err
    lowered = load("out")
    assert lowered(torch.zeros(4, 3, 16, 16)).shape == (4, 5)
    assert lowered.report()["settings"]["threads"] == 1


def test_compare_shows_every_backend(folder, capsys):
    status, out, err = fxtrt(capsys, "compare", "net.py:make", "--calibration", "photos")
    assert status == 0, err
    for name in ("trt int8", "onnxruntime int8", "tensorrt-onnx"):
        assert name in out


def test_bench_prints_both_sides(folder, capsys):
    status, out, err = fxtrt(
        capsys, "bench", "net.py:make", "--calibration", "photos", "--rounds", "2", "--threads", "1"
    )
    assert status == 0, err
    assert "PyTorch float" in out
    assert "ONNX Runtime int8" in out


def test_bench_leaves_the_number_of_threads_alone(folder, capsys):
    before = torch.get_num_threads()
    assert fxtrt(capsys, "bench", "net.py:make", "--rounds", "2", "--threads", "1", "--precision", "fp32")[0] == 0
    assert torch.get_num_threads() == before


def test_a_report_of_a_model_and_of_an_artifact(folder, capsys):
    assert fxtrt(capsys, "report", "net.py:make", "--out", "a.html", "--calibration", "photos")[0] == 0
    assert fxtrt(capsys, "lower", "net.py:make", "--out", "out", "--calibration", "photos")[0] == 0
    assert fxtrt(capsys, "report", "out", "--out", "b.html")[0] == 0
    for name in ("a.html", "b.html"):
        text = (folder / name).read_text()
        assert "segment_0" in text
        assert ('<div class="graph">' in text) == (name == "a.html")  # an artifact no longer has the model's graph
        assert str(folder) not in text


MISTAKES = {
    "no such file": (("lower", "other.py:make", "--out", "o"), "does not exist"),
    "no such zoo model": (("lower", "torchvision:resnet5O", "--out", "o"), "no model"),
    "no declared input": (("lower", "net.py:Bare", "--out", "o"), "--input"),
    "a shape that is none": (("lower", "net.py:Bare", "--out", "o", "--input", "axb"), "is no shape"),
    "images for no image model": (
        ("lower", "net.py:Bare", "--out", "o", "--input", "1x6", "--calibration", "photos"),
        "declares no image input",
    ),
    "a missing folder": (("lower", "net.py:make", "--out", "o", "--calibration", "nowhere"), "does not exist"),
    "an unknown precision": (("lower", "net.py:make", "--out", "o", "--precision", "int3"), "int3"),
    "an unknown float type": (("lower", "net.py:make", "--out", "o", "--float-type", "fp8"), "fp8"),
    "an unknown capability": (("lower", "net.py:make", "--out", "o", "--compute-capability", "3.14"), "3.14"),
    "capabilities for a file": (
        ("lower", "net.py:make", "--out", "o", "--backend", "onnxruntime", "--compute-capability", "8.9"),
        "are for engines",
    ),
    "a batch that is no range": (("lower", "net.py:make", "--out", "o", "--dynamic-batch", "1-8"), "MIN,OPT,MAX"),
    "a wrong rank": (
        ("lower", "net.py:make", "--out", "o", "--input", "3x16", "--backend", "onnxruntime", "--precision", "fp32"),
        "",
    ),
    "no artifact": (("inspect", "photos"), "manifest"),
    "an unwritable folder": (
        ("lower", "net.py:make", "--out", "net.py/o", "--backend", "onnxruntime", "--precision", "fp32"),
        "cannot write",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("arguments", "says"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_explained_without_a_traceback(folder, capsys, arguments, says):
    if "torchvision" in arguments[1]:
        pytest.importorskip("torchvision")
    status, _, err = fxtrt(capsys, *arguments)
    assert status == 1
    assert "error: " in err
    assert "next: " in err
    assert says in err
    assert "Traceback" not in err
    assert not (folder / "o").exists() or not list((folder / "o").iterdir())


def test_help_is_quick_and_needs_no_torch():
    code = "import sys; import lowering.command.cli; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_the_command_runs_as_a_module(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "lowering.command.cli", "inspect", "nowhere"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")


def test_a_configuration_file_and_settings_reach_the_lowering(folder, capsys):
    (folder / "q.toml").write_text('["fc"]\ndtype = "float"\n')
    arguments = ("lower", "net.py:make", "--out", "out", "--calibration", "photos", "--backend", "onnxruntime")
    status, out, err = fxtrt(capsys, *arguments, "--qconfig", "q.toml", "--set", "min_segment_nodes=2")
    assert status == 0, err
    assert "int8: 1 of 2" in out
    manifest = (folder / "out" / "manifest.json").read_text()
    assert '"min_segment_nodes": 2' in manifest

    status, _, err = fxtrt(capsys, *arguments, "--set", "min_segment_nods=2")
    assert status == 1
    assert "unknown settings: 'min_segment_nods'" in err
    status, _, err = fxtrt(capsys, *arguments, "--set", "min_segment_nodes")
    assert status == 1
    assert "has no value" in err
    (folder / "q.toml").write_text('["fcc"]\ndtype = "float"\n')
    status, _, err = fxtrt(capsys, *arguments, "--qconfig", "q.toml")
    assert status == 1
    assert "fcc" in err
