"""Sizes of tensors and what is computed from them: shape arithmetic at run time."""

from __future__ import annotations

import math
import operator

import torch

from lowering.trt.define.net import Net, Scalar, Size, Value
from lowering.trt.define.registry import converts

aten = torch.ops.aten


@converts(aten.sym_size.int)
def sym_size(net: Net, x: Value, dim: int) -> Size:
    return net.size(x, dim)


@converts(aten.sym_numel.default)
def sym_numel(net: Net, x: Value) -> Size:
    return net.numel(x)


def _arithmetic(function) -> None:
    # Scalar has the operators themselves
    @converts(function)
    def arithmetic(net: Net, a: Size, b: Size) -> Size:
        return function(a, b)


for _function in (
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.mod,
    operator.truediv,
    operator.pow,
):
    _arithmetic(_function)


@converts(operator.neg)
def neg(net: Net, a: Size) -> Size:
    return -a


@converts(torch.sym_max)
def sym_max(net: Net, a: Size, b: Size) -> Size:
    return net.maximum_size(a, b)


@converts(torch.sym_min)
def sym_min(net: Net, a: Size, b: Size) -> Size:
    return net.minimum_size(a, b)


@converts(torch.sym_float)
def sym_float(net: Net, a: Size) -> Size:
    return net.scalar(a, torch.float32)


@converts(torch.sym_int, math.trunc)
def sym_int(net: Net, a: Size) -> Size:
    return net.scalar(a, torch.int64)


def _rounded(function, op: str) -> None:
    @converts(function)
    def rounded(net: Net, a: Size) -> Size:
        if net.dtype(a) == torch.int64:
            return a
        return Scalar(net, net.cast(net.unary(op, net.scalar(a).tensor), torch.int64))


_rounded(math.floor, "FLOOR")
_rounded(math.ceil, "CEIL")
_rounded(round, "ROUND")


def _comparison(function, op: str, swap: bool = False, negate: bool = False) -> None:
    @converts(function)
    def comparison(net: Net, a: Size, b: Size) -> Scalar:
        result = net.compare_scalars(op, b, a) if swap else net.compare_scalars(op, a, b)
        return Scalar(net, net.unary("NOT", result.tensor), torch.bool) if negate else result


_comparison(operator.eq, "EQUAL")
_comparison(operator.ne, "EQUAL", negate=True)
_comparison(operator.gt, "GREATER")
_comparison(operator.lt, "LESS")
_comparison(operator.ge, "LESS", negate=True)
_comparison(operator.le, "GREATER", negate=True)


@converts(torch.sym_not)
def sym_not(net: Net, a: Scalar) -> Scalar:
    return Scalar(net, net.unary("NOT", a.tensor), torch.bool)


@converts(torch.sym_ite)
def sym_ite(net: Net, condition: Scalar, a: Size, b: Size) -> Scalar:
    dtype = torch.promote_types(net.dtype(a), net.dtype(b))
    chosen = net.where(condition.tensor, net.scalar(a, dtype).tensor, net.scalar(b, dtype).tensor, dtype)
    return Scalar(net, chosen, dtype)
