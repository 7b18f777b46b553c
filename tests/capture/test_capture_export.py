"""Roots that symbolic tracing refuses and torch.export captures: the same graph, the same names, the same numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from equality import same
from torch import nn

from fx_passes import convert_fx, functionalize, fuse_fx, prepare_calibration_fx, trace, wrap
from fx_passes.errors import ArtifactError, CaptureError, InputError
from lowering import load, lower_to_onnx, lower_to_trt

BACKENDS = {"trt": lower_to_trt, "onnx": lower_to_onnx}


def image(n=2, size=10, seed=0):
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


class Body(nn.Module):
    """Layers, functional layers and BatchNorms of both kinds, and a loop over rows, which cannot be traced."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.kernel, self.again = nn.Parameter(torch.randn(8, 8, 1, 1)), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)
        for norm in (self.norm, self.again):
            norm.running_mean.uniform_(-0.5, 0.5)
            norm.running_var.uniform_(0.5, 2.0)

    def features(self, x):
        y = F.relu(self.norm(self.conv(x)), inplace=True)
        return F.relu6(self.again(F.conv2d(y, self.kernel)))


class Rows(Body):
    def forward(self, x):
        total = 0
        for row in self.features(x).mean(3).permute(2, 0, 1):
            total = total + row
        return self.head(total)


class Straight(Body):
    """The same arithmetic, traceable."""

    def forward(self, x):
        rows = self.features(x).mean(3).permute(2, 0, 1)
        return self.head(sum([rows[i] for i in range(8)]))


class Out(NamedTuple):
    scores: torch.Tensor
    size: torch.Size


class Structured(Body):
    def forward(self, x, scale=1.5, *, extra):
        pooled = sum(row for row in self.features(x).mean(3).permute(2, 0, 1))
        for part in extra["parts"]:
            pooled = pooled + part.sum()
        return {"out": Out(self.head(pooled) * scale, x.shape), "pair": (pooled, None)}


class Counting(Body):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return torch.stack([row * self.calls for row in self.features(x).mean((2, 3))])


class SizedBranch(Body):
    """Branches on what symbolic tracing would have to take for a constant."""

    def forward(self, x):
        y = self.features(x)
        y = y.view(torch.Size((y.shape[0], 8, -1))) / math.sqrt(y.shape[1])
        return y.mean(2) if y.shape[2] > 40 else y.amax(2)


def test_graph_is_the_models_own_and_says_why_it_was_exported():
    model, x = Rows().eval(), image()
    gm = trace(model, x)
    assert isinstance(gm, Rows) and list(gm.state_dict()) == list(model.state_dict())
    assert "test_capture_export.py" in gm.meta["exported"] and "for row in" in gm.meta["exported"]
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["conv", "norm", "again", "head"]
    lines = {
        n.meta["source"][0].rpartition("/")[2]
        for n in gm.graph.nodes
        if n.op == "call_function" and n.meta.get("source")
    }
    assert lines == {"test_capture_export.py"}
    same(gm(x), model(x))
    same(functionalize(gm)(x), model(x))


def test_a_model_that_is_traced_is_not_exported():
    assert "exported" not in trace(Straight().eval(), image()).meta


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt-rtx"])
def test_folds_and_quantizes_like_the_traced_form(target):
    x = image()
    exported, traced = (fuse_fx(cls().eval(), x) for cls in (Rows, Straight))
    assert [f.meta["fuse_report"][0][1] for f in (exported, traced)] == ["folded into 'conv'"] * 2
    assert [len(f.meta["fuse_report"]) for f in (exported, traced)] == [2, 2]
    torch.testing.assert_close(exported(x), Rows().eval()(x), rtol=1e-5, atol=1e-5)
    converted = []
    for fused in (exported, traced):
        prepared = prepare_calibration_fx(fused, target=target)
        prepared(x)
        converted.append(convert_fx(prepared))
    # a functional layer's parameters are stored under the name of its node
    mine, theirs = ({k.replace("conv2d_1", "conv2d"): v for k, v in c.state_dict().items()} for c in converted)
    assert mine.keys() == theirs.keys() and {"conv.weight", "conv.weight_scale", "head.weight"} <= mine.keys()
    assert mine["conv.weight"].dtype == torch.int8
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_batch_stays_dynamic(backend, precision):
    model = Rows().eval()
    lowered = BACKENDS[backend](model, image(), precision=precision, calibration=[image()], dynamic_batch=(1, 2, 4))
    assert lowered.fallbacks == [] and lowered.report()["flops_share"] >= 0.99
    assert lowered.report()["capture"]["route"] == "torch.export" and "for row in" in lowered.summary()
    run = lowered.simulate if backend == "trt" else lowered
    for n in (1, 3, 4):
        x = image(n, seed=n)
        tolerance = 1e-4 if precision == "fp32" else 0.1
        torch.testing.assert_close(run(x), model(x), rtol=tolerance, atol=tolerance)


