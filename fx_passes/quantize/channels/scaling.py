"""Layers whose input and output channels are scaled, step by step, before new weights are written once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Node

from fx_passes.quantize.channels.groups import ChannelGroup, by_channel
from fx_passes.quantize.weights.layer import Layer

__all__ = ["ScaledLayer", "scale_group", "scaled_layers", "usable"]

# A channel that is next to nothing on one side is not blown up by more than this.
_LARGEST = 1e4


class ScaledLayer:
    """A layer with factors on its output and input channels, and what they make of the ranges of its weight.

    Attributes:
        repeat: how many neighbouring inputs belong to one channel.
        outputs, inputs: the factors, float64, (out,) and (in / repeat,).
    """

    def __init__(self, layer: Layer, repeat: int = 1):
        self.layer, self.repeat = layer, repeat
        found = by_channel(layer, layer.weight).abs().amax(3).cpu()
        # For each pair of an output and an input channel, (groups, out / groups, in / repeat / groups).
        self._largest = found.unflatten(2, (-1, repeat)).amax(3)
        self.outputs = torch.ones(found.shape[0] * found.shape[1], dtype=torch.float64)
        self.inputs = torch.ones(found.shape[0] * found.shape[2] // repeat, dtype=torch.float64)

    def output_ranges(self) -> Tensor:
        largest = self._largest
        inputs = self.inputs.to(largest.dtype).reshape(largest.shape[0], 1, -1)
        return (largest * inputs).amax(2).flatten().double() * self.outputs

    def input_ranges(self) -> Tensor:
        largest = self._largest
        outputs = self.outputs.to(largest.dtype).reshape(largest.shape[0], -1, 1)
        return (largest * outputs).amax(1).flatten().double() * self.inputs

    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias with the factors in them."""
        layer, weight = self.layer, self.layer.weight
        inputs = self.inputs.repeat_interleave(self.repeat).reshape(layer.groups, 1, -1)
        outputs = self.outputs.reshape(layer.groups, -1, 1)
        if layer.transposed:
            factor = (inputs.transpose(1, 2) * outputs.transpose(1, 2)).reshape(weight.shape[:2])
        else:
            factor = (outputs * inputs).reshape(weight.shape[:2])
        scaled = weight * factor.to(weight).reshape(*weight.shape[:2], *[1] * (weight.dim() - 2))
        bias = layer.bias
        return scaled, None if bias is None else (bias * self.outputs.to(bias.device)).to(bias.dtype)


def scaled_layers(groups: Iterable[ChannelGroup]) -> dict[Node, ScaledLayer]:
    """The layers that write or read values of `groups`, nothing scaled yet."""
    layers = {}
    groups = list(groups)
    for group in groups:
        layers.update({node: ScaledLayer(layer, repeat) for node, (layer, repeat) in group.readers.items()})
    for group in groups:
        for node, layer in group.writers.items():
            layers.setdefault(node, ScaledLayer(layer))
    return layers


def scale_group(group: ChannelGroup, layers: dict[Node, ScaledLayer], factor: Tensor) -> None:
    """Divide the channels of a group's values by `factor`, (channels,) float64, in the layers around them."""
    for node in group.writers:
        layers[node].outputs = layers[node].outputs / factor
    for node in group.readers:
        layers[node].inputs = layers[node].inputs * factor


def usable(factor: Tensor, *ranges: Tensor) -> Tensor:
    """`factor`, bounded, and 1 for a channel that is dead in one of `ranges`."""
    alive = factor.isfinite()
    for found in ranges:
        alive = alive & (found > 0)
    return torch.where(alive, factor, torch.ones_like(factor)).clamp(1 / _LARGEST, _LARGEST)
