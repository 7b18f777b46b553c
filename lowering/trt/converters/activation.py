"""Activation functions."""

from __future__ import annotations

import torch

from lowering.trt.net import Net, Tensor, Value
from lowering.trt.registry import converts

aten = torch.ops.aten


@converts(aten.relu.default)
def relu(net: Net, x: Value) -> Tensor:
    return net.relu(x)


@converts(aten.hardtanh.default)
def hardtanh(net: Net, x: Value, min_val: float = -1, max_val: float = 1) -> Tensor:
    return net.clamp(x, min_val, max_val)


@converts(aten.relu6.default)
def relu6(net: Net, x: Value) -> Tensor:
    return net.clamp(x, 0, 6)


@converts(aten.clamp.default, aten.clamp.Tensor)
def clamp(net: Net, x: Value, min: Value = None, max: Value = None) -> Tensor:
    return net.clamp(net.cast(x, net.result.dtype), min, max)