def test_structures_defaults_and_constants_of_the_signature():
    model = Structured().eval()
    inputs = {"x": image(), "extra": {"parts": [torch.ones(2), torch.ones(3)]}}
    gm = trace(model, inputs)
    same(gm(**inputs), model(**inputs))
    same(gm(image(), 1.5, extra=inputs["extra"]), model(**inputs))
    with pytest.raises(InputError, match="scale"):
        gm(image(), 2.5, extra=inputs["extra"])
    with pytest.raises(AssertionError, match="'extra'"):
        gm(image())


def test_a_size_that_decided_something_is_checked_at_each_call():
    gm = trace(Rows().eval(), image())
    same(gm(image(5)), Rows().eval()(image(5)))
    with pytest.raises(InputError, match=r"x\.shape\[2\]"):
        gm(image(2, size=12))
    fixed = trace(Rows().eval(), image(), varying=(image(), image()))
    with pytest.raises(InputError, match=r"x\.shape"):
        fixed(image(5))


def test_what_tracing_would_freeze_is_exported_if_it_varies():
    model = SizedBranch().eval()
    assert "exported" not in trace(model, image()).meta
    gm = trace(model, image(), varying=(image(1), image(4)))
    assert "constant" in gm.meta["exported"]
    same(gm(image(3)), model(image(3)))
    lowered = lower_to_onnx(model, image(), precision="fp32", dynamic_batch=(1, 2, 4))
    torch.testing.assert_close(lowered(image(3)), model(image(3)), rtol=1e-4, atol=1e-4)


def test_buffers_change_at_each_call():
    model, twin = Counting().eval(), Counting().eval()
    gm = trace(model, image())
    assert model.calls == 0
    same([gm(image()), gm(image())], [twin(image()), twin(image())])
    lowered = lower_to_onnx(Counting().eval(), image(), precision="fp32")
    again = Counting().eval()
    for _ in range(2):
        torch.testing.assert_close(lowered(image()), again(image()), rtol=1e-4, atol=1e-4)


@wrap
def python_only(x):
    return [row[row > 0] for row in x.flatten(1)]


class Wrapped(Body):
    def forward(self, x):
        for row in self.features(x):
            x = x + row.sum()
        return python_only(x)


def test_wrapped_python_is_not_exported_away():
    with pytest.raises(CaptureError, match="'python_only', which is wrapped"):
        trace(Wrapped().eval(), image())


class OnData(Body):
    def forward(self, x):
        y = self.features(x)
        return self.head(y.mean((2, 3))) if y.mean() > 0 else y


def test_a_branch_on_data_is_refused_by_both_with_the_line():
    with pytest.raises(CaptureError) as error:
        trace(OnData().eval(), image())
    assert str(error.value).count("if y.mean() > 0") == 2
    assert error.value.source is not None and error.value.source.startswith("test_capture_export.py:")


def test_leaves_and_concrete_arguments_are_not_given_up_for_an_export():
    with pytest.raises(CaptureError, match="a loop runs over"):
        trace(Rows().eval(), image(), leaves=[nn.Linear])


def test_saved_and_loaded(tmp_path):
    model = Structured().eval()
    inputs = {"x": image(), "extra": {"parts": [torch.ones(2)]}}
    lowered = lower_to_onnx(model, inputs, precision="fp32")
    lowered.save(tmp_path / "artifact")
    for given in ({"fallbacks": {"Out": Out}}, {"model": Structured()}):
        loaded = load(tmp_path / "artifact", **given)
        same(loaded(**inputs), lowered(**inputs))
    with pytest.raises(ArtifactError, match="'Out'"):
        load(tmp_path / "artifact")
    with pytest.raises(InputError, match="scale"):
        loaded(**(inputs | {"scale": 3.0}))


class ChecksType(Body):
    def forward(self, x):
        if not isinstance(x, torch.Tensor):
            raise TypeError("an image, please")
        return self.features(x) if isinstance(x.shape[0], int) else x


def test_isinstance_of_a_traced_tensor():
    model = ChecksType().eval()
    for example in (image(), None):
        gm = trace(model, example)
        assert "exported" not in gm.meta
    same(trace(model, image())(image()), model(image()))
    assert "isinstance" not in globals()
