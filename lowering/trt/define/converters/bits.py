"""Bitwise operations: TensorRT has them for bool; on integers they are arithmetic on runs of bits."""

from __future__ import annotations

import torch

from lowering.trt.define.net import Net, Tensor, Value
from lowering.trt.define.registry import converts

aten = torch.ops.aten


def _bool_or_constant(x, other, result) -> str | None:
    if result.dtype == torch.bool or isinstance(x, int) or isinstance(other, int):
        return None
    return "TensorRT has bitwise operations on bool only, and arithmetic can stand for those with a constant only"


def _bitwise(op: str, *targets) -> None:
    @converts(*targets, check=_bool_or_constant)
    def bitwise(net: Net, x: Value, other: Value) -> Tensor:
        dtype = net.result.dtype
        if dtype == torch.bool:
            return net.logical(op, x, other)
        x, mask = (x, other) if isinstance(other, int) else (other, x)
        common = _common_bits(net, net.cast(x, dtype), mask)
        if op == "AND":
            return common
        # x | m = x + m - (x & m), and x ^ m takes the common bits away twice
        both = net.sum(x, mask, dtype)
        return net.sub(both, common if op == "OR" else net.mul(common, 2))


_bitwise(
    "AND",
    *(aten.bitwise_and.Tensor, aten.bitwise_and.Scalar, aten.bitwise_and.Scalar_Tensor),
    *(aten.__and__.Tensor, aten.__and__.Scalar),
)
_bitwise(
    "OR",
    *(aten.bitwise_or.Tensor, aten.bitwise_or.Scalar, aten.bitwise_or.Scalar_Tensor),
    *(aten.__or__.Tensor, aten.__or__.Scalar),
)
_bitwise(
    "XOR",
    *(aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar, aten.bitwise_xor.Scalar_Tensor),
    *(aten.__xor__.Tensor, aten.__xor__.Scalar),
)


def _common_bits(net: Net, x: Tensor, mask: int) -> Tensor:
    """x & mask: for each run of ones in the mask, the bits of x there, cut out by rounding divisions."""
    if mask < 0:  # all bits but a few
        return net.sub(x, _common_bits(net, x, ~mask))
    found = net.mul(x, 0)
    low = 0
    while mask >> low:
        if not (mask >> low) & 1:
            low += 1
            continue
        high = low
        while (mask >> high) & 1:
            high += 1
        upper = net.mul(net.floor_div(x, 2**high), 2**high)
        lower = net.mul(net.floor_div(x, 2**low), 2**low) if low else x
        found = net.sum(found, net.sub(lower, upper))
        low = high
    return found


@converts(aten.bitwise_not.default)
def bitwise_not(net: Net, x: Value) -> Tensor:
    # two's complement: ~x = -x - 1
    return net.logical_not(x) if net.dtype(x) == torch.bool else net.sub(-1, x, net.dtype(x))


@converts(
    *(aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_left_shift.Scalar_Tensor),
    *(aten.__lshift__.Tensor, aten.__lshift__.Scalar),
)
def shift_left(net: Net, x: Value, other: Value) -> Tensor:
    return net.mul(x, _power_of_two(net, other), net.result.dtype)


@converts(
    *(aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar, aten.bitwise_right_shift.Scalar_Tensor),
    *(aten.__rshift__.Tensor, aten.__rshift__.Scalar),
)
def shift_right(net: Net, x: Value, other: Value) -> Tensor:
    return net.floor_div(x, _power_of_two(net, other), net.result.dtype)


def _power_of_two(net: Net, exponent: Value) -> Value:
    if isinstance(exponent, int):
        return 2**exponent
    dtype = net.result.dtype
    return net.pow(2, net.cast(exponent, dtype), dtype)
