"""What a layer computes at sampled places of its output, as a product of matrices: rows of inputs times its weight.

A convolution, transposed or not, at one place of its output is a linear layer on the window that it sees there. A few
thousand places say as much about its weight as whole images do, and cost a fraction of them.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_passes.quantize.weights.layer import Layer

__all__ = ["bias_free_targets", "input_rows", "output_places", "weight_of_rows", "weight_rows", "with_batch"]


def with_batch(layer: Layer, value: Tensor) -> Tensor:
    """An input or output of `layer`, with a first dimension of 1 where it has no batch."""
    expected = 2 if layer.op == "linear" else layer.weight.dim()
    return value.unsqueeze(0) if value.dim() < expected else value


def output_places(layer: Layer, output: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Indices of `count` random places of an output, one tensor for each dimension but that of the channels."""
    sizes = output.shape[:-1] if layer.op == "linear" else (output.shape[0], *output.shape[2:])
    return tuple(torch.randint(size, (count,), generator=generator) for size in sizes)


def bias_free_targets(layer: Layer, output: Tensor, places: tuple[Tensor, ...]) -> Tensor:
    """The output at `places` without the bias, (groups, places, out / groups)."""
    rows = output[places] if layer.op == "linear" else output.movedim(1, -1)[places]
    if layer.bias is not None:
        rows = rows - layer.bias
    return rows.reshape(rows.shape[0], layer.groups, -1).transpose(0, 1).contiguous()


def input_rows(layer: Layer, x: Tensor, places: tuple[Tensor, ...]) -> Tensor:
    """What the layer reads for its output at `places`, (groups, places, in / groups * window)."""
    if layer.op == "linear":
        return x[places].unsqueeze(0)
    window = layer.weight.shape[2:]
    if layer.pad is not None:
        x = F.pad(x, *layer.pad)
    reach = _reach_transposed if layer.transposed else _reach
    indices, inside = [], []
    for axis, place in enumerate(places[1:]):
        index = reach(layer, axis, place, window[axis])
        valid = (index >= 0) & (index < x.shape[2 + axis])
        indices.append(torch.where(valid, index, 0))
        inside.append(valid)
    shaped = [_spread(t, axis, len(window)) for axis, t in enumerate(indices)]
    batch = places[0].reshape(-1, *[1] * len(window))
    patches = x.movedim(1, -1)[(batch, *shaped)]  # (places, *window, in)
    for axis, valid in enumerate(inside):
        patches = patches * _spread(valid, axis, len(window)).unsqueeze(-1)
    patches = patches.movedim(-1, 1).reshape(len(places[0]), layer.groups, -1)
    return patches.transpose(0, 1).contiguous()


def weight_rows(layer: Layer, weight: Tensor) -> Tensor:
    """The weight as (groups, out / groups, in / groups * window): what `input_rows` is multiplied with."""
    if layer.transposed:
        grouped = weight.reshape(layer.groups, weight.shape[0] // layer.groups, *weight.shape[1:])
        return grouped.transpose(1, 2).reshape(layer.groups, weight.shape[1], -1)
    return weight.reshape(layer.groups, weight.shape[0] // layer.groups, -1)


def weight_of_rows(layer: Layer, rows: Tensor) -> Tensor:
    """The inverse of `weight_rows`."""
    shape = layer.weight.shape
    if not layer.transposed:
        return rows.reshape(shape)
    inputs = shape[0] // layer.groups
    return rows.reshape(layer.groups, shape[1], inputs, *shape[2:]).transpose(1, 2).reshape(shape)


def _spread(values: Tensor, axis: int, dimensions: int) -> Tensor:
    """(places, window of one axis) shaped to be combined with the other axes'."""
    return values.reshape(values.shape[0], *[values.shape[1] if i == axis else 1 for i in range(dimensions)])


def _reach(layer: Layer, axis: int, place: Tensor, size: int) -> Tensor:
    """Indices of the input along one axis that an output at `place` reads, (places, window)."""
    stride, padding, dilation = layer.options[:3]
    span = _at(dilation, axis) * torch.arange(size)
    before = _padding(padding, axis, _at(dilation, axis) * (size - 1))
    return place.unsqueeze(1) * _at(stride, axis) - before + span


def _reach_transposed(layer: Layer, axis: int, place: Tensor, size: int) -> Tensor:
    """The same of a transposed convolution; -1 where an entry of the window reaches no input."""
    stride, padding, _, _, dilation = layer.options[:5]
    step = _at(stride, axis)
    offset = place.unsqueeze(1) + _at(padding, axis) - _at(dilation, axis) * torch.arange(size)
    return torch.where(offset % step == 0, offset.div(step, rounding_mode="floor"), -1)


def _padding(padding: Any, axis: int, span: int) -> int:
    if isinstance(padding, str):
        return span // 2 if padding == "same" else 0
    return _at(padding, axis)


def _at(option: Any, axis: int) -> int:
    if isinstance(option, int):
        return option
    return next(itertools.islice(itertools.cycle(option), axis, None))  # one number may stand for all axes
