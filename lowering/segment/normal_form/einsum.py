"""Einsum equations in the one form that every backend takes."""

from __future__ import annotations

import string

import torch
from torch.fx import Graph

__all__ = ["explicit", "normalize_einsums"]


def normalize_einsums(graph: Graph) -> None:
    """Give every einsum an explicit equation in lower-case letters: TensorRT's layer and its parser refuse others."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.einsum.default):
        equation, *operands = node.args
        node.args = (explicit(str(equation)), *operands)


def explicit(equation: str) -> str:
    """The equation without spaces, in lower-case letters, with its result.

    >>> explicit("B G H, H i -> B i G")
    'abc,cd->adb'
    >>> explicit("ba,bA")
    'cb,ca->ab'
    """
    equation = equation.replace(" ", "")
    left, arrow, right = equation.partition("->")
    letters = left.replace(",", "").replace("...", "")
    if not arrow:  # implicit: letters that occur once, in alphabetical order (upper case first), after the ellipsis
        once = sorted(c for c in set(letters) if letters.count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    names = dict(zip(sorted(set(letters)), string.ascii_lowercase, strict=False))
    return "".join(names.get(c, c) for c in f"{left}->{right}")
