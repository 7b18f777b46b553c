"""Plain attributes that a forward sets: a graph cannot, and says so where it matters."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from fx_passes import trace, wrap
from lowering import lower_to_onnx


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls = nn.Linear(3, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.fc(x) * self.calls


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.cache = nn.Linear(3, 3), None

    def forward(self, x):
        y = self.fc(x)
        if self.cache is None:
            self.cache = y.mean()
        return y - self.cache


class Parent(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x):
        return self.child(x) + 1


@pytest.mark.parametrize(("make", "name"), [(Counter, "calls"), (Cache, "cache")])
def test_an_attribute_that_changes_is_named_with_its_line(make, name):
    model = make()
    before = vars(model)[name]
    with pytest.warns(UserWarning, match=rf"'{name}' of '{make.__name__}' is changed by forward \(.*: self\.{name} "):
        trace(model, torch.randn(2, 3))
    assert vars(model)[name] is before


def test_a_submodules_attribute_has_its_path():
    with pytest.warns(UserWarning, match=r"'calls' of 'child' \(Counter\)"):
        lower_to_onnx(Parent(Counter()).eval(), torch.randn(2, 3), precision="fp32")


class SameValue(Counter):
    """Sets what is there already, and ends a change with what it began with."""

    def forward(self, x):
        self.kind, self.shape = "plain", (2, [3.0])
        self.calls += 1
        self.calls -= 1
        return self.fc(x)


class WrappedCounter(Counter):
    """The change stays Python, which goes on counting."""

    def forward(self, x):
        return self.counted(self.fc(x))

    @wrap
    def counted(self, y):
        self.calls += 1
        return y * self.calls


class Buffers(Counter):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        return self.fc(x - self.mean)


class InPlace(Counter):
    """A tensor that is no buffer, written to in place: the graph does that, too."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(3)

    def forward(self, x):
        self.total += x.mean(0)
        return self.fc(x) + self.total


class Untraceable(Counter):
    """Asks for a value, so that it stays Python below its parent."""

    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y


def harmless() -> dict[str, nn.Module]:
    same = SameValue()
    same.kind, same.shape = "plain", (2, [3.0])
    return {
        "same": same,
        "wrapped": WrappedCounter(),
        "buffers": Buffers(),
        "in-place": InPlace(),
        "python": Parent(Untraceable()),
    }


@pytest.mark.parametrize("which", list(harmless()))
def test_nothing_is_said_of_changes_that_do_no_harm(which):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the attribute")
        trace(harmless()[which], torch.randn(2, 3))


class Flipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flag", torch.zeros(3, dtype=torch.bool))

    def forward(self, x):
        self.flag = ~self.flag  # operator.invert, which is none of the in-place operators for all its initial i
        return x + self.flag


def test_a_buffer_assigned_an_operator_with_an_i_is_recorded():
    x, model, graph = torch.randn(2, 3), Flipping(), trace(Flipping(), torch.randn(2, 3))
    for _ in range(3):
        assert torch.equal(graph(x), model(x))
