"""Manifests that lie: paths, links, types, numbers, code in names; and a search for others (hypothesis)."""

from __future__ import annotations

import copy
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fx_passes import wrap
from fx_passes.errors import ArtifactError, LoweringError
from lowering import load, lower_to_onnx, lower_to_trt
from lowering.artifact.files import manifest_text
from lowering.artifact.load import described

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@wrap
def rows(scores: torch.Tensor, most: int = 2) -> list[float]:
    """What only Python can do."""
    return [row.sum().item() for row in scores[:most]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x, scale: float = 1.0):
        scores = self.head(F.relu(self.conv(x)).mean((2, 3)))
        return {"rows": rows(scores, most=1), "best": self.decode(scores), "size": x.shape[0]}

    @wrap
    def decode(self, scores, limit: int = 3):
        return scores.topk(1)[1][:limit]


class Plain(Net):
    def forward(self, x):
        return self.head(F.relu(self.conv(x)).mean((2, 3)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """An ONNX artifact with a wrapped function, a wrapped method and sizes in the glue."""
    return lower_to_onnx(Net(), IMAGES, precision="fp32").save(tmp_path_factory.mktemp("onnx") / "artifact")


class Root(nn.Module):
    """Stays Python itself: what it does depends on the values."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))

    def forward(self, x):
        y = self.body(x)
        return y.flatten(1) if y.sum() > 1e6 else y * 2


@pytest.fixture(scope="module")
def children(tmp_path_factory) -> Path:
    """An artifact of a model that stays Python and has a lowered child."""
    lowered = lower_to_onnx(Root(), IMAGES, precision="fp32")
    assert lowered.details["capture"]["route"] == "children"
    return lowered.save(tmp_path_factory.mktemp("children") / "artifact")


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Path:
    """An artifact of one TensorRT engine."""
    return lower_to_trt(Plain(), IMAGES, precision="fp32").save(tmp_path_factory.mktemp("trt") / "artifact")


def _manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def _load(folder: Path):
    return load(folder, model=Net(), fallbacks={"rows": rows})


@pytest.fixture
def lie(tmp_path):
    """Copies an artifact, changes its manifest, and gives the folder."""

    def make(source: Path, change) -> Path:
        folder = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        shutil.copytree(source, folder)
        manifest = _manifest(folder)
        result = change(manifest)
        (folder / "manifest.json").write_bytes(result.encode() if isinstance(result, str) else manifest_text(manifest))
        return folder

    return make


def test_the_undamaged_artifact_loads(saved, engines, children):
    expected, got = Net()(IMAGES), _load(saved)(IMAGES)
    torch.testing.assert_close(got["rows"], expected["rows"], rtol=1e-4, atol=1e-4)
    assert torch.equal(got["best"], expected["best"])
    assert got["size"] == 2
    assert load(engines).simulate(IMAGES).shape == (2, 2)
    torch.testing.assert_close(load(children, model=Root())(IMAGES), Root()(IMAGES), rtol=1e-4, atol=1e-4)


# -- names that would be code ---------------------------------------------------------------------------------------

CODE = "x=__import__('os').system('touch hacked')"


def _node(manifest: dict, **where: str) -> dict:
    return next(n for n in manifest["glue"] if all(n[key] == value for key, value in where.items()))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: _node(m, op="placeholder").update(target=f"a, {CODE}"),
        lambda m: _node(m, op="placeholder").update(target="*a: print(1)"),
        lambda m: _node(m, op="call_method")["kwargs"].update({CODE: 1}),
        lambda m: _node(m, op="get_attr").update(target=f'_self.a", {CODE}, "b'),
        lambda m: _node(m, op="get_attr").update(target="_self.__class__.__init__.__globals__"),
        lambda m: _node(m, op="call_module").update(target=f'a"); {CODE}; ("'),
        lambda m: _node(m, op="call_method").update(target=f"decode({CODE})"),
        lambda m: m["segments"][0]["info"].update(name=f'a"); {CODE}'),
        lambda m: m["segments"][0]["info"].update(name="../../segment_0"),
    ],
    ids=["argument", "star", "keyword", "attribute", "dunder", "module", "method", "segment", "segment-path"],
)
def test_a_name_that_is_code_is_refused_and_not_run(change, saved, lie, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError):
        _load(lie(saved, change))
    assert not (tmp_path / "hacked").exists()


def test_the_callers_model_is_not_passed_on_by_an_operator(saved, lie):
    """An item of a list that holds it would be it, and `float`, `to` or `train` are methods of tensors and modules."""

    def through_a_list(manifest):
        held = _node(manifest, op="get_attr")
        index = manifest["glue"].index(held) + 1
        item = {"op": "call_function", "target": "_operator.getitem", "args": [[{"node": held["name"]}], 0]}
        manifest["glue"].insert(index, {"name": "item", "kwargs": {}, **item})
        call = {"op": "call_method", "target": "half", "args": [{"node": "item"}], "kwargs": {}}
        manifest["glue"].insert(index + 1, {"name": "call", **call})

    with pytest.raises(ArtifactError, match="passes on the caller's model"):
        _load(lie(saved, through_a_list))


# -- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "a/b", "..", "", ".hidden", "a\\b", "x\n", "con:"])
def test_a_file_outside_the_folder_is_refused(name, saved, lie):
    with pytest.raises(ArtifactError, match="outside its folder"):
        _load(lie(saved, lambda m: m["files"].update({name: {"sha256": "0" * 64, "bytes": 1}})))


@pytest.mark.parametrize("name", ["segment_0.onnx", "manifest.json"])
def test_a_link_is_refused(name, saved, lie, tmp_path):
    folder = lie(saved, lambda m: None)
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="symbolic link"):
        _load(folder)


def test_a_linked_folder_is_fine(saved, tmp_path):
    (tmp_path / "link").symlink_to(saved)
    assert _load(tmp_path / "link")(IMAGES)["size"] == 2


@pytest.mark.parametrize("source", ["saved", "engines"])
def test_a_file_that_is_not_listed_is_not_read(source, request, lie):
    folder = request.getfixturevalue(source)
    read = _load if source == "saved" else load
    for name in _manifest(folder)["files"]:
        if name.startswith("segment_0") and not name.endswith(".txt"):
            with pytest.raises(ArtifactError, match=f"does not list {name}"):
                read(lie(folder, lambda m, name=name: m["files"].pop(name)))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"sha256": 3, "bytes": 1}, "digest of x"),
        ({"sha256": "0" * 63, "bytes": 1}, "no SHA-256"),
        ({"sha256": "0" * 64, "bytes": "1"}, "size of x"),
        ({"sha256": "0" * 64, "bytes": True}, "size of x"),
        ("x", "entry of x"),
        ({}, "size of x"),
        ({"sha256": "0" * 64, "bytes": 1}, "lacks x"),
    ],
)
def test_an_entry_of_a_file_of_the_wrong_type(entry, message, saved, lie):
    with pytest.raises(ArtifactError, match=message):
        _load(lie(saved, lambda m: m["files"].update(x=entry)))


# -- JSON -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "3", '{"format": 1e999}', '{"format": NaN}', '{"format": -1}', '{"format": true}',
        '{"format": 1, "files": 3}', '{"format": 1, "files": {}}', '{"format": 1' + "0" * 5000 + "}",
        '{"format": ' + "[" * 100_000 + "]" * 100_000 + "}", '{"format": 1, "files": {}, "glue": [3]}',
    ],
    ids=lambda text: text[:24],
)  # fmt: skip
def test_a_manifest_that_is_something_else(text, saved, lie):
    with pytest.raises(ArtifactError):
        _load(lie(saved, lambda m: text))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["segments"][0]["backend"]["inputs"][0].update(max=[10**30] * 4), "impossible size"),
        (lambda m: m["segments"][0]["backend"]["inputs"][0].update(min=[-1] * 4), "impossible size"),
        (lambda m: m["segments"][0]["backend"]["inputs"][0].update(max=[2, 3, 2**60, 8]), "impossible size"),
        (lambda m: m["segments"][0]["backend"]["inputs"][0].update(opt=[2**40, 3, 2**20, 0]), "impossible size"),
        (lambda m: m["files"]["segment_0.onnx"].update(bytes=2**60), "manifest says 1152921504606846976"),
        (lambda m: m["segments"][0]["backend"]["inputs"][0].update(opt=[1]), "different ranks"),
        (lambda m: m["segments"][0]["backend"]["inputs"][0].update(dtype="load"), "unknown type 'load'"),
        (lambda m: m["segments"][0]["backend"]["inputs"][0].update(profiles=[[[1]]]), "not three shapes"),
        (lambda m: m["segments"][0]["backend"].update(outputs=[3]), "output of segment_0"),
        (lambda m: m["segments"][0]["backend"].update(kind=[]), "unknown kind"),
        (lambda m: m["segments"][0].update(buffers=["none"]), "not well-formed"),
        (lambda m: m["segments"].append(3), "a segment"),
        (lambda m: m.update(fallbacks=None), "list of fallbacks"),
        (lambda m: m.update(details={}), "not well-formed"),
        (lambda m: m["glue"].pop(), "does not end in one output"),
        (lambda m: _node(m, op="output").update(args=[{"node": "nothing"}]), "not well-formed"),
        (lambda m: _node(m, op="output").update(args=[{}]), "empty object"),
        (lambda m: m["glue"].insert(0, m["glue"][0]), "two nodes"),
        (lambda m: _node(m, op="call_method").update(op="call_anything"), "unknown kind 'call_anything'"),
    ],
)
def test_a_manifest_that_is_not_well_formed(change, message, saved, lie):
    with pytest.raises(ArtifactError, match=message):
        _load(lie(saved, change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["segments"][0]["backend"].update(engines=[]), "lists no engine"),
        (lambda m: m["segments"][0]["backend"].update(engines=3), "list of engines"),
        (lambda m: m["segments"][0]["backend"]["engines"][0].update(flavour=None), "flavour"),
        (lambda m: m["segments"][0]["backend"]["engines"][0].update(compute_capabilities=[8.9]), "capability"),
        (lambda m: m["segments"][0]["backend"].update(network=1), "'network'"),
        (lambda m: m["segments"][0]["backend"]["engines"].append({}), "does not list segment_0.1.engine"),
    ],
)
def test_a_record_of_an_engine_that_is_not_well_formed(change, message, engines, lie):
    with pytest.raises(ArtifactError, match=message):
        load(lie(engines, change))


def test_inspecting_a_damaged_artifact_is_an_error_too(saved, lie):
    folder = lie(saved, lambda m: m["files"].pop("report.json"))
    with pytest.raises(ArtifactError, match="no summary and report"):
        described(folder)


# -- what the caller supplies ---------------------------------------------------------------------------------------


def test_a_function_that_the_artifact_does_not_call_is_named(saved):
    with pytest.raises(ArtifactError, match=r"calls no function 'row'(?s:.*)it calls rows"):
        load(saved, model=Net(), fallbacks={"row": rows})


def test_a_method_of_another_signature_is_refused(saved):
    class Other(Net):
        @wrap
        def decode(self, scores):
            return scores

    with pytest.raises(ArtifactError, match=r"the method 'decode' has the signature \(scores\)"):
        load(saved, model=Other())


def test_a_module_of_another_signature_is_refused(tmp_path):
    class Inner(nn.Module):
        def forward(self, x, factor=2):
            return x * factor if x.sum() > 0 else x

    class Changed(nn.Module):
        def forward(self, x):
            return x

    model = nn.Sequential(nn.Conv2d(3, 4, 3), Inner(), nn.ReLU())
    lower_to_onnx(model, IMAGES, precision="fp32").save(tmp_path / "a")
    assert load(tmp_path / "a", model=model)(IMAGES).shape == (2, 4, 6, 6)
    with pytest.raises(ArtifactError, match=r"forward of '1' has the signature \(x\)"):
        load(tmp_path / "a", model=nn.Sequential(model[0], Changed(), model[2]))


def test_two_functions_of_one_name_cannot_be_saved(tmp_path):
    def other():
        @wrap
        def rows(scores):
            return scores + 1

        return rows

    second = other()

    class Twice(Plain):
        def forward(self, x):
            return rows(super().forward(x)), second(super().forward(x))

    with pytest.raises(ArtifactError, match="two Python functions are called 'rows'"):
        lower_to_onnx(Twice(), IMAGES, precision="fp32").save(tmp_path / "a")


# -- a search for damage that is not handled ------------------------------------------------------------------------

_JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.sampled_from(
            ["", "x", "node", "_self", "segment_0", "os.system", "__class__", "torch.add", "float32", "a.b"]
        ),
        st.text(max_size=8),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["node", "tuple", "torch", "kind", "x"]), inner)
    ),
    max_leaves=6,
)


_HOW = st.sampled_from(["replace", "remove", "add"])


def _paths(value: Any, path: tuple = ()) -> list[tuple]:
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += _paths(item, (*path, key))
    return found


def _change(manifest: dict[str, Any], path: tuple, how: str, new: Any) -> None:
    holder = manifest
    for key in path[:-1]:
        holder = holder[key]
    if how == "replace":
        holder[path[-1]] = new
    elif how == "remove":
        del holder[path[-1]]
    elif isinstance(holder, list):
        holder.insert(path[-1], new)
    else:
        holder[str(new)[:10]] = holder.pop(path[-1])


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of Python that a damaged graph becomes
@pytest.mark.parametrize("source", ["saved", "engines", "children"])
def test_no_damage_gives_another_kind_of_error(source, request, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(request.getfixturevalue(source), folder)
    original = _manifest(folder)
    # the digests are checked above, and the operators' reports are many and alike
    paths = [p for p in _paths(original) if p and p[0] != "files" and not {"ops", "rows"} & set(map(str, p))]
    outcomes = {"refused": 0, "loaded": 0}
    readers = {"saved": _load, "engines": load, "children": partial(load, model=Root())}

    @settings(
        max_examples=70,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(
        st.lists(
            st.tuples(st.sampled_from(paths), st.sampled_from(["replace", "remove", "add"]), _JSON),
            min_size=1,
            max_size=2,
        )
    )
    def damaged(changes):
        manifest = copy.deepcopy(original)
        for change in changes:
            try:
                _change(manifest, *change)
            except (KeyError, IndexError, TypeError):  # the first change took away the place of the second
                continue
        (folder / "manifest.json").write_bytes(manifest_text(manifest))
        try:
            readers[source](folder)
            outcomes["loaded"] += 1
        except LoweringError:
            outcomes["refused"] += 1

    damaged()
    assert outcomes["refused"] > outcomes["loaded"] / 2  # the damage reaches the reader
    assert not Path("hacked").exists()


def test_no_damage_of_the_network_gives_another_kind_of_error(engines, tmp_path):
    from lowering.trt.reference import ReferenceNetwork, store

    original = json.loads((engines / "segment_0.network.json").read_text())
    shutil.copyfile(engines / "segment_0.network.safetensors", tmp_path / "w")
    paths = [p for p in _paths(original) if p]

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from(paths), _HOW, _JSON)
    def damaged(path, how, new):
        plain = copy.deepcopy(original)
        _change(plain, path, how, new)
        (tmp_path / "s").write_text(json.dumps(plain))
        try:
            ReferenceNetwork(store.read(tmp_path / "s", tmp_path / "w"))
            outcomes["loaded"] += 1
        except LoweringError:
            outcomes["refused"] += 1

    outcomes = {"refused": 0, "loaded": 0}
    damaged()
    assert outcomes["refused"] > 0
