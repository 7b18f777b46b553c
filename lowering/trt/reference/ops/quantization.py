"""QUANTIZE and DEQUANTIZE, symmetric, as NVIDIA's documentation of the two layers defines them.

q = saturate(round_half_even(x / scale) + zero_point), x = (q - zero_point) * scale

The division is a product with the float32 reciprocal, as in the kernels that the builder makes of the layer (it calls
them `MulMinMaxRounCast`) and in torch's `quantize_per_tensor`: a quotient would round the other way next to a tie.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lowering.trt.reference.dtypes import CARRIER
from lowering.trt.reference.kernel import Kernel, Layer

__all__ = ["dequantize", "quantize"]

_RANGES = {"INT8": (-128.0, 127.0), "INT4": (-8.0, 7.0), "FP8": (-448.0, 448.0), "FP4": (-6.0, 6.0)}


def quantize(layer: Layer) -> Kernel:
    """Inputs: data, scale (0-D, (1,), (channels,) or one per block), zero point; output `to_type`."""
    target = layer["to_type"]
    if target not in _RANGES:
        raise layer.unsupported(f"quantizes to {target}")
    low, high = _RANGES[target]
    fit = _fitter(layer)
    integer = target.startswith("INT")

    def run(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None) -> torch.Tensor:
        result = x * fit(scale.reciprocal(), x)
        if integer:
            result = result.round_()
        if zero_point is not None:
            result = result + fit(zero_point.to(torch.float32), x)
        return result.clamp_(low, high)

    return Kernel(run, (target,), exact=integer)


def dequantize(layer: Layer) -> Kernel:
    """Inputs: quantized data, scale, zero point; output `to_type`."""
    target = layer["to_type"]
    if target not in CARRIER:
        raise layer.unsupported(f"dequantizes to {target}")
    fit = _fitter(layer)

    def run(q: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None) -> torch.Tensor:
        q = q.to(torch.float32)
        if zero_point is not None:
            q = q - fit(zero_point.to(torch.float32), q)
        return q * fit(scale, q)

    return Kernel(run, (target,))


def _fitter(layer: Layer) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Aligns a scale with the data: a scalar, one value along `axis`, or one value per block of elements."""
    axis, rank = int(layer["axis"]), layer.rank

    def fit(scale: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        if scale.numel() == 1:
            return scale.reshape(())
        if scale.ndim == 1:
            if rank == 1:
                return scale
            return scale.reshape([-1 if i == axis % rank else 1 for i in range(rank)])
        for dimension, (n, blocks) in enumerate(zip(data.shape, scale.shape, strict=True)):
            if n != blocks:
                scale = scale.repeat_interleave(-(-n // blocks), dimension).narrow(dimension, 0, n)
        return scale

    return fit
