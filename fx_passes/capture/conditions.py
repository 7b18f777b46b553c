"""Conditions on sizes as plain data: made of what torch.export assumed, computed at each call, put into graphs.

A condition is a number, ``("size", input, dimension)``, or ``(operation, operand, ...)`` with an operation of `ARITY`:
``("==", ("%", ("size", 0, 3), 4), 0)`` says that the last size of the first input, an image, is a multiple of 4.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

__all__ = [
    "ARITY",
    "Condition",
    "UntranslatableError",
    "compiled",
    "condition_node",
    "condition_of",
    "holds",
    "sizes_in",
    "worded",
]

Condition: TypeAlias = Any
Shapes: TypeAlias = Sequence[Sequence[int]]

SIZE = "size"


class UntranslatableError(Exception):
    """A condition holds something else than sizes of the inputs and arithmetic on them."""


@dataclass(frozen=True)
class _Operation:
    """One operation: on numbers, as a node of a graph (where sizes may be symbols), and in words."""

    on_numbers: Callable[..., Any]
    in_graphs: Callable[..., Any]
    words: str
    arity: int = 2


def _infix(sign: str, function: Callable[..., Any]) -> _Operation:
    return _Operation(function, function, f"({{}} {sign} {{}})")


def _named(name: str, function: Callable[..., Any], in_graphs: Any = None, arity: int = 1) -> _Operation:
    return _Operation(function, in_graphs or function, f"{name}({', '.join(['{}'] * arity)})", arity)


def _power(base: float, exponent: float) -> float:
    """With a large exponent, which no size has, as a float: a damaged file must not ask for a million digits."""
    return base**exponent if abs(exponent) <= 64 else math.pow(base, exponent)


_INFIX = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "//": operator.floordiv, "%": operator.mod, "==": operator.eq, "!=": operator.ne,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "and": operator.and_, "or": operator.or_,
}  # fmt: skip
_OPERATIONS: dict[str, _Operation] = {
    **{sign: _infix(sign, function) for sign, function in _INFIX.items()},
    "**": _Operation(_power, operator.pow, "({} ** {})"),
    "not": _Operation(operator.not_, torch.sym_not, "(not {})", 1),
    "where": _Operation(lambda c, a, b: a if c else b, torch.sym_ite, "({1} if {0} else {2})", 3),
    "max": _named("max", max, torch.sym_max, 2),
    "min": _named("min", min, torch.sym_min, 2),
    "abs": _named("abs", abs),
    "float": _named("float", float, torch.sym_float),
    "trunc": _named("int", math.trunc),
    "floor": _named("math.floor", math.floor),
    "ceil": _named("math.ceil", math.ceil),
    "round": _named("round", round),
    "sqrt": _named("math.sqrt", math.sqrt, torch.sym_sqrt),
}
ARITY = {name: operation.arity for name, operation in _OPERATIONS.items()}


# -- from torch.export -----------------------------------------------------------------------------------------------

# Classes of sympy and of torch.utils._sympy.functions, by name: those of two operands, or of any number of them.
_CLASSES = {
    "FloorDiv": "//", "CleanDiv": "//", "IntTrueDiv": "/", "FloatTrueDiv": "/", "Mod": "%", "PythonMod": "%",
    "Pow": "**", "PowByNatural": "**", "FloatPow": "**", "Mul": "*", "Max": "max", "Min": "min",
    "Equality": "==", "Unequality": "!=", "StrictLessThan": "<", "LessThan": "<=",
    "StrictGreaterThan": ">", "GreaterThan": ">=", "And": "and", "Or": "or",
}  # fmt: skip
_ONE_OPERAND = {
    "TruncToInt": "trunc", "FloorToInt": "floor", "CeilToInt": "ceil", "RoundToInt": "round", "ToFloat": "float",
    "Not": "not", "Abs": "abs", "OpaqueUnaryFn_sqrt": "sqrt",
}  # fmt: skip


def condition_of(expression: Any, sizes: Mapping[Any, Condition]) -> Condition:
    """A sympy expression as a condition.

    Args:
        expression: over symbols that stand for sizes.
        sizes: what each symbol is.

    Raises:
        UntranslatableError: it holds another symbol, or a function that is not known here.
    """
    if expression in sizes:
        return sizes[expression]
    if expression.is_Boolean and not expression.args:
        return bool(expression)
    if expression.is_Integer:
        return int(expression)
    if expression.is_Rational:
        return ("/", int(expression.p), int(expression.q))
    if expression.is_Float:
        return float(expression)
    kind = type(expression).__name__
    operands = [condition_of(argument, sizes) for argument in expression.args]
    if kind == "Identity":
        return operands[0]
    if kind == "Add":
        return _sum(operands)
    if kind in _ONE_OPERAND:
        return (_ONE_OPERAND[kind], *operands)
    if kind == "Where":
        return ("where", *operands)
    if kind == "TruncToFloat":
        return ("float", ("trunc", *operands))
    if kind == "CeilDiv":
        return ("-", 0, ("//", ("-", 0, operands[0]), operands[1]))
    if kind == "ModularIndexing":
        return ("%", ("//", operands[0], operands[1]), operands[2])
    if kind in _CLASSES and len(operands) > 1:
        return reduce(lambda a, b: (_CLASSES[kind], a, b), operands)
    raise UntranslatableError(str(expression))


def _sum(terms: list[Condition]) -> Condition:
    """A sum as one would write it: what is taken away comes last, with a minus."""
    added, taken = [], []
    for term in terms:
        negative = isinstance(term, (int, float)) and term < 0
        if negative:
            taken.append(-term)
        elif isinstance(term, tuple) and term[0] == "*" and isinstance(term[1], int) and term[1] < 0:
            taken.append(term[2] if term[1] == -1 else ("*", -term[1], term[2]))
        else:
            added.append(term)
    start = reduce(lambda a, b: ("+", a, b), added) if added else 0
    return reduce(lambda a, b: ("-", a, b), taken, start)


# -- what a condition is good for ------------------------------------------------------------------------------------


def compiled(condition: Condition) -> Callable[[Shapes], Any]:
    """A function of the shapes of the inputs that gives the condition's value; it may raise an ArithmeticError."""
    if not isinstance(condition, tuple):
        return lambda shapes: condition
    name, *operands = condition
    if name == SIZE:
        index, dim = operands
        return lambda shapes: shapes[index][dim]
    function, parts = _OPERATIONS[name].on_numbers, [compiled(operand) for operand in operands]
    if len(parts) == 2:
        first, second = parts
        return lambda shapes: function(first(shapes), second(shapes))
    return lambda shapes: function(*(part(shapes) for part in parts))


