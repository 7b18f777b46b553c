"""trace: graphs that compute what eager computes, under every way to call, and a model that stays as it was."""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
import operator
import threading
import typing

import pytest
import torch
import torch.nn.functional as F
from capture_models import Asserts
from equality import same
from torch import nn
from torch.ao.quantization import DeQuantStub as TorchDeQuantStub

from fx_passes import GraphModuleWithAttr, QuantizationTracer, QuantStub, trace, wrap
from fx_passes.errors import CaptureError, InputError

torch.set_num_threads(1)


def image(n=2, c=3, h=4, w=5, seed=0):
    return torch.randn(n, c, h, w, generator=torch.Generator().manual_seed(seed))


def targets(gm):
    return [n.target for n in gm.graph.nodes]


# -- the two programs of the first report -----------------------------------------------------------------------------


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), TorchDeQuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()

    def forward(self, input):
        x = self.dequant(self.relu(self.bn(self.conv(self.quant(input)))))
        if self.training:
            print("Run softmax")
            return F.softmax(x, dim=1)
        print("Run argmax")
        return torch.argmax(x, dim=1)


class Second(First):
    def forward(self, input):
        return self._post_process(self.dequant(self.relu(self.bn(self.conv(self.quant(input))))))

    @wrap
    def _post_process(self, x):
        if self.training:
            print("Run softmax")
            return F.softmax(x, dim=1)
        print("Run argmax")
        return torch.argmax(x, dim=1)


def test_post_processing_in_forward_is_traced_through(capsys):
    model = First()
    graph = QuantizationTracer([], []).trace(model)
    assert capsys.readouterr().out == "Run softmax\n"
    assert [n.name for n in graph.nodes] == ["input_1", "conv", "bn", "relu", "softmax", "output"]
    graph.print_tabular()
    assert "argmax" not in capsys.readouterr().out
    graph_model = GraphModuleWithAttr(model, graph)
    data = torch.rand(1, 3, 64, 64)
    assert torch.equal(graph_model(data), copy.deepcopy(model)(data))
    assert capsys.readouterr().out == "Run softmax\n"  # printed by the eager model alone
    assert list(graph_model.state_dict()) == list(model.state_dict())


def test_wrapped_post_processing_is_one_call(capsys):
    model = Second()
    graph = QuantizationTracer([], []).trace(model)
    assert capsys.readouterr().out == ""
    assert [n.name for n in graph.nodes] == ["input_1", "conv", "bn", "relu", "_self", "_post_process", "output"]
    call = next(n for n in graph.nodes if n.name == "_post_process")
    assert (call.op, call.target) == ("call_method", "_post_process")
    assert [n.name for n in call.args] == ["_self", "relu"]
    assert call.meta["python"] == "wrapped by the user"
    assert (call.args[0].op, call.args[0].target) == ("get_attr", "_self")
    graph_model = GraphModuleWithAttr(model, graph)
    assert "_self._post_process(relu)" in graph_model.code
    data = torch.rand(1, 3, 64, 64)
    assert graph_model(data).shape == (1, 3, 64, 64)
    assert capsys.readouterr().out == "Run softmax\n"
    assert graph_model.eval()(data).shape == (1, 64, 64)
    assert capsys.readouterr().out == "Run argmax\n"
    assert list(graph_model.state_dict()) == list(model.state_dict())


# -- what symbolic tracing alone refuses or gets wrong ----------------------------------------------------------------


class Unpacked(nn.Module):
    def forward(self, x):
        n, c, h, w = x.shape
        return x.reshape(n, c * h, w) / math.sqrt(w)


class Written(nn.Module):
    def forward(self, x):
        y = x * 2
        y[:, 0] = 0
        y[:, 1:] += 1
        y[y > 1] = 1.0
        return y


class Augmented(nn.Module):
    def forward(self, x):
        y = x + 1
        z = y
        y += x
        y *= 2
        y -= 1
        y /= 3
        return y, z


class Factories(nn.Module):
    def forward(self, x):
        n, w = x.shape[0], x.size(-1)
        parts = [torch.zeros(n, w), torch.ones((n, w)), torch.full((n, w), 2.0), torch.eye(n, w), torch.empty(n, 0)]
        return torch.cat(parts, 1), torch.arange(w), torch.linspace(0, 1, w), torch.tensor([1.0, 2.0]) * x.mean()


