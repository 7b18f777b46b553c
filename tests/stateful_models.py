"""Models whose forward keeps something: caches by size in all the places that people put them, and what calls carry on.

`CACHES` give at every call what a fresh model gives; `CARRYING` do not, and are said to be so by the name of what they
keep; `BY_PRODUCTS` leave something behind that no call reads.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict, deque

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["BY_PRODUCTS", "CACHES", "CARRYING"]


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)


def positions(size, like):
    return torch.arange(size, dtype=like.dtype, device=like.device)


# -- caches -----------------------------------------------------------------------------------------------------------


class ClassDefaults(_Base):
    """YOLO's head: anchors for the last size of the input, with defaults on the class."""

    shape = None
    anchors = torch.empty(0)
    strides = torch.empty(0)

    def forward(self, x):
        y = self.conv(x)
        if self.shape != x.shape:
            count = y.shape[2] * y.shape[3]
            self.anchors = torch.arange(count, dtype=x.dtype).view(1, 1, count)
            self.strides = torch.full((1, 1, count), 8.0)
            self.shape = x.shape
        return (y.flatten(2) + self.anchors) * self.strides


class GridOfEachLevel(_Base):
    """Older YOLOs: a list of grids, of which the tensor's own shape says whether it fits."""

    def __init__(self) -> None:
        super().__init__()
        self.grid = [torch.empty(0)] * 2

    def forward(self, x):
        out = []
        for i in range(2):
            x = self.conv(x)[:, :3]
            if self.grid[i].shape[1:3] != x.shape[2:4]:
                self.grid[i] = self.make(x.shape[3], x.shape[2]).to(x.device)
            out.append((x.permute(0, 2, 3, 1) + self.grid[i]).flatten(1))
        return torch.cat(out, 1)

    @staticmethod
    def make(nx, ny):
        yv, xv = torch.meshgrid(torch.arange(ny), torch.arange(nx), indexing="ij")
        return torch.stack((xv, yv, xv), 2).view(1, ny, nx, 3).float()


class GrowingBuffer(_Base):
    """A buffer of size 0 that is replaced by one of the right size."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.empty(0), persistent=False)

    def forward(self, x):
        y = self.conv(x)
        if self.grid.numel() != y.shape[-1]:
            self.grid = torch.arange(y.shape[-1]).float()
        return y * self.grid


class GrowingTable(_Base):
    """A table that is made longer when it has to be, and cut."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", self.rows(4))

    @staticmethod
    def rows(n):
        return torch.linspace(0, 1, 64)[:n] * 2.0

    def forward(self, x):
        y = self.conv(x)
        if y.shape[-1] > self.table.shape[0]:
            self.table = self.rows(y.shape[-1])
        return y * self.table[: y.shape[-1]]


class RotaryTable(nn.Module):
    """Rotary embedding that registers its tables anew for longer sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.longest = nn.Linear(3, 8), 0

    def make(self, n):
        self.longest = n
        angles = torch.outer(torch.arange(n).float(), 1.0 / 10 ** (torch.arange(0, 8, 2) / 8))
        table = torch.cat([angles, angles], -1)
        self.register_buffer("cos", table.cos()[None], persistent=False)
        self.register_buffer("sin", table.sin()[None], persistent=False)

    def forward(self, x):
        y = self.linear(x.flatten(2).transpose(1, 2))
        n = y.shape[1]
        if n > self.longest:
            self.make(n)
        a, b = y.chunk(2, -1)
        return y * self.cos[:, :n] + torch.cat([-b, a], -1) * self.sin[:, :n]


class NoneBuffer(_Base):
    """A mask registered as None, made at the first call and for each new size."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None)

    def forward(self, x):
        y = self.conv(x)
        if self.mask is None or self.mask.shape != y.shape[-2:]:
            mask = torch.zeros(y.shape[-2], y.shape[-1])
            mask[::2] = 1
            self.mask = mask
        return y * self.mask


