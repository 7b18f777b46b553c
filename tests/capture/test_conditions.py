"""Conditions on sizes as data, made of sympy's expressions as the versions of torch write them."""

from __future__ import annotations

import math

import pytest
import sympy
import torch
from torch.fx import Graph, GraphModule

from fx_passes.capture.conditions import UntranslatableError, condition_node, condition_of, holds, worded


def _sympy():
    from torch.utils._sympy import functions as f

    h, w = sympy.symbols("h w", integer=True, positive=True)
    return {
        "modulo": (sympy.Eq(f.Mod(w, 4), 0), "(x.shape[3] % 4) == 0", lambda h, w: w % 4 == 0),
        "difference": (h - 2 * w - 3 >= 0, None, lambda h, w: h - 2 * w - 3 >= 0),
        "floor": (sympy.Ne(f.FloorDiv(w + 1, 2), h), None, lambda h, w: (w + 1) // 2 != h),
        "ceil": (sympy.Le(f.CeilDiv(w, 3), h), None, lambda h, w: math.ceil(w / 3) <= h),
        "truncated": (sympy.Eq(f.TruncToInt(f.ToFloat(w) * 0.7), 3), None, lambda h, w: int(w * 0.7) == 3),
        "largest": (sympy.Max(h, w, 3) > 5, None, lambda h, w: max(h, w, 3) > 5),
        "joined": (sympy.And(h > 2, sympy.Or(w > 3, sympy.Ne(h, 7))), None, lambda h, w: h > 2 and (w > 3 or h != 7)),
        "divided": (sympy.Lt(f.IntTrueDiv(h, w), 0.5), None, lambda h, w: h / w < 0.5),
        "power": (f.PowByNatural(h, 2) > w, None, lambda h, w: h**2 > w),
    }


@pytest.mark.parametrize("name", _sympy())
def test_a_condition_of_sympy_holds_where_it_should_as_data_and_in_a_graph(name):
    expression, words, truth = _sympy()[name]
    symbols = {s: ("size", 0, {"h": 2, "w": 3}[s.name]) for s in expression.free_symbols}
    condition = condition_of(expression, symbols)
    if words is not None:
        assert worded(condition, ["x"]) == words
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(condition_node(graph, condition, [x]))
    module = GraphModule({}, graph)
    for h in range(1, 9):
        for w in range(1, 9):
            shape = (2, 3, h, w)
            assert holds(condition, [shape]) == bool(module(torch.empty(shape))) == truth(h, w), (h, w)


def test_what_cannot_be_computed_does_not_hold():
    assert not holds((">", ("//", 4, ("size", 0, 0)), 0), [(0,)])


def test_an_unknown_function_is_no_condition():
    x = sympy.Symbol("x")
    with pytest.raises(UntranslatableError, match="airyai"):
        condition_of(sympy.airyai(x) > 0, {x: ("size", 0, 0)})
    with pytest.raises(UntranslatableError, match="x"):
        condition_of(x > 0, {})
