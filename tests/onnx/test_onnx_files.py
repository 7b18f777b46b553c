"""Models whose weights lie in a file of their own, as above 2 GB: every runtime, artifacts, and names of other files.

The limit is lowered to a few bytes, so that small models take the way of large ones.
"""

from __future__ import annotations

import copy
import gc
import shutil
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from fx_passes.errors import ArtifactError
from lowering import load, lower_to_onnx
from lowering.onnx import export, files
from lowering.onnx.files import OnnxFile

IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def large(monkeypatch) -> None:
    monkeypatch.setattr(export, "_LARGEST_MESSAGE", 500)
    monkeypatch.setattr(files, "_SURELY_FITS", 500)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino", "tensorrt"])
def test_every_runtime_takes_a_model_in_two_files(large, runtime: str, precision: str, tmp_path) -> None:
    if runtime == "openvino":
        pytest.importorskip("openvino", reason="OpenVINO is an optional runtime and is not installed")
    lowered = lower_to_onnx(net(), IMAGES, precision=precision, calibration=[IMAGES], runtime=runtime)
    backend = lowered.backend_segments()[0].backend
    assert backend.file.path is not None
    assert backend.file.path.with_name("segment_0.onnx.data").stat().st_size > 1000
    expected = lowered(IMAGES)
    tolerance = 1e-4 if precision == "fp32" else 0.05
    torch.testing.assert_close(expected, net()(IMAGES), rtol=tolerance, atol=tolerance)
    assert sum(backend.optimized_ops().values()) >= 2
    lowered.save(tmp_path / "a")
    del lowered, backend  # the temporary folder goes with them
    shutil.move(tmp_path / "a", tmp_path / "b")
    again = load(tmp_path / "b")
    assert torch.equal(again(IMAGES), expected)
    assert torch.equal(copy.deepcopy(again.backend_segments()[0].backend)(IMAGES)[0], expected)
    again.save(tmp_path / "c")
    assert torch.equal(load(tmp_path / "c")(IMAGES), expected)


def test_the_temporary_folder_lives_as_long_as_its_users(large) -> None:
    lowered = lower_to_onnx(net(), IMAGES, precision="fp32")
    backend = copy.deepcopy(lowered.backend_segments()[0].backend)
    path = backend.file.path
    del lowered
    gc.collect()
    assert path.is_file()
    del backend
    gc.collect()
    assert not path.exists()


def test_the_weights_of_an_artifact_can_go_under_another_name(large, tmp_path) -> None:
    file = lower_to_onnx(net(), IMAGES, precision="fp32").backend_segments()[0].backend.file
    for name, write in file.writers("other.onnx").items():
        write(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.onnx", "other.onnx.data"]
    onnx.checker.check_model(str(tmp_path / "other.onnx"))
    assert OnnxFile.read(tmp_path / "other.onnx", external=True).path == tmp_path / "other.onnx"


def _naming(path: Path, location: str) -> None:
    model = onnx.load(path, load_external_data=False)
    tensor = model.graph.initializer[0]
    del tensor.external_data[:]
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location
    tensor.data_location = onnx.TensorProto.EXTERNAL
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("location", ["/etc/hostname", "../x", "b.onnx.data", ""])
def test_a_model_that_names_another_file_is_refused(location: str, external: bool, tmp_path) -> None:
    file = lower_to_onnx(net(), IMAGES, precision="fp32").backend_segments()[0].backend.file
    (tmp_path / "a.onnx").write_bytes(file.content)
    (tmp_path / "a.onnx.data").write_bytes(b"")
    _naming(tmp_path / "a.onnx", location)
    with pytest.raises(ArtifactError, match=r"a\.onnx takes weights from"):
        OnnxFile.read(tmp_path / "a.onnx", external)


def test_a_damaged_model_is_refused(tmp_path) -> None:
    (tmp_path / "a.onnx").write_bytes(b"location" * 9)
    with pytest.raises(ArtifactError, match="damaged"):
        OnnxFile.read(tmp_path / "a.onnx", external=False)


def test_a_large_artifact_without_its_weights(large, tmp_path) -> None:
    lower_to_onnx(net(), IMAGES, precision="fp32").save(tmp_path / "a")
    (tmp_path / "a" / "segment_0.onnx.data").unlink()
    with pytest.raises(ArtifactError, match=r"lacks segment_0\.onnx\.data"):
        load(tmp_path / "a")
