"""Conditions on sizes, in the words in which the versions of torch write them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Proxy

from fx_passes.capture.conditions import UntranslatableError, condition_node

X = torch.zeros(2, 3, 10, 7)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("L['x'].size()[1] == 3", True),
        ("((-16) + 8*L['x'].size()[2])*((-2) + L['x'].size()[3]) <= 2147483647", True),
        ("max(1, (-2) + L['x'].size()[3])*max(1, (-2) + L['x'].size()[2]) > 40", False),  # torch 2.9 to 2.13
        ("torch.sym_max(1, (-2) + L['x'].size()[3]) == 5", True),  # torch 2.14
        ("max(1, L['x'].size()[2], L['x'].size()[3]) == 10", True),
        ("min(L['x'].size()[2], L['x'].size()[3], 9) == 7", True),
    ],
)
def test_a_condition_is_computed(text, expected):
    graph = Graph()
    x = Proxy(graph.placeholder("x"))
    graph.output(condition_node(graph, text, {"x": x}))
    assert bool(GraphModule(nn.Module(), graph)(X)) is expected


@pytest.mark.parametrize(
    "text", ["__import__('os').getcwd() == 1", "L['x'].numel() == 3", "maximum(1, 2) == 2", "L['x'].size()[1:] == 3"]
)
def test_what_is_no_condition_on_sizes_is_refused(text):
    graph = Graph()
    with pytest.raises(UntranslatableError):
        condition_node(graph, text, {"x": Proxy(graph.placeholder("x"))})
