"""Functions of one number: exponentials, roots, trigonometry, error functions."""

from __future__ import annotations

import math

import torch

from lowering.trt.define.net import Net, Tensor, Value
from lowering.trt.define.registry import converts

aten = torch.ops.aten


def _float_unary(target, op: str) -> None:
    """An op whose integer input becomes the result's float type first, as in torch."""

    @converts(target)
    def unary(net: Net, x: Value) -> Tensor:
        return net.unary(op, net.cast(x, net.result.dtype))


for _target, _op in (
    (aten.exp.default, "EXP"),
    (aten.log.default, "LOG"),
    (aten.sqrt.default, "SQRT"),
    (aten.reciprocal.default, "RECIP"),
    (aten.sin.default, "SIN"),
    (aten.cos.default, "COS"),
    (aten.tan.default, "TAN"),
    (aten.sinh.default, "SINH"),
    (aten.cosh.default, "COSH"),
    (aten.asin.default, "ASIN"),
    (aten.acos.default, "ACOS"),
    (aten.atan.default, "ATAN"),
    (aten.asinh.default, "ASINH"),
    (aten.acosh.default, "ACOSH"),
    (aten.atanh.default, "ATANH"),
    (aten.erf.default, "ERF"),
    (aten.special_erf.default, "ERF"),
):
    _float_unary(_target, _op)


@converts(aten.abs.default)
def abs_(net: Net, x: Value) -> Tensor:
    return net.unary("ABS", x)


@converts(aten.neg.default)
def neg(net: Net, x: Value) -> Tensor:
    return net.unary("NEG", x)


@converts(aten.sign.default, aten.sgn.default)
def sign(net: Net, x: Value) -> Tensor:
    return net.tensor(x) if net.dtype(x) == torch.bool else net.unary("SIGN", x)


@converts(aten.signbit.default)
def signbit(net: Net, x: Value) -> Tensor:
    # the sign of a zero shows in its reciprocal only
    if isinstance(x, int | float) or not net.dtype(x).is_floating_point:
        return net.less(x, 0)
    zero = net.logical("AND", net.equal(x, 0.0), net.less(net.unary("RECIP", x), 0.0))
    return net.logical("OR", net.less(x, 0.0), zero)


@converts(aten.rsqrt.default)
def rsqrt(net: Net, x: Value) -> Tensor:
    return net.unary("RECIP", net.unary("SQRT", net.cast(x, net.result.dtype)))


@converts(aten.exp2.default, aten.special_exp2.default)
def exp2(net: Net, x: Value) -> Tensor:
    return net.unary("EXP", net.mul(x, math.log(2), net.result.dtype))


@converts(aten.log2.default)
def log2(net: Net, x: Value) -> Tensor:
    return net.mul(net.unary("LOG", net.cast(x, net.result.dtype)), 1 / math.log(2))


@converts(aten.log10.default)
def log10(net: Net, x: Value) -> Tensor:
    return net.mul(net.unary("LOG", net.cast(x, net.result.dtype)), 1 / math.log(10))


@converts(aten.log1p.default)
def log1p(net: Net, x: Value) -> Tensor:
    return accurate_log1p(net, net.cast(x, net.result.dtype))


@converts(aten.expm1.default, aten.special_expm1.default)
def expm1(net: Net, x: Value) -> Tensor:
    return accurate_expm1(net, net.cast(x, net.result.dtype))


def accurate_log1p(net: Net, x: Tensor) -> Tensor:
    """log(1 + x) without the loss near zero: ``log(u) * x / (u - 1)`` with u = 1 + x (Kahan)."""
    u = net.sum(x, 1.0)
    tail = net.sub(u, 1.0)
    small = net.equal(tail, 0.0)
    infinite = net.equal(u, float("inf"))
    ratio = net.div(x, net.where(small, 1.0, tail, net.dtype(x)))
    plain = net.unary("LOG", net.where(small, 1.0, u, net.dtype(x)))
    corrected = net.where(small, x, net.mul(plain, ratio))
    return net.where(infinite, u, corrected)


def accurate_expm1(net: Net, x: Tensor) -> Tensor:
    """exp(x) - 1 without the loss near zero: ``2 t / (1 - t)`` with t = tanh(x / 2)."""
    near = net.less(net.unary("ABS", x), 0.5)
    t = net.tanh(net.mul(net.where(near, x, 0.0, net.dtype(x)), 0.5))
    return net.where(near, net.div(net.mul(t, 2.0), net.sub(1.0, t)), net.sub(net.unary("EXP", x), 1.0))


@converts(aten.erfc.default, aten.special_erfc.default)
def erfc(net: Net, x: Value) -> Tensor:
    return net.sub(1.0, net.unary("ERF", net.cast(x, net.result.dtype)))


@converts(aten.logit.default)
def logit(net: Net, x: Value, eps: float | None = None) -> Tensor:
    x = net.cast(x, net.result.dtype)
    if eps is not None:
        x = net.clamp(x, eps, 1 - eps)
    return net.unary("LOG", net.div(x, net.sub(1.0, x)))


@converts(aten.sinc.default)
def sinc(net: Net, x: Value) -> Tensor:
    x = net.mul(x, math.pi, net.result.dtype)
    zero = net.equal(x, 0.0)
    return net.where(zero, 1.0, net.div(net.unary("SIN", x), net.where(zero, 1.0, x, net.dtype(x))), net.dtype(x))


@converts(aten.atan2.default, aten.arctan2.default)
def atan2(net: Net, x: Value, other: Value) -> Tensor:
    """`x` is the ordinate here (aten calls it self), `other` the abscissa."""
    dtype = net.result.dtype
    y, abscissa = net.align(x, other, dtype=dtype)
    on_axis = net.equal(abscissa, 0.0)
    angle = net.unary("ATAN", net.div(y, net.where(on_axis, 1.0, abscissa, dtype)))
    half_turn = net.where(net.less(y, 0.0), -math.pi, math.pi, dtype)
    left = net.where(net.less(abscissa, 0.0), net.sum(angle, half_turn), angle)
    vertical = net.mul(net.unary("SIGN", y), math.pi / 2)
    return net.where(on_axis, vertical, left)


@converts(aten.deg2rad.default)
def deg2rad(net: Net, x: Value) -> Tensor:
    return net.mul(x, math.pi / 180, net.result.dtype)


@converts(aten.rad2deg.default)
def rad2deg(net: Net, x: Value) -> Tensor:
    return net.mul(x, 180 / math.pi, net.result.dtype)


@converts(aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.special_xlogy.default)
def xlogy(net: Net, x: Value, other: Value) -> Tensor:
    dtype = net.result.dtype
    y = net.mul(x, net.unary("LOG", net.cast(other, dtype)), dtype)
    zero = net.logical("AND", net.equal(x, 0), net.equal(other, other))
    return net.where(zero, 0.0, y, dtype)


@converts(aten.logaddexp.default)
def logaddexp(net: Net, x: Value, other: Value) -> Tensor:
    dtype = net.result.dtype
    high, low = net.maximum(x, other, dtype), net.minimum(x, other, dtype)
    return net.sum(high, accurate_log1p(net, net.unary("EXP", net.sub(low, high))))
