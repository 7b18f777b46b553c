"""Latencies of several callables measured side by side in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fx_passes.errors import InputError

__all__ = ["Timing", "measure_interleaved", "torch_threads"]


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