class DictByText(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.cache = {}

    def forward(self, x):
        y = self.conv(x)
        key = f"{y.shape[2]}x{y.shape[3]}-{y.device}"
        if key not in self.cache:
            self.cache[key] = positions(y.shape[3], y)
        return y * self.cache[key]


class DictBySizes(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.cache = {}

    def forward(self, x):
        y = self.conv(x)
        try:
            table = self.cache[y.shape[2:], y.device]
        except KeyError:
            table = self.cache[y.shape[2:], y.device] = positions(y.shape[3], y)
        return y * table


class DictOfDicts(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.cache = defaultdict(dict)

    def forward(self, x):
        y = self.conv(x)
        table = self.cache[str(y.dtype)].get(y.size(-1))
        if table is None:
            table = self.cache[str(y.dtype)].setdefault(y.size(-1), positions(y.size(-1), y))
        return y * table


TABLES: dict = {}


class ModuleCache(_Base):
    """A global of the module, by the text of a size."""

    def forward(self, x):
        y = self.conv(x)
        key = str(y.shape[-2:])
        if key not in TABLES:
            TABLES[key] = positions(y.shape[-1], y) + y.shape[-2]
        return y * TABLES[key]


class ClassCache(_Base):
    """A dict of the class, that all models share."""

    tables: dict = {}  # noqa: RUF012

    def forward(self, x):
        y = self.conv(x)
        h, w = y.shape[-2:]
        if (h, w) not in self.tables:
            type(self).tables[h, w] = positions(w, y) + h
        return y * self.tables[h, w]


class CachedMethod(_Base):
    @functools.lru_cache(maxsize=4)  # noqa: B019
    def table(self, n):
        return torch.arange(n).float()

    def forward(self, x):
        y = self.conv(x)
        return y * self.table(y.shape[-1])


@functools.cache
def window(n):
    return torch.tensor([math.sin(i) for i in range(n)])


class CachedFunction(_Base):
    """A table computed in Python, by a cached function of the module."""

    def forward(self, x):
        y = self.conv(x)
        return y * window(y.shape[-1])


class CachedProperty(_Base):
    @functools.cached_property
    def gain(self):
        return self.conv.weight.detach().abs().sum((1, 2, 3))[:, None, None]

    def forward(self, x):
        return self.conv(x) / self.gain


class Tables:
    """A plain object that keeps tables by size."""

    def __init__(self) -> None:
        self.last, self.tables = None, {}

    def of(self, n, like):
        if n not in self.tables:
            self.tables[n] = positions(n, like)
        self.last = n
        return self.tables[n]


class ObjectCache(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.tables = Tables()

    def forward(self, x):
        y = self.conv(x)
        return y * self.tables.of(y.shape[-1], y)


class ShiftedWindows(_Base):
    """Swin's mask, made by loops and item assignment for each new size."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.mask = None, None

    def forward(self, x):
        y = self.conv(x)
        if self.size != tuple(y.shape[2:]):
            mask, count = torch.zeros(1, 1, *y.shape[2:]), 0
            for h in (slice(0, -2), slice(-2, None)):
                for w in (slice(0, -2), slice(-2, None)):
                    mask[:, :, h, w] = count
                    count += 1
            self.mask, self.size = mask, tuple(y.shape[2:])
        return torch.roll(y, (-1, -1), (2, 3)) + self.mask


class BelowAnother(nn.Module):
    """The cache is a submodule's, which is called twice, with two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ClassDefaults()

    def forward(self, x):
        return torch.cat([self.inner(x), self.inner(F.max_pool2d(x, 2))], 2)


CACHES = {
    c.__name__: c
    for c in (
        ClassDefaults, GridOfEachLevel, GrowingBuffer, GrowingTable, RotaryTable, NoneBuffer, DictByText, DictBySizes,
        DictOfDicts, ModuleCache, ClassCache, CachedMethod, CachedFunction, CachedProperty, ObjectCache, ShiftedWindows,
        BelowAnother,
    )
}  # fmt: skip


# -- by-products ------------------------------------------------------------------------------------------------------


class KeepsFeatures(nn.Module):
    """A list that forward empties and fills."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.features = nn.Conv2d(3, 3, 3, padding=1), []

    def forward(self, x):
        self.features.clear()
        for _ in range(2):
            x = self.conv(x)
            self.features.append(x)
        return self.features[0] + self.features[1]


class KeepsTheLast(_Base):
    """A bounded queue that every call fills."""

    def __init__(self) -> None:
        super().__init__()
        self.recent = deque(maxlen=2)

    def forward(self, x):
        y = self.conv(x)
        self.recent.append(y)
        self.recent.append(F.relu(y))
        return self.recent[0] + self.recent[1]


class HookedFeatures(_Base):
    """Hooks that fill a dict, which forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.third = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.found = {}
        for name in ("conv", "second"):
            getattr(self, name).register_forward_hook(self.keep(name))

    def keep(self, name):
        def hook(module, args, output):
            self.found[name] = output

        return hook

    def forward(self, x):
        self.second(self.conv(x))
        return self.third(self.found["conv"] + self.found["second"])


class ClosedOver(_Base):
    """The same with a list that only the hook's closure knows, and forward by way of it."""

    def __init__(self) -> None:
        super().__init__()
        found = []
        self.conv.register_forward_hook(lambda module, args, output: found.append(output))
        self.take = lambda: found.pop()

    def forward(self, x):
        self.conv(x)
        return F.relu(self.take())


BY_PRODUCTS = {c.__name__: c for c in (KeepsFeatures, KeepsTheLast, HookedFeatures, ClosedOver)}


# -- carried on -------------------------------------------------------------------------------------------------------


class Hidden(_Base):
    """A tensor attribute that the next call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.h = torch.zeros(4, 1, 1)

    def forward(self, x):
        y = self.conv(x) + self.h
        self.h = y.mean((0, 2, 3))[:, None, None]
        return y


class States(Hidden):
    """The same in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.states = [torch.zeros(4, 1, 1), torch.ones(4, 1, 1)]

    def forward(self, x):
        y = self.conv(x) + self.states[0]
        self.states[0] = y.mean((0, 2, 3))[:, None, None]
        return y * self.states[1]


class Named(_Base):
    """The same in a dict, which is empty at first."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = {}

    def forward(self, x):
        y = self.conv(x)
        if "k" in self.memory:
            y = y + self.memory["k"]
        self.memory["k"] = y.mean((0, 2, 3))[:, None, None]
        return y


class Appends(_Base):
    """A list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def forward(self, x):
        y = self.conv(x)
        self.seen.append(y)
        return y * len(self.seen)


class Queue(_Base):
    """The mean of the last calls."""

    def __init__(self) -> None:
        super().__init__()
        self.recent = deque(maxlen=3)

    def forward(self, x):
        self.recent.append(self.conv(x))
        return torch.stack(tuple(self.recent)).mean(0)


class Counter(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.conv(x) * self.calls


class ClassCounter(_Base):
    count = 0

    def forward(self, x):
        type(self).count += 1
        return self.conv(x) * self.count


CALLS = 0


class GlobalCounter(_Base):
    def forward(self, x):
        global CALLS
        CALLS += 1
        return self.conv(x) * CALLS


class FirstData(_Base):
    """Scales by what the first call sees: no cache, though it is set only once."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = None

    def forward(self, x):
        y = self.conv(x)
        if self.scale is None:
            self.scale = y.abs().mean()
        return y / self.scale


CARRYING = {
    "Hidden": (Hidden, "'h' of 'Hidden'"),
    "States": (States, "'states[0]' of 'States'"),
    "Named": (Named, "'memory"),
    "Appends": (Appends, "'seen' of 'Appends'"),
    "Queue": (Queue, "'recent' of 'Queue'"),
    "Counter": (Counter, "'calls' of 'Counter'"),
    "ClassCounter": (ClassCounter, "'count' of the class 'ClassCounter'"),
    "GlobalCounter": (GlobalCounter, "'CALLS' of the module 'stateful_models'"),
    "FirstData": (FirstData, "'scale' of 'FirstData'"),
}
