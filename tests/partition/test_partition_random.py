"""partition and trace on random programs: writes, views, aliases and Python calls in any order."""

from __future__ import annotations

import copy

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_partition import as_program, clones, same, segments
from torch import nn

from fx_passes import functionalize, trace, wrap
from fx_passes.partition.partition import partition

torch.set_num_threads(1)


@wrap
def pure(x):
    return x * 2 + float(x.sum() > 0)


@wrap
def gives_back(x):
    return x


@wrap
def writes(x):
    x.mul_(0.5)
    return x + 1


@wrap
def writes_and_gives_back(x):
    return x.add_(1)


@wrap
def number(x):
    return int(x.sum() > 0) + 1


@wrap
def pair(x):
    return [x + 1, (x, x.transpose(2, 3))]


def _setitem(v, i, j):
    v[i][:, 0] = v[j][:, 1]


def _iadd(v, i, j):
    x = v[i]
    x += v[j]


# Every value is (2, 3, 4, 4); an operation appends its results to the values `v` of the program.
OPS = {
    "conv": lambda m, v, i, j: v.append(m.conv(v[i])),
    "relu": lambda m, v, i, j: v.append(m.relu(v[i])),
    "relu_": lambda m, v, i, j: v.append(m.relu_(v[i])),
    "add": lambda m, v, i, j: v.append(v[i] + v[j]),
    "add_": lambda m, v, i, j: v.append(v[i].add_(v[j])),
    "iadd": lambda m, v, i, j: _iadd(v, i, j),
    "setitem": lambda m, v, i, j: _setitem(v, i, j),
    "transpose": lambda m, v, i, j: v.append(v[i].transpose(2, 3)),
    "view": lambda m, v, i, j: v.append(v[i][:]),
    "size": lambda m, v, i, j: v.append(v[i] * v[j].shape[0]),
    "chunk": lambda m, v, i, j: v.append(torch.cat(v[i].chunk(2, 2), 2)),
    "buffer": lambda m, v, i, j: v.append(v[i] + m.state),
    "write buffer": lambda m, v, i, j: m.state.add_(v[i].mean()),
    "pure": lambda m, v, i, j: v.append(pure(v[i])),
    "gives back": lambda m, v, i, j: v.append(gives_back(v[i])),
    "writes": lambda m, v, i, j: v.append(writes(v[i])),
    "writes and gives back": lambda m, v, i, j: v.append(writes_and_gives_back(v[i])),
    "number": lambda m, v, i, j: v.append(v[i] * number(v[j])),
    "pair": lambda m, v, i, j: v.extend(_flat(pair(v[i]))),
}


def _flat(p):
    return [p[0], p[1][0], p[1][1]]


class Program(nn.Module):
    def __init__(self, steps, outputs):
        super().__init__()
        self.steps, self.outputs = steps, outputs
        self.conv = nn.Conv2d(3, 3, 1)
        self.relu, self.relu_ = nn.ReLU(), nn.ReLU(inplace=True)
        self.register_buffer("state", torch.zeros(()))
        with torch.no_grad():
            self.conv.weight.copy_(torch.linspace(-0.4, 0.4, 9).view(3, 3, 1, 1))
            self.conv.bias.fill_(0.1)

    def forward(self, x, y):
        v = [x, y]
        for name, i, j in self.steps:
            OPS[name](self, v, i % len(v), j % len(v))
        return [v[o % len(v)] for o in self.outputs]


steps = st.lists(
    st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=9
)
outputs = st.lists(st.integers(0, 20), min_size=1, max_size=4)


def inputs():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, 4, 4, generator=generator), torch.randn(2, 3, 4, 4, generator=generator)


def two_calls(model):
    """What two calls return and leave in their inputs; the state of the model goes from one to the other."""
    seen = []
    with torch.no_grad():
        for _ in range(2):
            arguments = inputs()
            seen.append((clones(model(*arguments)), list(arguments)))
    return seen


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(steps, outputs, st.booleans())
def test_random_programs(steps, outputs, functional):
    model = Program(steps, outputs).eval()
    try:
        expected = two_calls(copy.deepcopy(model))
    except RuntimeError:
        return  # a write to memory that overlaps itself is no program of PyTorch's
    gm = trace(model)
    glue = partition(functionalize(gm) if functional else gm, inputs())
    same(two_calls(as_program(glue)), expected)
    assert len(segments(glue)) <= len(steps) + 1