def holds(condition: Condition, shapes: Shapes) -> bool:
    """Whether a condition holds for inputs of these shapes; one that cannot be computed, by a zero, does not."""
    try:
        return bool(compiled(condition)(shapes))
    except (ArithmeticError, ValueError):
        return False


def worded(condition: Condition, names: Sequence[str]) -> str:
    """The condition as Python code, with the names of the inputs: ``x.shape[3] % 4 == 0``."""
    text = _text(condition, names)
    return text[1:-1] if isinstance(condition, tuple) and text.startswith("(") else text


def _text(condition: Condition, names: Sequence[str]) -> str:
    if not isinstance(condition, tuple):
        return repr(condition)
    name, *operands = condition
    if name == SIZE:
        return f"{names[operands[0]]}.shape[{operands[1]}]"
    return _OPERATIONS[name].words.format(*(_text(operand, names) for operand in operands))


def condition_node(graph: Graph, condition: Condition, inputs: Sequence[Node]) -> Any:
    """Add nodes that compute a condition from the sizes of `inputs`; a number is itself."""
    if not isinstance(condition, tuple):
        return condition
    name, *operands = condition
    if name == SIZE:
        return graph.call_method("size", (inputs[operands[0]], operands[1]))
    parts = tuple(condition_node(graph, operand, inputs) for operand in operands)
    return graph.call_function(_OPERATIONS[name].in_graphs, parts)


def sizes_in(condition: Condition) -> Iterator[tuple[int, int]]:
    """(input, dimension) of every size that a condition reads, some perhaps more than once."""
    if not isinstance(condition, tuple):
        return
    name, *operands = condition
    if name == SIZE:
        yield operands[0], operands[1]
        return
    for operand in operands:
        yield from sizes_in(operand)
