"""Views and sizes."""

from __future__ import annotations

import torch

from lowering.trt.net import Net, Size, Tensor, Value
from lowering.trt.registry import converts

aten = torch.ops.aten


@converts(aten.sym_size.int)
def sym_size(net: Net, x: Value, dim: int) -> Size:
    return net.size(x, dim)


@converts(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def view(net: Net, x: Value, size) -> Tensor:
    return net.reshape(x, size)


@converts(aten.flatten.using_ints)
def flatten(net: Net, x: Value, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    return net.flatten(x, start_dim, end_dim)


@converts(aten._to_copy.default)
def to_copy(net: Net, x: Value) -> Tensor:
    return net.cast(x, net.result.dtype)


@converts(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default, aten.contiguous.default)
def same(net: Net, x: Value) -> Tensor:
    return net.tensor(x)
