"""Scatters that add up, or keep the largest: TensorRT's scatter only overwrites.

Each target looks at all updates: a comparison of every target's place with every update's, then a reduction. That is
quadratic, so only small ones are taken.
"""

from __future__ import annotations

import torch

from lowering.trt.define.net import Net, Tensor, Value, is_static, product
from lowering.trt.define.registry import converts

aten = torch.ops.aten
_PAIRS = 1 << 24  # comparisons written out at most
_TOO_MANY = "TensorRT scatters without adding up, and there are too many targets to compare each with each update"
_OPERATIONS = {"sum": "SUM", "prod": "PROD", "amax": "MAX", "amin": "MIN"}


def few_targets(x, indices) -> str | None:
    """The check of `add_rows`, on fake tensors: x and the index tensors (None where a dimension has none)."""
    used = [d for d, index in enumerate(indices) if index is not None]
    targets = [x.shape[d] for d in used]
    updates = torch.broadcast_shapes(*(indices[d].shape for d in used))
    if is_static([*x.shape, *updates]) and product(targets) * product(updates) <= _PAIRS:
        return None
    return _TOO_MANY


def add_rows(net: Net, x: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """``x[place] += row`` for every place, equal ones included.

    Args:
        net: the network.
        x: (t_1 ... t_k, inner...), static.
        places: (u..., k) int64, not negative.
        rows: (u..., inner...) of x's dtype.
    """
    k = places.shape[-1]
    targets, inner = net.dims(x)[:k], net.dims(x)[k:]
    weights = torch.tensor([product(targets[i + 1 :]) for i in range(k)])
    flat = net.reshape(net.reduce("SUM", net.mul(places, weights), [-1]), [-1])  # number of the target of each update
    width = product(inner)
    hits = net.equal(torch.arange(product(targets)).unsqueeze(1), net.unsqueeze(flat, [0]))
    rows = net.reshape(rows, [net.size(flat, 0), width])
    if net.dtype(x).is_floating_point:
        added = net.matmul(net.cast(hits, net.dtype(x)), rows)
    else:
        one_each = net.mul(net.unsqueeze(net.cast(hits, net.dtype(x)), [2]), net.unsqueeze(rows, [0]))
        added = net.reduce("SUM", one_each, [1])
    return net.sum(x, net.reshape(added, [*targets, *inner]))


def _few_elements(x, dim, index, reduce=None) -> str | None:
    if reduce is not None and reduce not in _OPERATIONS:
        return f"scattering with {reduce}"
    if not x.dim():
        return None
    if is_static([*x.shape, *index.shape]) and x.shape[dim] * index.numel() <= _PAIRS:
        return None
    return _TOO_MANY


def _reduced(net: Net, x: Value, dim: int, index: Value, src: Value, op: str, own: bool) -> Tensor:
    """``x[..., index[i], ...] = op(x[...], src[i])``; without `own`, what is written to forgets its old value."""
    if not net.rank(x):
        return _joined(net, op, x, src) if own else net.tensor(src)
    rank, dim = net.rank(x), dim % net.rank(x)
    dtype, sizes = net.dtype(x), net.dims(index)
    src = net.slice(net.tensor(src, dtype), [0] * rank, sizes)
    targets = torch.arange(net.size(x, dim)).reshape([-1 if d == dim else 1 for d in range(rank + 1)])
    hits = net.equal(net.unsqueeze(index, [dim]), targets)  # (..., target, update, ...)
    neutral = _neutral(op, dtype)
    found = net.reduce(op, net.where(hits, net.unsqueeze(src, [dim]), neutral, dtype), [dim + 1])
    touched = net.cast(net.reduce("MAX", net.cast(hits, torch.int32), [dim + 1]), torch.bool)
    after = [0 if d == dim else whole - part for d, (whole, part) in enumerate(zip(net.dims(x), sizes, strict=True))]
    found = net.pad(found, [0] * rank, after, fill=neutral)
    joined = _joined(net, op, x, found)
    if own:
        return joined
    touched = net.cast(net.pad(net.cast(touched, torch.int32), [0] * rank, after), torch.bool)
    return net.where(touched, found, x, dtype)


def _joined(net: Net, op: str, a: Value, b: Value) -> Tensor:
    return net.binary(op, a, b, net.dtype(a))  # the two enumerations share these names


def _neutral(op: str, dtype: torch.dtype) -> int | float:
    if op in ("SUM", "PROD"):
        number = 0 if op == "SUM" else 1
        return float(number) if dtype.is_floating_point else number
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return limits.min if op == "MAX" else limits.max


@converts(aten.scatter_add.default, check=_few_elements)
def scatter_add(net: Net, x: Value, dim: int, index: Value, src: Value) -> Tensor:
    return _reduced(net, x, dim, index, src, "SUM", own=True)


@converts(aten.scatter_reduce.two, check=_few_elements)
def scatter_reduce(
    net: Net, x: Value, dim: int, index: Value, src: Value, reduce: str, include_self: bool = True
) -> Tensor:
    return _reduced(net, x, dim, index, src, _OPERATIONS[reduce], own=include_self)
