"""Conditions on sizes as torch.export words them, "L['x'].size()[2] <= 8", as nodes of a graph."""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node, Proxy

__all__ = ["UntranslatableError", "condition_node"]

_BINARY: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,
}
_COMPARISONS: dict[type, Callable[..., Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "max": torch.sym_max,  # as torch writes them before 2.14
    "min": torch.sym_min,
    **{f"torch.{f.__name__}": f for f in (torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_int, torch.sym_float)},
    **{f"math.{f.__name__}": f for f in (math.ceil, math.floor, math.trunc, math.sqrt)},
}


class UntranslatableError(Exception):
    """A condition holds something else than sizes of the arguments and arithmetic on them."""


def condition_node(graph: Graph, text: str, values: dict[str, Any]) -> Node:
    """Add nodes that compute a condition. The text is parsed, never evaluated.

    Args:
        graph: where the nodes go.
        text: a Python expression over sizes of arguments.
        values: what stands for each argument, by name: proxies of `graph` in the argument's own structure.

    Raises:
        UntranslatableError: there is something in it that has no node.
    """
    return _Builder(graph, values).build(ast.parse(text, mode="eval").body)


class _Builder:
    def __init__(self, graph: Graph, values: dict[str, Any]):
        self.graph, self.values = graph, values

    def build(self, tree: ast.expr) -> Any:
        if isinstance(tree, ast.Constant) and isinstance(tree.value, (int, float)):
            return tree.value
        if isinstance(tree, ast.BinOp) and type(tree.op) in _BINARY:
            return self._call(_BINARY[type(tree.op)], tree.left, tree.right)
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            return self._call(operator.neg, tree.operand)
        if isinstance(tree, ast.Compare) and len(tree.ops) == 1 and type(tree.ops[0]) in _COMPARISONS:
            return self._call(_COMPARISONS[type(tree.ops[0])], tree.left, tree.comparators[0])
        if isinstance(tree, ast.BoolOp):
            joined = operator.and_ if isinstance(tree.op, ast.And) else operator.or_
            parts = [self.build(part) for part in tree.values]
            return functools.reduce(lambda a, b: self.graph.call_function(joined, (a, b)), parts)
        if isinstance(tree, ast.Call) and ast.unparse(tree.func) in _FUNCTIONS:
            function = _FUNCTIONS[ast.unparse(tree.func)]
            if function in (torch.sym_max, torch.sym_min):  # written with any number of operands, called with two
                operands = [self.build(operand) for operand in tree.args]
                return functools.reduce(lambda a, b: self.graph.call_function(function, (a, b)), operands)
            return self._call(function, *tree.args)
        if isinstance(tree, ast.Subscript) and isinstance(tree.value, ast.Call):
            method, index = tree.value.func, tree.slice
            if isinstance(method, ast.Attribute) and method.attr == "size" and isinstance(index, ast.Constant):
                return self.graph.call_method("size", (self._argument(method.value), index.value))  # type: ignore[arg-type]
        raise UntranslatableError(ast.unparse(tree))

    def _call(self, function: Callable[..., Any], *operands: ast.expr) -> Node:
        return self.graph.call_function(function, tuple(self.build(operand) for operand in operands))

    def _argument(self, tree: ast.expr) -> Node:
        """The node of L['name'], or of L['name'][0]['key'] inside structures."""
        path: list[Any] = []
        while isinstance(tree, ast.Subscript) and isinstance(tree.slice, ast.Constant):
            path.insert(0, tree.slice.value)
            tree = tree.value
        found: Any = self.values
        for key in path:
            found = found[key]
        if not isinstance(found, Proxy):
            raise UntranslatableError(ast.unparse(tree))
        return found.node
