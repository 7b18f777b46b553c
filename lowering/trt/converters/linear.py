"""Linear layers and matrix products."""

from __future__ import annotations

import torch

from lowering.trt.net import Net, Tensor, Value
from lowering.trt.registry import converts

aten = torch.ops.aten


@converts(aten.linear.default)
def linear(net: Net, x: Value, weight: Value, bias: Value = None) -> Tensor:
    if net.rank(x) == 1:
        y = net.squeeze(net.matmul(net.unsqueeze(x, [0]), weight, transpose_b=True), [0])
    else:
        y = net.matmul(x, weight, transpose_b=True)
    return y if bias is None else net.sum(y, bias)
