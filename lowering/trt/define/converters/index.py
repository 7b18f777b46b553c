"""Slicing, gathering, scattering and masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowering.trt.define.converters.accumulate import add_rows, few_targets
from lowering.trt.define.net import Net, Scalar, Size, Tensor, Value
from lowering.trt.define.registry import converts

aten = torch.ops.aten
_FAR = 2**62


def _bounds(net: Net, size: Size, start: Size | None, end: Size | None, step: Size) -> tuple[Size, Size]:
    """First index and number of elements of a Python slice, negative and out-of-range bounds included."""
    first = _clamped(net, 0 if start is None else start, size)
    last = size if end is None or (isinstance(end, int) and end >= _FAR) else _clamped(net, end, size)
    whole = last is size and isinstance(first, int) and first == 0
    length = size if whole else net.maximum_size(last - first, 0)
    if not (isinstance(step, int) and step == 1):
        length = (length + (step - 1)) // step
    return first, length


def _clamped(net: Net, index: Size, size: Size) -> Size:
    """An index as Python's slices read it: negative from the end, then limited to [0, size]."""
    if isinstance(index, Scalar):
        # which side it counts from is known at run time only
        wrapped = net.where(net.less(index.tensor, 0), (index + size).tensor, index.tensor, torch.int64)
        index = Scalar(net, wrapped)
    elif index < 0:
        index = size + index
    elif index == 0:
        return 0
    return net.minimum_size(net.maximum_size(index, 0), size)


@converts(aten.slice.Tensor)
def slice_(
    net: Net, x: Value, dim: int = 0, start: Size | None = None, end: Size | None = None, step: Size = 1
) -> Tensor:
    first, length = _bounds(net, net.size(x, dim), start, end, step)
    return net.narrow(x, dim, first, length, step)


@converts(aten.narrow.default)
def narrow(net: Net, x: Value, dim: int, start: Size, length: Size) -> Tensor:
    return net.narrow(x, dim, _wrapped_index(net, start, net.size(x, dim)), length)


def _wrapped_index(net: Net, index: Size, size: Size) -> Size:
    if isinstance(index, int):
        return index if index >= 0 else size + index
    return Scalar(net, net.where(net.less(index.tensor, 0), (index + size).tensor, index.tensor, torch.int64))


@converts(aten.select.int)
def select(net: Net, x: Value, dim: int, index: Size) -> Tensor:
    return net.select(x, dim, _wrapped_index(net, index, net.size(x, dim)))


@converts(aten.slice_scatter.default)
def slice_scatter(
    net: Net, x: Value, src: Value, dim: int = 0, start: Size | None = None, end: Size | None = None, step: Size = 1
) -> Tensor:
    rank, size = net.rank(x), net.size(x, dim)
    dim = dim % rank
    first, length = _bounds(net, size, start, end, step)
    src = net.expand(net.tensor(src, net.dtype(x)), [length if i == dim else d for i, d in enumerate(net.dims(x))])
    if isinstance(step, int) and step == 1:
        after = size - (first + length)
        parts = [net.narrow(x, dim, 0, first), src, net.narrow(x, dim, first + length, after)]
        return net.concat([p for p in parts if not (isinstance(p.shape[dim], int) and p.shape[dim] == 0)], dim)
    rows = net.iota(length, first, step, torch.int64)
    return _write_rows(net, x, dim, rows, src)


def _write_rows(net: Net, x: Value, dim: int, rows: Tensor, src: Value) -> Tensor:
    """x with ``x[..., rows, ...] = src`` along one dimension."""
    shape = [1] * net.rank(x)
    shape[dim] = net.size(rows, 0)
    indices = net.expand(net.reshape(rows, shape), net.dims(src))
    return net.scatter(x, indices, src, "ELEMENT", dim)


@converts(aten.select_scatter.default)
def select_scatter(net: Net, x: Value, src: Value, dim: int, index: Size) -> Tensor:
    dim = dim % net.rank(x)
    start = _wrapped_index(net, index, net.size(x, dim))
    return slice_scatter(net, x, net.unsqueeze(src, [dim]), dim, start, start + 1)


# -- gathering ----------------------------------------------------------------------------------------------------


def _not_negative(net: Net, index: Value, size: Size) -> Value:
    """Indices with negative ones counted from the end."""
    if isinstance(index, torch.Tensor) and isinstance(size, int):
        return torch.where(index < 0, index + size, index)
    index = net.tensor(index)
    dtype = net.dtype(index)
    return net.where(net.less(index, 0), net.sum(index, size, dtype), index, dtype)


