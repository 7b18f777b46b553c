"""Saved artifacts: round trips, wrapped Python supplied by the caller, damaged files, no code from files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import wrap
from fx_passes.errors import ArtifactError
from lowering import load, lower_to_onnx, lower_to_trt
from lowering.artifact.files import manifest_text

IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two outputs in a dict, one of them nested."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x):
        features = F.relu(self.stem(x))
        return {"scores": self.head(features.mean((2, 3))), "aux": (features, x)}


@wrap
def best(scores: torch.Tensor, k: int = 2) -> list[int]:
    """Post-processing that only Python can do."""
    return [int(row.argmax()) for row in scores[:k]]


class Wrapped(Net):
    def forward(self, x):
        return best(self.head(F.relu(self.stem(x)).mean((2, 3))), k=2)


class WrappedMethod(Net):
    def forward(self, x):
        return self.decode(F.relu(self.stem(x)).mean((2, 3)))

    @wrap
    def decode(self, pooled):
        return [self.head(row) for row in pooled]

    def secret(self, pooled):
        raise AssertionError("a file made the loader call this")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One ONNX artifact to damage copies of."""
    return lower_to_onnx(Net(), IMAGES, calibration=[IMAGES]).save(tmp_path_factory.mktemp("net") / "artifact")


def _edit(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_bytes(manifest_text(manifest))


def _assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_onnx_round_trip_after_moving_the_folder(precision, tmp_path):
    lowered = lower_to_onnx(Net(), IMAGES, precision=precision, calibration=[IMAGES])
    lowered.save(tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "b")
    again = load(tmp_path / "b")
    expected, got = lowered(IMAGES), again(IMAGES)
    assert list(got) == ["scores", "aux"] and isinstance(got["aux"], tuple)
    _assert_same(got["scores"], expected["scores"])
    _assert_same(got["aux"][0], expected["aux"][0])
    assert again.summary() == lowered.summary()
    assert again.report() == json.loads(json.dumps(lowered.report()))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_trt_round_trip_simulates(precision, tmp_path):
    lowered = lower_to_trt(Net(), IMAGES, precision=precision, calibration=[IMAGES])
    lowered.save(tmp_path / "a")
    _assert_same(load(tmp_path / "a").simulate(IMAGES)["scores"], lowered.simulate(IMAGES)["scores"])


def test_loads_in_a_fresh_process_without_the_model(saved):
    code = (
        "import sys, torch; from lowering import load; "
        f"print(tuple(load({str(saved)!r})(torch.zeros(2, 3, 12, 12))['scores'].shape))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert done.stdout.strip() == "(2, 4)", done.stderr


def test_wrapped_function_by_name_or_from_the_model(tmp_path):
    model = Wrapped()
    lowered = lower_to_onnx(model, IMAGES, precision="fp32")
    assert [f.reason for f in lowered.fallbacks] == ["wrapped by the user"]
    lowered.save(tmp_path / "a")
    expected = model(IMAGES)
    assert load(tmp_path / "a", fallbacks={"best": best})(IMAGES) == expected
    assert load(tmp_path / "a", model=model)(IMAGES) == expected
    with pytest.raises(ArtifactError, match=r"fallbacks=\{'best': best\}"):
        load(tmp_path / "a")
    with pytest.raises(ArtifactError, match="signature"):
        load(tmp_path / "a", fallbacks={"best": lambda scores: scores})


def test_wrapped_method_needs_the_model(tmp_path):
    model = WrappedMethod()
    lower_to_onnx(model, IMAGES, precision="fp32").save(tmp_path / "a")
    with pytest.raises(ArtifactError, match="model="):
        load(tmp_path / "a")
    got = load(tmp_path / "a", model=model)(IMAGES)
    torch.testing.assert_close(got, model(IMAGES), rtol=1e-4, atol=1e-4)


class Limits(nn.Module):
    """Wrapped class and static methods; `highest` is called twice, `ceiling` is inherited."""

    offset = 0.0

    def forward(self, x):
        return self.highest(self.highest(self.ceiling(x)))

    @wrap
    @classmethod
    def ceiling(cls, x):
        return x + cls.offset if x.sum() > -1e9 else x

    @classmethod
    @wrap
    def highest(cls, x):
        return x.clamp(max=cls.lowest(x))

    @wrap
    @staticmethod
    def lowest(x):
        return float(x.detach().max()) / 2

    @staticmethod
    def secret(x):
        raise AssertionError("a file made the loader call this")


class Raised(Limits):
    offset = 3.0

    def forward(self, x):
        return super().forward(x).clamp(max=self.lowest(x))


class WrappedOnClasses(Net):
    """Two classes with wrapped methods of one name, of which the graph calls those of the second."""

    def __init__(self):
        super().__init__()
        self.plain, self.limits = Limits(), nn.ModuleList([Raised()])

    def forward(self, x):
        return self.limits[0](self.stem(x)) * 2


def test_wrapped_class_and_static_methods_are_found_on_the_model(tmp_path):
    model = WrappedOnClasses()
    lower_to_onnx(model, IMAGES, precision="fp32").save(tmp_path / "a")
    again = load(tmp_path / "a", model=WrappedOnClasses())
    assert "wrapped by the user" in {f.reason for f in again.fallbacks}
    torch.testing.assert_close(again(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-4)
    with pytest.raises(ArtifactError, match=r"fallbacks=\{'ceiling': Raised.ceiling\}"):
        load(tmp_path / "a")
    with pytest.raises(ArtifactError, match=r"fallbacks=\{'ceiling': Raised.ceiling\}"):
        load(tmp_path / "a", model=Limits())  # that has one of another class
    methods = {"ceiling": Raised.ceiling, "highest": Raised.highest, "lowest": Raised.lowest}
    _assert_same(load(tmp_path / "a", fallbacks=methods)(IMAGES), again(IMAGES))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"fallback": "secret"}, "'secret' stays outside", id="not-wrapped"),
        pytest.param({"fallback": "system", "class": "os"}, "'system' stays outside", id="no-class-of-the-model"),
        pytest.param({"signature": "(x, y)"}, r"has the signature \(x\)", id="other-signature"),
        pytest.param({"class": 3}, "the class of 'lowest'", id="no-text"),
    ],
)
def test_a_file_names_only_wrapped_class_and_static_methods_of_the_model(change, message, tmp_path):
    lower_to_onnx(WrappedOnClasses(), IMAGES, precision="fp32").save(tmp_path / "a")

    def alter(manifest):
        for node in manifest["glue"]:
            if isinstance(node["target"], dict) and node["target"]["fallback"] == "lowest":
                node["target"].update(change)

    _edit(tmp_path / "a", alter)
    with pytest.raises(ArtifactError, match=message):
        load(tmp_path / "a", model=WrappedOnClasses())


