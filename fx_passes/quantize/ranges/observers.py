"""Observers: modules that watch one value during calibration and give its range.

An observer returns its input unchanged. In calibration all of them are exact under any split of the data into batches:
the same samples give the same range, whatever the batch sizes were.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fx_passes.errors import CalibrationError, StageError
from fx_passes.quantize.scheme import QuantScheme, affine_qparams, symmetric_scales

__all__ = ["FixedRangeObserver", "MinMaxObserver", "MovingAverageObserver", "Observer", "RunningRangeObserver"]


class Observer(nn.Module):
    """Base of the observers.

    Args:
        scheme: the integer format that the range is for.
        axis: channel axis for one range per channel; None for one range.
        name: the graph node whose value is watched, for messages.
        where: that node described with its source line, for messages.

    Buffers:
        low, high: float32, 0-dim or (channels,); +inf and -inf until something was seen.
        channel_low, channel_high: float32, (channels,), the extrema of each; 0-dim where they are not asked for.
        channel_sum, channel_count: float64, (channels,), and int64, 0-dim: their sums, and the number of values summed.

    Attributes:
        channel_axis: axis of the channels, None to watch none.
        channel_statistics: what is watched of them: "low", "high", "sum".
    """

    low: Tensor
    high: Tensor
    channel_low: Tensor
    channel_high: Tensor
    channel_sum: Tensor
    channel_count: Tensor

    def __init__(self, scheme: QuantScheme, axis: int | None = None, name: str = "", where: str = ""):
        super().__init__()
        self.scheme, self.axis, self.name, self.where = scheme, axis, name, where
        self.enabled = True
        self.seen_type: str | None = None  # of a value that has no range: an integer tensor, a list
        self.channel_axis: int | None = None
        self.channel_statistics: frozenset[str] = frozenset({"high", "sum"})
        self.register_buffer("channel_low", torch.tensor(float("inf")))
        self.register_buffer("channel_high", torch.tensor(float("-inf")))
        self.register_buffer("channel_sum", torch.tensor(0.0, dtype=torch.float64))
        self.register_buffer("channel_count", torch.tensor(0))
        self.register_buffer("low", torch.tensor(float("inf")))
        self.register_buffer("high", torch.tensor(float("-inf")))

    def forward(self, x: Tensor) -> Tensor:
        if self.enabled:
            if isinstance(x, Tensor) and x.is_floating_point():
                if x.numel():
                    with torch.no_grad():
                        self.observe(x.detach())
                        self._observe_channels(x.detach())
            else:
                self.seen_type = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        return x

    def observe(self, x: Tensor) -> None:
        """Take in one value: any shape, floating point, not empty."""
        raise NotImplementedError

    def _observe_channels(self, x: Tensor) -> None:
        if self.channel_axis is None or x.dim() < 2:
            return
        others = [i for i in range(x.dim()) if i != self.channel_axis % x.dim()]
        if "low" in self.channel_statistics:
            self.channel_low = torch.minimum(self.channel_low, x.amin(others).float())
        if "high" in self.channel_statistics:
            self.channel_high = torch.maximum(self.channel_high, x.amax(others).float())
        if "sum" in self.channel_statistics:
            self.channel_sum = self.channel_sum + x.sum(others)
            self.channel_count = self.channel_count + x.numel() // x.shape[self.channel_axis]

    def channel_mean(self) -> Tensor | None:
        """Mean of every channel, float64, (channels,); None where channels are not observed."""
        return self.channel_sum / self.channel_count if self.channel_sum.dim() else None

    @property
    def calibrated(self) -> bool:
        """Whether a floating point value was seen."""
        return bool((self.low <= self.high).all())

    def range(self) -> tuple[Tensor, Tensor]:
        """Lowest and highest value to represent, float32.

        Raises:
            StageError: nothing was observed.
        """
        if not self.calibrated:
            raise StageError(
                f"the value of {self._called()} was never observed",
                hint="run calibration batches through the prepared module before convert_fx",
            )
        return self.low, self.high

    def qparams(self) -> tuple[float, int]:
        """Scale and zero point of a per-tensor range."""
        low, high = self.range()
        return affine_qparams(float(low), float(high), self.scheme)

    def scales(self) -> Tensor:
        """Scales of a symmetric range, float32, with the shape of `range()`."""
        low, high = self.range()
        return symmetric_scales(torch.maximum(-low, high), self.scheme)

    def merged(self, others: Sequence[Observer]) -> Observer:
        """A new observer of the same kind that has seen what this one and `others` have."""
        result = copy.deepcopy(self)
        for other in others:
            result._absorb(other)
        return result

    def _absorb(self, other: Observer) -> None:
        self.low = torch.minimum(self.low, other.low)
        self.high = torch.maximum(self.high, other.high)
        self.channel_low = torch.minimum(self.channel_low, other.channel_low)
        self.channel_high = torch.maximum(self.channel_high, other.channel_high)
        self.channel_sum = self.channel_sum + other.channel_sum
        self.channel_count = self.channel_count + other.channel_count

    def synchronize(self, group: Any = None) -> None:
        """Merge with the same observer on the other ranks of a `torch.distributed` group (collective call)."""
        import torch.distributed as dist

        dist.all_reduce(self.low, dist.ReduceOp.MIN, group=group)
        dist.all_reduce(self.high, dist.ReduceOp.MAX, group=group)
        self._synchronize_channels(group)

    def _synchronize_channels(self, group: Any) -> None:
        import torch.distributed as dist

        if self.channel_low.dim():
            dist.all_reduce(self.channel_low, dist.ReduceOp.MIN, group=group)
        if self.channel_high.dim():
            dist.all_reduce(self.channel_high, dist.ReduceOp.MAX, group=group)
        if self.channel_sum.dim():
            dist.all_reduce(self.channel_sum, group=group)
            dist.all_reduce(self.channel_count, group=group)

    def _extrema(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Minimum and maximum of `x` in float32, per channel if there is an axis.

        Raises:
            CalibrationError: NaN or infinity in `x`, naming the value.
        """
        if self.axis is None:
            low, high = torch.aminmax(x)
        else:
            channels = x.movedim(self.axis, 0).reshape(x.shape[self.axis], -1)
            # amin and amax: aminmax over a dimension is some twenty times slower on the CPU.
            low, high = channels.amin(1), channels.amax(1)
        low, high = low.float(), high.float()
        if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
            found = "NaN" if bool((low.isnan() | high.isnan()).any()) else "infinity"
            raise CalibrationError(
                f"{found} in the value of {self._called()} during calibration",
                hint="look for bad samples in the calibration data, or for an overflow in the layers before this one",
            )
        return low, high

    def _called(self) -> str:
        return self.where or (f"'{self.name}'" if self.name else "an observed tensor")

    def extra_repr(self) -> str:
        return f"{self.name}, {str(self.scheme.dtype).removeprefix('torch.')}" + (
            f", axis={self.axis}" if self.axis is not None else ""
        )


