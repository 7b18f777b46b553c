"""Observers: exact under any split of the data, merging, ranges and the scales that follow from them."""

from __future__ import annotations

import itertools
import math
import socket
from typing import Any

import pytest
import torch
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fx_passes import convert_fx, prepare_calibration_fx
from fx_passes.errors import CalibrationError, InputError, StageError
from fx_passes.quantize.calibrate import calibrate
from fx_passes.quantize.decomposed import decomposed, is_quantize
from fx_passes.quantize.ranges.histogram import (
    EntropyObserver,
    HistogramObserver,
    MSEObserver,
    PercentileObserver,
    _divergence,
)
from fx_passes.quantize.ranges.names import OBSERVERS
from fx_passes.quantize.ranges.observers import MinMaxObserver, MovingAverageObserver, RunningRangeObserver
from fx_passes.quantize.scheme import SCHEMES, affine_qparams, symmetric_scales
from fx_passes.quantize.weights.scales import channel_sqnr, dequantize_weight, quantize_weight, weight_scale

torch.set_num_threads(1)
INT8, UINT8 = SCHEMES["tensorrt"].activation, SCHEMES["onnxruntime"].activation
WEIGHT = SCHEMES["tensorrt"].weight


def samples(seed: int = 0, count: int = 12) -> Tensor:
    """Values with very different ranges from sample to sample."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, 5, 4, generator=generator)
    return x * torch.logspace(-2, 1, count).reshape(-1, 1, 1, 1)[torch.randperm(count, generator=generator)]


def observed(observer: Any, *batches: Tensor) -> Any:
    for batch in batches:
        assert observer(batch) is batch
    return observer


@pytest.mark.parametrize("sizes", [[12], [1] * 12, [5, 7], [1, 11], [8, 3, 1]], ids=str)
@pytest.mark.parametrize("scheme", [INT8, UINT8], ids=["int8", "uint8"])
@pytest.mark.parametrize("kind", OBSERVERS)
def test_batch_sizes_do_not_matter(kind, scheme, sizes):
    x = samples()
    whole, split = (observed(OBSERVERS[kind](scheme), *batches) for batches in ([x], x.split(sizes)))
    assert split.range() == whole.range()
    assert split.qparams() == whole.qparams()


@pytest.mark.parametrize("kind", sorted(OBSERVERS.keys() - {"moving_average"}))
def test_order_does_not_matter(kind):
    x = samples()
    assert observed(OBSERVERS[kind](INT8), *x.split(3)).range() == observed(OBSERVERS[kind](INT8), x.flip(0)).range()


@pytest.mark.parametrize("kind", sorted(OBSERVERS.keys() - {"moving_average"}))
def test_merged_observers_have_seen_everything(kind):
    x = samples()
    parts = [observed(OBSERVERS[kind](UINT8), part) for part in x.split([3, 4, 5])]
    merged = parts[0].merged(parts[1:])
    assert merged.range() == observed(OBSERVERS[kind](UINT8), x).range()
    assert parts[0].range() == observed(OBSERVERS[kind](UINT8), x[:3]).range(), "merging changed a part"


def test_sizes_may_differ_from_batch_to_batch():
    x, y = torch.randn(2, 3, 8, 8), torch.randn(1, 3, 5, 9) * 3
    observer = observed(MinMaxObserver(INT8), x, y)
    assert observer.range() == (min(x.min(), y.min()), max(x.max(), y.max()))


def test_channels():
    x = samples()
    observer = observed(MinMaxObserver(WEIGHT, axis=1), x[:5], x[5:])
    low, high = observer.range()
    assert torch.equal(low, x.amin((0, 2, 3))) and torch.equal(high, x.amax((0, 2, 3)))
    assert torch.allclose(observer.scales(), x.abs().amax((0, 2, 3)) / 127)


def test_moving_average_is_the_mean_of_few_samples_and_follows_many():
    x = samples()
    low, high = observed(MovingAverageObserver(INT8), x).range()
    assert torch.allclose(high, x.flatten(1).amax(1).mean()) and torch.allclose(low, x.flatten(1).amin(1).mean())
    follower = observed(MovingAverageObserver(INT8, rate=0.1), torch.ones(50, 2), 3 * torch.ones(200, 2))
    assert abs(float(follower.range()[1]) - 3.0) < 1e-3


def test_a_running_range_keeps_what_calibration_saw_and_follows_training():
    observer = observed(RunningRangeObserver(INT8), torch.tensor([[-1.0, 4.0]]), torch.tensor([[-3.0, 2.0]]))
    assert [float(v) for v in observer.range()] == [-3.0, 4.0]
    observer.train()
    observer(torch.tensor([[-1.0, 2.0]]))
    assert [float(v) for v in observer.range()] == pytest.approx([-2.98, 3.98])
    for _ in range(1000):
        observer(torch.tensor([[-1.0, 2.0]]))
    assert [float(v) for v in observer.range()] == pytest.approx([-1.0, 2.0], abs=1e-3)


def test_moving_average_per_channel_equals_one_sample_after_the_other():
    x = samples()
    low, high = observed(MovingAverageObserver(WEIGHT, axis=1, rate=0.2), x[:5], x[5:]).range()
    expected = x[0].amin((1, 2))
    for n, sample in enumerate(x[1:], 2):
        expected = torch.lerp(expected, sample.amin((1, 2)), max(1 / n, 0.2))
    assert torch.allclose(low, expected) and high.shape == low.shape


def test_histogram_counts_every_value():
    x = torch.cat([samples().flatten(), torch.zeros(7)])
    observer = observed(HistogramObserver(INT8), x)
    assert int(observer.counts.sum() + observer.zeros) == x.numel() and int(observer.zeros) >= 7
    values, counts = observer.values()
    assert abs(float((values * counts).sum()) / float(x.sum()) - 1) < 5e-3
    assert bool((values.diff() > 0).all())


def test_histogram_edges_are_those_of_the_values():
    """A value lies between the edges of its bin."""
    for value in (1.0, 1.5, 1.9999, 3e-7, 12345.0):
        observer = observed(HistogramObserver(INT8), torch.tensor([value]))
        (index,) = observer.counts[0].nonzero().flatten().tolist()
        edges = observer.magnitudes()
        assert edges[index - 1] <= value < edges[index]
        assert edges[index] / edges[index - 1] < 1.005


@pytest.mark.parametrize("percentile", [100.0, 99.9, 99.0, 90.0])
def test_percentile(percentile):
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    low, high = observed(PercentileObserver(INT8, percentile=percentile), *x.split(70_000)).range()
    expected = torch.quantile(x.abs().double(), percentile / 100)
    assert (
        float(high) == pytest.approx(float(expected.clamp_max(x.max())), rel=5e-3) and float(low) >= -float(high) * 1.3
    )
    ends = observed(PercentileObserver(UINT8, percentile=percentile), x).range()
    outside = (100 - percentile) / 200
    for end, share in zip(ends, (outside, 1 - outside), strict=True):
        assert float(end) == pytest.approx(float(torch.quantile(x.double(), share)), rel=6e-3)


def squared_error(x: Tensor, observer: Any) -> float:
    scale, zero_point = observer.qparams()
    s = observer.scheme
    args = (scale, zero_point, s.quant_min, s.quant_max, s.dtype)
    ops = decomposed()
    return float((ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *args), *args) - x).square().sum())


DISTRIBUTIONS = {
    "normal": lambda g: torch.randn(50_000, generator=g),
    "relu": lambda g: torch.randn(50_000, generator=g).relu(),
    "outlier": lambda g: torch.cat([torch.randn(50_000, generator=g), torch.tensor([60.0, -45.0])]),
    "laplace": lambda g: torch.randn(50_000, generator=g) * torch.rand(50_000, generator=g).log().abs(),
}


@pytest.mark.parametrize("scheme", [INT8, UINT8], ids=["int8", "uint8"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_squared_error_is_the_least_of_all_fractions(name, scheme):
    x = DISTRIBUTIONS[name](torch.Generator().manual_seed(0))
    best = squared_error(x, observed(MSEObserver(scheme), x))
    for fraction in torch.linspace(0.1, 1.0, 19):
        other = observed(MinMaxObserver(scheme), x.clamp(x.min() * fraction, x.max() * fraction))
        assert best <= squared_error(x, other) * 1.01, float(fraction)


@pytest.mark.parametrize("scheme", [INT8, UINT8], ids=["int8", "uint8"])
def test_entropy_cuts_outliers_and_keeps_the_bulk(scheme):
    x = DISTRIBUTIONS["outlier"](torch.Generator().manual_seed(0))
    low, high = observed(EntropyObserver(scheme), x).range()
    assert 2.5 < float(high) < 30.0 and -25.0 < float(low) < -2.0


def divergence(counts: Tensor, bins: int, levels: float) -> float:
    """KL of the first `bins` bins, the rest counted into the last, from `levels` levels, bin by bin."""
    shown = counts[:bins].tolist()
    reference = [*shown[:-1], shown[-1] + float(counts[bins:].sum())]
    edges = [min(round(level * bins / levels), bins) for level in range(math.ceil(levels) + 1)]
    spread = [0.0] * bins
    for start, end in itertools.pairwise(edges):
        used = [b for b in range(start, end) if reference[b] > 0]
        for b in used:
            spread[b] = max(sum(shown[start:end]) / len(used), 1e-4)
    p, q = (torch.tensor(v, dtype=torch.float64) for v in (reference, spread))
    q = q / sum(shown)
    p = p / p.sum()
    return float((p[p > 0] * (p[p > 0] / q[p > 0]).log()).sum())


@pytest.mark.parametrize("levels", [128, 255, 150.5])
def test_divergence_by_running_sums_is_the_one_by_bins(levels):
    generator = torch.Generator().manual_seed(0)
    counts = torch.histc(torch.randn(5_000, generator=generator).abs(), 512, 0, 4).double()
    counts[300:320] = 0.0
    ends = torch.tensor([260, 310, 311, 512])
    found = _divergence(counts, ends, torch.full((4,), float(levels), dtype=torch.float64), 255)
    expected = [divergence(counts, int(end), levels) for end in ends]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_equal_bins_hold_what_the_bins_of_the_format_hold():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).relu()
    observer = observed(EntropyObserver(INT8), x)
    largest = float(x.max())
    found = observer._linear(largest)
    expected = torch.histc(x[x > 0], 2048, 0, largest).double()
    assert float(found.sum()) == float(observer.counts.sum())
    # A bin of the format is up to 8 of the equal ones wide: compared in groups of 64.
    torch.testing.assert_close(found.reshape(-1, 64).sum(1), expected.reshape(-1, 64).sum(1), rtol=0.05, atol=120)


def test_samples_are_counted_in_part_but_their_extrema_are_exact():
    x = torch.randn(3, 8, 200, 200, generator=torch.Generator().manual_seed(0))
    x[1, 3, 17, 5] = 50.0
    whole, parts = observed(HistogramObserver(INT8), x), observed(HistogramObserver(INT8), *x.split(1))
    assert torch.equal(whole.counts, parts.counts) and float(whole.range()[1]) == 50.0
    total = int(whole.counts.sum() + whole.zeros)
    assert 3 * (1 << 15) <= total <= 3 * (1 << 17)
    share = float(whole.counts[0].sum()) / total
    assert share == pytest.approx(0.5, abs=0.01)


def test_entropy_keeps_an_even_distribution_whole():
    x = torch.linspace(0, 1, 100_000)
    _, high = observed(EntropyObserver(UINT8), x).range()
    assert float(high) > 0.97


# ---- extreme values

RANGES = {
    "zero": (0.0, 0.0),
    "denormal": (-1e-41, 1e-40),
    "tiny": (0.0, 1e-35),
    "small": (-3e-20, 1e-20),
    "positive": (2.0, 3.0),
    "negative": (-7.0, -6.5),
    "huge": (-3e38, 3e38),
}


@pytest.mark.parametrize("scheme", [INT8, UINT8], ids=["int8", "uint8"])
@pytest.mark.parametrize("name", RANGES)
def test_scales_are_finite_positive_and_normal(name, scheme):
    scale, zero_point = affine_qparams(*RANGES[name], scheme)
    assert torch.finfo(torch.float32).tiny <= scale < float("inf")
    assert scale == float(torch.tensor(scale, dtype=torch.float32)), "not a float32"
    assert scheme.quant_min <= zero_point <= scheme.quant_max


@settings(deadline=None, max_examples=200)
@given(
    st.floats(-1e6, 1e6, width=32),
    st.floats(-1e6, 1e6, width=32),
    st.sampled_from([INT8, UINT8]),
)
def test_every_value_in_the_range_is_within_half_a_step(a, b, scheme):
    low, high = min(a, b), max(a, b)
    scale, zero_point = affine_qparams(low, high, scheme)
    x = torch.linspace(low, high, 50)
    args = (scale, zero_point, scheme.quant_min, scheme.quant_max, scheme.dtype)
    ops = decomposed()
    back = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *args), *args)
    # One step at the ends of an affine range, whose zero point is rounded.
    assert (back - x).abs().max() <= scale * (0.5001 if scheme.symmetric else 1.0001)
    zero = ops.dequantize_per_tensor(ops.quantize_per_tensor(torch.zeros(1), *args), *args)
    assert zero == 0.0


@pytest.mark.parametrize("kind", OBSERVERS)
@pytest.mark.parametrize("value", [0.0, 5.0, -1e-40], ids=["zeros", "constant", "denormal"])
def test_constant_values(kind, value):
    scale, zero_point = observed(OBSERVERS[kind](UINT8), torch.full((4, 3), value)).qparams()
    assert 0 < scale < float("inf") and 0 <= zero_point <= 255


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("kind", OBSERVERS)
def test_values_that_are_not_finite(kind, bad):
    observer = OBSERVERS[kind](INT8, name="conv1", where="node 'conv1' from model.py:7")
    x = torch.ones(2, 3)
    x[1, 2] = bad
    with pytest.raises(CalibrationError, match=r"node 'conv1' from model.py:7"):
        observer(x)


@pytest.mark.parametrize("kind", OBSERVERS)
def test_nothing_observed(kind):
    observer = OBSERVERS[kind](INT8, name="conv1")
    observer(torch.ones(0, 3))
    with pytest.raises(StageError, match="conv1"):
        observer.qparams()


def test_values_that_are_no_float_tensors():
    observer = MinMaxObserver(INT8)
    observer(torch.ones(2, dtype=torch.int64))
    assert observer.seen_type == "torch.int64" and not observer.calibrated


def test_bad_options():
    with pytest.raises(InputError, match="percentile"):
        PercentileObserver(INT8, percentile=0.999)
    with pytest.raises(InputError, match="per tensor"):
        HistogramObserver(INT8, axis=0)


# ---- weights


@pytest.mark.parametrize("method", ["minmax", "mse"])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_weights_are_within_half_a_step(axis, method):
    weight = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    scale = weight_scale(weight, WEIGHT, axis, method)
    assert scale.shape == (() if axis is None else (weight.shape[axis],))
    error = (dequantize_weight(quantize_weight(weight, scale, WEIGHT, axis), scale, axis) - weight).abs()
    if method == "minmax":
        assert bool((error.movedim(axis or 0, -1) <= scale * 0.5001).all())
    assert error.square().sum() > 0


def test_mse_weights_have_less_error():
    weight = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0))
    weight[0, 0] = 12.0  # far out, and few: clipping it costs less than rounding all others coarsely
    errors = []
    for method in ("minmax", "mse"):
        scale = weight_scale(weight, WEIGHT, 0, method)
        rounded = dequantize_weight(quantize_weight(weight, scale, WEIGHT, 0), scale, 0)
        errors.append((rounded - weight).square().sum(1))
    assert errors[1][0] < 0.7 * errors[0][0] and errors[1][1] <= errors[0][1]


def test_dead_weight_channels():
    weight = torch.randn(4, 9)
    weight[1], weight[2] = 0.0, 1e-38
    scale = weight_scale(weight, WEIGHT, 0)
    assert bool((scale.isfinite() & (scale > 1e-6)).all())
    assert bool((quantize_weight(weight, scale, WEIGHT, 0)[1:3] == 0).all())
    assert bool((symmetric_scales(torch.zeros(3), WEIGHT) > 0).all())


@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
def test_expected_weight_noise_is_the_measured_one(granularity):
    weight = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -1.2, 8).reshape(
        -1, 1, 1, 1
    )
    axis = 0 if granularity == "per_channel" else None
    scale = weight_scale(weight, WEIGHT, axis)
    error = (dequantize_weight(quantize_weight(weight, scale, WEIGHT, axis), scale, axis) - weight).flatten(1)
    measured = 10 * torch.log10(weight.flatten(1).square().sum(1) / error.square().sum(1))
    assert (channel_sqnr(weight, WEIGHT, 0, granularity) - measured).abs().max() < 3.0


# ---- several processes


def _worker(rank: int, port: int, kind: str, answers: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        prepared = prepare_calibration_fx(_net(), target="onnxruntime", qconfig={"": {"observer": kind}})
        calibrate(prepared, _batches()[rank::2])
        answers.put((rank, _scales(prepared)))
    finally:
        dist.destroy_process_group()


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()


def _batches() -> list[Tensor]:
    return list(samples(count=12).split([3, 2, 4, 3]))


def _scales(prepared: nn.Module) -> list[tuple[Any, ...]]:
    return [node.args[1:3] for node in convert_fx(prepared).graph.nodes if is_quantize(node)]


@pytest.mark.parametrize("kind", ["minmax", "moving_average", "mse"])
def test_two_processes_find_the_scales_of_one(kind):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = torch.multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    workers = [context.Process(target=_worker, args=(rank, port, kind, answers)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    found = dict(answers.get() for _ in workers)
    assert found[0] == found[1]
    prepared = prepare_calibration_fx(_net(), target="onnxruntime", qconfig={"": {"observer": kind}})
    calibrate(prepared, _batches())
    alone = _scales(prepared)
    if kind == "moving_average":  # few samples: a plain mean, whose sum is rounded differently
        assert all(a[0] == pytest.approx(b[0], rel=1e-6) for a, b in zip(alone, found[0], strict=True))
    else:
        assert alone == found[0]