@wrap
class Shift(nn.Module):
    """A wrapped class: all of its methods are."""

    def forward(self, x):
        return x

    def method(self, x):
        return x + 1 if x.sum() > -1e9 else x

    @classmethod
    def class_method(cls, x):
        return x + 2 if x.sum() > -1e9 else x

    @staticmethod
    def static_method(x):
        return x + 3 if x.sum() > -1e9 else x


class Shifted(Net):
    def __init__(self, called="method"):
        super().__init__()
        self.shift, self.called = Shift(), called

    def forward(self, x):
        return getattr(self.shift, self.called)(self.stem(x))


@pytest.mark.parametrize("called", ["method", "class_method", "static_method"])
def test_methods_of_a_wrapped_class_are_found_on_the_model(called, tmp_path):
    model = Shifted(called)
    lower_to_onnx(model, IMAGES, precision="fp32").save(tmp_path / "a")
    torch.testing.assert_close(load(tmp_path / "a", model=Shifted())(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["register_forward_hook", "load_state_dict", "double"])
def test_a_file_cannot_call_what_a_wrapped_class_has_from_torch(name, tmp_path):
    lower_to_onnx(Shifted(), IMAGES, precision="fp32").save(tmp_path / "a")

    def to_torch(manifest):
        for node in manifest["glue"]:
            if node["target"] == "method":
                node["target"] = name

    _edit(tmp_path / "a", to_torch)
    with pytest.raises(ArtifactError, match="not wrapped"):
        load(tmp_path / "a", model=Shifted())


def test_a_file_cannot_call_a_method_that_is_not_wrapped(tmp_path):
    lower_to_onnx(WrappedMethod(), IMAGES, precision="fp32").save(tmp_path / "a")

    def to_secret(manifest):
        for node in manifest["glue"]:
            if node["target"] == "decode":
                node["target"] = "secret"

    _edit(tmp_path / "a", to_secret)
    with pytest.raises(ArtifactError, match="not wrapped"):
        load(tmp_path / "a", model=WrappedMethod())


@pytest.mark.parametrize("function", ["os.system", "builtins.eval", "torch.load", "posix.system"])
def test_a_file_cannot_name_a_function_to_call(function, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "a")
    node = {"name": "evil", "op": "call_function", "target": function, "args": ["echo"], "kwargs": {}}
    _edit(tmp_path / "a", lambda manifest: manifest["glue"].insert(0, node))
    with pytest.raises(ArtifactError, match="no operator"):
        load(tmp_path / "a")


def _truncate(folder):
    path = next(folder.glob("segment_0.onnx"))
    path.write_bytes(path.read_bytes()[:-10])


def _alter(folder):
    path = next(folder.glob("segment_0.onnx"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(_truncate, "truncated", id="truncated"),
        pytest.param(_alter, "SHA-256", id="altered"),
        pytest.param(lambda f: (f / "segment_0.onnx").unlink(), "lacks segment_0.onnx", id="missing"),
        pytest.param(lambda f: (f / "manifest.json").unlink(), "manifest.json", id="no-manifest"),
        pytest.param(lambda f: (f / "manifest.json").write_text("{"), "not JSON", id="broken-manifest"),
        pytest.param(lambda f: (f / "manifest.json").write_text("[]"), "not a manifest", id="other-json"),
        pytest.param(lambda f: _edit(f, lambda m: m.update(format=99)), "format 99", id="newer"),
        pytest.param(lambda f: _edit(f, lambda m: m["files"].update({"../x": {}})), "outside", id="path-escape"),
        pytest.param(lambda f: _edit(f, lambda m: m.pop("segments")), "list of segments", id="incomplete"),
    ],
)
def test_damage_is_an_error_that_says_what(damage, message, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(ArtifactError, match=message):
        load(tmp_path / "a")


def test_saving_again_keeps_other_files_and_removes_obsolete_ones(tmp_path):
    lower_to_trt(Net(), IMAGES, precision="fp32").save(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert (tmp_path / "segment_0.engine").exists()
    lower_to_onnx(Net(), IMAGES, precision="fp32").save(tmp_path)
    assert not (tmp_path / "segment_0.engine").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not list(tmp_path.glob(".saving-*"))
    load(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        pytest.param("notes.txt", "mine", "No such file", id="no-manifest"),
        pytest.param(
            "manifest.json", '{"name": "a web page"}', "not a manifest of this project", id="another-manifest"
        ),
        pytest.param("manifest.json", '{"format": 99}', "format 99", id="newer"),
    ],
)
def test_a_folder_with_other_files_is_not_written_to(name, text, reason, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ArtifactError, match=f"holds files and is no artifact.*{reason}"):
        lower_to_onnx(Net(), IMAGES, precision="fp32").save(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: text}


def test_hidden_files_and_folders_are_no_other_files(tmp_path):
    (tmp_path / ".gitignore").write_text("*")
    (tmp_path / ".saving-interrupted").mkdir()
    (tmp_path / "cpu").mkdir()
    load(lower_to_onnx(Net(), IMAGES, precision="fp32").save(tmp_path))
    assert (tmp_path / ".gitignore").read_text() == "*"


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot write"):
        lower_to_onnx(Net(), IMAGES, precision="fp32").save(tmp_path / "file" / "a")


def test_no_absolute_path_is_written(saved):
    for path in saved.iterdir():
        data = path.read_bytes()
        assert os.path.dirname(__file__).encode() not in data, path.name
        assert os.path.dirname(torch.__file__).encode() not in data, path.name
