"""Conditions on sizes over the ranges of these sizes: where one fails, if anywhere, and whether it matters there."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fx_passes.capture.conditions import Condition, compiled, holds, sizes_in
from fx_passes.capture.export import Guard
from fx_passes.graph.resized import brought_to

__all__ = ["Comparison", "Failures", "SizeRanges"]

Shapes = list[list[int]]

_TRIED = 4096  # combinations of sizes that are gone through; of more, so many are drawn
_DRAWN = 512
_RUNS = 8  # of two forms of a program, at sizes for which torch's own conditions do not hold


@dataclass(frozen=True)
class Failures:
    """Where a condition fails.

    Attributes:
        shapes: of all inputs, each combination of sizes at which it does.
        complete: whether every combination was tried.
    """

    shapes: list[Shapes]
    complete: bool

    @property
    def impossible(self) -> bool:
        """Whether the condition holds for all sizes of the ranges."""
        return self.complete and not self.shapes


class SizeRanges:
    """The sizes that the inputs of a program may have.

    Args:
        smallest, largest: shapes of all inputs.
        start: the shapes of one call.
        guards: what the program takes for granted; the relations among them say which sizes follow from others.
    """

    def __init__(
        self,
        smallest: Sequence[Sequence[int]],
        largest: Sequence[Sequence[int]],
        start: Sequence[Sequence[int]],
        guards: Iterable[Guard],
    ):
        self.smallest, self.largest = smallest, largest
        self.start = [list(shape) for shape in start]
        self._relations = [(g.condition[1], compiled(g.condition[2])) for g in guards if g.relation]

    def failures(self, condition: Condition) -> Failures:
        """The shapes at which `condition` fails; what it does not read is as in `start`."""
        places = sorted(set(sizes_in(condition)))
        ranges = [range(self.smallest[i][d], self.largest[i][d] + 1) for i, d in places]
        complete = prod(map(len, ranges)) <= _TRIED
        shapes = [list(shape) for shape in self.start]
        value, found = compiled(condition), []
        for sizes in product(*ranges) if complete else _some(ranges):
            for (i, d), size in zip(places, sizes, strict=True):
                shapes[i][d] = size
            if not _is_true(value, shapes):
                found.append([list(shape) for shape in shapes])
        return Failures(found, complete)

    def fails_at_ends(self, condition: Condition) -> int:
        """At how many of the smallest and the largest sizes a condition fails: 0, 1 or 2."""
        return sum(not holds(condition, shapes) for shapes in (self.smallest, self.largest))

    def related(self, shapes: Shapes) -> Shapes | None:
        """`shapes` with the sizes that follow from others put in; None if one is out of its range."""
        shapes = [list(shape) for shape in shapes]
        for (_, i, d), value in self._relations:
            shapes[i][d] = size = value(shapes)
            if not self.smallest[i][d] <= size <= self.largest[i][d]:
                return None
        return shapes


def _some(ranges: Sequence[range]) -> Iterator[tuple[int, ...]]:
    """The corners, and some combinations from between them."""
    yield from islice(product(*((r[0], r[-1]) for r in ranges)), _DRAWN)
    draw = random.Random(0)
    for _ in range(_DRAWN):
        yield tuple(draw.choice(r) for r in ranges)


def _is_true(value: Callable[[Shapes], object], shapes: Shapes) -> bool:
    try:
        return bool(value(shapes))
    except (ArithmeticError, ValueError):
        return False


class Comparison:
    """Two forms of one program, run at the same sizes: a condition of torch's own code may decide nothing of a result.

    Args:
        original: what is right.
        other: what was made of it.
        example: inputs of both, repeated or cut to other sizes.
        ranges: of these sizes.
        limit: on the relative difference of a result, as a norm.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        other: Callable[..., Any],
        example: Sequence[Tensor],
        ranges: SizeRanges,
        limit: float,
    ):
        self.original, self.other, self.example = original, other, example
        self.ranges, self.limit = ranges, limit
        self._agree: dict[str, bool] = {}  # by shapes

    def is_immaterial(self, failures: Failures, asked: Sequence[Condition] = ()) -> bool:
        """Whether a condition decides nothing: the forms agree at some of the sizes where it fails.

        Sizes at which one of `asked` fails as well are left out, as they are not served anyway.
        """
        served = [shapes for shapes in failures.shapes if all(holds(condition, shapes) for condition in asked)]
        if not served:
            return failures.complete
        seen = [shapes for shapes in served if str(shapes) in self._agree]
        return all(self._agrees(shapes) for shapes in seen or (served[0], served[len(served) // 2], served[-1]))

    def _agrees(self, shapes: Shapes) -> bool:
        key = str(shapes)
        if key not in self._agree:
            if len(self._agree) >= _RUNS:
                return False
            self._agree[key] = self._compare(shapes)
        return self._agree[key]

    def _compare(self, shapes: Shapes) -> bool:
        related = self.ranges.related(shapes)
        if related is None:
            return False
        inputs = [brought_to(t, sizes) for t, sizes in zip(self.example, related, strict=False)]
        results = []
        for run in (self.original, self.other):
            try:
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    results.append(pytree.tree_leaves(run(*(t.clone() for t in inputs))))
            except Exception as error:  # the model does not take these sizes, or what was made of it does not
                logging.getLogger(__name__).debug("at %s: %s", shapes, error)
                return False
        want, got = results
        return all(_alike(a, b, self.limit) for a, b in zip(got, want, strict=False))


def _alike(a: Any, b: Any, limit: float) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return float((a - b).norm()) <= limit * float(b.norm())
