"""Engines of several GPUs in one artifact: merging, choosing, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from fx_passes.errors import ArtifactError, BackendUnavailableError
from lowering import load, lower_to_onnx, lower_to_trt
from lowering.artifact.files import manifest_text
from lowering.artifact.load import described
from lowering.artifact.merging import merge

IMAGE = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))


def saved(folder: Path, capabilities, seed: int = 0, **options) -> Path:
    save = {"include_network": options.pop("include_network", True)}
    return lower_to_trt(net(seed), IMAGE, precision="fp16", compute_capabilities=capabilities, **options).save(
        folder, **save
    )


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("artifacts")
    return {
        "portable": saved(folder / "portable", None),
        "ada": saved(folder / "ada", "8.9"),
        "two": saved(folder / "two", ["8.6", "12.0"]),
    }


@pytest.fixture
def base(artifacts, tmp_path) -> Path:
    return Path(shutil.copytree(artifacts["portable"], tmp_path / "base"))


def test_merged_engines_are_all_there_and_it_still_simulates(artifacts, base):
    before = load(base).simulate(IMAGE)
    assert merge(base, artifacts["ada"]) == base
    merge(base, artifacts["two"])
    merged = load(base)
    assert torch.equal(merged.simulate(IMAGE), before)
    engines = merged.backend_segments()[0].backend.engines
    assert [file.target.compute_capabilities for file in engines] == [None, ("8.9",), ("8.6", "12.0")]
    assert engines[1].data == (artifacts["ada"] / "segment_0.engine").read_bytes()
    assert sorted(p.name for p in base.glob("*.engine")) == [
        "segment_0.1.engine",
        "segment_0.2.engine",
        "segment_0.engine",
    ]
    assert not [path for path in base.iterdir() if path.name.startswith(".")]


def test_the_report_and_the_summary_have_every_engine(artifacts, base):
    merge(base, artifacts["ada"])
    summary, report = described(base)
    assert "engine (portable)" in summary
    assert "engine (8.9)" in summary
    assert [e["compute_capabilities"] for e in report["segments"][0]["engines"]] == [None, ["8.9"]]
    assert load(base).summary() == summary


def test_merging_again_changes_nothing(artifacts, base):
    merge(base, artifacts["ada"])
    before = (base / "manifest.json").read_text()
    merge(base, artifacts["ada"])
    assert (base / "manifest.json").read_text() == before


def test_a_merged_artifact_can_be_saved_and_moved(artifacts, base, tmp_path):
    merge(base, artifacts["ada"])
    load(base).save(tmp_path / "again")
    shutil.move(tmp_path / "again", tmp_path / "moved")
    engines = load(tmp_path / "moved").backend_segments()[0].backend.engines
    assert [file.target.compute_capabilities for file in engines] == [None, ("8.9",)]


def test_where_none_fits_the_error_says_what_is_there(artifacts, base, monkeypatch):
    merge(base, artifacts["ada"])
    backend = load(base).backend_segments()[0].backend
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    with pytest.raises(BackendUnavailableError, match=r"Tesla T4 \(compute capability 7\.5\).*portable.*for 8\.9"):
        backend._load(torch.device("cuda", 0))


def test_other_weights_are_refused(base, tmp_path):
    with pytest.raises(ArtifactError, match=r"differ in segment_0\.network"):
        merge(base, saved(tmp_path / "other", "8.9", seed=1))


def test_another_input_is_refused(base, tmp_path):
    with pytest.raises(ArtifactError, match="differ in the inputs of segment_0"):
        merge(base, saved(tmp_path / "other", "8.9", dynamic_batch=(1, 1, 4)))


def test_without_networks_nothing_shows_that_they_are_of_one(tmp_path):
    folders = [saved(tmp_path / name, c, include_network=False) for name, c in (("a", None), ("b", "8.9"))]
    with pytest.raises(ArtifactError, match="include_network=True"):
        merge(*folders)
    with pytest.raises(BackendUnavailableError, match="without its network"):
        load(folders[0]).simulate(IMAGE)


def test_onnx_files_are_refused(base, tmp_path):
    lower_to_onnx(net(), IMAGE, precision="fp32").save(tmp_path / "onnx")
    with pytest.raises(ArtifactError, match="holds no TensorRT engines"):
        merge(base, tmp_path / "onnx")


def test_a_damaged_source_changes_nothing(artifacts, base, tmp_path):
    other = shutil.copytree(artifacts["ada"], tmp_path / "other")
    data = (other / "segment_0.engine").read_bytes()
    (other / "segment_0.engine").write_bytes(data[:-1])
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    with pytest.raises(ArtifactError, match="truncated"):
        merge(base, other)
    manifest = json.loads((artifacts["ada"] / "manifest.json").read_text())
    manifest["segments"][0]["info"]["engines"].append({})
    shutil.copyfile(artifacts["ada"] / "segment_0.engine", other / "segment_0.engine")
    (other / "manifest.json").write_bytes(manifest_text(manifest))
    with pytest.raises(ArtifactError):
        merge(base, other)
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before


class Root(nn.Module):
    """Stays Python itself: what it does depends on the values."""

    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x):
        y = self.body(x)
        return y.flatten(1) if y.sum() > 1e6 else y * 2


def test_lowered_children_are_merged_too(tmp_path):
    for name, capability in (("a", None), ("b", "8.9")):
        lowered = lower_to_trt(Root(), IMAGE, precision="fp32", compute_capabilities=capability)
        lowered.save(tmp_path / name)
    merged = load(merge(tmp_path / "a", tmp_path / "b"), model=Root())
    (segment,) = merged.backend_segments()
    assert [file.target.compute_capabilities for file in segment.backend.engines] == [None, ("8.9",)]
    torch.testing.assert_close(merged.simulate(IMAGE), Root()(IMAGE), rtol=1e-4, atol=1e-4)
