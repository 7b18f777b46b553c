"""wrap on functions: wherever they are imported to, kept, or named, and nowhere else."""

from __future__ import annotations

import functools
import math
import threading

import capture_models
import capture_third
import pytest
import torch
import torch.nn.functional as F
from capture_models import keep_positive
from test_wrap_methods import Methods
from torch import nn
from wrapping import check, image

from fx_passes import trace, wrap

torch.set_num_threads(1)


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
