"""trace: submodules that cannot be entered, what is asked for as leaves, what is refused, what nodes carry."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from equality import same
from torch import nn
from tracing import image, targets

from fx_passes import QuantizationTracer, trace
from fx_passes.errors import CaptureError, InputError

torch.set_num_threads(1)


# -- leaves -----------------------------------------------------------------------------------------------------------


class Branchy(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        y = self.conv(x)
        if y.sum() > 0:  # the line that is named
            return y
        return -y


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mid, self.second = Branchy(), nn.Sequential(nn.ReLU(), Branchy()), nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return self.second(self.mid(self.first(x)))


def test_a_submodule_that_cannot_be_entered_becomes_a_leaf_with_the_line_as_reason():
    model = Holder()
    gm = trace(model)
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["first", "mid.0", "mid.1", "second"]
    assert set(gm.meta["leaf_reasons"]) == {"first", "mid.1"}
    for reason in gm.meta["leaf_reasons"].values():
        assert "control flow" in reason and "test_trace_leaves.py:" in reason and "if y.sum() > 0" in reason
    first = next(n for n in gm.graph.nodes if n.target == "first")
    assert first.meta["untraceable"] == gm.meta["leaf_reasons"]["first"]
    assert "python" not in first.meta
    same(gm(image()), model(image()))


def test_user_code_cannot_swallow_the_failure():
    class Swallows(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Branchy()

        def forward(self, x):
            try:
                return self.inner(x)
            except Exception:
                return x * 0

    gm = trace(Swallows())
    assert list(gm.meta["leaf_reasons"]) == ["inner"]


def test_a_root_that_cannot_be_traced_is_refused_with_line_and_remedy():
    with pytest.raises(CaptureError) as caught:
        trace(Branchy())
    assert "Branchy" in str(caught.value) and "if y.sum() > 0" in str(caught.value)
    assert "wrap()" in str(caught.value)


REFUSED = {
    "len": lambda self, x: x * len(x),
    "loop over a tensor": lambda self, x: sum(row for row in x),
    "int of a size": lambda self, x: x * int(x.shape[0]),
    "attribute assignment": lambda self, x: setattr(x, "data", x + 1),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_recorded_is_refused_not_lost(case):
    model = type("Model", (nn.Module,), {"forward": REFUSED[case]})()
    with pytest.raises(CaptureError, match=r"test_trace_leaves\.py"):
        trace(model)


def test_autocast_in_forward_is_refused():
    class Mixed(nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ x.transpose(-1, -2)

    with pytest.raises(CaptureError, match="autocast"):
        trace(Mixed())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return F.relu(self.conv(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Block(), nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.b(self.a(x))


@pytest.mark.parametrize(
    ("leaves", "expected"),
    [
        ([], ["a.conv", "b.0.conv", "b.1.conv"]),
        (["a"], ["a", "b.0.conv", "b.1.conv"]),
        (["b"], ["a.conv", "b"]),
        ([Block], ["a", "b.0", "b.1"]),
        ([nn.Sequential, "a.conv"], ["a.conv", "b"]),
    ],
    ids=["none", "a name", "a container", "a class", "mixed"],
)
def test_leaves(leaves, expected):
    model = Net()
    gm = trace(model, leaves=leaves)
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == expected
    same(gm(image()), model(image()))
    tracer = QuantizationTracer([x for x in leaves if isinstance(x, str)], [x for x in leaves if isinstance(x, type)])
    assert [n.target for n in tracer.trace(model).nodes if n.op == "call_module"] == expected


def test_a_module_object_can_be_a_leaf_and_an_unknown_name_is_refused():
    model = Net()
    assert "b.1" in targets(trace(model, leaves=[model.b[1]]))
    with pytest.raises(InputError, match=r"b\.7"):
        trace(model, leaves=["b.7"])


def test_a_module_outside_the_model_is_refused():
    outside = nn.Conv2d(3, 3, 1)

    class Uses(nn.Module):
        def forward(self, x):
            return outside(x)

    with pytest.raises(CaptureError, match="no registered submodule"):
        trace(Uses())


# -- meta -------------------------------------------------------------------------------------------------------------


def test_nodes_carry_the_users_line_and_the_module_that_made_them():
    gm = trace(Net())
    by_name = {n.name: n for n in gm.graph.nodes}
    file, line = by_name["relu"].meta["source"]
    assert file == __file__
    with open(file) as lines:
        assert "F.relu(self.conv(x))" in lines.readlines()[line - 1]
    paths = {n.name: n.meta["module_path"] for n in gm.graph.nodes if n.op not in ("placeholder", "output")}
    assert paths == {
        "a_conv": "a",
        "relu": "a",
        "b_0_conv": "b.0",
        "relu_1": "b.0",
        "b_1_conv": "b.1",
        "relu_2": "b.1",
    }


def test_stage_and_mode_are_recorded():
    assert trace(Net().eval()).meta["training"] is False
    assert trace(Net()).meta["training"] is True
    assert trace(Net()).meta["stage"] == "traced"


class SizeBranch(nn.Module):
    """Pads to even sizes, as TensorFlow-style convolutions and window attention do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2, 2)

    def forward(self, x):
        h, w = x.shape[-2:]
        pad_h, pad_w = max(-h % 2, 0), max(-w % 2, 0)
        if pad_h > 0 or pad_w > 0:
            x = F.pad(x, (0, pad_w, 0, pad_h))
        return self.conv(x)


