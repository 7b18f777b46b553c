"""Running products, maxima and minima: TensorRT has a layer for running sums only."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lowering.trt.define.converters.math import accurate_log1p
from lowering.trt.define.net import Net, Tensor, Value
from lowering.trt.define.registry import converts

aten = torch.ops.aten


@converts(aten.cumsum.default)
def cumsum(net: Net, x: Value, dim: int) -> Tensor:
    x = net.cast(x, net.result.dtype)
    return net.cumsum(x, dim) if net.rank(x) else x


def _known_length(x, dim) -> str | None:
    if x.dim() and not isinstance(x.shape[dim], int):
        return "running along a dynamic dimension"
    return None


def _scan(
    net: Net, values: tuple[Tensor, ...], neutral: tuple[Value, ...], dim: int, combine: Callable[..., tuple]
) -> tuple[Tensor, ...]:
    """Inclusive scan in ceil(log2 n) steps (Hillis and Steele): each combines with what stands 1, 2, 4 ... before.

    Args:
        net: the network.
        values: tensors of one shape that are scanned together.
        neutral: for each, what stands before the first element.
        dim: where to.
        combine: (those before, those here) to the new ones.
    """
    length, step = net.size(values[0], dim), 1
    before = [0] * net.rank(values[0])
    while step < length:
        before[dim] = step
        none = [0] * len(before)
        earlier = [
            net.pad(net.narrow(v, dim, 0, length - step), before, none, fill=n)
            for v, n in zip(values, neutral, strict=True)
        ]
        values = combine(*earlier, *values)
        step *= 2
    return values


@converts(aten.cumprod.default, check=_known_length)
def cumprod(net: Net, x: Value, dim: int) -> Tensor:
    x = net.cast(x, net.result.dtype)
    if not net.rank(x):
        return x
    one = 1.0 if net.dtype(x).is_floating_point else 1
    return _scan(net, (x,), (one,), dim % net.rank(x), lambda a, b: (net.mul(a, b),))[0]


@converts(aten.logcumsumexp.default, check=_known_length)
def logcumsumexp(net: Net, x: Value, dim: int) -> Tensor:
    x = net.cast(x, net.result.dtype)
    if not net.rank(x):
        return x
    lowest = torch.finfo(net.dtype(x)).min  # not -inf, whose difference to itself is no number

    def combine(a: Tensor, b: Tensor) -> tuple[Tensor]:
        high, low = net.maximum(a, b), net.minimum(a, b)
        return (net.sum(high, accurate_log1p(net, net.unary("EXP", net.sub(low, high)))),)

    return _scan(net, (x,), (lowest,), dim % net.rank(x), combine)[0]


def _extreme(net: Net, x: Value, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Values and indices; of equal ones the last, as in torch."""
    if not net.rank(x):
        return net.tensor(x), net.tensor(0, torch.int64)
    x, dim = net.tensor(x), dim % net.rank(x)
    dtype = net.dtype(x)
    if dtype == torch.bool:
        values, indices = _extreme(net, net.cast(x, torch.int32), dim, largest)
        return net.cast(values, torch.bool), indices
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    first = limits.min if largest else limits.max
    ramp = net.iota(net.size(x, dim), 0, 1, torch.int64)
    places = net.expand(net.reshape(ramp, [-1 if d == dim else 1 for d in range(net.rank(x))]), net.dims(x))

    def combine(a: Tensor, at: Tensor, b: Tensor, bt: Tensor) -> tuple[Tensor, Tensor]:
        earlier = net.greater(a, b) if largest else net.less(a, b)
        return net.where(earlier, a, b), net.where(earlier, at, bt)

    values, indices = _scan(net, (x, places), (first, 0), dim, combine)
    return values, indices


@converts(aten.cummax.default, check=_known_length)
def cummax(net: Net, x: Value, dim: int) -> tuple[Tensor, Tensor]:
    return _extreme(net, x, dim, largest=True)


@converts(aten.cummin.default, check=_known_length)
def cummin(net: Net, x: Value, dim: int) -> tuple[Tensor, Tensor]:
    return _extreme(net, x, dim, largest=False)
