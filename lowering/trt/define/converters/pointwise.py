"""Arithmetic, comparison, logic and rounding."""

from __future__ import annotations

import torch

from lowering.trt.define.converters.math import signbit
from lowering.trt.define.net import Net, Tensor, Value
from lowering.trt.define.registry import converts

aten = torch.ops.aten


def is_number(value: Value, *numbers: float) -> bool:
    """Whether a value is a Python number, and one of `numbers` if any are given."""
    return isinstance(value, int | float) and not isinstance(value, bool) and (not numbers or value in numbers)


# -- arithmetic ---------------------------------------------------------------------------------------------------


@converts(aten.add.Tensor, aten.add.Scalar)
def add(net: Net, x: Value, other: Value, alpha: Value = 1) -> Tensor:
    dtype = net.result.dtype
    if dtype == torch.bool:
        return net.logical("OR", x, other)
    return net.sum(x, other if is_number(alpha, 1) else net.mul(other, alpha, dtype), dtype)


@converts(aten.sub.Tensor, aten.sub.Scalar)
def sub(net: Net, x: Value, other: Value, alpha: Value = 1) -> Tensor:
    dtype = net.result.dtype
    return net.sub(x, other if is_number(alpha, 1) else net.mul(other, alpha, dtype), dtype)


@converts(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(net: Net, x: Value, other: Value, alpha: Value = 1) -> Tensor:
    return sub(net, other, x, alpha)


@converts(aten.mul.Tensor, aten.mul.Scalar)
def mul(net: Net, x: Value, other: Value) -> Tensor:
    if net.result.dtype == torch.bool:
        return net.logical("AND", x, other)
    return net.mul(x, other, net.result.dtype)


@converts(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)
def div(net: Net, x: Value, other: Value) -> Tensor:
    return net.div(x, other, net.result.dtype)


@converts(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(net: Net, x: Value, other: Value, rounding_mode: str | None = None) -> Tensor:
    dtype = net.result.dtype
    if rounding_mode == "floor":
        return net.floor_div(x, other, dtype)
    quotient = net.div(x, other, dtype)
    return truncate(net, quotient) if rounding_mode == "trunc" else quotient


@converts(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(net: Net, x: Value, other: Value) -> Tensor:
    return net.floor_div(x, other, net.result.dtype)


@converts(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(net: Net, x: Value, other: Value) -> Tensor:
    dtype = net.result.dtype
    return net.sub(x, net.mul(net.floor_div(x, other, dtype), other, dtype), dtype)


@converts(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(net: Net, x: Value, other: Value) -> Tensor:
    dtype = net.result.dtype
    return net.sub(x, net.mul(truncate(net, net.div(x, other, dtype)), other, dtype), dtype)


@converts(aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar)
def pow(net: Net, x: Value, exponent: Value) -> Tensor:
    dtype = net.result.dtype
    if is_number(exponent, 1):
        return net.cast(x, dtype)
    if is_number(exponent, 2, 3):  # products: exact, and defined for negative bases on every backend
        base = net.cast(x, dtype)
        square = net.mul(base, base)
        return square if exponent == 2 else net.mul(square, base)
    if is_number(exponent, 0.5) and dtype.is_floating_point:
        return net.unary("SQRT", net.cast(x, dtype))
    if is_number(exponent, -1) and dtype.is_floating_point:
        return net.unary("RECIP", net.cast(x, dtype))
    return net.pow(x, exponent, dtype)


@converts(aten.square.default)
def square(net: Net, x: Value) -> Tensor:
    return net.mul(x, x, net.result.dtype)


@converts(aten.maximum.default, aten.max.other)
def maximum(net: Net, x: Value, other: Value) -> Tensor:
    if net.result.dtype == torch.bool:
        return net.logical("OR", x, other)
    return net.maximum(x, other, net.result.dtype)


@converts(aten.minimum.default, aten.min.other)
def minimum(net: Net, x: Value, other: Value) -> Tensor:
    if net.result.dtype == torch.bool:
        return net.logical("AND", x, other)
    return net.minimum(x, other, net.result.dtype)


@converts(aten.clamp.default, aten.clamp.Tensor, aten.clip.default, aten.clip.Tensor)
def clamp(net: Net, x: Value, min: Value = None, max: Value = None) -> Tensor:
    return net.clamp(net.cast(x, net.result.dtype), min, max)


@converts(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(net: Net, x: Value, min: Value) -> Tensor:
    return net.maximum(x, min, net.result.dtype)


@converts(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(net: Net, x: Value, max: Value) -> Tensor:
    return net.minimum(x, max, net.result.dtype)


@converts(aten.lerp.Tensor, aten.lerp.Scalar)
def lerp(net: Net, x: Value, end: Value, weight: Value) -> Tensor:
    return net.sum(x, net.mul(weight, net.sub(end, x)))


@converts(aten.addcmul.default)
def addcmul(net: Net, x: Value, tensor1: Value, tensor2: Value, value: Value = 1) -> Tensor:
    dtype = net.result.dtype
    product = net.mul(tensor1, tensor2, dtype)
    return net.sum(x, product if is_number(value, 1) else net.mul(product, value, dtype), dtype)


@converts(aten.addcdiv.default)
def addcdiv(net: Net, x: Value, tensor1: Value, tensor2: Value, value: Value = 1) -> Tensor:
    dtype = net.result.dtype
    quotient = net.div(tensor1, tensor2, dtype)
    return net.sum(x, quotient if is_number(value, 1) else net.mul(quotient, value, dtype), dtype)


@converts(aten.hypot.default)
def hypot(net: Net, x: Value, other: Value) -> Tensor:
    dtype = net.result.dtype
    return net.unary("SQRT", net.sum(net.mul(x, x, dtype), net.mul(other, other, dtype)))


# -- rounding -----------------------------------------------------------------------------------------------------


def truncate(net: Net, x: Value) -> Tensor:
    """Towards zero; integers stay."""
    if not net.dtype(x).is_floating_point:
        return net.tensor(x)
    return net.where(net.less(x, 0.0), net.unary("CEIL", x), net.unary("FLOOR", x))


def _rounding(target, op: str) -> None:
    @converts(target)
    def rounding(net: Net, x: Value) -> Tensor:
        return net.unary(op, x) if net.dtype(x).is_floating_point else net.tensor(x)


_rounding(aten.floor.default, "FLOOR")
_rounding(aten.ceil.default, "CEIL")
_rounding(aten.round.default, "ROUND")


@converts(aten.round.decimals)
def round_decimals(net: Net, x: Value, decimals: int = 0) -> Tensor:
    if not net.dtype(x).is_floating_point:
        return net.tensor(x)
    factor = 10.0 ** abs(decimals)
    if decimals < 0:
        return net.mul(net.unary("ROUND", net.div(x, factor)), factor)
    return net.div(net.unary("ROUND", net.mul(x, factor)), factor)


@converts(aten.trunc.default, aten.fix.default)
def trunc(net: Net, x: Value) -> Tensor:
    return truncate(net, x)


@converts(aten.frac.default)
def frac(net: Net, x: Value) -> Tensor:
    return net.sub(x, truncate(net, x))


# -- comparison and logic -----------------------------------------------------------------------------------------


@converts(aten.eq.Tensor, aten.eq.Scalar)
def eq(net: Net, x: Value, other: Value) -> Tensor:
    return net.equal(x, other)


@converts(aten.ne.Tensor, aten.ne.Scalar)
def ne(net: Net, x: Value, other: Value) -> Tensor:
    return net.logical_not(net.equal(x, other))


@converts(aten.gt.Tensor, aten.gt.Scalar)
def gt(net: Net, x: Value, other: Value) -> Tensor:
    return net.greater(x, other)


@converts(aten.lt.Tensor, aten.lt.Scalar)
def lt(net: Net, x: Value, other: Value) -> Tensor:
    return net.less(x, other)


@converts(aten.ge.Tensor, aten.ge.Scalar)
def ge(net: Net, x: Value, other: Value) -> Tensor:
    # not "not less": a NaN compares false both ways
    return net.logical("OR", net.greater(x, other), net.equal(x, other))


@converts(aten.le.Tensor, aten.le.Scalar)
def le(net: Net, x: Value, other: Value) -> Tensor:
    return net.logical("OR", net.less(x, other), net.equal(x, other))


def _logic(op: str, *targets) -> None:
    @converts(*targets)
    def logic(net: Net, x: Value, other: Value) -> Tensor:
        return net.logical(op, x, other)


_logic("AND", aten.logical_and.default)
_logic("OR", aten.logical_or.default)
_logic("XOR", aten.logical_xor.default)


@converts(aten.logical_not.default)
def logical_not(net: Net, x: Value) -> Tensor:
    return net.logical_not(x)


@converts(aten.fmax.default)
def fmax(net: Net, x: Value, other: Value) -> Tensor:
    return _or_the_number(net, maximum, x, other)


@converts(aten.fmin.default)
def fmin(net: Net, x: Value, other: Value) -> Tensor:
    return _or_the_number(net, minimum, x, other)


def _or_the_number(net: Net, function, x: Value, other: Value) -> Tensor:
    """The greater or smaller one; where one is no number, the other."""
    dtype = net.result.dtype
    a, b = (net.cast(v, dtype) for v in (x, other))
    if not dtype.is_floating_point:
        return function(net, a, b)
    both = net.where(net.equal(b, b), function(net, a, b), a, dtype)
    return net.where(net.equal(a, a), both, b, dtype)


@converts(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(net: Net, x: Value, other: Value) -> Tensor:
    size = net.unary("ABS", net.cast(x, net.result.dtype))
    return net.where(signbit(net, other), net.unary("NEG", size), size)


@converts(aten.ldexp.Tensor)
def ldexp(net: Net, x: Value, other: Value) -> Tensor:
    dtype = net.result.dtype
    return net.mul(x, net.pow(2.0, net.cast(other, dtype), dtype), dtype)


@converts(aten.isnan.default)
def isnan(net: Net, x: Value) -> Tensor:
    return net.logical_not(net.equal(x, x))


@converts(aten.isinf.default)
def isinf(net: Net, x: Value) -> Tensor:
    if not net.dtype(x).is_floating_point:
        return net.logical("XOR", net.equal(x, x), True)
    return net.equal(net.unary("ABS", x), float("inf"))


@converts(aten.isfinite.default)
def isfinite(net: Net, x: Value) -> Tensor:
    if not net.dtype(x).is_floating_point:
        return net.equal(x, x)
    return net.less(net.unary("ABS", x), float("inf"))


@converts(aten.nan_to_num.default)
def nan_to_num(
    net: Net, x: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    dtype = net.dtype(x)
    if not dtype.is_floating_point:
        return net.tensor(x)
    limits = torch.finfo(dtype)
    y = net.where(net.equal(x, x), x, 0.0 if nan is None else nan, dtype)
    y = net.where(net.equal(y, float("inf")), limits.max if posinf is None else posinf, y, dtype)
    return net.where(net.equal(y, float("-inf")), limits.min if neginf is None else neginf, y, dtype)


# -- choice -------------------------------------------------------------------------------------------------------


@converts(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(net: Net, condition: Value, x: Value, other: Value) -> Tensor:
    return net.where(condition, x, other, net.result.dtype)


@converts(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(net: Net, x: Value, mask: Value, value: Value) -> Tensor:
    return net.where(mask, value, x, net.result.dtype)


@converts(aten.heaviside.default)
def heaviside(net: Net, x: Value, values: Value) -> Tensor:
    dtype = net.result.dtype
    return net.where(net.equal(x, 0), values, net.cast(net.greater(x, 0), dtype), dtype)
