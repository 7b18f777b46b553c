"""Latencies of several callables measured side by side in one process, and which of them is faster beyond the noise."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fx_passes.errors import InputError

__all__ = ["Ratio", "Timing", "contest", "measure_interleaved", "ratio_interval", "torch_threads"]


@dataclass(frozen=True)
class Timing:
    """Latencies of one callable.

    Args:
        milliseconds: one value per timed call, in the order of the calls.
        rounds: the median of each round, in ms; rounds of different callables at the same index ran side by side.
    """

    milliseconds: list[float]
    rounds: list[float]

    @property
    def median(self) -> float:
        """ms."""
        return statistics.median(self.milliseconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile, ms: the spread to state beside a median."""
        low, _, high = statistics.quantiles(self.milliseconds, n=4, method="inclusive")
        return low, high

    def ratio(self, other: Timing) -> float:
        """Time of `self` over `other`: the median over rounds, so that a slow spell of the machine hits both sides."""
        return statistics.median(a / b for a, b in zip(self.rounds, other.rounds, strict=True))


def measure_interleaved(
    candidates: Mapping[str, Callable[[], Any]], *, rounds: int = 15, calls: int = 6, warm_up: int = 2
) -> dict[str, Timing]:
    """Time callables in turn, round by round, in an order that rotates.

    Args:
        candidates: name to a call without arguments.
        rounds: how often each candidate's turn comes.
        calls: timed calls in a turn.
        warm_up: untimed calls before them in every turn. They bring the weights back into the caches, and outlast the
            spinning of the worker threads that the candidate before leaves behind (ONNX Runtime's spin for some
            milliseconds after a call).

    Returns:
        Timings in the order of `candidates`.

    Raises:
        InputError: fewer than 2 rounds or 1 call.

    Example:
        >>> timings = measure_interleaved({"sum": lambda: sum(range(99))}, rounds=2, calls=1)
        >>> len(timings["sum"].milliseconds)
        2
    """
    if rounds < 2 or calls < 1 or warm_up < 0:
        raise InputError(f"{rounds} rounds of {calls} calls measure nothing", hint="use at least 2 rounds and 1 call")
    names = list(candidates)
    samples: dict[str, list[list[float]]] = {name: [] for name in names}
    with torch.inference_mode():
        for turn in range(rounds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                call = candidates[name]
                for _ in range(warm_up):
                    call()
                samples[name].append([_milliseconds(call) for _ in range(calls)])
    return {
        name: Timing([value for turn in turns for value in turn], [statistics.median(turn) for turn in turns])
        for name, turns in samples.items()
    }


@dataclass(frozen=True)
class Ratio:
    """A ratio of two times, with an interval that holds its median in 90 of 100 repetitions (from 5 rounds on).

    Attributes:
        median: over rounds.
        low, high: the ends of the interval.
        rounds: how many there were.
    """

    median: float
    low: float
    high: float
    rounds: int


_CONFIDENCE = 0.9  # fewer rounds than 5 cannot give it: their extremes hold the median in 75 % (3) and 87.5 % (4)


def ratio_interval(ours: Sequence[float], others: Sequence[float]) -> Ratio:
    """The ratio of `ours` over `others`, round by round, with a distribution-free interval of its median.

    The interval is that of the sign test: order statistics of the ratios, which takes no shape of the noise for
    granted (Conover, Practical Nonparametric Statistics, section 3.2).

    Raises:
        InputError: the two have not the same number of rounds, or none.

    Example:
        >>> ratio_interval([1.0, 1.1, 0.9, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0])
        Ratio(median=0.5, low=0.45, high=0.55, rounds=5)
    """
    if len(ours) != len(others) or not ours:
        raise InputError(f"{len(ours)} and {len(others)} rounds are not pairs")
    ratios = sorted(a / b for a, b in zip(ours, others, strict=True))
    cut = _rank(len(ratios))
    return Ratio(statistics.median(ratios), ratios[cut], ratios[-1 - cut], len(ratios))


def _rank(count: int) -> int:
    """How many of `count` sorted values can be left out at either end, so that the rest still holds the median."""
    cut = 0
    while 1 - 2 * sum(math.comb(count, i) for i in range(cut + 2)) / 2**count >= _CONFIDENCE:
        cut += 1
    return cut


@dataclass(frozen=True)
class Round:
    """One candidate's turn: the least wall and CPU time of its calls, ms."""

    wall: float
    cpu: float


def contest(
    candidates: Mapping[str, Callable[[], Any]], *, seconds: float, least: int = 3, most: int = 25, calls: int = 3
) -> dict[str, list[Round]]:
    """Rounds of all candidates in turn until time is up: short enough to be part of a lowering.

    Other work on the machine makes single calls slow, never fast: a turn counts by its fastest call. The CPU time is
    that of the whole process; it does not grow while the process waits for a core.

    Args:
        candidates: name to a call without arguments; each is called once before the first round.
        seconds: after which no further round begins.
        least: rounds that there are at least, however long they take.
        most: rounds that there are at most.
        calls: timed calls in a turn; one where a call takes longer than a tenth of a second.

    Returns:
        For each candidate its rounds, equally many.
    """
    found: dict[str, list[Round]] = {name: [] for name in candidates}
    start = time.perf_counter()
    with torch.inference_mode():
        first = {name: _timed(call).wall for name, call in candidates.items()}
        names = list(candidates)
        for turn in range(most):
            if turn >= least and time.perf_counter() - start > seconds:
                break
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                repeated = 1 if first[name] > 100 else calls
                timed = [_timed(candidates[name]) for _ in range(repeated)]
                found[name].append(Round(min(t.wall for t in timed), min(t.cpu for t in timed)))
    return found


def _timed(call: Callable[[], Any]) -> Round:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Round((time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3)


def _milliseconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """`torch.set_num_threads(count)` for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
