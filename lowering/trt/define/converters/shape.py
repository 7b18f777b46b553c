"""Views, order of dimensions, joining and splitting."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowering.trt.define.net import Net, Scalar, Size, Tensor, Value, product
from lowering.trt.define.registry import converts

aten = torch.ops.aten


@converts(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.view_copy.default)
def reshape(net: Net, x: Value, size: Sequence[Size] = (), shape: Sequence[Size] = ()) -> Tensor:
    return net.reshape(x, _without_minus_one(net, x, list(size or shape)))


def _without_minus_one(net: Net, x: Value, sizes: list[Size]) -> list[Size]:
    """The size that -1 stands for, where it can be known now; a run-time one stays -1, which the layer understands."""
    if -1 not in [s for s in sizes if isinstance(s, int)]:
        return sizes
    at = next(i for i, s in enumerate(sizes) if isinstance(s, int) and s == -1)
    total, rest = product(net.dims(x)), product(sizes[:at] + sizes[at + 1 :])
    if isinstance(total, int) and isinstance(rest, int) and rest:
        sizes[at] = total // rest
    elif isinstance(net.result.shape[at], int):
        sizes[at] = net.result.shape[at]
    return sizes


@converts(aten.flatten.using_ints)
def flatten(net: Net, x: Value, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    return net.flatten(x, start_dim, end_dim)


@converts(aten.unflatten.int)
def unflatten(net: Net, x: Value, dim: int, sizes: Sequence[Size]) -> Tensor:
    dims = net.dims(x)
    dim = dim % len(dims)
    return net.reshape(x, _without_minus_one(net, x, [*dims[:dim], *sizes, *dims[dim + 1 :]]))


@converts(aten.view_as.default, aten.reshape_as.default)
def view_as(net: Net, x: Value, other: Value) -> Tensor:
    return net.reshape(x, net.dims(other))


@converts(aten.permute.default)
def permute(net: Net, x: Value, dims: Sequence[int]) -> Tensor:
    return net.permute(x, dims)


@converts(aten.transpose.int, aten.swapaxes.default, aten.swapdims.default)
def transpose(
    net: Net, x: Value, dim0: int = 0, dim1: int = 0, axis0: int | None = None, axis1: int | None = None
) -> Tensor:
    return net.transpose(x, dim0 if axis0 is None else axis0, dim1 if axis1 is None else axis1)


@converts(aten.t.default, aten.numpy_T.default, aten.mT.default)
def t(net: Net, x: Value) -> Tensor:
    return net.transpose(x, -1, -2) if net.rank(x) >= 2 else net.tensor(x)


@converts(aten.movedim.intlist, aten.movedim.int)
def movedim(net: Net, x: Value, source, destination) -> Tensor:
    rank = net.rank(x)
    sources = [s % rank for s in ([source] if isinstance(source, int) else source)]
    targets = [d % rank for d in ([destination] if isinstance(destination, int) else destination)]
    order = dict(zip(targets, sources, strict=True))
    rest = iter(d for d in range(rank) if d not in sources)
    return net.permute(x, [order[i] if i in order else next(rest) for i in range(rank)])


@converts(aten.unsqueeze.default)
def unsqueeze(net: Net, x: Value, dim: int) -> Tensor:
    return net.unsqueeze(x, [dim])


@converts(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(net: Net, x: Value, dim: int | Sequence[int] | None = None) -> Tensor:
    # whether a dimension goes is read from torch's own result: a dynamic one stays
    rank = net.rank(x)
    candidates = range(rank) if dim is None else [d % max(rank, 1) for d in ([dim] if isinstance(dim, int) else dim)]
    gone = [d for d in candidates if rank and isinstance(x.shape[d], int) and x.shape[d] == 1]
    return net.squeeze(x, gone)


@converts(aten.expand.default)
def expand(net: Net, x: Value, size: Sequence[Size]) -> Tensor:
    own = [None] * (len(size) - net.rank(x)) + net.dims(x)
    return net.expand(x, [d if isinstance(s, int) and s == -1 else s for s, d in zip(size, own, strict=True)])


@converts(aten.expand_as.default)
def expand_as(net: Net, x: Value, other: Value) -> Tensor:
    return net.expand(x, net.dims(other))


@converts(aten.broadcast_to.default)
def broadcast_to(net: Net, x: Value, size: Sequence[Size]) -> Tensor:
    return expand(net, x, size)


@converts(aten.repeat.default, aten.tile.default)
def repeat(net: Net, x: Value, repeats: Sequence[Size] = (), dims: Sequence[Size] = ()) -> Tensor:
    """Every repeated dimension becomes (times, size): a broadcast, then merged."""
    times = list(repeats or dims)
    times = [1] * (net.rank(x) - len(times)) + times
    if not times:
        return net.tensor(x)
    sizes = [1] * (len(times) - net.rank(x)) + net.dims(x)
    x = net.reshape(x, sizes)
    if len([t for t in times if not (isinstance(t, int) and t == 1)]) + len(sizes) > 8:
        return _repeat_by_concat(net, x, times)
    split: list[Size] = []
    wide: list[Size] = []
    for count, size in zip(times, sizes, strict=True):
        if not (isinstance(count, int) and count == 1):
            split.append(1)
            wide.append(count)
        split.append(size)
        wide.append(size)
    merged = [s if isinstance(c, int) and c == 1 else s * c for c, s in zip(times, sizes, strict=True)]
    return net.reshape(net.expand(net.reshape(x, split), wide), merged)


def _repeat_by_concat(net: Net, x: Tensor, times: Sequence[Size]) -> Tensor:
    for dim, count in enumerate(times):
        if not isinstance(count, int):
            raise net.unsupported("repeat of a tensor of this rank by a dynamic count")
        x = net.concat([x] * count, dim)
    return x


def _times_known(x, repeats) -> str | None:
    return None if isinstance(repeats, int) else "the number of repeats is dynamic"


@converts(aten.repeat_interleave.self_int, check=_times_known)
def repeat_interleave(net: Net, x: Value, repeats: int, dim: int | None = None, output_size=None) -> Tensor:
    x = net.flatten(x) if dim is None else net.tensor(x)
    dim = 0 if dim is None else dim % net.rank(x)
    dims = net.dims(x)
    wide = net.expand(net.unsqueeze(x, [dim + 1]), [*dims[: dim + 1], repeats, *dims[dim + 1 :]])
    return net.reshape(wide, [*dims[:dim], dims[dim] * repeats, *dims[dim + 1 :]])


# -- joining and splitting ----------------------------------------------------------------------------------------


@converts(aten.cat.default, aten.concat.default)
def cat(net: Net, tensors: Sequence[Value], dim: int = 0) -> Tensor:
    dtype = net.result.dtype
    # torch lets an empty 1-D tensor join anything
    parts = [t for t in tensors if not (net.rank(t) == 1 and net.result.dim() > 1)]
    return net.concat([net.tensor(t, dtype) for t in parts], dim)


@converts(aten.stack.default)
def stack(net: Net, tensors: Sequence[Value], dim: int = 0) -> Tensor:
    dim = dim % (net.rank(tensors[0]) + 1)
    return net.concat([net.tensor(net.unsqueeze(t, [dim]), net.result.dtype) for t in tensors], dim)


def _pieces(net: Net, x: Value, sizes: Sequence[Size], dim: int) -> list[Tensor]:
    start: Size = 0
    parts = []
    for size in sizes:
        parts.append(net.narrow(x, dim, start, size))
        start = start + size
    return parts


def _split_size_known(x, dim, split_size=None, chunks=None) -> str | None:
    if isinstance(x.shape[dim], int):
        return None
    return "the number of parts depends on a dynamic size"


@converts(aten.split.Tensor, check=_split_size_known)
def split(net: Net, x: Value, split_size: int, dim: int = 0) -> list[Tensor]:
    size = net.size(x, dim)
    return _pieces(net, x, [min(split_size, size - s) for s in range(0, size, split_size)] or [0], dim)


@converts(aten.split_with_sizes.default, aten.split.sizes)
def split_with_sizes(
    net: Net, x: Value, split_sizes: Sequence[Size] = (), dim: int = 0, split_size: Sequence[Size] = ()
):
    return _pieces(net, x, split_sizes or split_size, dim)


@converts(aten.chunk.default, check=_split_size_known)
def chunk(net: Net, x: Value, chunks: int, dim: int = 0) -> list[Tensor]:
    return split(net, x, -(-net.size(x, dim) // chunks), dim)


@converts(aten.unbind.int, check=_split_size_known)
def unbind(net: Net, x: Value, dim: int = 0) -> list[Tensor]:
    return [net.select(x, dim, i) for i in range(net.size(x, dim))]


# -- patterns of reshape and permute --------------------------------------------------------------------------------


@converts(aten.pixel_shuffle.default)
def pixel_shuffle(net: Net, x: Value, upscale_factor: int) -> Tensor:
    *lead, c, h, w = net.dims(x)
    r, k = upscale_factor, len(lead)
    y = net.reshape(x, [*lead, c // (r * r), r, r, h, w])
    y = net.permute(y, [*range(k), k, k + 3, k + 1, k + 4, k + 2])
    return net.reshape(y, [*lead, c // (r * r), h * r, w * r])


@converts(aten.pixel_unshuffle.default)
def pixel_unshuffle(net: Net, x: Value, downscale_factor: int) -> Tensor:
    *lead, c, h, w = net.dims(x)
    r, k = downscale_factor, len(lead)
    y = net.reshape(x, [*lead, c, h // r, r, w // r, r])
    y = net.permute(y, [*range(k), k, k + 2, k + 4, k + 1, k + 3])
    return net.reshape(y, [*lead, c * r * r, h // r, w // r])


@converts(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def channel_shuffle(net: Net, x: Value, groups: int) -> Tensor:
    n, c, *rest = net.dims(x)
    y = net.reshape(x, [n, groups, c // groups, *rest])
    return net.reshape(net.transpose(y, 1, 2), [n, c, *rest])


@converts(aten.flip.default)
def flip(net: Net, x: Value, dims: Sequence[int]) -> Tensor:
    gone = {d % net.rank(x) for d in dims} if net.rank(x) else set()
    sizes = net.dims(x)
    starts = [size - 1 if i in gone else 0 for i, size in enumerate(sizes)]
    return net.slice(x, starts, sizes, [-1 if i in gone else 1 for i in range(len(sizes))])


@converts(aten.fliplr.default)
def fliplr(net: Net, x: Value) -> Tensor:
    return flip(net, x, [1])


@converts(aten.flipud.default)
def flipud(net: Net, x: Value) -> Tensor:
    return flip(net, x, [0])


@converts(aten.rot90.default)
def rot90(net: Net, x: Value, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    turns = k % 4
    if turns == 0:
        return net.tensor(x)
    if turns == 2:
        return flip(net, x, dims)
    return net.transpose(flip(net, x, [dims[1] if turns == 1 else dims[0]]), *dims)


@converts(aten.roll.default)
def roll(net: Net, x: Value, shifts: Sequence[Size], dims: Sequence[int] = ()) -> Tensor:
    if not dims:
        return net.reshape(roll(net, net.flatten(x), shifts, [0]), net.dims(x))
    for shift, dim in zip(shifts, dims, strict=True):
        size = net.size(x, dim)
        cut = shift % size
        if not isinstance(cut, Scalar) and cut == 0:
            continue
        tail, head = net.narrow(x, dim, size - cut, cut), net.narrow(x, dim, 0, size - cut)
        x = net.concat([tail, head], dim)
    return net.tensor(x)


# -- casts and copies ---------------------------------------------------------------------------------------------


@converts(
    aten._to_copy.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.type_as.default,
)
def to_copy(net: Net, x: Value, other: Value = None) -> Tensor:
    return net.cast(x, net.result.dtype)


@converts(
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
    aten.positive.default,
    narrow=True,
)
def same(net: Net, x: Value) -> Tensor:
    return net.tensor(x)


def _eval_only(train) -> str | None:
    return "random in training mode" if train else None


@converts(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default, check=_eval_only)
def dropout(net: Net, x: Value, p: float, train: bool) -> Tensor:
    return net.tensor(x)
