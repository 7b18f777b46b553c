"""What calibration learns about the channels of a layer's input, and bias correction, which follows from it."""

from __future__ import annotations

from torch import Tensor
from torch.fx import GraphModule, Node

from fx_passes.quantize.annotation import annotation_of, quantized_values
from fx_passes.quantize.weights.layer import Layer, layer_of

__all__ = ["bias_shift", "channel_axes", "keeps_channels", "keeps_mean"]

_KEEPS_MEAN = frozenset({"flatten"})
_KEEPS_CHANNELS = _KEEPS_MEAN | {"max_pool2d"}


def channel_axes(gm: GraphModule) -> dict[str, int]:
    """Of the values that int8 layers read, the channel axis, by the name of the node whose range is observed.

    Readers may also be behind ops that keep the order of channels. A value whose readers disagree is left out.
    """
    axes: dict[str, set[int]] = {}
    for value in quantized_values(gm.graph):
        if not keeps_channels(value.node, value.scale_of):
            continue
        for reader in value.readers:
            annotation = annotation_of(reader)
            if annotation is not None and annotation.op == "pad":
                reader = next(iter(reader.users))
            layer = layer_of(gm, reader)
            if isinstance(layer, Layer):
                axis = -1 if layer.op == "linear" and value.node is value.scale_of else 1
                axes.setdefault(value.scale_of.name, set()).add(axis)
    return {name: found.pop() for name, found in axes.items() if len(found) == 1}


def keeps_channels(node: Node, source: Node) -> bool:
    """Whether `node` has the channels of `source`, in their order."""
    return _only_through(_KEEPS_CHANNELS, node, source)


def keeps_mean(node: Node, source: Node) -> bool:
    """Whether the channels of `node` also have the means of those of `source` (if their number is the same)."""
    return _only_through(_KEEPS_MEAN, node, source)


def _only_through(ops: frozenset[str], node: Node, source: Node) -> bool:
    while node is not source:
        annotation = annotation_of(node)
        if annotation is None or annotation.op not in ops:
            return False
        node = node.all_input_nodes[0]
    return True


def bias_shift(layer: Layer, rounded: Tensor, mean: Tensor) -> Tensor | None:
    """By how much rounding the weight moves the mean of every output channel, which the bias can take back.

    Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, 4.2,
    with the means observed in calibration. Zero padding at the border is neglected.

    Args:
        layer: the float layer.
        rounded: its weight after rounding, (out, in / groups, *window).
        mean: of every input channel, (in,).

    Returns:
        float32, (out,); None for a transposed convolution, or if `mean` is not that of the layer's channels.
    """
    if layer.transposed or mean.numel() != layer.groups * layer.weight.shape[1]:
        return None
    error = (rounded - layer.weight).flatten(2).sum(2) if rounded.dim() > 2 else rounded - layer.weight
    per_group = mean.float().reshape(layer.groups, -1).repeat_interleave(error.shape[0] // layer.groups, 0)
    return (error * per_group).sum(1)
