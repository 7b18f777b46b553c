"""Models that stay Python: their children are lowered one by one, and no call of them is ever wrong."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from fx_passes import wrap
from fx_passes.errors import ArtifactError, BackendUnavailableError, CaptureError, InputError, UnsupportedOpError
from lowering import load, lower_to_onnx, lower_to_trt

BACKENDS = {"trt": lower_to_trt, "onnx": lower_to_onnx}


def image(n=2, size=16, seed=0):
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


def runner(lowered, backend):
    return lowered.simulate if backend == "trt" else lowered


def close(actual, expected, tolerance=1e-4):
    assert pytree.tree_structure(actual) == pytree.tree_structure(expected)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def block(channels, out):
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


class Pyramid(nn.Module):
    """Takes and returns lists and dicts of tensors."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)])

    def forward(self, levels, names=("a", "b")):
        return {name: conv(x) for name, conv, x in zip(names, self.inner, levels, strict=True)}


class Detector(nn.Module):
    """A root that branches on data, children of every kind, and Python around them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = block(3, 8)
        self.pyramid = Pyramid()
        self.tower = block(4, 4)
        self.box = nn.Linear(4, 6)
        self.unused = nn.Linear(4, 4)
        self.heads = {"score": self.box}  # a plain dict: the module is found by its other name

    def forward(self, x, *, flip=False):
        x = x.flip(3) if flip else x
        y = self.stem(x)
        if y.sum() < 0:
            return self.unused(y)
        levels = self.pyramid([y, F.max_pool2d(y, 2)])
        towers = {name: self.tower(level) for name, level in levels.items()}
        rows = towers["a"].mean(3).permute(0, 2, 1)[towers["a"].mean((1, 3)) > towers["a"].mean()]
        return self.heads["score"](rows), towers


NAMES = ["stem", "pyramid", "tower", "box"]


@pytest.fixture(scope="module", params=BACKENDS)
def lowered(request):
    model = Detector().eval()
    return request.param, model, BACKENDS[request.param](model, image(), precision="fp32", dynamic_batch=(1, 2, 4))


def test_children_are_the_segments_and_the_root_is_the_fallback(lowered):
    _, _, module = lowered
    report = module.report()
    assert [s["name"] for s in report["segments"]] == NAMES
    assert report["flops_share"] >= 0.98 and report["capture"]["route"] == "children"
    assert [f["node"] for f in report["fallbacks"]] == ["Detector", "unused"]
    assert report["fallbacks"][0]["source"].startswith("test_children.py:")
    assert "if y.sum() < 0" in report["fallbacks"][0]["reason"]
    assert report["fallbacks"][1]["reason"] == "not called on the example inputs"
    assert "its submodules are lowered one by one" in module.summary()


@pytest.mark.parametrize("n", [1, 3, 4])
def test_equals_eager_at_every_batch_size(lowered, n):
    backend, model, module = lowered
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for flip in (False, True):
            close(runner(module, backend)(image(n, seed=n), flip=flip), model(image(n, seed=n), flip=flip))


def test_a_varying_number_of_rows_is_lowered_with_headroom(lowered):
    _, _, module = lowered
    box = next(child for child in module.lowered_children() if child.path == "box")
    (_, rows), *_ = box.accepts.places
    seen = 4 * 16
    assert rows.min[0] == 1 and rows.max[0] > seen / 2


def test_calls_outside_of_what_was_lowered_are_run_by_pytorch_and_said(lowered):
    backend, model, module = lowered
    x = image(2, size=24)
    with pytest.warns(UserWarning) as caught:
        close(runner(module, backend)(x), model(x))
    assert "'stem' is run by PyTorch" in str(caught[0].message) and "lowered for 16" in str(caught[0].message)
    assert len(caught) == 3  # once for each child that is concerned
    assert module.report()["outside"]["stem"] == {"'input' has size 24 in dimension 2, and it was lowered for 16": 1}
    assert "stem: 1 x 'input' has size 24" in module.summary()


def test_the_model_is_as_before():
    model = Detector()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    lowered = lower_to_trt(model, image(), calibration=[image()])
    assert model.training and all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == attributes
    parameters = {id(p) for p in model.parameters()}
    assert not parameters & {id(p) for p in lowered.parameters()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_int8(backend):
    model = Detector().eval()
    model.stem[1].momentum = None
    model.stem[1].train()(model.stem[0](image(8)))
    model.eval()
    lowered = BACKENDS[backend](model, image(), calibration=(image(seed=s) for s in range(3)))
    assert [s.name for s in lowered.segments] == NAMES and all(s.precision.startswith("int8") for s in lowered.segments)
    assert all(row.int8 for s in lowered.segments for row in s.ops if row.op in ("conv2d", "linear"))
    (_, towers), (_, expected) = runner(lowered, backend)(image()), model(image())
    for name in expected:
        cosine = F.cosine_similarity(towers[name].flatten(), expected[name].flatten(), dim=0)
        assert cosine > 0.99


def test_a_configuration_names_layers_by_their_place_in_the_model():
    config = {"stem.0": {"dtype": "float"}, nn.Linear: {"weight": "per_tensor"}}
    lowered = lower_to_trt(Detector().eval(), image(), calibration=[image()], qconfig=config, dry_run=True)
    assert [s.name for s in lowered.segments if "int8" not in s.precision] == ["stem"]
    assert next(f.reason for f in lowered.fallbacks if f.node == "stem").startswith("float: nothing in this model")
    with pytest.raises(InputError, match="'neck'"):
        lower_to_trt(Detector().eval(), image(), calibration=[image()], qconfig={"neck": None}, dry_run=True)


class Holder(nn.Module):
    """A traceable root around a leaf that stays Python."""

    def __init__(self):
        super().__init__()
        self.detector = Detector()
        self.before = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        scores, towers = self.detector(self.before(x))
        return {"scores": scores.softmax(1), "towers": towers}


def test_children_of_a_leaf_that_tracing_cannot_enter(tmp_path):
    model = Holder().eval()
    lowered = lower_to_trt(model, image(), precision="fp32")
    names = [s.name for s in lowered.segments]
    assert names[:1] == ["segment_0"] and names[-4:] == [f"detector.{name}" for name in NAMES]
    assert lowered.report()["flops_share"] >= 0.98
    assert [f.node for f in lowered.fallbacks] == ["detector"] and "if y.sum() < 0" in lowered.fallbacks[0].reason
    close(lowered.simulate(image(seed=5)), model(image(seed=5)))
    lowered.save(tmp_path / "artifact")
    other = Holder()
    torch.nn.init.zeros_(other.detector.box.weight)
    loaded = load(tmp_path / "artifact", model=other)
    close(loaded.simulate(image(seed=5)), model(image(seed=5)))


# --- sizes that follow from data


@wrap
def above_the_mean(x):
    return x[x.mean(1) > x.mean() + 1e-3]


class Picks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(above_the_mean(self.first(x)).relu())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_varying_number_of_rows_after_a_python_call(backend):
    model = Picks().eval()
    rows = [torch.randn(n, 8, generator=torch.Generator().manual_seed(n)) for n in range(12, 18)]
    lowered = BACKENDS[backend](model, rows[0], precision="fp32", dynamic_batch=(12, 12, 18))
    seen = set()
    for x in [*rows, torch.ones(12, 8)]:  # of equal rows none is above the mean
        expected = model(x)
        seen.add(len(expected))
        close(runner(lowered, backend)(x), expected)
    assert len(seen) > 3 and 0 in seen
    assert [f.node for f in lowered.fallbacks] == ["above_the_mean"]


class Averages(Picks):
    def forward(self, x):
        return self.second(above_the_mean(self.first(x)).relu().mean(0))


def test_a_result_that_would_come_from_nothing_is_refused():
    lowered = lower_to_trt(Averages().eval(), torch.randn(12, 8), precision="fp32")
    with pytest.raises(InputError, match="gets an empty tensor"):
        lowered.simulate(torch.ones(12, 8))


# --- saving


def test_saved_and_loaded_with_a_model_of_other_weights(lowered, tmp_path):
    backend, model, module = lowered
    module.save(tmp_path / "artifact")
    fresh = Detector()
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    for parameter in fresh.parameters():
        parameter.data.zero_()
    loaded = load(tmp_path / "artifact", model=fresh)
    assert fresh.training and not any(p.any() for p in fresh.parameters())
    assert before.keys() == fresh.state_dict().keys()
    close(runner(loaded, backend)(image(3, seed=7)), model(image(3, seed=7)))
    with pytest.warns(UserWarning, match="is run by PyTorch"):
        close(runner(loaded, backend)(image(2, size=20)), model(image(2, size=20)))


class Renamed(Detector):
    pass


class OtherSignature(Detector):
    def __init__(self):
        super().__init__()
        self.stem.__class__ = type("Stem", (nn.Sequential,), {"forward": lambda self, x, more=1: None})


WRONG = {
    "no model": (None, "Detector itself stays in Python"),
    "another class": (Renamed(), "is a Renamed; the lowered one was a Detector"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_model_is_refused(case, lowered, tmp_path):
    lowered[2].save(tmp_path / "artifact")
    model, message = WRONG[case]
    with pytest.raises(ArtifactError, match=message):
        load(tmp_path / "artifact", model=model)


def test_other_parameters_and_signatures_are_refused(lowered, tmp_path):
    lowered[2].save(tmp_path / "artifact")
    wider = Detector()
    wider.box = nn.Linear(4, 7)
    with pytest.raises(ArtifactError, match="other parameters"):
        load(tmp_path / "artifact", model=wider)
    changed = OtherSignature()
    changed.__class__ = Detector
    with pytest.raises(ArtifactError, match="'stem' has the signature"):
        load(tmp_path / "artifact", model=changed)


def test_loads_in_a_fresh_process(tmp_path):
    lowered = lower_to_trt(Detector().eval(), image(), precision="fp32")
    lowered.save(tmp_path / "artifact")
    torch.save(lowered.simulate(image(seed=3))[0], tmp_path / "expected")
    program = (
        "import sys, torch; sys.path[:0] = sys.argv[1].split(',')\n"
        "from test_children import Detector, image\n"
        "from lowering import load\n"
        "loaded = load(sys.argv[2], model=Detector())\n"
        "assert torch.equal(loaded.simulate(image(seed=3))[0], torch.load(sys.argv[3]))\n"
    )
    folder = str((tmp_path / "artifact").rename(tmp_path / "moved"))
    here = Path(__file__).parent
    args = [sys.executable, "-c", program, f"{here},{here.parent}", folder, str(tmp_path / "expected")]
    subprocess.run(args, check=True, timeout=120)


class Scaled(nn.Module):
    """Called with a tensor, with lists, and with numbers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 4, 1)

    def forward(self, x, scale=1.5, sizes=(4, 4)):
        if isinstance(x, list):
            return [self.conv(part) * scale for part in x]
        return F.adaptive_avg_pool2d(self.conv(x) * scale, sizes)