class FactoryThenWrite(nn.Module):
    def forward(self, x):
        out = torch.zeros(2, 3)
        out[0] = x.mean((0, 2, 3))
        return out


class ShapeOfParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("table", torch.randn(2, 3))

    def forward(self, x):
        if self.weight.shape[0] == 3 and self.table.dim() == 2:
            x = x * self.weight.view(1, -1, 1, 1)
        for row in self.table:
            x = x + row.view(1, -1, 1, 1)
        return x


class Named(typing.NamedTuple):
    mean: torch.Tensor
    top: typing.Any


@dataclasses.dataclass
class Boxed:
    values: torch.Tensor
    extra: typing.Any = None


class Structures(nn.Module):
    def forward(self, x):
        m = x.mean()
        ordered = collections.OrderedDict(b=m, a=x)
        return {"named": Named(m, (x, [m])), "boxed": Boxed(x), "ordered": ordered, "none": None, "n": 3}


class PlainTensorAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.anchors = torch.randn(3, 1, 1)
        self.hidden = [torch.randn(3, 1, 1)]
        self.loose = [nn.Parameter(torch.randn(3, 1, 1))]

    def forward(self, x):
        return x + self.anchors - self.hidden[0] * self.loose[0]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = self.b = nn.Conv2d(3, 3, 1)
        self.c = nn.Conv2d(3, 3, 1)
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(self.a(x))) + self.c.weight.sum()


EQUAL = [Unpacked, Written, Augmented, Factories, FactoryThenWrite, Asserts, ShapeOfParameter, Structures]
EQUAL += [PlainTensorAttribute, Tied]


@pytest.mark.parametrize("cls", EQUAL, ids=lambda c: c.__name__)
def test_graph_computes_what_eager_computes(cls):
    model = cls().eval()
    gm = trace(model)
    assert gm.meta["leaf_reasons"] == {}
    for x in (image(), image(1), image(3, h=6)):
        same(gm(x.clone()), model(x.clone()))
        same(copy.deepcopy(gm)(x.clone()), model(x.clone()))
    assert list(gm.state_dict()) == list(model.state_dict())


def test_augmented_assignment_is_recorded_under_its_own_operator():
    recorded = targets(trace(Augmented()))
    assert [t for t in recorded if t in (operator.iadd, operator.imul, operator.isub, operator.itruediv)] == [
        operator.iadd,
        operator.imul,
        operator.isub,
        operator.itruediv,
    ]
    assert operator.setitem in targets(trace(Written()))


def test_factories_of_traced_sizes_are_nodes_and_constant_ones_stay_values():
    recorded = targets(trace(Factories()))
    assert recorded.count(torch.zeros) == 1 and recorded.count(torch.arange) == 1
    assert torch.tensor not in recorded


def test_a_recorded_assertion_still_fails():
    gm = trace(Asserts())
    with pytest.raises(AssertionError):
        gm(image(c=4))


def test_random_factories_draw_at_each_call():
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.rand(1)

    gm, x = trace(Noise()), image()
    assert not torch.equal(gm(x), gm(x))


class Counter(nn.Module):
    def __init__(self, rebind):
        super().__init__()
        self.rebind = rebind
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        before = self.count
        if self.rebind:
            self.count = self.count + 1
            return x + self.count, before
        self.count += 1
        return x + self.count, before.clone()


@pytest.mark.parametrize("rebind", [False, True], ids=["in place", "rebound"])
def test_buffers_change_at_each_call_and_not_while_tracing(rebind):
    model = Counter(rebind)
    gm = trace(copy.deepcopy(model))
    x = image()
    assert gm.count.item() == 0
    for _ in range(3):
        same(gm(x), model(x))
    assert gm.count.item() == model.count.item() == 3


# -- call signatures --------------------------------------------------------------------------------------------------


class Optional(nn.Module):
    def forward(self, x, mask=None, flip=False, scale=2.0, *, bias=None):
        if mask is not None:
            x = x * mask
        if flip:
            x = x.flip(-1)
        if bias is not None:
            x = x + bias
        return x * scale


