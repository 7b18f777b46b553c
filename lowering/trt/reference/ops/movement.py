"""Layers that move data: SHUFFLE, SLICE, CONCATENATION, SQUEEZE, UNSQUEEZE, PADDING, REVERSE_SEQUENCE."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from lowering.trt.reference.kernel import Kernel, Layer

__all__ = ["concatenation", "padding", "reverse_sequence", "shuffle", "slice_", "squeeze", "unsqueeze"]


def shuffle(layer: Layer) -> Kernel:
    """Input: data, and its new shape where that is computed: transpose, reshape, transpose."""
    rank, out_rank = layer.rank, len(layer.outputs[0].shape)
    first, second = layer.axis_list("first_transpose")[:rank], layer.axis_list("second_transpose")[:out_rank]
    static: tuple[int, ...] | None = layer["reshape_dims"]
    placeholder = bool(layer["zero_is_placeholder"])
    first_moves, second_moves = first != tuple(range(rank)), second != tuple(range(out_rank))

    def run(x: torch.Tensor, shape: torch.Tensor | None = None) -> torch.Tensor:
        if first_moves:
            x = x.permute(first)
        target = static if shape is None else tuple(shape.tolist())
        if target is not None:
            x = x.reshape(tuple(resolve_shape(x.shape, target, placeholder)))
        return x.permute(second) if second_moves else x

    return layer.same(run, exact=True)


def resolve_shape(shape: Sequence[int], target: Sequence[int], zero_is_placeholder: bool) -> list[int]:
    """Fills in 0 (copy the input's dimension, if placeholders are on) and -1 (infer)."""
    resolved = [shape[i] if size == 0 and zero_is_placeholder else size for i, size in enumerate(target)]
    if -1 in resolved:
        known = 1
        for size in resolved:
            known *= size if size != -1 else 1
        total = 1
        for size in shape:
            total *= size
        resolved[resolved.index(-1)] = total // known if known else 0
    return resolved


def slice_(layer: Layer) -> Kernel:
    """Inputs: data; start, size, stride (1-D), fill value, axes where they are computed."""
    mode = layer["mode"]
    names = ("start", "shape", "stride")
    static = [None if layer[name] is None else layer.axis_list(name) for name in names]
    static_axes = layer.axis_list("axes") if layer.record.attributes.get("axes") is not None else None

    def run(x: torch.Tensor, *inputs: torch.Tensor | None) -> torch.Tensor:
        given = [*inputs, *(None,) * (5 - len(inputs))]
        start, size, stride = (_dims(value, default) for value, default in zip(given[:3], static, strict=True))
        axes = _dims(given[4], tuple(range(x.ndim)) if static_axes is None else static_axes)
        return slice_with_mode(x, start, size, stride, axes, mode, given[3])

    return layer.same(run, exact=True)


def _dims(value: torch.Tensor | None, default: tuple[int, ...] | None) -> tuple[int, ...]:
    if value is not None:
        return tuple(value.tolist())
    assert default is not None, "a slice has each of start, size and stride as dimensions or as an input"
    return default


def slice_with_mode(
    x: torch.Tensor,
    start: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    axes: Sequence[int],
    mode: str,
    fill: torch.Tensor | None,
) -> torch.Tensor:
    """Takes start + i * stride for i < size along each axis; `mode` says what lies outside."""
    outside: torch.Tensor | None = None
    for begin, count, step, axis in zip(start, size, stride, axes, strict=True):
        n, axis = x.shape[axis], axis % x.ndim
        last = begin + (count - 1) * step
        if count == 0:
            x = x.narrow(axis, 0, 0)
        elif step > 0 and begin >= 0 and last < n:
            if (begin, count, step) != (0, n, 1):
                x = x[(slice(None),) * axis + (slice(begin, last + 1, step),)]
        elif step == 0 and 0 <= begin < n:
            x = x.narrow(axis, begin, 1).expand(*x.shape[:axis], count, *x.shape[axis + 1 :])
        else:
            index = begin + step * torch.arange(count)
            if mode == "FILL":
                shape = [1] * x.ndim
                shape[axis] = count
                beyond = ((index < 0) | (index >= n)).reshape(shape)
                outside = beyond if outside is None else outside | beyond
            index = _inside(index, n, mode)
            empty = n == 0  # all of it is outside: something to overwrite
            x = x.new_zeros(*x.shape[:axis], count, *x.shape[axis + 1 :]) if empty else x.index_select(axis, index)
    if outside is not None:
        value = x.new_zeros(()) if fill is None else fill.to(x.dtype)
        x = torch.where(outside, value, x)
    return x


def _inside(index: torch.Tensor, n: int, mode: str) -> torch.Tensor:
    """Maps coordinates that may lie outside [0, n) into it."""
    if mode == "WRAP":
        return index % n
    if mode in ("CLAMP", "FILL"):
        return index.clamp(0, max(n - 1, 0))
    if mode == "REFLECT":  # without repeating the edge
        if n == 1:
            return torch.zeros_like(index)
        period = 2 * (n - 1)
        index = index % period
        return torch.where(index >= n, period - index, index)
    if bool(((index < 0) | (index >= n)).any()):
        raise IndexError(f"indices {index.tolist()} are out of bounds for a dimension of size {n}")
    return index


def concatenation(layer: Layer) -> Kernel:
    """Inputs: tensors of one type that agree in every other dimension."""
    layer.require_same_dtypes()
    axis = int(layer["axis"])
    return layer.same(lambda *tensors: torch.cat(tensors, axis), exact=True)


def unsqueeze(layer: Layer) -> Kernel:
    """Inputs: data, axes (1-D) in the output."""

    def run(x: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
        rank = x.ndim + axes.numel()
        for axis in sorted(a % rank for a in axes.reshape(-1).tolist()):
            x = x.unsqueeze(axis)
        return x

    return layer.same(run, exact=True)


def squeeze(layer: Layer) -> Kernel:
    """Inputs: data, axes (1-D) in the input; without axes, every dimension of size 1 goes."""

    def run(x: torch.Tensor, axes: torch.Tensor | None = None) -> torch.Tensor:
        if axes is None:
            return x.squeeze()
        for axis in sorted((a % x.ndim for a in axes.reshape(-1).tolist()), reverse=True):
            if x.shape[axis] != 1:
                raise ValueError(f"dimension {axis} has size {x.shape[axis]}, not 1")
            x = x.squeeze(axis)
        return x

    return layer.same(run, exact=True)


def padding(layer: Layer) -> Kernel:
    """Input: (..., H, W), zero-padded; negative amounts crop."""
    before, after = layer.axis_list("pre_padding_nd"), layer.axis_list("post_padding_nd")
    amounts: list[int] = []
    for b, e in zip(before, after, strict=True):
        amounts[:0] = [b, e]
    return layer.same(lambda x: F.pad(x, amounts), exact=True)


def reverse_sequence(layer: Layer) -> Kernel:
    """Inputs: data, and for each index of the batch axis how many leading elements to reverse."""
    batch, sequence = int(layer["batch_axis"]), int(layer["sequence_axis"])

    def run(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        moved = x.movedim((batch, sequence), (0, 1))
        position = torch.arange(moved.shape[1])
        lengths = lengths.to(torch.int64).reshape(-1, 1)
        source = torch.where(position < lengths, lengths - 1 - position, position)
        index = source.reshape(*source.shape, *(1,) * (moved.ndim - 2)).expand_as(moved)
        return moved.gather(1, index).movedim((0, 1), (batch, sequence))

    return layer.same(run, exact=True)
