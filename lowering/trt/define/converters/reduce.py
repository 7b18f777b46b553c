"""Reductions, variances, norms and distances."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowering.trt.define.net import Net, Tensor, Value, product
from lowering.trt.define.registry import converts

aten = torch.ops.aten
Dims = int | Sequence[int] | None


@converts(aten.sum.default, aten.sum.dim_IntList)
def sum_(net: Net, x: Value, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return net.reduce("SUM", net.cast(x, net.result.dtype), dim, keepdim)


@converts(aten.mean.default, aten.mean.dim)
def mean(net: Net, x: Value, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return net.mean(net.cast(x, net.result.dtype), dim, keepdim)


@converts(aten.prod.default, aten.prod.dim_int)
def prod(net: Net, x: Value, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return net.reduce("PROD", net.cast(x, net.result.dtype), dim, keepdim)


def _extreme(net: Net, op: str, x: Value, dim: Dims, keepdim: bool) -> Tensor:
    if net.dtype(x) == torch.bool:  # over nothing the smallest or largest integer comes out, so not a cast back
        return net.greater(net.reduce(op, net.cast(x, torch.int32), dim, keepdim), 0)
    return net.reduce(op, x, dim, keepdim)


@converts(aten.amax.default)
def amax(net: Net, x: Value, dim: Dims = (), keepdim: bool = False) -> Tensor:
    return _extreme(net, "MAX", x, dim, keepdim)


@converts(aten.amin.default)
def amin(net: Net, x: Value, dim: Dims = (), keepdim: bool = False) -> Tensor:
    return _extreme(net, "MIN", x, dim, keepdim)


@converts(aten.max.default)
def max_(net: Net, x: Value) -> Tensor:
    return _extreme(net, "MAX", x, None, False)


@converts(aten.min.default)
def min_(net: Net, x: Value) -> Tensor:
    return _extreme(net, "MIN", x, None, False)


@converts(aten.aminmax.default)
def aminmax(net: Net, x: Value, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _extreme(net, "MIN", x, dim, keepdim), _extreme(net, "MAX", x, dim, keepdim)


@converts(aten.any.default, aten.any.dim, aten.any.dims)
def any_(net: Net, x: Value, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return _extreme(net, "MAX", net.cast(x, torch.bool), dim, keepdim)


@converts(aten.all.default, aten.all.dim, aten.all.dims)
def all_(net: Net, x: Value, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return _extreme(net, "MIN", net.cast(x, torch.bool), dim, keepdim)


@converts(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(net: Net, x: Value, dim: Dims = None) -> Tensor:
    return net.reduce("SUM", net.cast(net.cast(x, torch.bool), torch.int64), dim)


# -- variance and norms ---------------------------------------------------------------------------------------------


def _variance(net: Net, x: Value, dim: Dims, correction: float, keepdim: bool) -> Tensor:
    axes = net.axes(x, dim)
    centred = net.sub(x, net.mean(x, axes, keepdim=True))
    total = net.reduce("SUM", net.mul(centred, centred), axes, keepdim)
    count = product([net.size(x, a) for a in axes])
    if isinstance(count, int):
        return net.div(total, float("nan") if count - correction <= 0 else float(count - correction))
    return net.div(total, net.cast(count - correction, net.dtype(x)))


@converts(aten.var.default, aten.var.dim)
def var(net: Net, x: Value, dim: Dims = None, unbiased: bool = True, keepdim: bool = False) -> Tensor:
    return _variance(net, x, dim, 1 if unbiased else 0, keepdim)


@converts(aten.var.correction)
def var_correction(
    net: Net, x: Value, dim: Dims = None, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _variance(net, x, dim, 1 if correction is None else correction, keepdim)


@converts(aten.std.default, aten.std.dim)
def std(net: Net, x: Value, dim: Dims = None, unbiased: bool = True, keepdim: bool = False) -> Tensor:
    return net.unary("SQRT", var(net, x, dim, unbiased, keepdim))


@converts(aten.std.correction)
def std_correction(
    net: Net, x: Value, dim: Dims = None, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return net.unary("SQRT", var_correction(net, x, dim, correction, keepdim))


@converts(aten.var_mean.correction)
def var_mean(net: Net, x: Value, dim: Dims = None, correction: float | None = None, keepdim: bool = False) -> tuple:
    return var_correction(net, x, dim, correction, keepdim), net.mean(x, net.axes(x, dim), keepdim)


@converts(aten.var_mean.default, aten.var_mean.dim)
def var_mean_unbiased(net: Net, x: Value, dim: Dims = None, unbiased: bool = True, keepdim: bool = False) -> tuple:
    return var(net, x, dim, unbiased, keepdim), net.mean(x, net.axes(x, dim), keepdim)


@converts(aten.std_mean.default, aten.std_mean.dim)
def std_mean_unbiased(net: Net, x: Value, dim: Dims = None, unbiased: bool = True, keepdim: bool = False) -> tuple:
    return std(net, x, dim, unbiased, keepdim), net.mean(x, net.axes(x, dim), keepdim)


@converts(aten.std_mean.correction)
def std_mean(net: Net, x: Value, dim: Dims = None, correction: float | None = None, keepdim: bool = False) -> tuple:
    return std_correction(net, x, dim, correction, keepdim), net.mean(x, net.axes(x, dim), keepdim)


def _vector_norm(net: Net, x: Value, ord: float, dim: Dims, keepdim: bool) -> Tensor:
    x = net.cast(x, net.result.dtype)
    if ord == 2:
        return net.unary("SQRT", net.reduce("SUM", net.mul(x, x), dim, keepdim))
    size = net.unary("ABS", x)
    if ord == 1:
        return net.reduce("SUM", size, dim, keepdim)
    if ord in (float("inf"), float("-inf")):
        return net.reduce("MAX" if ord > 0 else "MIN", size, dim, keepdim)
    if ord == 0:
        return net.reduce("SUM", net.cast(net.cast(x, torch.bool), net.dtype(x)), dim, keepdim)
    return net.pow(net.reduce("SUM", net.pow(size, float(ord)), dim, keepdim), 1.0 / ord)


@converts(aten.linalg_vector_norm.default)
def linalg_vector_norm(net: Net, x: Value, ord: float = 2, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return _vector_norm(net, x, ord, dim, keepdim)


@converts(aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim_dtype)
def norm(net: Net, x: Value, p: float | None = 2, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return _vector_norm(net, x, 2 if p is None else p, dim, keepdim)


@converts(aten.frobenius_norm.dim)
def frobenius_norm(net: Net, x: Value, dim: Dims, keepdim: bool = False) -> Tensor:
    return _vector_norm(net, x, 2, dim, keepdim)


@converts(aten.logsumexp.default)
def logsumexp(net: Net, x: Value, dim: Dims, keepdim: bool = False) -> Tensor:
    x = net.cast(x, net.result.dtype)
    high = net.reduce("MAX", x, dim, keepdim=True)
    infinite = net.equal(net.unary("ABS", high), float("inf"))
    high = net.where(infinite, 0.0, high, net.dtype(x))
    total = net.reduce("SUM", net.unary("EXP", net.sub(x, high)), dim, keepdim)
    return net.sum(net.unary("LOG", total), high if keepdim else net.squeeze(high, net.axes(x, dim)))


# -- distances --------------------------------------------------------------------------------------------------------


@converts(aten.norm_except_dim.default)
def norm_except_dim(net: Net, v: Value, pow: int = 2, dim: int = 0) -> Tensor:
    others = [d for d in range(net.rank(v)) if d != dim % net.rank(v)] if dim != -1 else None
    return _vector_norm(net, v, pow, others, keepdim=dim != -1)


@converts(aten.cosine_similarity.default)
def cosine_similarity(net: Net, x1: Value, x2: Value, dim: int = 1, eps: float = 1e-8) -> Tensor:
    def length(v: Value) -> Tensor:
        norm = net.unary("SQRT", net.reduce("SUM", net.mul(v, v), [dim], keepdim=True))
        return net.maximum(norm, eps)

    a, b = net.align(x1, x2)
    return net.reduce("SUM", net.mul(net.div(a, length(a)), net.div(b, length(b))), [dim])


@converts(aten.pairwise_distance.default)
def pairwise_distance(net: Net, x1: Value, x2: Value, p: float = 2, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    return _vector_norm(net, net.sum(net.sub(x1, x2), eps), p, [-1], keepdim)


@converts(aten._cdist_forward.default)
def cdist(net: Net, x1: Value, x2: Value, p: float, compute_mode: int | None) -> Tensor:
    difference = net.sub(net.unsqueeze(x1, [-2]), net.unsqueeze(x2, [-3]))
    return _vector_norm(net, difference, p, [-1], keepdim=False)