class Variadic(nn.Module):
    def forward(self, x, *rest, flip=False, **named):
        for r in rest:
            x = x + r
        for key in named:
            x = x * named[key]
        return x.flip(-1) if flip else x


class Nested(nn.Module):
    def forward(self, batch, sizes=(1, 2)):
        total = sum(v.mean() for v in batch["images"])
        return {k: v + total for k, v in batch["maps"].items()}, sizes


NESTED = {"images": [image(), image(seed=1)], "maps": {"b": image(seed=2), "a": image(seed=3)}}
# (model, example inputs given to trace, calls that must then equal eager)
SIGNATURES = {
    "defaults": (Optional, None, [((image(),), {}), ((image(),), {"scale": 3.0}), ((), {"x": image()})]),
    "mask given": (Optional, (image(), image(seed=1)), [((image(), image(seed=5)), {"scale": 0.5})]),
    "keyword example": (
        Optional,
        {"x": image(), "flip": True, "bias": image()},
        [((image(), None, True), {"bias": image(seed=4)})],
    ),
    "extra positional": (Variadic, (image(), image(), image()), [((image(), image(seed=1), image(seed=2)), {})]),
    "extra keywords": (
        Variadic,
        {"x": image(), "gain": image(), "flip": True},
        [((image(),), {"flip": True, "gain": image(seed=1)})],
    ),
    "nested": (Nested, (NESTED,), [((NESTED,), {})]),
}  # fmt: skip


@pytest.mark.parametrize("case", SIGNATURES)
def test_call_signature_is_kept(case):
    cls, example, calls = SIGNATURES[case]
    model = cls()
    gm = trace(model, example)
    for args, kwargs in calls:
        same(gm(*args, **kwargs), model(*args, **kwargs))


def test_an_argument_the_graph_was_not_traced_for_is_refused_by_name():
    gm = trace(Optional())
    with pytest.raises(InputError, match="'mask'"):
        gm(image(), image())
    with pytest.raises(InputError, match="'flip'"):
        gm(image(), flip=True)
    assert gm(image(), None, False).shape == image().shape


def test_concrete_args_fix_an_argument_and_keep_its_name():
    class Steps(nn.Module):
        def forward(self, x, steps):
            for _ in range(steps):
                x = x * 2
            return x

    gm = trace(Steps(), concrete_args={"steps": 3})
    assert torch.equal(gm(image(), steps=3), image() * 8)
    with pytest.raises(InputError, match="traced for 3"):
        gm(image(), steps=2)
    with pytest.raises(InputError, match="no argument of forward"):
        trace(Steps(), concrete_args={"stpes": 3})


def test_a_number_is_fixed_only_where_tracing_needs_its_value():
    class Steps(nn.Module):
        def forward(self, x, steps=2):
            for _ in range(steps):
                x = x * 2
            return x

    gm = trace(Steps())
    assert torch.equal(gm(image()), image() * 4)
    with pytest.raises(InputError, match="'steps'"):
        gm(image(), 3)
    assert torch.equal(trace(Optional())(image(), scale=5.0), image() * 5)


def test_example_inputs_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="do not fit"):
        trace(Unpacked(), (image(), image()))


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
        assert "control flow" in reason and "test_trace.py:" in reason and "if y.sum() > 0" in reason
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
    with pytest.raises(CaptureError, match=r"test_trace\.py"):
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


# -- nothing else changes ---------------------------------------------------------------------------------------------


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.calls, self.last, self.table = 0, None, torch.zeros(1)
        self.seen = []

    def forward(self, x):
        self.calls += 1
        self.table.add_(1)
        y = self.bn(self.conv(x))
        self.last = y
        if self.fail:
            raise RuntimeError("as asked")
        return y + torch.rand(())

    fail = False


