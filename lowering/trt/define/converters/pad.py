"""Padding in all modes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowering.trt.define.net import Net, Size, Tensor, Value
from lowering.trt.define.registry import converts

aten = torch.ops.aten


def _sides(rank: int, pad: Sequence[Size]) -> tuple[list[Size], list[Size]]:
    """torch's list (last dimension first, before and after) as one number per dimension and side."""
    before: list[Size] = [0] * rank
    after: list[Size] = [0] * rank
    for i in range(len(pad) // 2):
        before[rank - 1 - i], after[rank - 1 - i] = pad[2 * i], pad[2 * i + 1]
    return before, after


def _in_slices(net: Net, x: Value, pad: Sequence[Size], mode: str) -> Tensor:
    before, after = _sides(net.rank(x), pad)
    return net.pad(x, before, after, mode)


@converts(aten.constant_pad_nd.default)
def constant_pad(net: Net, x: Value, pad: Sequence[Size], value: Value = 0) -> Tensor:
    before, after = _sides(net.rank(x), pad)
    dtype = net.dtype(x)
    if dtype in (torch.bool, torch.uint8, torch.int8):
        wide = net.pad(net.cast(x, torch.int32), before, after, fill=int(value))
        return net.cast(wide, dtype)
    return net.pad(x, before, after, fill=value)


@converts(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def reflection_pad(net: Net, x: Value, padding: Sequence[Size]) -> Tensor:
    return _in_slices(net, x, padding, "REFLECT")


@converts(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def replication_pad(net: Net, x: Value, padding: Sequence[Size]) -> Tensor:
    return _in_slices(net, x, padding, "CLAMP")


@converts(aten._pad_circular.default)
def circular_pad(net: Net, x: Value, pad: Sequence[Size]) -> Tensor:
    return _in_slices(net, x, pad, "WRAP")


@converts(aten.pad.default)
def pad(net: Net, x: Value, pad: Sequence[Size], mode: str = "constant", value: Value = None) -> Tensor:
    if mode == "constant":
        return constant_pad(net, x, pad, 0 if value is None else value)
    return _in_slices(net, x, pad, {"reflect": "REFLECT", "replicate": "CLAMP", "circular": "WRAP"}[mode])
