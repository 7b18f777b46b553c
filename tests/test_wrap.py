"""wrap: every form in which people use it, what it must leave alone, and what becomes of the call later."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import threading
import typing

import capture_models
import capture_third
import pytest
import torch
import torch.nn.functional as F
from capture_models import keep_positive
from equality import same
from torch import nn

from fx_passes import trace, wrap
from fx_passes.errors import InputError
from fx_passes.partition import partition
from fx_passes.wrap import is_wrapped

torch.set_num_threads(1)
WRAPPED = "wrapped by the user"


def image(n=2, c=3, h=4, w=5, seed=0):
    return torch.randn(n, c, h, w, generator=torch.Generator().manual_seed(seed))


def python_calls(gm):
    return [(n.op, n.target) for n in gm.graph.nodes if n.meta.get("python") == WRAPPED]


def check(model, *inputs, calls):
    """The model traces, its wrapped calls are `calls`, and every form of the graph gives what eager gives."""
    gm = trace(model.eval())
    assert python_calls(gm) == calls
    assert [n for n in gm.graph.nodes if n.meta.get("python") not in (None, WRAPPED)] == []
    forms = {
        "traced": gm,
        "traced twice": trace(gm),
        "deepcopy": copy.deepcopy(gm),
        "copy": copy.copy(gm),
        "traced copy": trace(copy.deepcopy(model)),
        "partitioned": partition(gm, inputs),
        "inside another": trace(nn.Sequential(gm)),
    }
    expected = model(*inputs)
    for name, form in forms.items():
        same(form(*inputs), expected, name)
        assert [c[0] for c in python_calls(form)] == [c[0] for c in calls], name
    assert list(gm.state_dict()) == list(model.state_dict())
    return gm


# -- functions ---------------------------------------------------------------------------------------------------------


@wrap
def decorated(x, k, *extra, scale=1.0, **named):
    """Documented."""
    if x.sum() > 1e9:
        raise ValueError
    total = sum(e.sum() for e in extra) + sum(named.values())
    return {"top": x.flatten().topk(k).values * scale, "total": total, "k": k, "none": None}


def called_later(x):
    return x[x > 0].sort().values


wrap(called_later)
wrap("keep_positive")
wrap("len")
wrap("defined_below")
wrap(math.floor)


def defined_below(x):
    return x * float(x.detach().max())


class Functions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x):
        y = self.conv(x)
        return decorated(y, 3, y, scale=0.5, more=y.mean()), called_later(y), defined_below(y)


def test_functions_by_decorator_by_call_and_by_name():
    gm = check(
        Functions(),
        image(),
        calls=[("call_function", f) for f in (decorated, called_later, defined_below)],
    )
    call = next(n for n in gm.graph.nodes if n.target is decorated)
    assert call.args[1] == 3 and call.kwargs["scale"] == 0.5
    assert decorated.__doc__ == "Documented." and decorated.__name__ == "decorated"


class Imported(nn.Module):
    def forward(self, x):
        return keep_positive(x), capture_models.keep_positive(x), capture_third.by_name(x), capture_third.by_module(x)


def test_a_function_is_reached_wherever_it_was_imported_to():
    check(Imported(), image(), calls=[("call_function", keep_positive)] * 4)


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.post = called_later
        self.table = {"post": called_later}
        self.partial = functools.partial(decorated, k=2)

    def forward(self, x):
        return self.post(x), self.table["post"](x), self.partial(x)


def test_a_function_is_reached_wherever_it_is_kept():
    check(Held(), image(), calls=[("call_function", called_later)] * 2 + [("call_function", decorated)])


class Builtins(nn.Module):
    def forward(self, x):
        return x * len(x), math.floor(x.shape[-1] / 2)


def test_builtins_by_name_and_as_objects():
    check(Builtins(), image(), calls=[("call_function", len), ("call_function", math.floor)])


def test_a_builtin_is_wrapped_for_the_module_that_asked_alone():
    class Elsewhere(nn.Module):
        def forward(self, x):
            return capture_models.number_of_rows(x)

    from fx_passes.errors import CaptureError

    with pytest.raises(CaptureError, match="len"):
        trace(Elsewhere())


def local_functions():
    """Two functions of one name, with closures."""
    made = []
    for offset in (1.0, 2.0):

        @wrap
        def post(x, offset=offset):
            return x + float(x.sum()) * offset + made[0].__defaults__[0]

        made.append(post)
    return made


def test_functions_of_one_name_do_not_disturb_each_other():
    first, second = local_functions()

    class Model(nn.Module):
        def __init__(self, post):
            super().__init__()
            self.post = post

        def forward(self, x):
            return self.post(x)

    class Both(nn.Module):
        def forward(self, x):
            return first(x), second(x)

    check(Model(first), image(), calls=[("call_function", first)])
    check(Model(second), image(), calls=[("call_function", second)])
    check(Both(), image(), calls=[("call_function", first), ("call_function", second)])


def test_a_call_without_traced_values_runs_as_plain_python():
    seen = []

    @wrap
    def scale(k):
        seen.append(k)
        return k * 2.0

    @wrap
    def of_parameter(module):
        return module.weight.detach().sum().item()  # a real tensor, not a traced one

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return self.conv(x) * scale(3) + of_parameter(self.conv)

    check(Model(), image(), calls=[])
    assert set(seen) == {3}


def test_nothing_is_replaced_outside_a_trace():
    codes = {f: f.__code__ for f in (decorated, called_later, keep_positive, Methods.scores, F.softmax)}
    names = dict(globals()), dict(capture_models.__dict__)
    trace(Functions())
    with pytest.raises(RuntimeError):
        trace_and_fail()
    assert all(f.__code__ is code for f, code in codes.items())
    assert dict(globals()) == names[0] and dict(capture_models.__dict__) == names[1]
    assert "len" not in globals()


def trace_and_fail():
    class Fails(nn.Module):
        def forward(self, x):
            assert decorated.__code__.co_filename.endswith("patching.py")
            raise KeyboardInterrupt

    try:
        trace(Fails())
    except KeyboardInterrupt:
        raise RuntimeError from None


def test_another_thread_may_call_a_wrapped_function_while_one_traces():
    x = torch.tensor([3.0, -1.0, 2.0])
    failures, done = [], threading.Event()

    def run():
        while not done.is_set():
            if not torch.equal(called_later(x), torch.tensor([2.0, 3.0])):
                failures.append(1)

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(20):
        trace(Functions())
    done.set()
    thread.join()
    assert failures == []


# -- methods -----------------------------------------------------------------------------------------------------------


class Decoder:
    """A plain object that a model holds."""

    def __init__(self, gain):
        self.gain = gain

    @wrap
    def decode(self, x):
        return [row * self.gain for row in x if row.sum() != 0]


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return self.conv(x)

    @wrap
    def summary(self, x):
        return float(x.detach().mean()) + self.conv.weight.sum()


class Base(nn.Module):
    @wrap
    def scores(self, x, k=2):
        return x.flatten().topk(k).values * self.conv.weight.mean()

    def inherited(self, x):
        return x * float(x.detach().sum())


wrap(Base.inherited)


class Methods(Base):
    limit = 4

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 3, 1), nn.ModuleList([Head()])
        self.decoder, self.holder = Decoder(2.0), Decoder(3.0)
        self.holder.inner = Decoder(5.0)

    @wrap
    @staticmethod
    def static(x):
        return x[x > 0]

    @staticmethod
    @wrap
    def static_inside(x):
        return x[x < 0]

    @classmethod
    @wrap
    def of_class(cls, x):
        return x.flatten()[: cls.limit].tolist()

    @wrap
    def scores(self, x, k=3):
        return super().scores(x, k) + k

    def forward(self, x):
        y = self.conv(x)
        return (
            self.scores(y, k=4),
            self.inherited(y),
            self.head[0].summary(self.head[0](y)),
            self.decoder.decode(y),
            self.holder.inner.decode(y),
            self.static(y),
            Methods.static_inside(y),
            self.of_class(y),
        )


def test_methods_of_every_kind():
    gm = check(
        Methods(),
        image(),
        calls=[
            ("call_method", "scores"),
            ("call_method", "inherited"),
            ("call_method", "summary"),
            ("call_method", "decode"),
            ("call_method", "decode"),
            ("call_function", Methods.static),
            ("call_function", Methods.static_inside),
            ("call_function", Methods.of_class),
        ],
    )
    receivers = [n.args[0].target for n in gm.graph.nodes if n.op == "call_method"]
    assert receivers == ["_self", "_self", "_self.head.0", "_self.decoder", "_self.holder.inner"]


def test_an_overridden_method_that_is_called_through_super_is_the_base_classes():
    class Derived(Base):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def scores(self, x, k=1):  # not wrapped: traced through
            return super().scores(self.conv(x), k) * 2

        def forward(self, x):
            return self.scores(x)

    check(Derived(), image(), calls=[("call_function", Base.scores)])


def test_a_wrapped_method_sees_the_original_float_modules_whatever_becomes_of_the_graph():
    from fx_passes.graph_module import copy_graph_module, set_buffer, set_submodule

    model = Methods().eval()
    gm = copy_graph_module(trace(model))
    set_submodule(gm, "conv", nn.Conv2d(3, 3, 1))
    set_buffer(gm, "head.0.conv.weight", torch.zeros(2, 3, 1, 1))
    y = gm.conv(image())
    same(gm(image())[0], model.scores(y, k=4))


def test_mode_reaches_the_self_of_a_wrapped_method():
    class Says(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Dropout()

        @wrap
        def mode(self, x):
            return self.training, self.inner.training

        def forward(self, x):
            return self.mode(x)

    gm = trace(Says())
    assert gm(image()) == (True, True)
    assert gm.eval()(image()) == (False, False)
    assert copy.deepcopy(gm).train()(image()) == (True, True)
    assert gm(image()) == (False, False)


def test_state_held_by_self_is_returned_and_kept():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.history, self.factor = [], 1.0

        @wrap
        def remember(self, x):
            self.history.append(float(x.sum()))
            return self.history, x * self.factor

        def forward(self, x):
            return self.remember(x + 1)

    model = Keeps()
    gm = trace(model)
    assert model.history == []
    gm(image())
    history, _ = gm(image())
    assert history is model.history and len(history) == 2
    gm.factor = 3.0
    assert torch.equal(gm(image())[1], (image() + 1) * 3.0)


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
        from fx_passes.wrap import _names

        del _names[id(globals()), "no_such_function"]


def test_is_wrapped():
    assert is_wrapped(decorated) and is_wrapped(Methods.scores) and is_wrapped(Special) and is_wrapped(Methods().scores)
    assert is_wrapped(keep_positive) and is_wrapped(Boxes) and is_wrapped(math.floor)
    assert not is_wrapped(image) and not is_wrapped(Methods) and not is_wrapped(math.ceil)
