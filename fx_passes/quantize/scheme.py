"""How numbers are stored in eight bits, per target, and the scales that follow from a range.

TensorRT takes signed symmetric int8 everywhere, bias in float. ONNX Runtime on x86 wants unsigned affine activations
(a ReLU then vanishes into the zero point), signed symmetric weights per output channel, and an int32 bias whose scale
is the product of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from fx_passes.errors import InputError

__all__ = ["SCHEMES", "QuantScheme", "TargetScheme", "affine_qparams", "symmetric_scales", "target_scheme"]

# Below this a magnitude counts as zero: 1/scale stays a normal float32 and so does a product of two scales.
_VANISHING = 1e-30
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class QuantScheme:
    """One integer format.

    Args:
        dtype: the integer type that is stored.
        quant_min: smallest integer used.
        quant_max: largest integer used.
        symmetric: the zero point is 0; otherwise it is chosen so that 0.0 is represented exactly.
        per_channel: one scale per output channel instead of one per tensor.
    """

    dtype: torch.dtype
    quant_min: int
    quant_max: int
    symmetric: bool
    per_channel: bool = False


@dataclass(frozen=True)
class TargetScheme:
    """The formats of one target.

    Attributes:
        activation: of a layer's input and of other values.
        weight: of weights.
        bias: of biases; None where they stay float.
        safe_pairs: scale weights so that the products with two neighbouring inputs never add up beyond 16 bits.
            x86 processors without VNNI add them in 16 saturating bits (`vpmaddubsw`): 2 * 255 * 127 does not fit.
        weight_zero_point: store a zero point of 0 beside every weight. ONNX Runtime 1.32 makes an integer Gemm only
            where its weight's DequantizeLinear has one.
    """

    activation: QuantScheme
    weight: QuantScheme
    bias: QuantScheme | None = None
    safe_pairs: bool = False
    weight_zero_point: bool = False


_INT8 = QuantScheme(torch.int8, -128, 127, symmetric=True)
_UINT8 = QuantScheme(torch.uint8, 0, 255, symmetric=False)
# -128 is left out so that a weight and its negative have the same magnitude.
_WEIGHT = QuantScheme(torch.int8, -127, 127, symmetric=True, per_channel=True)
_BIAS = QuantScheme(torch.int32, -(2**31), 2**31 - 1, symmetric=True, per_channel=True)

SCHEMES: Mapping[str, TargetScheme] = MappingProxyType(
    {
        "tensorrt": TargetScheme(_INT8, _WEIGHT),
        "tensorrt-rtx": TargetScheme(_INT8, _WEIGHT),
        "onnxruntime": TargetScheme(_UINT8, _WEIGHT, _BIAS, safe_pairs=True, weight_zero_point=True),
    }
)


def target_scheme(target: str) -> TargetScheme:
    """The formats of `target`; raises `InputError` naming the known ones."""
    if target not in SCHEMES:
        raise InputError(f"unknown quantization target {target!r}", hint=f"use one of {', '.join(SCHEMES)}")
    return SCHEMES[target]


def affine_qparams(low: float, high: float, scheme: QuantScheme) -> tuple[float, int]:
    """Scale and zero point of one tensor whose values lie in [low, high] (finite, low <= high).

    The range is widened to hold 0.0. A tensor that is zero throughout gets the scale of the range [0, 1], so that
    the result is always a positive, normal float32 number. The top of an affine range never exceeds `high`, so that
    ONNX Runtime drops a ReLU6 before the quantization ("ClipQuantFusion" asks exactly that).
    """
    low, high = min(low, 0.0), max(high, 0.0)
    steps = scheme.quant_max - scheme.quant_min
    if scheme.symmetric:
        bound = max(-low, high)
        bound = 1.0 if bound < _VANISHING else bound
        return _float32(bound / min(-scheme.quant_min, scheme.quant_max)), 0
    if high - low < _VANISHING:
        low, high = 0.0, 1.0
    scale = _float32((high - low) / steps)
    zero_point = max(scheme.quant_min, min(scheme.quant_max, round(scheme.quant_min - low / scale)))
    if low == 0.0 and (scheme.quant_max - zero_point) * scale > high:
        scale = float(torch.nextafter(torch.tensor(scale), torch.tensor(0.0)))
    return scale, zero_point


def symmetric_scales(bound: Tensor, scheme: QuantScheme) -> Tensor:
    """Scales of the channels whose magnitudes reach `bound` (any shape); float32, positive, normal.

    A dead channel (all zero, or so small that a product of scales would underflow) takes the scale of the largest
    channel, at which it rounds to zero like the zeros it holds.
    """
    bound = bound.detach().to(torch.float32)
    largest = bound.max()
    fallback = torch.where(largest < _VANISHING, torch.ones_like(largest), largest)
    bound = torch.where(bound < _VANISHING, fallback, bound)
    return (bound / min(-scheme.quant_min, scheme.quant_max)).clamp_min(_TINY)


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