class MinMaxObserver(Observer):
    """The smallest and the largest value seen."""

    def observe(self, x: Tensor) -> None:
        low, high = self._extrema(x)
        self.low = torch.minimum(self.low.to(low.device), low)
        self.high = torch.maximum(self.high.to(high.device), high)


class FixedRangeObserver(Observer):
    """The range that a value has by what computes it: [0, 1] for a softmax. What is observed does not change it.

    Args:
        bounds: lowest and highest value.
    """

    def __init__(
        self,
        scheme: QuantScheme,
        axis: int | None = None,
        name: str = "",
        where: str = "",
        bounds: tuple[float, float] = (0.0, 1.0),
    ):
        super().__init__(scheme, axis, name, where)
        self.bounds = bounds

    def observe(self, x: Tensor) -> None:
        low, _ = self._extrema(x)
        self.low, self.high = (torch.full_like(low, bound) for bound in self.bounds)


class MovingAverageObserver(Observer):
    """Mean over the samples (dimension 0) of each sample's minimum and maximum.

    A plain mean up to 1/`rate` samples, an exponential moving average after: sample n has weight max(1/n, `rate`) when
    it comes. Counting samples and not batches makes the result independent of the batch sizes.
    """

    count: Tensor

    def __init__(
        self, scheme: QuantScheme, axis: int | None = None, name: str = "", where: str = "", rate: float = 0.01
    ):
        super().__init__(scheme, axis, name, where)
        self.rate = rate
        self.register_buffer("count", torch.tensor(0, dtype=torch.int64))

    def observe(self, x: Tensor) -> None:
        before = int(self.count)
        # One after the other, and not in closed form: any split into batches then gives the same bits.
        for number, (low, high) in enumerate(zip(*self._sample_extrema(x), strict=True), before + 1):
            weight = max(1.0 / number, self.rate)
            self.low = low if number == 1 else torch.lerp(self.low.to(low.device), low, weight)
            self.high = high if number == 1 else torch.lerp(self.high.to(high.device), high, weight)
        self.count = self.count + (x.shape[0] if self._has_samples(x) else 1)

    def _has_samples(self, x: Tensor) -> bool:
        """Whether dimension 0 counts samples: not where it is the channels, or the only one."""
        return x.dim() > 1 and self.axis != 0

    def _sample_extrema(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(samples,) or (samples, channels) each."""
        if not self._has_samples(x):
            low, high = self._extrema(x)
            return low[None], high[None]
        self._extrema(x)  # refuses NaN and infinity
        others = [d for d in range(1, x.dim()) if self.axis is None or d != self.axis % x.dim()]
        return x.amin(others).float(), x.amax(others).float()

    def synchronize(self, group: Any = None) -> None:
        """Mean of the ranks' averages, weighted by their numbers of samples."""
        import torch.distributed as dist

        total = self.count.clone()
        dist.all_reduce(total, group=group)
        for name in ("low", "high"):
            share = torch.where(self.count > 0, getattr(self, name), torch.zeros_like(getattr(self, name)))
            share = share * self.count
            dist.all_reduce(share, group=group)
            setattr(self, name, share / total)
        self.count = total
        self._synchronize_channels(group)


class RunningRangeObserver(MinMaxObserver):
    """The extrema of what was seen in eval mode; in train mode they follow those of the batches.

    What quantization-aware training wants: nothing is cut off that calibration saw, and ranges move with the weights.
    An exponential moving average of the batches' extrema, as in Jacob et al. (arXiv 1712.05877, section 3.1).
    """

    def __init__(
        self, scheme: QuantScheme, axis: int | None = None, name: str = "", where: str = "", rate: float = 0.01
    ):
        super().__init__(scheme, axis, name, where)
        self.rate = rate
        self.training = False  # until a module around it is set to train

    def observe(self, x: Tensor) -> None:
        if not (self.training and self.calibrated):
            super().observe(x)
            return
        low, high = self._extrema(x)
        self.low = torch.lerp(self.low.to(low.device), low, self.rate)
        self.high = torch.lerp(self.high.to(high.device), high, self.rate)
