"""trace: graphs that compute what eager computes, under every way to call, and a model that stays as it was."""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
import operator
import typing

import pytest
import torch
import torch.nn.functional as F
from capture_models import Asserts
from equality import same
from torch import nn
from torch.ao.quantization import DeQuantStub as TorchDeQuantStub
from tracing import image, targets

from fx_passes import GraphModuleWithAttr, QuantizationTracer, QuantStub, trace, wrap
from fx_passes.errors import InputError

torch.set_num_threads(1)


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
class KeywordOnly(nn.Module):
    def forward(self, x, scale=2.0, *, other):
        return x * scale + other


SIGNATURES = {
    "required keyword after a default": (KeywordOnly, None, [((image(), 3.0), {"other": image(seed=1)})]),
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
