"""Intervals of ratios, and rounds that end when their time is up."""

from __future__ import annotations

import time

import pytest
import torch

from fx_passes.errors import InputError
from lowering.timing import contest, ratio_interval


@pytest.mark.parametrize(
    ("count", "left_out"), [(1, 0), (3, 0), (5, 0), (8, 1), (11, 2), (25, 7)], ids=lambda value: str(value)
)
def test_the_interval_leaves_out_as_many_rounds_as_the_sign_test_allows(count: int, left_out: int):
    found = ratio_interval([float(i + 1) for i in range(count)], [1.0] * count)
    assert (found.low, found.high) == (left_out + 1, count - left_out)
    assert found.rounds == count


def test_the_interval_holds_the_median_as_often_as_it_says():
    random = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(400):
        noise = (torch.randn(9, generator=random).exp() * 2).tolist()  # skewed, median 2
        found = ratio_interval(noise, [1.0] * 9)
        held += found.low <= 2 <= found.high
    assert held >= 0.9 * 400


def test_rounds_that_are_no_pairs_are_refused():
    for ours, others in (([1.0], [1.0, 2.0]), ([], [])):
        with pytest.raises(InputError, match="are not pairs"):
            ratio_interval(ours, others)


def test_a_contest_ends_when_its_time_is_up_but_not_before_three_rounds():
    found = contest({"a": lambda: time.sleep(0.01), "b": lambda: None}, seconds=0.0)
    assert {name: len(rounds) for name, rounds in found.items()} == {"a": 3, "b": 3}
    assert len(contest({"a": lambda: None}, seconds=60.0)["a"]) == 25


def test_waiting_counts_as_wall_time_and_not_as_cpu_time():
    (first, *_) = contest({"a": lambda: time.sleep(0.02)}, seconds=0.0)["a"]
    assert first.wall >= 20 > first.cpu
