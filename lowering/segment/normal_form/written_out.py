"""Ops that backends take apart each in a way of their own, and not always rightly, written out once for all of them.

Each function takes the arguments of the aten op and gives its value in ops that every backend has. Edge cases follow
the CPU kernels of torch: broadcasting before a reduction, negative dimensions, signed zeros, infinities, empty ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from lowering.segment.normal_form.edit import arguments, is_static, shape_of

__all__ = ["written_out"]

aten = torch.ops.aten


def written_out(node: Node) -> Callable[..., Any] | None:
    """The function that computes the op of `node`; None where the op stays as it is."""
    choose = _CHOICES.get(node.target)
    return None if choose is None else choose(node, arguments(node))


def _cosine_similarity(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """`dim` counts in the shape that both broadcast to."""
    x, y = torch.broadcast_tensors(x, y)
    norms = [(t * t).sum(dim, keepdim=True).sqrt().clamp_min(eps) for t in (x, y)]
    return ((x / norms[0]) * (y / norms[1])).sum(dim)


def _circular_pad(node: Node, given: dict[str, Any]) -> Callable[..., Any] | None:
    """Negative sides are cut off first: what wraps around is what is left."""
    if given.get("mode", "circular") != "circular" or not all(isinstance(n, int) for n in given["pad"]):
        return None
    sides = given["pad"]
    if min(sides) >= 0:
        return None
    cut, added = [min(n, 0) for n in sides], [max(n, 0) for n in sides]

    def padded(x: Tensor, *_: Any, **__: Any) -> Tensor:
        x = F.pad(x, cut)
        for index in range(len(added) // 2):
            dim, before, after = x.dim() - 1 - index, added[2 * index], added[2 * index + 1]
            size = x.shape[dim]
            x = torch.cat([x.narrow(dim, size - before, before), x, x.narrow(dim, 0, after)], dim)
        return x

    return padded


def _logit(node: Node, given: dict[str, Any]) -> Callable[..., Any] | None:
    """With eps above a half the lower bound is the higher one, and is the first to be asked."""
    eps = given["eps"]
    if eps is None or not 0.5 < eps < 1:
        return None

    def logit(x: Tensor, *_: Any, **__: Any) -> Tensor:
        low, high = math.log(eps / (1 - eps)), math.log((1 - eps) / eps)
        return torch.where(x < eps, torch.full_like(x, low), torch.full_like(x, high))

    return logit


def _is_negative(x: Tensor) -> Tensor:
    """Whether the sign bit is set: of -0.0 too, whose reciprocal is minus infinity."""
    if not x.is_floating_point():
        return x < 0
    return (x < 0) | ((x == 0) & (x.reciprocal() < 0))


def _copysign(x: Tensor, sign: Tensor) -> Tensor:
    magnitude = x.abs() if x.is_floating_point() else x.float().abs()
    return torch.where(_is_negative(sign), -magnitude, magnitude)


def _atan2(y: Tensor, x: Tensor) -> Tensor:
    """By the quadrant: signs count at zero, and of two infinities the angle is a diagonal."""
    y, x = (t if t.is_floating_point() else t.float() for t in (y, x))
    down, left = _is_negative(y), _is_negative(x)
    both = x.isinf() & y.isinf()
    ratio = torch.where(both, torch.ones_like(x + y), (y / x).abs())
    angle = torch.where((x == 0) & (y == 0), torch.zeros_like(ratio), ratio.atan())
    angle = torch.where(left, math.pi - angle, angle)
    return torch.where(down, -angle, angle)


def _hypot(x: Tensor, y: Tensor) -> Tensor:
    """Scaled by the larger one, so that squares neither overflow nor vanish; infinite if either is, NaN or not."""
    x, y = x.abs(), y.abs()
    large, small = torch.maximum(x, y), torch.minimum(x, y)
    ratio = small / torch.where(large == 0, torch.ones_like(large), large)
    length = large * (1 + ratio * ratio).sqrt()
    return torch.where(x.isinf() | y.isinf(), torch.full_like(length, math.inf), length)


def _prelu(node: Node, given: dict[str, Any]) -> Callable[..., Any] | None:
    if len(shape_of(node.args[1])) > 0:
        return None
    return lambda x, weight: torch.where(x > 0, x, weight * x)


def _pdist(node: Node, given: dict[str, Any]) -> Callable[..., Any] | None:
    rows, p = shape_of(node.args[0])[0], given["p"]
    if not is_static(rows) or rows < 2:
        return None

    def distances(x: Tensor, *_: Any, **__: Any) -> Tensor:
        differences = torch.cat([x[i : i + 1] - x[i + 1 :] for i in range(int(rows) - 1)])
        return torch.linalg.vector_norm(differences, p, dim=-1)

    return distances


def _as_strided(node: Node, given: dict[str, Any]) -> Callable[..., Any] | None:
    """A gather from the memory of a value whose own layout is contiguous."""
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    size, stride, offset = given["size"], given["stride"], given["storage_offset"] or 0
    known = [*value.shape, *size, *stride, offset]
    if not all(is_static(n) for n in known) or not value.is_contiguous():
        return None
    if not size or 0 in size:
        return None

    def gathered(x: Tensor, *_: Any, **__: Any) -> Tensor:
        places = torch.arange(offset, offset + 1)
        for n, step in zip(size, stride, strict=True):
            places = places.unsqueeze(-1) + torch.arange(n) * step
        return x.reshape(-1)[places.reshape(-1)].reshape(list(size))

    return gathered


def _native_batch_norm(node: Node, given: dict[str, Any]) -> Callable[..., Any] | None:
    """In eval mode its second and third results are empty."""
    if given.get("training", False) or given["running_mean"] is None:
        return None

    def normalized(x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, *_: Any, **__: Any) -> Any:
        shape = [1, -1] + [1] * (x.dim() - 2)
        y = (x - mean.reshape(shape)) * torch.rsqrt(variance.reshape(shape) + given["eps"])
        y = y if weight is None else y * weight.reshape(shape)
        y = y if bias is None else y + bias.reshape(shape)
        return y, x.new_zeros(0), x.new_zeros(0)

    return normalized


def _always(function: Callable[..., Any]) -> Callable[[Node, dict[str, Any]], Callable[..., Any]]:
    return lambda node, given: function


_CHOICES: dict[Any, Callable[[Node, dict[str, Any]], Callable[..., Any] | None]] = {
    aten.cosine_similarity.default: _always(_cosine_similarity),
    aten._pad_circular.default: _circular_pad,
    aten.pad.default: _circular_pad,
    aten.logit.default: _logit,
    aten.atan2.default: _always(_atan2),
    aten.arctan2.default: _always(_atan2),
    aten.hypot.default: _always(_hypot),
    aten.copysign.Tensor: _always(_copysign),
    aten.signbit.default: _always(_is_negative),
    aten.prelu.default: _prelu,
    aten.pdist.default: _pdist,
    aten.as_strided.default: _as_strided,
    aten.native_batch_norm.default: _native_batch_norm,
}