class RankAndLength(nn.Module):
    def forward(self, x):
        if x.dim() == 3:
            x = x.unsqueeze(0)
        *batch, last = x.shape
        pieces = [p * i for i, p in enumerate(x.chunk(2, -1))]
        return torch.cat(pieces, -1).reshape(*batch, last), len(x.shape)


@pytest.mark.parametrize("inside", [False, True], ids=["as root", "as submodule"])
@pytest.mark.parametrize("cls", [SizeBranch, RankAndLength])
def test_branches_on_sizes_are_followed_for_the_example_and_checked_later(cls, inside):
    model = nn.Sequential(nn.ReLU(), cls()) if inside else cls()
    gm = trace(model, image(w=5))
    assert gm.meta["leaf_reasons"] == {}
    for n in (2, 1, 3):
        same(gm(image(n, w=5)), model(image(n, w=5)))
    if cls is SizeBranch:
        with pytest.raises(InputError, match=r"test_trace_leaves\.py:\d+: if pad_h > 0 or pad_w > 0"):
            gm(image(w=4))
    else:
        with pytest.raises(InputError, match=r"if x\.dim\(\) == 3"):
            gm(image()[0])


def test_without_an_example_a_branch_on_a_size_makes_a_leaf():
    gm = trace(nn.Sequential(nn.ReLU(), SizeBranch()))
    assert "if pad_h > 0" in gm.meta["leaf_reasons"]["1"] or "max(" in gm.meta["leaf_reasons"]["1"]


def test_a_branch_on_data_makes_a_leaf_with_an_example_too():
    assert set(trace(Holder(), image()).meta["leaf_reasons"]) == {"first", "mid.1"}
    with pytest.raises(CaptureError, match=r"if y\.sum\(\) > 0"):
        trace(Branchy(), image())


def test_a_size_becomes_a_number_only_where_nothing_else_helps_and_is_checked():
    class Rows(nn.Module):
        def forward(self, x):
            return sum(x[i] for i in range(x.shape[0]))

    gm = trace(Rows(), image(3))
    assert torch.equal(gm(image(3)), Rows()(image(3)))
    with pytest.raises(InputError, match="traced with inputs for which this is 3"):
        gm(image(2))
    below = trace(nn.Sequential(Rows()), image(3))
    assert below.meta["leaf_reasons"] == {}
    assert torch.equal(below(image(3)), Rows()(image(3)))
    with pytest.raises(InputError, match="traced with inputs for which this is 3"):
        below(image(2))


def test_what_a_half_traced_submodule_did_is_undone():
    class Appends(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, features, x):
            y = self.conv(features[-1]) * x.shape[0]
            features.append(y)
            if y.sum() > 0:
                return y + 1
            return y

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Appends()

        def forward(self, x):
            size = x.shape
            features = [x * 2]
            return self.inner(features, x) + features[0] + size[0] + self.inner.conv.bias.sum()

    model = Model().eval()
    gm = trace(model)
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["inner"]
    same(gm(image()), model(image()))


def test_what_a_half_traced_submodule_left_on_itself_is_not_used():
    class Leaves(nn.Module):
        def forward(self, x):
            self.left = x * 2
            return x if x.sum() > 0 else -x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Leaves()

        def forward(self, x):
            return self.inner(x) + self.inner.left

    with pytest.raises(CaptureError, match="left behind"):
        trace(Model())
