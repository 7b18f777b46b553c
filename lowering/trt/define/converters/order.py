"""Order: top-k, sorting, positions of extremes, places in a sorted sequence."""

from __future__ import annotations

import torch

from lowering.trt.define.net import Net, Tensor, Value
from lowering.trt.define.registry import converts

aten = torch.ops.aten
_TOPK_LIMIT = 3840  # of the layer
_PAIRS = 1 << 24  # comparisons written out at most


def _topk_type(x) -> str | None:
    if x.dtype in (torch.bool, torch.uint8, torch.int8):
        return f"TensorRT does not order {x.dtype}"
    return None


def _topk_check(x, k, dim=-1) -> str | None:
    if not isinstance(k, int):
        return "k is dynamic"
    if k > _TOPK_LIMIT:
        return f"k is {k}, TensorRT takes at most {_TOPK_LIMIT}"
    return _topk_type(x)


@converts(aten.topk.default, check=_topk_check)
def topk(net: Net, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    if net.rank(x) == 0:
        return net.tensor(x), net.tensor(0, torch.int64)
    return net.topk(x, k, dim, largest)


def _sort_check(x, dim=-1, stable=None) -> str | None:
    size = x.shape[dim] if x.dim() else 1
    if not isinstance(size, int):
        return "sorting along a dynamic dimension"
    if stable or x.dtype == torch.bool:
        return _few_pairs(x, size)
    if size > _TOPK_LIMIT:
        return f"{size} elements to sort, TensorRT takes at most {_TOPK_LIMIT}"
    return _topk_type(x)


def _few_pairs(x, size: int) -> str | None:
    count = x.numel()
    if isinstance(count, int) and count * size <= _PAIRS:
        return None
    return "TensorRT does not promise an order of equal elements, and there are too many to compare each with each"


@converts(aten.sort.default, aten.sort.stable, check=_sort_check)
def sort(net: Net, x: Value, dim: int = -1, descending: bool = False, stable: bool | None = None) -> tuple:
    if not net.rank(x):
        return net.tensor(x), net.tensor(0, torch.int64)
    if stable or net.dtype(x) == torch.bool:
        return _by_rank(net, net.tensor(x), dim % net.rank(x), descending)
    return topk(net, x, net.size(x, dim), dim, largest=descending)


def _by_rank(net: Net, x: Tensor, dim: int, descending: bool) -> tuple[Tensor, Tensor]:
    """Stable sorting: an element's place is the number of those that come before it."""
    length = net.size(x, dim)
    dtype = net.dtype(x)
    key = net.cast(x, torch.int32) if dtype == torch.bool else x
    here, there = net.unsqueeze(key, [dim + 1]), net.unsqueeze(key, [dim])  # (..., i, 1, ...) and (..., 1, j, ...)
    first = net.greater(there, here) if descending else net.less(there, here)
    same = net.equal(there, here)
    if dtype.is_floating_point:  # a number that is none counts as the largest
        nan_here, nan_there = net.logical_not(net.equal(here, here)), net.logical_not(net.equal(there, there))
        lone = net.logical(
            "AND", *((nan_there, net.logical_not(nan_here)) if descending else (nan_here, net.logical_not(nan_there)))
        )
        first = net.logical("OR", first, lone)
        same = net.logical("OR", same, net.logical("AND", nan_here, nan_there))
    earlier = torch.ones(length, length, dtype=torch.bool).tril(-1)
    shape = [1] * dim + [length, length] + [1] * (net.rank(x) - dim - 1)
    before = net.logical("OR", first, net.logical("AND", same, earlier.reshape(shape)))
    place = net.reduce("SUM", net.cast(before, torch.int64), [dim + 1])
    ramp = torch.arange(length).reshape([-1 if d == dim else 1 for d in range(net.rank(x))])
    indices = net.scatter(net.mul(place, 0), place, net.expand(ramp, net.dims(x)), "ELEMENT", dim)
    return net.gather_elements(x, indices, dim), indices


@converts(aten.argsort.default, aten.argsort.stable, check=_sort_check)
def argsort(net: Net, x: Value, dim: int = -1, descending: bool = False, stable: bool | None = None) -> Tensor:
    return sort(net, x, dim, descending, stable)[1]


def _arg(net: Net, x: Value, dim: int | None, keepdim: bool, largest: bool) -> Tensor:
    rank = net.rank(x)
    if dim is None:
        x = net.flatten(x) if rank else net.unsqueeze(x, [0])
    elif rank == 0:
        return net.tensor(0, torch.int64)
    indices = net.topk(x, 1, 0 if dim is None else dim, largest)[1]
    if dim is None:
        return net.reshape(indices, [1] * rank if keepdim else [])
    return indices if keepdim else net.squeeze(indices, [dim % rank])


@converts(aten.argmax.default, check=_topk_type)
def argmax(net: Net, x: Value, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _arg(net, x, dim, keepdim, largest=True)


@converts(aten.argmin.default, check=_topk_type)
def argmin(net: Net, x: Value, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _arg(net, x, dim, keepdim, largest=False)


def _with_index(net: Net, x: Value, dim: int, keepdim: bool, largest: bool) -> tuple[Tensor, Tensor]:
    values, indices = topk(net, x, 1, dim, largest)
    if keepdim or not net.rank(x):
        return values, indices
    gone = [dim % net.rank(x)]
    return net.squeeze(values, gone), net.squeeze(indices, gone)


@converts(aten.max.dim, check=_topk_type)
def max_dim(net: Net, x: Value, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _with_index(net, x, dim, keepdim, largest=True)


@converts(aten.min.dim, check=_topk_type)
def min_dim(net: Net, x: Value, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _with_index(net, x, dim, keepdim, largest=False)


@converts(aten.kthvalue.default, check=_topk_check)
def kthvalue(net: Net, x: Value, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = topk(net, x, k, dim, largest=False)
    if not net.rank(x):
        return values, indices
    last = [net.narrow(v, dim, k - 1, 1) for v in (values, indices)]
    return tuple(last if keepdim else [net.squeeze(v, [dim]) for v in last])  # type: ignore[return-value]


@converts(aten.median.dim, check=_sort_check)
def median_dim(net: Net, x: Value, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return kthvalue(net, x, (net.size(x, dim) + 1) // 2 if net.rank(x) else 1, dim, keepdim)


@converts(aten.median.default, check=_sort_check)
def median(net: Net, x: Value) -> Tensor:
    if not net.rank(x):
        return net.tensor(x)
    return median_dim(net, net.flatten(x), 0)[0]


def _few_boundaries(x, boundaries=None, sorted_sequence=None) -> str | None:
    boundaries = sorted_sequence if boundaries is None else boundaries
    count = x.numel() * boundaries.shape[-1]
    if isinstance(count, int) and count <= _PAIRS:
        return None
    return "the place of each value is found by comparing it with all boundaries: too many, or a dynamic number"


@converts(aten.bucketize.Tensor, check=_few_boundaries)
def bucketize(net: Net, x: Value, boundaries: Value, out_int32: bool = False, right: bool = False) -> Tensor:
    """How many boundaries lie before each value (`right`: before it or at it)."""
    value, boundary = net.unsqueeze(x, [-1]), net.tensor(boundaries)
    before = net.logical_not(net.less(value, boundary)) if right else net.less(boundary, value)
    dtype = torch.int32 if out_int32 else torch.int64
    return net.reduce("SUM", net.cast(before, dtype), [-1])


@converts(aten.searchsorted.Tensor, check=_few_boundaries)
def searchsorted(
    net: Net, sorted_sequence: Value, x: Value, out_int32: bool = False, right: bool = False, side=None, sorter=None
) -> Tensor:
    if sorter is not None:
        sorted_sequence = net.gather_elements(sorted_sequence, sorter, -1)
    if net.rank(sorted_sequence) > 1:  # (..., boundaries) beside (..., values)
        sorted_sequence = net.unsqueeze(sorted_sequence, [-2])
    return bucketize(net, x, sorted_sequence, out_int32, right or side == "right")
