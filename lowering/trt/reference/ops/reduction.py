"""REDUCE, SOFTMAX, RAGGED_SOFTMAX, CUMULATIVE."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lowering.trt.reference.dtypes import INTEGER
from lowering.trt.reference.kernel import Kernel, Layer, axes_of

__all__ = ["cumulative", "ragged_softmax", "reduce", "softmax"]


def reduce(layer: Layer) -> Kernel:
    """Input: data, reduced over a bit mask of axes."""
    op, axes, keep = layer["op"], axes_of(layer["axes"]), bool(layer["keep_dims"])
    integer = layer.dtype in INTEGER

    def product(x: torch.Tensor) -> torch.Tensor:
        for axis in reversed(axes):
            x = x.prod(axis, keepdim=keep, dtype=x.dtype)
        return x

    def average(x: torch.Tensor) -> torch.Tensor:
        if not integer:
            return x.mean(axes, keepdim=keep)
        count = 1
        for axis in axes:
            count *= x.shape[axis]
        return torch.div(x.sum(axes, keepdim=keep, dtype=x.dtype), count, rounding_mode="trunc")

    def extreme(function: Callable[..., torch.Tensor], empty: float) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            if all(x.shape[axis] for axis in axes):
                return function(x, axes, keepdim=keep)
            # over nothing: what changes no maximum (`ReduceOperation` in NVIDIA's interface)
            limits = torch.iinfo(x.dtype) if integer and not x.dtype.is_floating_point else None
            value = empty if limits is None else (limits.min if empty < 0 else limits.max)
            return x.new_full(x.sum(axes, keepdim=keep).shape, value)

        return run

    functions = {
        "SUM": lambda x: x.sum(axes, keepdim=keep, dtype=x.dtype),
        "PROD": product,
        "MAX": extreme(torch.amax, float("-inf")),
        "MIN": extreme(torch.amin, float("inf")),
        "AVG": average,
        "NONE": lambda x: x,
    }
    return layer.same(functions[op], exact=op in ("MAX", "MIN", "NONE"))


def softmax(layer: Layer) -> Kernel:
    """Input: data, normalized along the one axis of a bit mask."""
    axes = axes_of(layer["axes"])
    if len(axes) != 1:
        raise layer.unsupported(f"works along the axes {axes}")
    return layer.same(lambda x: torch.softmax(x, axes[0]))


def ragged_softmax(layer: Layer) -> Kernel:
    """Inputs: (Z, S), and for each row (Z, 1) how many elements count; the others become 0."""

    def run(x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        valid = torch.arange(x.shape[-1]) < bounds
        return torch.nan_to_num(torch.softmax(x.masked_fill(~valid, float("-inf")), -1))

    return layer.same(run)


def cumulative(layer: Layer) -> Kernel:
    """Inputs: data, axis (0-D)."""
    exclusive, reverse = bool(layer["exclusive"]), bool(layer["reverse"])

    def run(x: torch.Tensor, axis: torch.Tensor) -> torch.Tensor:
        dim = int(axis)
        x = x.flip(dim) if reverse else x
        result = torch.cumsum(x, dim, dtype=x.dtype)
        if exclusive:
            result = torch.cat((torch.zeros_like(x.narrow(dim, 0, 1)), result.narrow(dim, 0, x.shape[dim] - 1)), dim)
        return result.flip(dim) if reverse else result

    return layer.same(run)
