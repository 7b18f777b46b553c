"""wrap on classes, with structured arguments and results, and its misuse."""

from __future__ import annotations

import dataclasses
import math
import typing

import pytest
import torch
from capture_models import keep_positive
from test_wrap_functions import Builtins, decorated
from test_wrap_methods import Decoder, Methods
from torch import nn
from wrapping import check, image

from fx_passes import trace, wrap
from fx_passes.capture.wrap import is_wrapped
from fx_passes.errors import InputError

torch.set_num_threads(1)


# -- classes -----------------------------------------------------------------------------------------------------------


@wrap
class WrappedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return self.conv(x) if x.sum() > 0 else self.conv(-x)

    def anchors(self, x):
        return x.flatten()[: int(x.shape[0])]


class Special(WrappedHead):
    def more(self, x):
        return x.tolist()


class WithHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head, self.special = nn.Conv2d(3, 3, 1), WrappedHead(), Special()

    def forward(self, x):
        y = self.conv(x)
        return self.head(y), self.head.anchors(y), self.special(y), self.special.more(y)


def test_a_module_class_is_a_leaf_and_so_are_its_methods_and_subclasses():
    gm = check(
        WithHead(),
        image(),
        calls=[
            ("call_module", "head"),
            ("call_method", "anchors"),
            ("call_module", "special"),
            ("call_method", "more"),
        ],
    )
    assert gm.meta["leaf_reasons"] == {}


@wrap
class Boxes:
    unit = 2.0

    def __init__(self, values, scale=1.0):
        self.values = values * scale if values.sum() > 0 else values

    def area(self):
        return self.values.abs() * self.unit

    @staticmethod
    def joined(parts):
        return torch.cat([p for p in parts if p.sum() > 0] or parts)


@wrap
class Caller:
    def __init__(self, k):
        self.k = k

    def __call__(self, x):
        return x.flatten()[: self.k].tolist()


class UsesClasses(nn.Module):
    def __init__(self):
        super().__init__()
        self.caller = Caller(3)
        self.plain = isinstance(self.caller, Caller)

    def forward(self, x):
        boxes = Boxes(x, scale=2.0)
        assert not isinstance(3, Boxes)
        return boxes.area(), Boxes.joined([x, x + 1]), self.caller(x), Boxes.unit


def test_any_class_its_construction_and_its_calls():
    gm = check(
        UsesClasses(),
        image(),
        calls=[
            ("call_function", Boxes),
            ("call_function", Boxes.joined),
            ("call_method", "__call__"),
        ],
    )
    assert "area" in [n.target for n in gm.graph.nodes]
    assert Boxes(torch.ones(2)).area().tolist() == [2.0, 2.0]


def test_a_class_defined_in_a_function():
    @wrap
    class Local:
        def __init__(self, x):
            self.x = x[x > 0]

    class Model(nn.Module):
        def forward(self, x):
            return Local(x).x

    check(Model(), image(), calls=[("call_function", Local)])


def test_a_wrapped_class_leaves_its_base_class_alone():
    class Common:
        def twice(self, x):
            return x * 2

    @wrap
    class Wrapped(Common):
        pass

    class Free(Common):
        pass

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.wrapped, self.free = Wrapped(), Free()

        def forward(self, x):
            return self.free.twice(x) + self.wrapped.twice(x)

    check(Model(), image(), calls=[("call_method", "twice")])


# -- arguments and results ---------------------------------------------------------------------------------------------


class Pair(typing.NamedTuple):
    left: torch.Tensor
    right: typing.Any


@dataclasses.dataclass
class Options:
    tensor: typing.Any
    k: int = 2
    frozen: int = dataclasses.field(default=7, init=False)


@wrap
def structured(pair, options, nested, *, config=None):
    left = pair.left[: options.k]
    return Pair(left, options), {"list": [nested["a"][0], None], "config": config}, options.frozen


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Options(None, 9)

    def forward(self, x):
        y = x + 1
        return structured(Pair(y, None), Options(y), {"a": [y, (x, None)], "b": slice(0, 2)}, config=self.config)


def test_named_tuples_dataclasses_and_nested_structures_pass_in_and_out():
    check(
        Structured(),
        image(),
        calls=[("call_function", structured)],
    )


def test_modules_and_plain_objects_as_arguments_are_the_models_own():
    decoder = Decoder(4.0)

    @wrap
    def uses(module, obj, x, key):
        return module.weight.sum() * x * obj.gain, key

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.decoder = nn.Conv2d(3, 3, 1), decoder

        def forward(self, x):
            return uses(self.conv, self.decoder, self.conv(x), "a")

    model = Model()
    gm = check(model, image(), calls=[("call_function", uses)])
    call = next(n for n in gm.graph.nodes if n.target is uses)
    assert [a.target for a in call.args[:2]] == ["_self.conv", "_self.decoder"]
    gm.decoder.gain = 1.0
    assert torch.equal(gm(image())[0], model(image())[0])


# -- misuse ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [3, None, [len], property(lambda self: 1)], ids=["int", "None", "list", "property"])
def test_what_cannot_be_wrapped_is_refused(target):
    with pytest.raises(InputError, match="cannot wrap"):
        wrap(target)


def test_a_name_that_the_module_does_not_have_is_warned_about():
    from fx_passes import wrap as wrap_module_function

    wrap_module_function("no_such_function")
    try:
        with pytest.warns(UserWarning, match="no_such_function"):
            trace(Builtins())
    finally:
        from fx_passes.capture.wrap import _names

        del _names[id(globals()), "no_such_function"]


def test_is_wrapped():
    assert is_wrapped(decorated) and is_wrapped(Methods.scores) and is_wrapped(Special) and is_wrapped(Methods().scores)
    assert is_wrapped(keep_positive) and is_wrapped(Boxes) and is_wrapped(math.floor)
    assert not is_wrapped(image) and not is_wrapped(Methods) and not is_wrapped(math.ceil)
