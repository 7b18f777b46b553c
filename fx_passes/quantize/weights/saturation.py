"""Weight scales at which 8-bit products never overflow 16 bits.

On x86 without VNNI, ONNX Runtime multiplies unsigned by signed bytes with `vpmaddubsw`, which adds two neighbouring
products in 16 *saturating* bits: 2 * 255 * 127 does not fit. Unchecked, this costs more than quantization itself
(EfficientNet-Lite0: 7 dB instead of 18). Exact kernels exist and take a third longer. Here the scale of a channel is
raised until no pair can overflow, given the largest integer that calibration saw in every input channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fx_passes.quantize.scheme import QuantScheme

__all__ = ["fits_pairs", "highest_integers", "pair_scale"]

_LIMIT = 2**15 - 1
# Other data may reach higher than the calibration data did, within the range of the whole tensor.
_HEADROOM = 1.25


def highest_integers(high: Tensor, scale: float, zero_point: int, scheme: QuantScheme) -> Tensor:
    """The largest integer that a channel is taken to reach, whose largest number in calibration was `high`."""
    integers = torch.ceil(high.clamp_min(0.0) * (_HEADROOM / scale)) + zero_point
    return integers.clamp(zero_point, scheme.quant_max)


def pair_scale(weight: Tensor, groups: int, highest: Tensor | None) -> Tensor:
    """Lowest scale of every output channel at which no pair of products overflows.

    The kernels run over the input channels first, then over the window, and pair neighbours.

    Args:
        weight: (out, in / groups, *window), or (out, in).
        groups: of the convolution.
        highest: largest integer of every input channel, (in,); None: 255.

    Returns:
        float32, (out,); 0 where a channel has no pair of one sign.
    """
    channel_last, reach = weight.movedim(1, -1).float(), _reach(weight, groups, highest)
    products = _pairs((channel_last * reach).flatten(1))
    if not products.shape[1]:
        return torch.zeros(weight.shape[0])
    # Rounding may add half a step to each weight.
    room = _LIMIT - 0.5 * _pairs(reach.flatten(1)).sum(2)
    worst = torch.maximum(products.clamp_min(0).sum(2), products.clamp_max(0).sum(2).neg())
    return (worst / room).amax(1)


def fits_pairs(integers: Tensor, groups: int, highest: Tensor | None) -> Tensor:
    """Where an integer weight is in no pair of products that overflows 16 bits; bool, with the shape of `integers`."""
    channel_last, reach = integers.movedim(1, -1).float(), _reach(integers, groups, highest)
    products = _pairs((channel_last * reach).flatten(1))
    worst = torch.maximum(products.clamp_min(0).sum(2), products.clamp_max(0).sum(2).neg())
    fits = torch.ones(channel_last.flatten(1).shape, dtype=torch.bool)
    fits[:, : 2 * worst.shape[1]] = (worst <= _LIMIT).repeat_interleave(2, 1)
    return fits.reshape(channel_last.shape).movedim(-1, 1)


def _reach(weight: Tensor, groups: int, highest: Tensor | None) -> Tensor:
    """Largest integer that every weight is multiplied with, (out, *window, in / groups)."""
    inputs = weight.shape[1]
    if highest is None or highest.numel() != inputs * groups:
        highest = torch.full((inputs * groups,), 255.0)
    reach = highest.reshape(groups, inputs).repeat_interleave(weight.shape[0] // groups, 0)
    reach = reach.reshape(weight.shape[0], *[1] * (weight.dim() - 2), inputs)
    return reach.expand(weight.shape[0], *weight.shape[2:], inputs)


def _pairs(rows: Tensor) -> Tensor:
    return rows[:, : rows.shape[1] // 2 * 2].unflatten(1, (-1, 2)) if rows.shape[1] > 1 else rows[:, :0].unsqueeze(2)
