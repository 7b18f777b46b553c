"""Reductions."""

from __future__ import annotations

import torch

from lowering.trt.net import Net, Tensor, Value
from lowering.trt.registry import converts

aten = torch.ops.aten


@converts(aten.mean.default, aten.mean.dim)
def mean(net: Net, x: Value, dim=None, keepdim: bool = False) -> Tensor:
    return net.mean(net.cast(x, net.result.dtype), dim, keepdim)