@pytest.mark.parametrize("fail", [False, True], ids=["traced", "refused"])
def test_the_model_and_global_state_stay_as_they_were(fail):
    model = Stateful()
    model.fail = fail
    calls = []
    model.conv.register_forward_hook(lambda *a: calls.append(1))
    before, attributes = copy.deepcopy(model.state_dict()), dict(model.__dict__)
    torch.manual_seed(3)
    rng = torch.random.get_rng_state()
    functions = (torch.zeros, torch.rand, nn.Module.__call__, nn.Module.__getattr__, nn.Module.__setattr__)
    if fail:
        with pytest.raises(CaptureError, match="as asked"):
            trace(model)
    else:
        trace(model)
    assert functions == (torch.zeros, torch.rand, nn.Module.__call__, nn.Module.__getattr__, nn.Module.__setattr__)
    assert torch.equal(torch.random.get_rng_state(), rng)
    assert dict(model.__dict__) == attributes and model.training
    assert model.calls == 0 and model.last is None and model.table.item() == 0 and calls == []
    assert len(model.conv._forward_hooks) == 1
    same(dict(model.state_dict()), dict(before))


def test_other_threads_are_undisturbed_while_one_traces():
    traced, eager = Net().eval(), nn.Sequential(Net(), Second()).eval()
    x = image()
    expected, failures, done = eager(x), [], threading.Event()

    def run():
        while not done.is_set():
            out = eager(x)
            sizes = torch.zeros(2, 3).shape, torch.rand(2).shape
            if not (isinstance(out, torch.Tensor) and torch.equal(out, expected)) or sizes != ((2, 3), (2,)):
                failures.append(out)
                return

    threads = [threading.Thread(target=run) for _ in range(2)]
    for t in threads:
        t.start()
    graphs = [str(trace(traced).graph) for _ in range(10)]
    done.set()
    for t in threads:
        t.join()
    assert failures == [] and len(set(graphs)) == 1


def test_two_threads_may_trace():
    results = {}

    def run(name, model):
        results[name] = [str(trace(model).graph) for _ in range(5)]

    threads = [threading.Thread(target=run, args=a) for a in (("net", Net()), ("tied", Tied()))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert set(results["net"]) == {str(trace(Net()).graph)} and set(results["tied"]) == {str(trace(Tied()).graph)}


# -- real models ------------------------------------------------------------------------------------------------------


@pytest.mark.zoo
@pytest.mark.parametrize(
    "name", ["resnet18", "mobilenet_v2", "densenet121", "shufflenet_v2_x0_5", "googlenet", "regnet_y_400mf"]
)
def test_torchvision_models_trace_to_equal_graphs(name):
    models = pytest.importorskip("torchvision.models")
    options = {"init_weights": False} if name == "googlenet" else {}
    torch.manual_seed(0)
    model = models.get_model(name, weights=None, **options).eval()
    gm = trace(model)
    assert gm.meta["leaf_reasons"] == {} and list(gm.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        x = torch.randn(1, 3, 64, 64)
        same(gm(x), model(x))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.MultiheadAttention(8, 2),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
    ],
    ids=["attention", "encoder"],
)
@pytest.mark.parametrize("inside", [False, True], ids=["as root", "as submodule"])
def test_attention_is_entered(layer, inside):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer()

        def forward(self, x):
            return self.layer(x, x, x)[0] if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)

    torch.manual_seed(0)
    model = (Model() if inside else layer()).eval()
    inputs = (torch.randn(3, 2, 8),) * (1 if inside or not isinstance(model, nn.MultiheadAttention) else 3)
    gm = trace(model)
    assert not any(isinstance(m, nn.MultiheadAttention) for n, m in gm.named_modules() if n in targets(gm))
    assert gm.meta["leaf_reasons"] == {} and list(gm.state_dict()) == list(model.state_dict())
    actual, expected = gm(*inputs), model(*inputs)
    for a, e in zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]:
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)  # the products are summed in another order


# -- branches on sizes -------------------------------------------------------------------------------------------------


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
        with pytest.raises(InputError, match=r"test_trace\.py:\d+: if pad_h > 0 or pad_w > 0"):
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


def test_a_size_becomes_a_number_only_where_the_root_cannot_do_without_and_is_checked():
    class Rows(nn.Module):
        def forward(self, x):
            return sum(x[i] for i in range(x.shape[0]))

    gm = trace(Rows(), image(3))
    assert torch.equal(gm(image(3)), Rows()(image(3)))
    with pytest.raises(InputError, match="traced with inputs for which this is 3"):
        gm(image(2))
    leaf = trace(nn.Sequential(Rows()), image(3))
    assert list(leaf.meta["leaf_reasons"]) == ["0"]
    assert torch.equal(leaf(image(2)), Rows()(image(2)))


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
