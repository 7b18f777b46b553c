"""Observers that keep a histogram, and choose the range from it: percentile, least squared error, least divergence.

The bins are those of the floating point format itself: exponent and the first 8 bits of the mantissa, so a bin is 0.2%
to 0.4% of its value wide. Bin edges therefore never depend on the data, and counts of any two batches, or of two
machines, simply add up: the result is the same whatever the batch sizes and their order. Memory is fixed: the 16 powers
of two below the largest magnitude are kept, what is smaller counts as zero.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from fx_passes.errors import InputError
from fx_passes.quantize.ranges.observers import Observer
from fx_passes.quantize.scheme import QuantScheme, affine_qparams

__all__ = ["EntropyObserver", "HistogramObserver", "MSEObserver", "PercentileObserver"]

_MANTISSA = 8
_PER_OCTAVE = 1 << _MANTISSA
_OCTAVES = 16
_BINS = _OCTAVES * _PER_OCTAVE
_SHIFT = 23 - _MANTISSA
_SIGN = 1 << (31 - _SHIFT)
# Values of one sample that are counted; of more, every n-th. The extrema are always those of all values.
_PER_SAMPLE = 1 << 16


class HistogramObserver(Observer):
    """Counts values in bins of 0.4%; its range is that of min-max, its subclasses cut it.

    Buffers:
        counts: int64, (2, 4096): positive and negative values by magnitude, the bins below the largest power of two.
            Of samples with more than 65536 values a regular subset is counted.
        zeros: int64, 0-dim: values too small for the bins, zeros among them.
        top: int64, 0-dim: biased exponent of the largest power of two, 0 before anything was seen.
    """

    counts: Tensor
    zeros: Tensor
    top: Tensor

    def __init__(self, scheme: QuantScheme, axis: int | None = None, name: str = "", where: str = "", **options: Any):
        if axis is not None:
            raise InputError("a histogram is kept per tensor only", hint='use "minmax" or "mse" for weights')
        super().__init__(scheme, axis, name, where)
        self.options = options
        self.register_buffer("counts", torch.zeros(2, _BINS, dtype=torch.int64))
        self.register_buffer("zeros", torch.tensor(0))
        self.register_buffer("top", torch.tensor(0))

    def observe(self, x: Tensor) -> None:
        low, high = self._extrema(x)
        self.low = torch.minimum(self.low.to(low.device), low)
        self.high = torch.maximum(self.high.to(high.device), high)
        bits = _sampled(x).float().contiguous().reshape(-1).view(torch.int32) >> _SHIFT
        if float(low) < 0:
            bits &= 2 * _SIGN - 1
        found = torch.bincount(bits, minlength=2 * _SIGN if float(low) < 0 else _SIGN)
        self._add(found[:_SIGN], found[_SIGN:], max(-float(low), float(high)))

    def _add(self, positive: Tensor, negative: Tensor, largest: float) -> None:
        """Add counts by bit pattern (exponent and mantissa) of values up to `largest`."""
        top = int(torch.tensor(largest, dtype=torch.float32).view(torch.int32) >> 23)
        self._raise_top(top)
        end = (int(self.top) + 1) * _PER_OCTAVE
        start = max(end - _BINS, 0)
        for row, found in enumerate((positive, negative)):
            if not found.numel():
                continue
            kept = found[start:end]
            self.counts[row, _BINS - kept.numel() :] += kept
            self.zeros = self.zeros + found[:start].sum()

    def _raise_top(self, top: int) -> None:
        shift = (top - int(self.top)) * _PER_OCTAVE if int(self.top) else 0
        if top <= int(self.top):
            return
        if shift:
            shift = min(shift, _BINS)
            self.zeros = self.zeros + self.counts[:, :shift].sum()
            self.counts = torch.cat([self.counts[:, shift:], torch.zeros_like(self.counts[:, :shift])], 1)
        self.top = torch.full_like(self.top, top)

    def _absorb(self, other: Observer) -> None:
        assert isinstance(other, HistogramObserver)
        super()._absorb(other)
        self._raise_top(int(other.top))
        aligned = copy.deepcopy(other)
        aligned._raise_top(int(self.top))
        self.counts = self.counts + aligned.counts
        self.zeros = self.zeros + aligned.zeros

    def synchronize(self, group: Any = None) -> None:
        import torch.distributed as dist

        super().synchronize(group)
        top = self.top.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        self._raise_top(int(top))
        dist.all_reduce(self.counts, group=group)
        dist.all_reduce(self.zeros, group=group)

    def range(self) -> tuple[Tensor, Tensor]:
        low, high = super().range()
        cut_low, cut_high = self._cut(float(low), float(high))
        # A bin is an interval: its edge may be a little outside of what was seen.
        return low.clamp_min(min(cut_low, 0.0)), high.clamp_max(max(cut_high, 0.0))

    def _cut(self, low: float, high: float) -> tuple[float, float]:
        """The range to represent, out of the one that was seen."""
        return low, high

    def magnitudes(self) -> Tensor:
        """Upper edges of the bins, float64, (4096,)."""
        first = (int(self.top) + 1) * _PER_OCTAVE - _BINS
        index = torch.arange(first + 1, first + _BINS + 1, dtype=torch.int64).clamp_min(1)
        exponent, mantissa = index // _PER_OCTAVE, index % _PER_OCTAVE
        return torch.ldexp(1.0 + mantissa.double() / _PER_OCTAVE, (exponent - 127).double())

    def values(self) -> tuple[Tensor, Tensor]:
        """Centres of all bins in ascending order, zero among them, and their counts; float64."""
        upper = self.magnitudes()
        centre = upper * (1.0 - 0.5 / _PER_OCTAVE / 1.5)
        zero = torch.zeros(1, dtype=torch.float64)
        counts = self.counts.cpu().double()
        zeros = self.zeros.cpu().double().reshape(1)
        return torch.cat([-centre.flip(0), zero, centre]), torch.cat([counts[1].flip(0), zeros, counts[0]])


def _sampled(x: Tensor) -> Tensor:
    """Every n-th value of each sample (index of dimension 0) that has more than `_PER_SAMPLE` of them.

    n has no factor in common with the last dimension, so that all its places take part. It follows from the shape of
    one sample, so the result is the same whatever the batches are.
    """
    if x.dim() < 2:
        return x
    values = x.flatten(1)
    step = values.shape[1] // _PER_SAMPLE
    if step < 2:
        return x
    while math.gcd(step, x.shape[-1]) > 1:
        step += 1
    return values[:, ::step]


class PercentileObserver(HistogramObserver):
    """Leaves out the outermost values.

    Args:
        percentile: share of the values that is represented, in percent; the rest is cut from both ends, or of the
            magnitudes if the format is symmetric.
    """

    def __init__(self, *args: Any, percentile: float = 99.99, **options: Any):
        super().__init__(*args, **options)
        if not 50.0 < percentile <= 100.0:
            raise InputError(f"percentile is {percentile}", hint="use a number above 50 and up to 100, such as 99.99")
        self.percentile = percentile

    def _cut(self, low: float, high: float) -> tuple[float, float]:
        outside = 1.0 - self.percentile / 100.0
        upper = self.magnitudes()
        counts, total = self.counts.cpu().double(), float(self.counts.sum() + self.zeros)
        if self.scheme.symmetric:
            bound = _edge_above(upper, counts.sum(0), outside * total)
            return max(low, -bound), min(high, bound)
        sides = 2 if low < 0 < high else 1
        cuts = [_edge_above(upper, counts[row], outside * total / sides) for row in (1, 0)]
        return max(low, -cuts[0]), min(high, cuts[1])


def _edge_above(upper: Tensor, counts: Tensor, outside: float) -> float:
    """The lowest edge with at most `outside` values beyond it."""
    beyond = counts.flip(0).cumsum(0).flip(0) - counts
    return float(upper[int((beyond <= outside).nonzero()[0])])


class MSEObserver(HistogramObserver):
    """The fraction of the range that was seen whose rounding and clipping give the least squared error."""

    candidates = torch.linspace(0.1, 1.0, 91, dtype=torch.float64)

    def _cut(self, low: float, high: float) -> tuple[float, float]:
        values, counts = self.values()
        used = counts > 0
        values, counts = values[used], counts[used]
        losses = [self._loss(values, counts, float(f) * low, float(f) * high) for f in self.candidates]
        best = float(self.candidates[int(torch.tensor(losses).argmin())])
        return best * low, best * high

    def _loss(self, values: Tensor, counts: Tensor, low: float, high: float) -> float:
        s = self.scheme
        scale, zero_point = affine_qparams(low, high, s)
        rounded = (torch.clamp(torch.round(values / scale) + zero_point, s.quant_min, s.quant_max) - zero_point) * scale
        return float((counts * (rounded - values).square()).sum())


class EntropyObserver(HistogramObserver):
    """The range whose integers diverge least from the values (Kullback-Leibler), as TensorRT's calibrators chose it.

    Source: S. Migacz, "8-bit Inference with TensorRT", GTC 2017: 2048 bins of equal width over the magnitudes; for
    every number of bins from that of the levels on, what lies beyond is counted into the last of them, and the
    distribution is compared with that of the levels, spread evenly over the bins of each that hold anything. Zeros are
    left out, as there: a ReLU's zeros are exact in any range. The sums over levels are differences of running sums, so
    all thresholds are tried at once.
    """

    bins, stride = 2048, 4

    def _cut(self, low: float, high: float) -> tuple[float, float]:
        largest = max(-low, high)
        counts = self._linear(largest)
        if largest <= 0.0 or not bool(counts.any()):
            return low, high
        steps = self.scheme.quant_max - self.scheme.quant_min
        ends = torch.arange(steps // 2 + 1, self.bins + 1, self.stride)
        bounds = ends.double() * (largest / self.bins)
        span = 2 * bounds if self.scheme.symmetric else bounds.clamp_max(-low) + bounds.clamp_max(high)
        loss = _divergence(counts, ends, bounds * steps / span, steps)
        bound = float(bounds[int(loss.argmin())])
        return max(low, -bound), min(high, bound)

    def _linear(self, largest: float) -> Tensor:
        """Counts of the magnitudes in equal bins up to `largest`, values spread evenly in the bins they come from."""
        upper = self.magnitudes()
        below = self.counts.cpu().double().sum(0).cumsum(0)
        edges = torch.linspace(0.0, 1.0, self.bins + 1, dtype=torch.float64) * largest
        at = torch.searchsorted(upper, edges).clamp_max(_BINS - 1)
        start = torch.where(at > 0, upper[at - 1], 0.0)
        width = upper[at] - start
        before = torch.where(at > 0, below[at - 1], 0.0)
        share = ((edges - start) / width).clamp(0.0, 1.0)
        reached = before + share * (below[at] - before)
        reached[-1] = below[-1]
        return reached.diff()


def _divergence(counts: Tensor, ends: Tensor, levels: Tensor, most: int) -> Tensor:
    """Of the first `ends` bins, from `levels` evenly spread levels; float64, (thresholds,).

    Args:
        counts: of every bin, float64.
        ends: numbers of bins to keep, ascending, (thresholds,).
        levels: how many levels each of them has, may be broken numbers, (thresholds,).
        most: an upper limit of `levels`.
    """

    def running(values: Tensor) -> Tensor:
        return torch.cat([values.new_zeros(1), values.cumsum(0)])

    total, used = running(counts), running((counts > 0).double())
    own = running(torch.where(counts > 0, counts * counts.clamp_min(1e-300).log(), 0.0))
    beyond = total[-1] - total[ends]
    last = counts[ends - 1]
    # Where the levels of every threshold begin, and its end: (thresholds, levels + 1).
    edges = torch.arange(most + 1) * (ends / levels).unsqueeze(1)
    edges = torch.minimum(edges.round().long(), ends.unsqueeze(1))
    inside = total[edges].diff(dim=1)
    bins = used[edges].diff(dim=1)
    # The bin that takes what lies beyond is the last one of the last level.
    in_last = (edges[:, 1:] == ends.unsqueeze(1)) & (edges[:, :-1] < ends.unsqueeze(1))
    bins = bins + in_last * ((last == 0) & (beyond > 0)).unsqueeze(1)
    compared = inside + in_last * beyond.unsqueeze(1)
    spread = (inside / bins.clamp_min(1.0)).clamp_min(1e-4)
    cross = torch.where(compared > 0, compared * spread.log(), 0.0).sum(1)
    merged = last + beyond
    entropy = own[ends - 1] + torch.where(merged > 0, merged * merged.clamp_min(1e-300).log(), 0.0)
    kept = total[ends].clamp_min(1e-300)
    return (entropy - cross) / total[-1] - total[-1].log() + kept.log()