class ManyCalls(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = block(3, 8), Scaled()

    def forward(self, x):
        y = self.stem(x)
        if y.sum() < 0:
            return y
        inner = self.stem[0](x)  # a layer of a child, on its own
        return self.head(y), self.head(inner), self.head(y, scale=2.0), self.head([y, inner])


def test_calls_of_several_forms():
    model = ManyCalls().eval()
    lowered = lower_to_trt(model, image(), precision="fp32")
    assert [s.name for s in lowered.segments] == ["stem", "stem.0", "head"]
    assert [(f.node, f.reason) for f in lowered.fallbacks][1:] == [
        ("head", "2 of 4 calls have arguments of another form")
    ]
    with pytest.warns(UserWarning, match="'head' is run by PyTorch"):
        close(lowered.simulate(image()), model(image()))
    assert sum(lowered.report()["outside"]["head"].values()) == 2


# --- as language models are written


@dataclasses.dataclass
class Output:
    scores: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, states, mask=None, output_all=False):
        scores = self.project(states) @ states.transpose(1, 2)
        scores = scores if mask is None else scores.masked_fill(~mask, -1e4)
        return (self.norm(states + scores.softmax(2) @ states), *((scores,) if output_all else ()))


class Masked(nn.Module):
    """Tensors by keyword, a mask that is looked at, a dataclass out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(20, 8), nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(8, 20)

    def forward(self, tokens=None, mask=None):
        states = (self.embed(tokens),)
        keep = None if mask is None or bool(mask.all()) else mask[:, None].bool()
        for layer in self.layers:
            states = (*states, layer(states[-1], mask=keep)[0])
        return Output(self.head(states[-1]), hidden=states)


def test_keyword_tensors_and_a_dataclass(tmp_path):
    model, tokens = Masked().eval(), torch.arange(12).reshape(2, 6)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, 4:] = 0
    inputs = {"tokens": tokens, "mask": mask}
    lowered = lower_to_trt(model, inputs, precision="fp32", dynamic_batch=(1, 2, 4))
    assert [s.name for s in lowered.segments] == ["layers.0", "layers.1", "head"]
    lowered.save(tmp_path / "artifact")
    for run in (lowered, load(tmp_path / "artifact", model=Masked())):
        found, expected = run.simulate(**inputs), model(**inputs)
        assert type(found) is Output
        close((found.scores, found.hidden), (expected.scores, expected.hidden))


# --- what is refused


class Hopeless(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


def test_a_model_of_which_nothing_can_be_lowered_is_refused():
    with pytest.raises(CaptureError, match="no submodule of it can be lowered either"):
        lower_to_onnx(Hopeless(), image(), precision="fp32")


def test_full_lowering_of_such_a_model_is_refused():
    with pytest.raises(UnsupportedOpError, match="if y"):
        lower_to_onnx(Detector().eval(), image(), precision="fp32", settings={"require_full_lowering": True})


@wrap
class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x)


class WithKept(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.kept = block(3, 8), Kept()

    def forward(self, x):
        y = self.stem(x).mean((2, 3))
        return self.kept(y) if y.sum() > -100 else y


def test_a_wrapped_child_stays_whole():
    lowered = lower_to_onnx(WithKept().eval(), image(), precision="fp32")
    assert [s.name for s in lowered.segments] == ["stem"]
    assert [(f.node, f.reason) for f in lowered.fallbacks][1:] == [("kept", "wrapped by the user")]


# --- dry runs


@pytest.mark.parametrize(("lower", "model"), [(lower_to_trt, Holder), (lower_to_onnx, WithKept)])
def test_a_dry_run_reports_and_builds_nothing(lower, model, tmp_path):
    dry = lower(model().eval(), image(), calibration=[image()], dry_run=True)
    wet = lower(model().eval(), image(), calibration=[image()])
    mine, theirs = dry.report(), wet.report()
    for key in ("flops_share", "flops", "fallbacks", "capture"):
        assert mine[key] == theirs[key]
    for one, other in zip(mine["segments"], theirs["segments"], strict=True):
        assert one["engines"] == [] and "dry run" in one["backend"]
        assert [one[key] for key in ("name", "nodes", "ops")] == [other[key] for key in ("name", "nodes", "ops")]
    assert "dry run" in dry.summary()
    for call in (dry, dry.simulate):
        with pytest.raises(BackendUnavailableError, match="dry run"):
            call(image())
    with pytest.raises(ArtifactError, match="dry run"):
        dry.save(tmp_path / "nothing")
