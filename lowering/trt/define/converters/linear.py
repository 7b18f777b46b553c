"""Linear layers and matrix products."""

from __future__ import annotations

import torch

from lowering.segment.normal_form.einsum import explicit
from lowering.trt.define.converters.pointwise import is_number
from lowering.trt.define.net import Net, Tensor, Value
from lowering.trt.define.registry import converts

aten = torch.ops.aten
_INTEGER_PRODUCTS = 1 << 24  # written out at most


def _floats(result) -> str | None:
    return None if result.dtype.is_floating_point else "TensorRT multiplies float matrices only"


@converts(aten.linear.default, check=_floats)
def linear(net: Net, x: Value, weight: Value, bias: Value = None) -> Tensor:
    if net.rank(weight) == 1:
        y = matmul(net, x, weight)
    elif net.rank(x) == 1:
        y = net.squeeze(net.matmul(net.unsqueeze(x, [0]), weight, transpose_b=True), [0])
    else:
        y = net.matmul(x, weight, transpose_b=True)
    return y if bias is None else net.sum(y, bias)


def _floats_or_few(x, result, other=None, mat2=None, vec=None) -> str | None:
    if result.dtype.is_floating_point:
        return None
    depth = x.shape[-1] if x.dim() else 1
    count = result.numel() * depth
    if isinstance(count, int) and count <= _INTEGER_PRODUCTS:
        return None
    return "TensorRT multiplies float matrices only, and this one of integers is too large to be written as products"


def _product(net: Net, a: Value, b: Value) -> Tensor:
    """Matrix product; of integers as products and a sum."""
    dtype = net.result.dtype
    if dtype.is_floating_point:
        return net.matmul(a, b)
    return net.reduce("SUM", net.mul(net.unsqueeze(a, [-1]), net.unsqueeze(b, [-3]), dtype), [-2])


@converts(aten.matmul.default, check=_floats_or_few)
def matmul(net: Net, x: Value, other: Value) -> Tensor:
    left, right = net.rank(x) == 1, net.rank(other) == 1
    a = net.unsqueeze(x, [0]) if left else x
    b = net.unsqueeze(other, [1]) if right else other
    y = _product(net, a, b)
    return net.squeeze(y, ([-2] if left else []) + ([-1] if right else []))


@converts(aten.mm.default, aten.bmm.default, check=_floats_or_few)
def mm(net: Net, x: Value, mat2: Value) -> Tensor:
    return _product(net, x, mat2)


@converts(aten.mv.default, check=_floats_or_few)
def mv(net: Net, x: Value, vec: Value) -> Tensor:
    return matmul(net, x, vec)


@converts(aten.dot.default, aten.vdot.default)
def dot(net: Net, x: Value, tensor: Value = None, other: Value = None) -> Tensor:
    return net.reduce("SUM", net.mul(x, other if tensor is None else tensor), None)


@converts(aten.outer.default, aten.ger.default)
def outer(net: Net, x: Value, vec2: Value) -> Tensor:
    return net.mul(net.unsqueeze(x, [1]), net.unsqueeze(vec2, [0]), net.result.dtype)


def _scaled_sum(net: Net, x: Value, product: Tensor, beta: Value, alpha: Value) -> Tensor:
    product = product if is_number(alpha, 1) else net.mul(product, alpha, net.dtype(product))
    if is_number(beta, 0):  # torch ignores x then, NaN included
        return product
    return net.sum(x if is_number(beta, 1) else net.mul(x, beta, net.dtype(product)), product)


@converts(aten.addmm.default, check=_floats)
def addmm(net: Net, x: Value, mat1: Value, mat2: Value, beta: Value = 1, alpha: Value = 1) -> Tensor:
    return _scaled_sum(net, x, net.matmul(mat1, mat2), beta, alpha)


@converts(aten.baddbmm.default, check=_floats)
def baddbmm(net: Net, x: Value, batch1: Value, batch2: Value, beta: Value = 1, alpha: Value = 1) -> Tensor:
    return _scaled_sum(net, x, net.matmul(batch1, batch2), beta, alpha)


@converts(aten.addbmm.default, check=_floats)
def addbmm(net: Net, x: Value, batch1: Value, batch2: Value, beta: Value = 1, alpha: Value = 1) -> Tensor:
    return _scaled_sum(net, x, net.reduce("SUM", net.matmul(batch1, batch2), [0]), beta, alpha)


@converts(aten.addmv.default, check=_floats)
def addmv(net: Net, x: Value, mat: Value, vec: Value, beta: Value = 1, alpha: Value = 1) -> Tensor:
    return _scaled_sum(net, x, matmul(net, mat, vec), beta, alpha)


@converts(aten.addr.default, check=_floats)
def addr(net: Net, x: Value, vec1: Value, vec2: Value, beta: Value = 1, alpha: Value = 1) -> Tensor:
    return _scaled_sum(net, x, net.mul(net.unsqueeze(vec1, [1]), net.unsqueeze(vec2, [0])), beta, alpha)


@converts(aten.einsum.default, check=_floats)
def einsum(net: Net, equation: str, tensors: list[Value]) -> Tensor:
    return net.einsum(explicit(equation), tensors)


@converts(aten.bilinear.default)
def bilinear(net: Net, input1: Value, input2: Value, weight: Value, bias: Value = None) -> Tensor:
    left = net.einsum("ni,oij->noj", [_rows(net, input1), weight])
    y = net.reduce("SUM", net.mul(left, net.unsqueeze(_rows(net, input2), [1])), [2])
    y = net.reshape(y, [*net.dims(input1)[:-1], weight.shape[0]])
    return y if bias is None else net.sum(y, bias)


def _rows(net: Net, x: Value) -> Tensor:
    return net.flatten(x, 0, -2) if net.rank(x) > 2 else (net.unsqueeze(x, [0]) if net.rank(x) == 1 else net.tensor(x))
