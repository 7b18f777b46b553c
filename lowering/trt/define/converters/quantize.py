"""Quantize and dequantize: the only way to int8 that every TensorRT flavour has."""

from __future__ import annotations

import torch

from fx_passes.quantize.decomposed import decomposed
from lowering.trt.define.net import Net, Tensor, Value
from lowering.trt.define.registry import converts

ops = decomposed()


def _int8(dtype, quant_min, quant_max) -> str | None:
    if dtype != torch.int8 or (quant_min, quant_max) not in ((-128, 127), (-127, 127)):
        return f"TensorRT quantizes to int8 over its full range, not to {dtype} in [{quant_min}, {quant_max}]"
    return None


def _int8_range(quant_min, quant_max) -> str | None:
    return _int8(torch.int8, quant_min, quant_max)


def _symmetric(dtype, quant_min, quant_max, zero_point) -> str | None:
    if isinstance(zero_point, int) and zero_point != 0:
        return f"TensorRT's quantization is symmetric, the zero point is {zero_point}"
    return _int8(dtype, quant_min, quant_max)


@converts(ops.quantize_per_tensor.default, ops.quantize_per_tensor.tensor, check=_symmetric, narrow=True)
def quantize_per_tensor(net: Net, x: Value, scale: Value, zero_point: Value, quant_min: int, quant_max: int) -> Tensor:
    _require_zero(net, zero_point)
    return net.quantize(_limited(net, x, scale, None, quant_min), scale)


@converts(ops.dequantize_per_tensor.default, ops.dequantize_per_tensor.tensor, check=_symmetric, narrow=True)
def dequantize_per_tensor(
    net: Net, x: Value, scale: Value, zero_point: Value, quant_min: int, quant_max: int, out_dtype=None
) -> Tensor:
    _require_zero(net, zero_point)
    return net.dequantize(x, scale, dtype=net.result.dtype)


@converts(ops.quantize_per_channel.default, check=_int8, narrow=True)
def quantize_per_channel(
    net: Net, x: Value, scales: Value, zero_points: Value, axis: int, quant_min: int, quant_max: int
):
    _require_zero(net, zero_points)
    return net.quantize(_limited(net, x, scales, axis, quant_min), scales, axis)


@converts(ops.dequantize_per_channel.default, check=_int8, narrow=True)
def dequantize_per_channel(
    net: Net, x: Value, scales: Value, zero_points: Value, axis: int, quant_min: int, quant_max: int, out_dtype=None
) -> Tensor:
    _require_zero(net, zero_points)
    return net.dequantize(x, scales, axis, dtype=net.result.dtype)


@converts(torch.ops.aten.fake_quantize_per_tensor_affine.default, check=_int8_range)
def fake_quantize(net: Net, x: Value, scale: float, zero_point: int, quant_min: int, quant_max: int) -> Tensor:
    _require_zero(net, zero_point)
    return net.dequantize(net.quantize(_limited(net, x, scale, None, quant_min), scale), scale, dtype=net.dtype(x))


@converts(torch.ops.aten.fake_quantize_per_channel_affine.default, check=_int8_range)
def fake_quantize_per_channel(
    net: Net, x: Value, scale: Value, zero_point: Value, axis: int, quant_min: int, quant_max: int
) -> Tensor:
    _require_zero(net, zero_point)
    levels = net.quantize(_limited(net, x, scale, axis, quant_min), scale, axis)
    return net.dequantize(levels, scale, axis, dtype=net.dtype(x))


def _require_zero(net: Net, zero_point: Value) -> None:
    known = zero_point if isinstance(zero_point, torch.Tensor) else None
    if zero_point is None or (isinstance(zero_point, int) and zero_point == 0):
        return
    if known is None or bool((known != 0).any()):
        raise net.unsupported("TensorRT's quantization is symmetric: the zero point must be zero")


def _limited(net: Net, x: Value, scale: Value, axis: int | None, quant_min: int) -> Value:
    """x limited so that nothing rounds to -128, if the range is [-127, 127]: TensorRT saturates at -128."""
    if quant_min == -128:
        return x
    if axis is None:
        low = net.mul(scale, -127.0, torch.float32) if not isinstance(scale, float) else -127.0 * scale
        return net.maximum(x, low, net.dtype(x))
    shape = [1] * net.rank(x)
    shape[axis] = -1
    low = scale.reshape(shape) * -127.0
    return net.maximum(x, low, net.dtype(x))