@converts(aten.index_select.default)
def index_select(net: Net, x: Value, dim: int, index: Value) -> Tensor:
    if net.rank(x) == 0:
        return net.tensor(x)
    index = net.unsqueeze(index, [0]) if net.rank(index) == 0 else index
    return net.gather(x, index, dim)


@converts(aten.gather.default)
def gather(net: Net, x: Value, dim: int, index: Value, sparse_grad: bool = False) -> Tensor:
    if net.rank(x) == 0:
        return net.tensor(x)
    return net.gather_elements(x, index, dim)


@converts(aten.take_along_dim.default)
def take_along_dim(net: Net, x: Value, indices: Value, dim: int | None = None) -> Tensor:
    if dim is None:
        return net.gather_elements(net.flatten(x), net.flatten(indices), 0)
    rank, dim = net.rank(x), dim % net.rank(x)
    # the other dimensions broadcast against each other
    both = list(zip(net.dims(x), net.dims(indices), strict=True))
    wide = [b if isinstance(a, int) and a == 1 else a for a, b in both]
    x = net.expand(x, [both[i][0] if i == dim else wide[i] for i in range(rank)])
    indices = net.expand(indices, [both[i][1] if i == dim else wide[i] for i in range(rank)])
    return net.gather_elements(x, _not_negative(net, indices, net.size(x, dim)), dim)


@converts(aten.take.default)
def take(net: Net, x: Value, index: Value) -> Tensor:
    flat = net.flatten(x)
    return net.gather(flat, _not_negative(net, index, net.size(flat, 0)), 0)


@converts(aten.embedding.default)
def embedding(
    net: Net, weight: Value, indices: Value, padding_idx: int = -1, scale_grad_by_freq=False, sparse=False
) -> Tensor:
    return net.gather(weight, indices, 0)


def _integer_indices(x, indices) -> str | None:
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return "the size of a boolean-mask selection depends on the data"
    return None


@converts(aten.index.Tensor, aten._unsafe_index.Tensor, check=_integer_indices)
def index(net: Net, x: Value, indices: Sequence[Value | None]) -> Tensor:
    """``x[i, :, j]``: one index tensor is a gather, several are looked up together."""
    used = [d for d, i in enumerate(indices) if i is not None]
    wrapped = {d: _not_negative(net, indices[d], net.size(x, d)) for d in used}  # type: ignore[arg-type]
    if len(used) == 1:
        return net.gather(x, wrapped[used[0]], used[0])
    rest = [d for d in range(net.rank(x)) if d not in used]
    front = net.permute(x, used + rest)
    joined = _joined(net, [wrapped[d] for d in used])
    found = net.gather_nd(front, joined)
    shared = net.rank(joined) - 1
    if used == list(range(used[0], used[-1] + 1)):
        # neighbouring indices leave their result where they stood, others move it to the front
        before = used[0]
        order = (
            [shared + i for i in range(before)] + list(range(shared)) + list(range(shared + before, shared + len(rest)))
        )
        return net.permute(found, order)
    return found


def _joined(net: Net, indices: Sequence[Value]) -> Tensor:
    """Index tensors broadcast against each other and joined along a new last dimension."""
    rank = max(net.rank(i) for i in indices)
    dtype = torch.int64
    aligned = net.align(*indices, dtype=dtype)
    sizes: list[Size] = []
    for axis in range(rank):
        known = [net.size(i, axis) for i in aligned]
        sizes.append(next((s for s in known if not (isinstance(s, int) and s == 1)), 1))
    return net.concat([net.unsqueeze(net.expand(i, sizes), [rank]) for i in aligned], rank)


# -- scattering ---------------------------------------------------------------------------------------------------


def _writable(x, indices, values, accumulate=False) -> str | None:
    if _one_mask(indices):
        if accumulate or not isinstance(values.numel(), int) or values.numel() != 1:
            return "which values go where depends on the data"
        return None
    return _integer_indices(x, indices) or (few_targets(x, indices) if accumulate else None)


def _one_mask(indices) -> bool:
    """``x[mask] = ...``"""
    return len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool


