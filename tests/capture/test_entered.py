"""Submodules that tracing cannot follow are entered by torch.export: as their layers, their results as they are."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from equality import same
from torch import nn
from tracing import image, targets

from fx_passes import convert_fx, fuse_fx, prepare_calibration_fx, trace, wrap
from fx_passes.errors import InputError


class Output(OrderedDict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


@dataclasses.dataclass
class Found:
    boxes: Any
    scores: Any = None
    kind: str = "none"


class Pair(NamedTuple):
    first: Any
    second: Any


def not_followed(y):
    """What no proxy can go through: a number made of a size."""
    return y * float(torch.tensor(y.shape[-1]) // 2)


class Inner(nn.Module):
    """Cannot be followed; gives what `make` makes of its features."""

    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.make = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), make
        self.table = nn.Buffer(torch.ones(4, 1, 1))

    def forward(self, x):
        return self.make(not_followed(self.bn(self.conv(x))) + self.table)


class Outer(nn.Module):
    def __init__(self, make=lambda y: y, read=lambda out: out):
        super().__init__()
        self.inner, self.head, self.read = Inner(make), nn.Conv2d(4, 2, 1), read

    def forward(self, x):
        return self.head(self.read(self.inner(x)))


def extra_or_not(out):
    return out.boxes if out.scores is None else out.scores


RESULTS = {
    "tensor": (lambda y: y, lambda out: out),
    "tuple with a number": (lambda y: (y, 2), lambda out: out[0] * out[1]),
    "list": (lambda y: [y, y + 1], lambda out: sum(out) * len(out)),
    "dict": (lambda y: {"a": y, "b": None}, lambda out: out["a"] if out["b"] is None else out["b"]),
    "attributes": (lambda y: Output(boxes=y, scores=None), extra_or_not),
    "dataclass": (lambda y: Found(y), lambda out: extra_or_not(out) if out.kind == "none" else out.kind),
    "named tuple": (lambda y: Pair(y, None), lambda out: out.first if out.second is None else out.second),
    "nested": (lambda y: ([y, (None, {"z": y})], True), lambda out: out[0][1][1]["z"] if out[1] else out[0][0]),
}


@pytest.mark.parametrize("make, read", RESULTS.values(), ids=RESULTS)
def test_code_behind_sees_the_result_as_it_is(make, read):
    model = Outer(make, read).eval()
    gm = trace(model, image())
    assert gm.meta["leaf_reasons"] == {}
    assert {"inner.conv", "inner.bn", "head"} <= set(targets(gm))
    same(gm(image(seed=1)), model(image(seed=1)))


@pytest.mark.parametrize("make, read", [RESULTS["dict"], RESULTS["dataclass"], RESULTS["named tuple"]])
def test_what_a_leaf_gives_is_opened_where_it_holds_none(make, read):
    class Looks(Inner):
        def forward(self, x):
            if x.sum() > 1e9:  # torch.export refuses that too
                return None
            return super().forward(x)

    model = Outer(make, read).eval()
    model.inner.__class__ = Looks
    gm = trace(model, image())
    assert list(gm.meta["leaf_reasons"]) == ["inner"]
    same(gm(image(seed=1)), model(image(seed=1)))


def test_layers_inside_are_fused_and_quantized():
    model = Outer().eval()
    fused = fuse_fx(model, image())
    assert "inner.bn" not in targets(fused)
    prepared = prepare_calibration_fx(fused, image())
    prepared(image())
    converted = convert_fx(prepared)
    assert converted.get_buffer("inner.conv.weight").dtype is torch.int8


def test_sizes_that_vary_stay_free_or_are_checked():
    class Halves(nn.Module):
        def forward(self, x):
            return x[..., : int(x.shape[-1] * 0.5)] if len([*x.shape]) == 4 else x

    def wide(n):
        return torch.randn(2, 3, 4, n)

    model = nn.Sequential(nn.Conv2d(3, 4, 1), Halves()).eval()
    gm = trace(model, wide(8), varying=(wide(6), wide(12)))
    for n in (6, 8, 10, 12):
        try:
            result = gm(wide(n))
        except InputError:
            continue
        assert result.shape[-1] == n // 2


def test_what_is_wrapped_stays_python():
    calls = []

    @wrap
    def noted(y):
        calls.append(1)
        return y + 1

    model = Outer(noted).eval()
    gm = trace(model, image())
    assert list(gm.meta["leaf_reasons"]) == ["inner"]
    calls.clear()
    same(gm(image(seed=1)), model(image(seed=1)))
    assert len(calls) == 2


def test_the_model_stays_as_it_is():
    model = Outer(lambda y: y, lambda out: out)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = (len(model.inner._forward_hooks), len(model.inner._forward_pre_hooks))
    trace(model.train(), image())
    assert (len(model.inner._forward_hooks), len(model.inner._forward_pre_hooks)) == hooks
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_submodule_called_twice_is_entered_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner(lambda y: y[:, :3])

        def forward(self, x):
            return self.inner(self.inner(x)[..., :2])

    model = Twice().eval()
    gm = trace(model, image())
    assert targets(gm).count("inner.conv") == 2
    same(gm(image(seed=1)), model(image(seed=1)))


@torch.fx.wrap
def as_rows(x, rank):
    if x.dim() == rank:
        return x, True
    return x.flatten(1), F.relu(x).dim() == 4


def test_functions_that_a_library_marked_are_followed():
    class Marked(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            rows, flat = as_rows(self.conv(x), 2)
            return rows * 2 if flat else rows

    model = Marked().eval()
    gm = trace(model, image())
    assert as_rows not in [node.target for node in gm.graph.nodes]
    same(gm(image(seed=1)), model(image(seed=1)))
