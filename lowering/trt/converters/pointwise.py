"""Arithmetic, comparison, logic and rounding."""

from __future__ import annotations

import torch

from lowering.trt.net import Net, Tensor, Value
from lowering.trt.registry import converts

aten = torch.ops.aten


@converts(aten.add.Tensor, aten.add.Scalar)
def add(net: Net, x: Value, other: Value, alpha: Value = 1) -> Tensor:
    dtype = net.result.dtype
    if dtype == torch.bool:
        return net.logical("OR", x, other)
    if not (isinstance(alpha, int | float) and alpha == 1):
        other = net.mul(other, alpha, dtype)
    return net.sum(x, other, dtype)
