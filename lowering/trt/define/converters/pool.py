"""Pooling windows, fixed and adaptive."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

import torch
import torch.nn.functional as F

from lowering.trt.define.converters.conv import as_images, spread
from lowering.trt.define.net import Net, Size, Tensor, Value, is_static
from lowering.trt.define.registry import converts

aten = torch.ops.aten


def _float_input(x) -> str | None:
    return None if x.dtype.is_floating_point else f"TensorRT pools floats only, not {x.dtype}"


def _ceil_needs_sizes(x, ceil_mode, kernel_size) -> str | None:
    if ceil_mode and any(not isinstance(d, int) for d in x.shape[-_spatial(x, kernel_size) :]):
        return "ceil_mode with a dynamic spatial size"
    return _float_input(x)


def _spatial(x, kernel_size) -> int:
    return len(kernel_size) if not isinstance(kernel_size, int) and len(kernel_size) > 1 else max(1, x.dim() - 2)


def _ceil_padding(size: int, kernel: int, stride: int, pad: int, dilation: int = 1) -> int:
    """Padding at the end for torch's ceil_mode size; a window must start inside the input or its left padding."""
    span = dilation * (kernel - 1) + 1
    out = -(-(size + 2 * pad - span) // stride) + 1
    if (out - 1) * stride >= size + pad:
        out -= 1
    return max(0, (out - 1) * stride + span - size - pad)


def _ends(net, x, kernel, stride, padding, dilation, ceil_mode) -> list[int]:
    """Padding after each spatial dimension."""
    if not ceil_mode:
        return list(padding)
    sizes = net.dims(x)[-len(kernel) :]
    return [_ceil_padding(*v) for v in zip(sizes, kernel, stride, padding, dilation, strict=True)]


def _max_pool(net: Net, spatial: int, x, kernel_size, stride, padding, dilation, ceil_mode) -> Tensor:
    kernel, padding, dilation = (spread(v, spatial) for v in (kernel_size, padding, dilation))
    stride = spread(stride, spatial) if stride else kernel
    ends = _ends(net, x, kernel, stride, padding, dilation, ceil_mode)
    if spatial == 1:
        kernel, stride, padding, ends, dilation = (
            [n, *v] for n, v in zip((1, 1, 0, 0, 1), (kernel, stride, padding, ends, dilation), strict=True)
        )
    pads = list(zip(padding, ends, strict=True))
    if any(d != 1 for d in dilation):
        return as_images(net, x, spatial, lambda y: _dilated_max(net, y, kernel, stride, pads, dilation))
    return as_images(net, x, spatial, lambda y: net.pool("MAX", y, kernel, stride, pads))


def _dilated_max(net: Net, x: Tensor, kernel, stride, pads, dilation) -> Tensor:
    """Maximum over shifted, strided views: TensorRT's pooling has no dilation."""
    before, after = [0, 0, *(p for p, _ in pads)], [0, 0, *(p for _, p in pads)]
    x = net.pad(x, before, after, fill=float("-inf"))
    n, c, *sizes = net.dims(x)
    best = None
    for starts, out in _shifts(sizes, kernel, stride, dilation):
        view = net.slice(x, [0, 0, *starts], [n, c, *out], [1, 1, *stride])
        best = view if best is None else net.maximum(best, view)
    return best


@converts(aten.max_pool1d.default, check=_ceil_needs_sizes)
def max_pool1d(net: Net, x, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False) -> Tensor:
    return _max_pool(net, 1, x, kernel_size, stride, padding, dilation, ceil_mode)


@converts(aten.max_pool2d.default, check=_ceil_needs_sizes)
def max_pool2d(net: Net, x, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False) -> Tensor:
    return _max_pool(net, 2, x, kernel_size, stride, padding, dilation, ceil_mode)


@converts(aten.max_pool3d.default, check=_ceil_needs_sizes)
def max_pool3d(net: Net, x, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False) -> Tensor:
    return _max_pool(net, 3, x, kernel_size, stride, padding, dilation, ceil_mode)


@converts(aten.max_pool2d_with_indices.default, check=_ceil_needs_sizes)
def max_pool2d_values(net: Net, x, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False) -> tuple:
    return _max_and_place(net, 2, x, kernel_size, stride, padding, dilation, ceil_mode)


@converts(aten.max_pool3d_with_indices.default, check=_ceil_needs_sizes)
def max_pool3d_values(net: Net, x, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False) -> tuple:
    return _max_and_place(net, 3, x, kernel_size, stride, padding, dilation, ceil_mode)


def _max_and_place(net: Net, spatial: int, x, kernel_size, stride, padding, dilation, ceil_mode) -> tuple:
    """The maxima and, where they are read, their places: numbers of elements of the flattened input plane."""
    if not any(user.args[1] == 1 for user in net.node.users):  # type: ignore[union-attr]
        return _max_pool(net, spatial, x, kernel_size, stride, padding, dilation, ceil_mode), None
    kernel, padding, dilation = (spread(v, spatial) for v in (kernel_size, padding, dilation))
    stride = spread(stride, spatial) if stride else kernel
    sizes = net.dims(x)[-spatial:]
    if not is_static(sizes):
        raise net.unsupported("the places of maxima in a plane of dynamic size")
    ends = _ends(net, x, kernel, stride, padding, dilation, ceil_mode)
    places = torch.arange(prod(sizes)).reshape(1, 1, *sizes)
    sides = [side for pad in reversed(list(zip(padding, ends, strict=True))) for side in pad]
    places = F.pad(places, sides)
    batched = net.rank(x) == spatial + 2
    wide = net.pad(
        net.tensor(x) if batched else net.unsqueeze(x, [0]), [0, 0, *padding], [0, 0, *ends], fill=float("-inf")
    )
    best = at = None
    for starts, out in _shifts(net.dims(wide)[2:], kernel, stride, dilation):
        view = net.slice(wide, [0, 0, *starts], [*net.dims(wide)[:2], *out], [1, 1, *stride])
        here = places
        for axis, (first, count, step) in enumerate(zip(starts, out, stride, strict=True), start=2):
            here = here.index_select(axis, torch.arange(first, first + count * step, step))
        if best is None:
            best, at = view, net.expand(here, net.dims(view))
            continue
        larger = net.greater(view, best)  # of equal ones the first, as in torch
        best, at = net.where(larger, view, best), net.where(larger, here, at, torch.int64)
    return (best, at) if batched else (net.squeeze(best, [0]), net.squeeze(at, [0]))


def _shifts(sizes, kernel, stride, dilation) -> Iterator[tuple[list[int], list[Size]]]:
    """For each element of the kernel: where it first stands, and over how many windows it goes."""
    out = [(d - (dil * (k - 1) + 1)) // s + 1 for d, k, s, dil in zip(sizes, kernel, stride, dilation, strict=True)]
    for offset in itertools.product(*(range(k) for k in kernel)):
        yield [o * d for o, d in zip(offset, dilation, strict=True)], out


def _known_plane(output_size) -> str | None:
    return None if is_static(output_size) else "unpooling to a dynamic size"


@converts(aten.max_unpool2d.default, check=_known_plane)
def max_unpool2d(net: Net, x: Value, indices: Value, output_size: Sequence[int]) -> Tensor:
    return _unpool(net, 2, x, indices, output_size)


@converts(aten.max_unpool3d.default, check=_known_plane)
def max_unpool3d(net: Net, x: Value, indices: Value, output_size: Sequence[int], stride=(), padding=()) -> Tensor:
    return _unpool(net, 3, x, indices, output_size)


def _unpool(net: Net, spatial: int, x: Value, indices: Value, sizes: Sequence[int]) -> Tensor:
    lead = net.dims(x)[:-spatial]
    zeros = net.expand(net.tensor(0.0, net.dtype(x), rank=len(lead) + 1), [*lead, prod(sizes)])
    places, values = (net.flatten(v, -spatial, -1) for v in (indices, x))
    return net.reshape(net.scatter(zeros, places, values, "ELEMENT", -1), [*lead, *sizes])


def _avg_pool(
    net, spatial, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override=None
) -> Tensor:
    kernel, padding = spread(kernel_size, spatial), spread(padding, spatial)
    stride = spread(stride, spatial) if stride else kernel
    ends = _ends(net, x, kernel, stride, padding, [1] * spatial, ceil_mode)
    factor = None
    count_padding = count_include_pad
    if divisor_override is not None:
        factor, count_padding = torch.tensor(prod(kernel) / divisor_override), True
    elif ends != padding and count_include_pad:
        # torch counts the padding it was given, not what ceil_mode adds
        counts = _window_counts(net.dims(x)[-spatial:], kernel, stride, padding, ends)
        factor, count_padding = prod(kernel) / counts, True
    if spatial == 1:
        kernel, stride, padding, ends = [1, *kernel], [1, *stride], [0, *padding], [0, *ends]
    pads = list(zip(padding, ends, strict=True))
    y = as_images(net, x, spatial, lambda z: net.pool("AVERAGE", z, kernel, stride, pads, count_padding))
    return y if factor is None else net.mul(y, factor, net.dtype(y))


def _window_counts(sizes, kernel, stride, padding, ends) -> torch.Tensor:
    """Elements that torch divides by, per output position: those inside the input and its stated padding."""
    counts = torch.ones(())
    for size, k, s, p, e in zip(sizes, kernel, stride, padding, ends, strict=True):
        starts = torch.arange(0, size + p + e - k + 1, s) - p
        inside = (starts + k).clamp(max=size + p) - starts
        counts = counts.unsqueeze(-1) * inside.float()
    return counts


@converts(aten.avg_pool1d.default, check=_ceil_needs_sizes)
def avg_pool1d(net: Net, x, kernel_size, stride=(), padding=(0,), ceil_mode=False, count_include_pad=True) -> Tensor:
    return _avg_pool(net, 1, x, kernel_size, stride, padding, ceil_mode, count_include_pad)


@converts(aten.avg_pool2d.default, check=_ceil_needs_sizes)
def avg_pool2d(
    net: Net, x, kernel_size, stride=(), padding=(0,), ceil_mode=False, count_include_pad=True, divisor_override=None
) -> Tensor:
    return _avg_pool(net, 2, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@converts(aten.avg_pool3d.default, check=_ceil_needs_sizes)
def avg_pool3d(
    net: Net, x, kernel_size, stride=(), padding=(0,), ceil_mode=False, count_include_pad=True, divisor_override=None
) -> Tensor:
    return _avg_pool(net, 3, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


# -- adaptive -----------------------------------------------------------------------------------------------------


def _adaptive_sizes(x, output_size) -> str | None:
    wanted = [output_size] if isinstance(output_size, int) else list(output_size)
    for size, out in zip(x.shape[-len(wanted) :], wanted, strict=True):
        if not isinstance(size, int) and not (isinstance(out, int) and out == 1):
            return "adaptive pooling of a dynamic spatial size to more than one element"
    return _float_input(x)


def _windows(size: int, out: int) -> list[tuple[int, int]]:
    return [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]


def _adaptive(net: Net, x: Value, output_size: Sequence[int], reduction: str) -> Tensor:
    sizes = [output_size] if isinstance(output_size, int) else list(output_size)
    spatial = len(sizes)
    whole = [axis for axis, out in enumerate(sizes, start=-spatial) if isinstance(out, int) and out == 1]
    if whole:
        x = net.reduce(reduction, x, whole, keepdim=True)
    if len(whole) == spatial:
        return x
    inner = net.dims(x)[-spatial:]
    if all(size % out == 0 for size, out in zip(inner, sizes, strict=True)):
        kernel = [size // out for size, out in zip(inner, sizes, strict=True)]
        if reduction == "AVG":
            return _avg_pool(net, spatial, x, kernel, kernel, (0,), False, True)
        return _max_pool(net, spatial, x, kernel, kernel, (0,), (1,), False)
    # windows of different sizes: one slice and reduction per output index, dimension by dimension
    y = net.tensor(x)
    for axis, (size, out) in enumerate(zip(inner, sizes, strict=True), start=-spatial):
        if size != out:
            parts = [net.narrow(y, axis, start, end - start) for start, end in _windows(size, out)]
            y = net.concat([net.reduce(reduction, part, [axis], keepdim=True) for part in parts], axis)
    return y


@converts(
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool3d.default,
    check=_adaptive_sizes,
)
def adaptive_avg_pool(net: Net, x: Value, output_size: Sequence[int]) -> Tensor:
    return _adaptive(net, x, output_size, "AVG")


@converts(
    aten.adaptive_max_pool1d.default,
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
    check=_adaptive_sizes,
)
def adaptive_max_pool(net: Net, x: Value, output_size: Sequence[int]) -> tuple:
    return _adaptive(net, x, output_size, "MAX"), None
