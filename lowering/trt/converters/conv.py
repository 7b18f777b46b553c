"""Convolution and transposed convolution in one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowering.trt.net import Net, Tensor, Value
from lowering.trt.registry import converts

aten = torch.ops.aten


def _spread(value: Sequence[int], spatial: int) -> list[int]:
    return list(value) * spatial if len(value) == 1 else list(value)


@converts(aten.conv2d.default, aten.conv3d.default)
def conv(
    net: Net,
    x: Value,
    weight: Value,
    bias: Value = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Tensor:
    spatial = net.rank(weight) - 2
    pads = [(p, p) for p in _spread(padding, spatial)]
    return net.convolution(x, weight, bias, _spread(stride, spatial), pads, _spread(dilation, spatial), groups)
