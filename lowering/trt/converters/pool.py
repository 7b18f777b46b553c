"""Pooling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowering.trt.net import Net, Tensor, Value
from lowering.trt.registry import converts

aten = torch.ops.aten


@converts(aten.max_pool2d.default)
def max_pool(net: Net, x: Value, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False) -> Tensor:
    def pair(v: Sequence[int]) -> list[int]:
        return list(v) * 2 if len(v) == 1 else list(v)

    kernel = pair(kernel_size)
    return net.pool("MAX", x, kernel, pair(stride) if stride else kernel, [(p, p) for p in pair(padding)])


@converts(aten.adaptive_avg_pool2d.default)
def adaptive_avg_pool2d(net: Net, x: Value, output_size: Sequence[int]) -> Tensor:
    return net.mean(x, [-2, -1], keepdim=True)