@converts(aten.index_put.default, aten._unsafe_index_put.default, check=_writable)
def index_put(net: Net, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Tensor:
    if len(indices) == 1 and net.dtype(indices[0]) == torch.bool:  # one value where the mask says so
        mask = net.reshape(indices[0], [*net.dims(indices[0]), *[1] * (net.rank(x) - net.rank(indices[0]))])
        return net.where(mask, net.reshape(values, []), x, net.dtype(x))
    used = [d for d, i in enumerate(indices) if i is not None]
    rest = [d for d in range(net.rank(x)) if d not in used]
    front = net.permute(net.tensor(x), used + rest)
    joined = _joined(net, [_not_negative(net, indices[d], net.size(x, d)) for d in used])  # type: ignore[arg-type]
    shared = net.dims(joined)[:-1]
    inner = net.dims(front)[len(used) :]
    values = net.tensor(values, net.dtype(x))
    if used == list(range(used[0], used[-1] + 1)) and used[0]:
        # torch has the values where the indices stood; the layer wants them in front
        before = used[0]
        values = net.expand(values, [*inner[:before], *shared, *inner[before:]])
        k = len(shared)
        order = [*range(before, before + k), *range(before), *range(before + k, before + k + len(inner) - before)]
        values = net.permute(values, order)
    else:
        values = net.expand(values, [*shared, *inner])
    written = add_rows(net, front, joined, values) if accumulate else net.scatter(front, joined, values, "ND")
    inverse = sorted(range(net.rank(x)), key=lambda d: (used + rest)[d])
    return net.permute(written, inverse)


@converts(aten.scatter.src)
def scatter_src(net: Net, x: Value, dim: int, index: Value, src: Value) -> Tensor:
    sizes = net.dims(index)
    src = net.tensor(src, net.dtype(x))
    if list(src.shape) != list(index.shape):
        src = net.slice(src, [0] * len(sizes), sizes)
    return net.scatter(x, index, src, "ELEMENT", dim)


@converts(aten.scatter.value)
def scatter_value(net: Net, x: Value, dim: int, index: Value, value: Value) -> Tensor:
    filled = net.expand(net.tensor(value, net.dtype(x), rank=net.rank(x)), net.dims(index))
    return net.scatter(x, index, filled, "ELEMENT", dim)


# -- masks --------------------------------------------------------------------------------------------------------


def _triangle(net: Net, x: Value, diagonal: Size, upper: bool) -> Tensor:
    rows = net.iota(net.size(x, -2), 0, 1, torch.int64)
    columns = net.iota(net.size(x, -1), 0, 1, torch.int64)
    edge = net.unsqueeze(net.sum(rows, diagonal, torch.int64), [1])
    columns = net.unsqueeze(columns, [0])
    outside = net.less(columns, edge) if upper else net.greater(columns, edge)
    zero = False if net.dtype(x) == torch.bool else 0
    return net.where(outside, zero, x, net.dtype(x))


@converts(aten.tril.default)
def tril(net: Net, x: Value, diagonal: Size = 0) -> Tensor:
    return _triangle(net, x, diagonal, upper=False)


@converts(aten.triu.default)
def triu(net: Net, x: Value, diagonal: Size = 0) -> Tensor:
    return _triangle(net, x, diagonal, upper=True)


@converts(aten.diagonal.default)
def diagonal(net: Net, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    rank = net.rank(x)
    dim1, dim2 = dim1 % rank, dim2 % rank
    rest = [d for d in range(rank) if d not in (dim1, dim2)]
    rows, columns = net.size(x, dim1), net.size(x, dim2)
    y = net.permute(x, [*rest, dim1, dim2])
    length = net.minimum_size(rows + min(offset, 0), columns - max(offset, 0))
    length = net.maximum_size(length, 0)
    # element (i, i + offset) is number i * (columns + 1) + offset of the flattened matrix
    flat = net.flatten(y, -2, -1)
    first = offset if offset >= 0 else columns * -offset
    return net.gather(flat, net.iota(length, first, columns + 1, torch.int64), -1)


@converts(aten.one_hot.default)
def one_hot(net: Net, x: Value, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        raise net.unsupported("the number of classes depends on the data", "pass num_classes")
    classes = net.iota(num_classes, 0, 1, torch.int64)
    return net.cast(net.equal(net.unsqueeze(x, [-1]), classes), torch.int64)


@converts(aten.unfold.default)
def unfold(net: Net, x: Value, dimension: int, size: int, step: int) -> Tensor:
    """Windows along a dimension; what they hold becomes the last one."""
    if not net.rank(x):
        return net.reshape(x, [1])
    rank, dim = net.rank(x), dimension % net.rank(x)
    windows = (net.size(x, dim) - size) // step + 1
    starts = net.unsqueeze(net.iota(windows, 0, step, torch.int64), [1])
    places = net.sum(starts, net.unsqueeze(net.iota(size, 0, 1, torch.int64), [0]))
    return net.permute(net.gather(x, places, dim), [*(d for d in range(rank + 1) if d != dim + 1), dim + 1])
