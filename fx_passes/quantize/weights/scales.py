"""Weights and biases to integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fx_passes.errors import QuantizationError
from fx_passes.quantize.annotation import Granularity
from fx_passes.quantize.scheme import QuantScheme, TargetScheme, symmetric_scales
from fx_passes.quantize.weights.layer import Layer
from fx_passes.quantize.weights.saturation import pair_scale

__all__ = [
    "LayerScale",
    "channel_sqnr",
    "dequantize_weight",
    "integer_bias",
    "quantize_weight",
    "raise_scale_for_bias",
    "spread_scale",
    "weight_scale",
]

_TINY = torch.finfo(torch.float32).tiny
_MSE_CANDIDATES = torch.linspace(0.4, 1.0, 31).tolist()


def weight_scale(weight: Tensor, scheme: QuantScheme, axis: int | None, method: str = "minmax") -> Tensor:
    """Scales of a weight, float32: shape (channels,) along `axis`, 0-dim if `axis` is None.

    Args:
        method: "minmax", or "mse": the fraction of the magnitude that gives the least squared error.

    Raises:
        QuantizationError: NaN or infinity in the weight.
    """
    rows = _rows(weight, axis)
    bound = rows.abs().amax(1)
    if not bool(torch.isfinite(bound).all()):
        raise QuantizationError("a weight holds NaN or infinity", hint="check the checkpoint that was loaded")
    if method == "mse":
        bound = _least_error_bound(rows, bound, scheme)
    elif method != "minmax":
        raise QuantizationError(f"unknown weight observer {method!r}", hint='use "minmax" or "mse"')
    scale = symmetric_scales(bound, scheme)
    return scale if axis is not None else scale.reshape(())


def _least_error_bound(rows: Tensor, bound: Tensor, scheme: QuantScheme) -> Tensor:
    best, least = bound, torch.full_like(bound, float("inf"))
    for fraction in _MSE_CANDIDATES:
        scale = symmetric_scales(bound * fraction, scheme).unsqueeze(1)
        rounded = torch.clamp(torch.round(rows / scale), scheme.quant_min, scheme.quant_max) * scale
        error = (rounded - rows).square().sum(1)
        best, least = torch.where(error <= least, bound * fraction, best), torch.minimum(error, least)
    return best


def quantize_weight(weight: Tensor, scale: Tensor, scheme: QuantScheme, axis: int | None) -> Tensor:
    """Integers of `weight`, in `scheme.dtype`; the arithmetic of `quantized_decomposed.quantize_per_channel`."""
    inverse = spread_scale(1.0 / scale, weight, axis)
    return torch.clamp(torch.round(weight.float() * inverse), scheme.quant_min, scheme.quant_max).to(scheme.dtype)


def dequantize_weight(integers: Tensor, scale: Tensor, axis: int | None) -> Tensor:
    """The float32 weight that the integers stand for."""
    return integers.float() * spread_scale(scale, integers, axis)


def spread_scale(scale: Tensor, weight: Tensor, axis: int | None) -> Tensor:
    """`scale`, (channels,) along `axis` or 0-dim, shaped to multiply `weight`."""
    return scale.reshape([-1 if i == axis else 1 for i in range(weight.dim())])


def channel_sqnr(weight: Tensor, scheme: QuantScheme, axis: int, granularity: Granularity) -> Tensor:
    """Expected signal to quantization noise of every channel in dB, shape (channels,); -inf for a channel of zeros.

    Rounding errors are taken as uniform over one step s, so with a mean square of s^2 / 12 (Widrow's model): two
    passes over the weight instead of quantizing it.
    """
    scale = weight_scale(weight, scheme, axis if granularity == "per_channel" else None)
    rows = _rows(weight, axis)
    mean_square = torch.linalg.vector_norm(rows, dim=1).square() / rows.shape[1]
    return 10.0 * torch.log10(12.0 * mean_square / scale.square())


@dataclass
class LayerScale:
    """How the weight scale of one layer is found: the same for post-training conversion and for training.

    Attributes:
        scheme: the target's formats.
        axis: channel axis of the weight, None for one scale.
        method: "minmax" or "mse".
        products: products that are summed up to one output value.
        pairs: groups of the convolution if pairs of its products are to be kept within 16 bits (see
            `fx_passes.quantize.weights.saturation`), else None.
    """

    scheme: TargetScheme
    axis: int | None
    method: str
    products: int
    pairs: int | None = None

    @classmethod
    def for_layer(cls, layer: Layer, scheme: TargetScheme, granularity: Granularity, method: str) -> LayerScale:
        paired = scheme.safe_pairs and not layer.transposed and not layer.depthwise
        axis = layer.axis if granularity == "per_channel" else None
        return cls(scheme, axis, method, layer.products, layer.groups if paired else None)

    def of(
        self,
        weight: Tensor,
        bias: Tensor | None,
        input_scale: float | None,
        learned: Tensor | None = None,
        highest: Tensor | None = None,
    ) -> Tensor:
        """Scales of a weight.

        Args:
            weight, bias: of the layer, BatchNorm folded in.
            input_scale: scale of the layer's input if the bias is stored as integers, else None.
            learned: scales that training found, instead of `method`.
            highest: largest integer of every input channel, None where it is not known.

        Returns:
            float32, (channels,) or 0-dim.
        """
        scale = weight_scale(weight, self.scheme.weight, self.axis, self.method) if learned is None else learned
        if self.pairs is not None:
            lowest = pair_scale(weight, self.pairs, highest)
            scale = torch.maximum(scale, lowest if self.axis is not None else lowest.amax())
        if input_scale is not None:
            scale = raise_scale_for_bias(scale, bias, input_scale, self.products, self.scheme.weight)
        return scale


def raise_scale_for_bias(
    scale: Tensor, bias: Tensor | None, input_scale: float, products: int, weight_scheme: QuantScheme
) -> Tensor:
    """Weight scales at which an int32 bias fits beside the sum of products.

    The bias is stored in steps of input_scale * scale. Vanishing weights make that step so small that the integer
    would overflow (microsoft/onnxruntime #22020): the scale of such a channel is raised, which costs it nothing, as
    its weights are far below its bias.

    Args:
        scale: (channels,) or 0-dim, float32.
        bias: (channels,) float32 or None.
        input_scale: scale of the layer's input, whose integers are below 256.
        products: products summed up per output value.
    """
    most = max(2**31 - 1 - 256 * weight_scheme.quant_max * products, 2**24)
    lowest = torch.full_like(scale, _TINY / input_scale)
    if bias is not None:
        needed = bias.detach().float().abs() / (input_scale * most)
        lowest = torch.maximum(lowest, needed if scale.dim() else needed.amax())
    # A hair more, as the quotient is rounded.
    return torch.maximum(scale, lowest * (1.0 + 2.0**-20))


def integer_bias(bias: Tensor, scale: Tensor, input_scale: float, scheme: TargetScheme) -> tuple[Tensor, Tensor]:
    """A bias as integers, and their unit, float32 (channels,): the scale of the products.

    Args:
        bias: (channels,) float32.
        scale: of the weight, (channels,) or 0-dim.
        input_scale: of the layer's input.
        scheme: a target's formats with a `bias`.
    """
    assert scheme.bias is not None
    unit = (scale * input_scale).expand(bias.shape).contiguous()
    # In float64: an int32 has more digits than a float32.
    integers = torch.round(bias.detach().double() / unit.double()).clamp(scheme.bias.quant_min, scheme.bias.quant_max)
    return integers.to(scheme.bias.dtype), unit


def _rows(weight: Tensor, axis: int | None) -> Tensor:
    return weight.reshape(1, -1) if axis is None else weight.movedim(axis, 0).reshape(weight.shape[axis], -1)
