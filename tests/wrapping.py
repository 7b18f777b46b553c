"""What the tests of wrap share: an input, and a check of every form that a traced model takes."""

from __future__ import annotations

import copy

from equality import same
from torch import nn
from tracing import image

from fx_passes import trace
from fx_passes.partition.partition import partition

__all__ = ["WRAPPED", "check", "image", "python_calls"]

WRAPPED = "wrapped by the user"


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
