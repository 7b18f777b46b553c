"""Quantize and dequantize."""

from __future__ import annotations

from fx_passes.quantize.decomposed import decomposed
from lowering.trt.net import Net, Tensor, Value
from lowering.trt.registry import converts

ops = decomposed()


@converts(ops.quantize_per_tensor.default)
def quantize_per_tensor(net: Net, x: Value, scale, zero_point, quant_min, quant_max) -> Tensor:
    return net.quantize(x, scale)


@converts(ops.dequantize_per_tensor.default)
def dequantize_per_tensor(net: Net, x: Value, scale, zero_point, quant_min, quant_max, out_dtype=None) -> Tensor:
    return net.dequantize(x, scale, dtype=net.result.dtype)


@converts(ops.quantize_per_channel.default)
def quantize_per_channel(net: Net, x: Value, scales, zero_points, axis, quant_min, quant_max) -> Tensor:
    return net.quantize(x, scales, axis)


@converts(ops.dequantize_per_channel.default)
def dequantize_per_channel(net: Net, x: Value, scales, zero_points, axis, quant_min, quant_max, out_dtype=None) -> Tensor:
    return net.dequantize(x, scales, axis, dtype=net.result.dtype)
