"""NORMALIZATION and LRN."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from lowering.trt.reference.kernel import Kernel, Layer, axes_of

__all__ = ["lrn", "normalization"]


def normalization(layer: Layer) -> Kernel:
    """Inputs: data, scale, bias, all of one rank → (x - mean) / sqrt(variance + epsilon) * scale + bias.

    With groups, the channels (dimension 1) are split, and the statistics are those of each group; scale and bias have
    one value per group (`add_normalization`) or per channel (`add_normalization_v2`).
    """
    layer.require_same_dtypes()
    axes, epsilon, groups = axes_of(layer["axes"]), float(layer["epsilon"]), int(layer["num_groups"])

    def normalized(x: torch.Tensor, over: tuple[int, ...]) -> torch.Tensor:
        variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + epsilon)

    def run(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if groups == 1:
            return normalized(x, axes) * scale + bias
        split = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
        over = (2, *(axis + 1 for axis in axes if axis > 1))
        result = normalized(split, over).reshape(x.shape)
        return result * _per_channel(scale, x) + _per_channel(bias, x)

    return layer.same(run)


def _per_channel(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    channels = x.shape[1]
    if value.shape[1] in (1, channels):
        return value
    return value.repeat_interleave(channels // value.shape[1], 1)


def lrn(layer: Layer) -> Kernel:
    """Input: (N, C, ...) → x / (k + alpha / window * sum of squares over neighbouring channels) ** beta."""
    size, alpha, beta, k = int(layer["window_size"]), float(layer["alpha"]), float(layer["beta"]), float(layer["k"])
    before, after = (size - 1) // 2, math.ceil((size - 1) / 2)

    def run(x: torch.Tensor) -> torch.Tensor:
        channel = x.ndim - 3
        squares = F.pad((x * x).movedim(channel, -1), (before, after)).unfold(-1, size, 1).sum(-1)
        return x / (k + alpha / size * squares.movedim(-1, channel)) ** beta

    return layer.same(run)
