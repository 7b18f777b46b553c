"""Tensors made from nothing: ramps, constants, and their *_like forms."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowering.trt.define.net import Net, Size, Tensor, Value, is_static
from lowering.trt.define.registry import converts

aten = torch.ops.aten


def filled(net: Net, size: Sequence[Size], value: Value, dtype: torch.dtype) -> Value:
    """A tensor of one value: a host constant if its size is known and small, else a broadcast at run time."""
    if is_static(size) and isinstance(value, bool | int | float):
        total = 1
        for s in size:
            total *= s
        if net.foldable(0, total):
            return torch.full(tuple(size), value, dtype=dtype)
    return net.expand(
        net.tensor(value, dtype, rank=len(size)) if not _is_tensor(net, value) else net.tensor(value, dtype), size
    )


def _is_tensor(net: Net, value: Value) -> bool:
    return not isinstance(value, bool | int | float) and net.rank(value) > 0


@converts(aten.full.default)
def full(net: Net, size: Sequence[Size], fill_value: Value) -> Value:
    return filled(net, size, fill_value, net.result.dtype)


@converts(aten.zeros.default, aten.empty.memory_format)
def zeros(net: Net, size: Sequence[Size]) -> Value:
    return filled(net, size, 0, net.result.dtype)


@converts(aten.ones.default)
def ones(net: Net, size: Sequence[Size]) -> Value:
    return filled(net, size, 1, net.result.dtype)


@converts(aten.full_like.default)
def full_like(net: Net, x: Value, fill_value: Value) -> Value:
    return filled(net, net.dims(x), fill_value, net.result.dtype)


@converts(aten.zeros_like.default, aten.empty_like.default)
def zeros_like(net: Net, x: Value) -> Value:
    return filled(net, net.dims(x), 0, net.result.dtype)


@converts(aten.ones_like.default)
def ones_like(net: Net, x: Value) -> Value:
    return filled(net, net.dims(x), 1, net.result.dtype)


@converts(aten.new_zeros.default, aten.new_empty.default)
def new_zeros(net: Net, x: Value, size: Sequence[Size]) -> Value:
    return filled(net, size, 0, net.result.dtype)


@converts(aten.new_ones.default)
def new_ones(net: Net, x: Value, size: Sequence[Size]) -> Value:
    return filled(net, size, 1, net.result.dtype)


@converts(aten.new_full.default)
def new_full(net: Net, x: Value, size: Sequence[Size], fill_value: Value) -> Value:
    return filled(net, size, fill_value, net.result.dtype)


@converts(aten.fill.Scalar, aten.fill.Tensor)
def fill(net: Net, x: Value, value: Value) -> Value:
    return filled(net, net.dims(x), value, net.result.dtype)


@converts(aten.copy.default)
def copy(net: Net, x: Value, src: Value) -> Tensor:
    """The functional form of `copy_`: src in the dtype and the size of x."""
    return net.expand(net.tensor(src, net.dtype(x)), net.dims(x))


@converts(aten.scalar_tensor.default)
def scalar_tensor(net: Net, s: Value) -> Tensor:
    return net.tensor(s, net.result.dtype)


@converts(aten.arange.default)
def arange(net: Net, end: Value) -> Tensor:
    return arange_step(net, 0, end)


@converts(aten.arange.start)
def arange_start(net: Net, start: Value, end: Value) -> Tensor:
    return arange_step(net, start, end)


def _integer_bounds(start, end, step) -> str | None:
    if any(isinstance(v, torch.SymFloat) for v in (start, end, step)):
        return "a ramp whose bounds are floats computed at run time"
    return None


@converts(aten.arange.start_step, check=_integer_bounds)
def arange_step(net: Net, start: Value = 0, end: Value = None, step: Value = 1) -> Tensor:
    dtype = net.result.dtype
    if all(isinstance(v, int | float) for v in (start, end, step)):
        return net.constant(torch.arange(start, end, step, dtype=dtype))
    length = net.maximum_size((end - start + (step - (1 if _positive(step) else -1))) // step, 0)
    wide = dtype if dtype in (torch.int32, torch.int64, torch.float32) else torch.float32
    return net.cast(net.iota(length, start, step, wide), dtype)


def _positive(step: Value) -> bool:
    return not isinstance(step, int | float) or step > 0


@converts(aten.eye.default, aten.eye.m)
def eye(net: Net, n: Size, m: Size | None = None) -> Tensor:
    rows = net.unsqueeze(net.iota(n, 0, 1, torch.int64), [1])
    columns = net.unsqueeze(net.iota(n if m is None else m, 0, 1, torch.int64), [0])
    return net.cast(net.equal(rows, columns), net.result.dtype)


def _static_steps(steps) -> str | None:
    return None if isinstance(steps, int) else "the number of steps is dynamic"


@converts(aten.linspace.default, check=_static_steps)
def linspace(net: Net, start: Value, end: Value, steps: int) -> Tensor:
    unit = torch.linspace(0, 1, steps)
    dtype = net.result.dtype
    span = net.cast(net.tensor(end - start, torch.float32), torch.float32)
    return net.cast(net.sum(net.mul(unit, span), net.tensor(start, torch.float32)), dtype)
