"""restored_state: every place that code can write to is put back, and nothing else is touched."""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass

import pytest
import torch
from object_graph import difference, image_of
from torch import nn

from fx_passes.capture.state import restored_state

TABLE: dict = {"a": 1}
COUNT = 0
STATE = torch.zeros(2)
UNNAMED: list = []


@dataclass(slots=True)
class Slotted:
    value: int = 0


class Plain:
    shared: list = []  # noqa: RUF012

    def __init__(self) -> None:
        self.inner, self.slotted = {"k": [1]}, Slotted()

    def bump(self):
        global COUNT
        COUNT += 1
        self.shared.append(COUNT)


@functools.lru_cache(maxsize=8)
def squared(n):
    return torch.tensor(n * n)


class Everywhere(nn.Module):
    """It holds something in each place that code can write to."""

    default = 1
    table: dict = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("buffer", torch.zeros(2))
        self.register_buffer("none", None)
        self.number, self.tensor = 0, torch.zeros(2)
        self.list, self.dict, self.set = [torch.zeros(2)], OrderedDict(a=[1]), {1}
        self.queue, self.missing, self.plain = deque([1], maxlen=2), defaultdict(list), Plain()
        found, count = [], 0

        def hook(module, args, output):
            nonlocal count
            count += 1
            found.append(output)

        self.norm.register_forward_hook(hook)
        self.partial = functools.partial(lambda into: into.append(1), [])

    @functools.cached_property
    def once(self):
        return object()

    @functools.lru_cache  # noqa: B019
    def cached(self, n):
        return n

    def forward(self, x):
        return WRITES[self.what](self, x)


def set_default(model, x):
    type(model).default = 2


def add_default(model, x):
    type(model).another = 2


def set_global(model, x):
    global COUNT, NEW
    COUNT, NEW = 5, 1
    TABLE["b"] = 2


def keep_in_default(model, x, kept=[]):  # noqa: B006
    kept.append(x)


def keep_on_function(model, x):
    keep_on_function.calls = 1


WRITES = {
    "attribute": lambda m, x: setattr(m, "number", 1),
    "new attribute": lambda m, x: setattr(m, "fresh", x),
    "deleted attribute": lambda m, x: delattr(m, "number"),
    "tensor attribute": lambda m, x: setattr(m, "tensor", x),
    "tensor in place": lambda m, x: m.tensor.add_(1),
    "tensor of another size": lambda m, x: m.tensor.resize_(7),
    "buffer": lambda m, x: setattr(m, "buffer", x),
    "buffer in place": lambda m, x: m.buffer.add_(1),
    "buffer that was None": lambda m, x: setattr(m, "none", x),
    "new buffer": lambda m, x: m.register_buffer("later", x, persistent=False),
    "new module": lambda m, x: m.add_module("later", nn.ReLU()),
    "statistics": lambda m, x: m.norm(x),
    "hook": lambda m, x: m.norm.register_forward_pre_hook(lambda *_: None),
    "list item": lambda m, x: m.list.__setitem__(0, x),
    "list append": lambda m, x: m.list.append(x),
    "list tensor": lambda m, x: m.list[0].add_(1),
    "dict": lambda m, x: m.dict.update(b=x),
    "dict order": lambda m, x: m.dict.setdefault("z", m.dict.pop("a")),
    "inside a dict": lambda m, x: m.dict["a"].clear(),
    "missing": lambda m, x: m.missing["k"],
    "set": lambda m, x: m.set.add(2),
    "queue": lambda m, x: m.queue.extend([2, 3]),
    "object": lambda m, x: setattr(m.plain, "inner", x),
    "inside an object": lambda m, x: m.plain.inner["k"].append(x),
    "slots": lambda m, x: setattr(m.plain.slotted, "value", x),
    "method of an object": lambda m, x: m.plain.bump(),
    "partial": lambda m, x: m.partial(),
    "cached property": lambda m, x: m.once,
    "cached method": lambda m, x: m.cached(3),
    "cached function": lambda m, x: squared(3),
    "class attribute": set_default,
    "new class attribute": add_default,
    "class table": lambda m, x: m.table.update(k=x),
    "globals": set_global,
    "global tensor": lambda m, x: STATE.add_(1),
    "default argument": keep_in_default,
    "function attribute": keep_on_function,
}


@pytest.mark.parametrize("fail", [False, True], ids=["ends", "raises"])
@pytest.mark.parametrize("what", WRITES)
def test_what_a_call_writes_is_put_back(what, fail):
    model = Everywhere()
    model.what = what
    before = image_of(model)
    try:
        with restored_state(model):
            model(torch.ones(3, 2))
            if what not in ("cached method", "cached function"):  # these have another cache inside
                assert difference(before, image_of(model)) != []
            if fail:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fail
    assert difference(before, image_of(model)) == []


def test_what_no_code_of_the_model_names_is_left_alone():
    model = Everywhere()
    with restored_state(model):
        UNNAMED.append(1)
    assert UNNAMED.pop() == 1


def test_what_was_loaded_meanwhile_stays():
    """A module or function that code imports when it is first run is not imported again."""

    class Loading(nn.Module):
        def forward(self, x):
            global loaded_later
            loaded_later = types.ModuleType("loaded_later")
            return x

    with restored_state(Loading()) as state:
        assert "loaded_later" not in vars(sys.modules[__name__])
        Loading()(torch.ones(1))
    assert isinstance(vars(sys.modules[__name__]).pop("loaded_later"), types.ModuleType)
    assert state.holders


def test_containers_that_are_as_before_are_not_written_to():
    """Another thread may be reading them."""

    class Watched(dict):
        def clear(self):
            raise AssertionError

    model = Everywhere()
    model.watched = Watched(a=1)
    with restored_state(model):
        model.number = 3
    assert model.watched == {"a": 1} and model.number == 0


def test_cached_functions_have_their_entries_afterwards():
    model, entries = Everywhere(), squared.cache_info()
    model.what = "cached function"
    squared(2)
    with restored_state(model):
        model(torch.ones(3, 2))
        assert squared.cache_info().currsize == 1 and squared.cache_parameters()["maxsize"] == 8
    assert squared.cache_info().currsize == entries.currsize + 1
    assert squared(2) is squared(2)
    squared.cache_clear()


def test_the_walk_ends_in_a_circle():
    model = Everywhere()
    model.list.append(model.list)
    model.plain.model = model
    with restored_state(model):
        model.list.clear()
    assert model.list[1] is model.list
