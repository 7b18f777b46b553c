"""POOLING."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from lowering.trt.reference.kernel import Kernel, Layer
from lowering.trt.reference.ops.windows import Window

__all__ = ["pooling"]

_MAX: dict[int, Callable[..., torch.Tensor]] = {2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE: dict[int, Callable[..., torch.Tensor]] = {2: F.avg_pool2d, 3: F.avg_pool3d}


def pooling(layer: Layer) -> Kernel:
    """Input: (*leading, *spatial), pooled over as many trailing dimensions as the window has."""
    size = layer.axis_list("window_size_nd")
    stride, before, after = (
        layer.axis_list("stride_nd"),
        layer.axis_list("pre_padding"),
        layer.axis_list("post_padding"),
    )
    window = Window(size, stride, (1,) * len(size), layer["padding_mode"], before, after)
    if len(size) not in _MAX:
        raise layer.unsupported(f"has a {len(size)}-D window")
    exclusive, blend = bool(layer["average_count_excludes_padding"]), float(layer["blend_factor"])
    kind = layer["type"]

    def run(x: torch.Tensor) -> torch.Tensor:
        leading = x.shape[: x.ndim - len(size)]
        folded = x if x.ndim == len(size) + 2 else x.reshape(-1, 1, *x.shape[x.ndim - len(size) :])
        if kind == "MAX":
            result = _maximum(folded, window)
        elif kind == "AVERAGE":
            result = _average(folded, window, exclusive)
        else:
            result = (1 - blend) * _maximum(folded, window) + blend * _average(folded, window, exclusive)
        return result.reshape(*leading, *result.shape[2:])

    return layer.same(run, exact=kind == "MAX")


def _maximum(x: torch.Tensor, window: Window) -> torch.Tensor:
    _, before, after = window.resolve(x.shape[2:])
    pool = _MAX[len(window.size)]
    if before == after and all(2 * p <= k for p, k in zip(before, window.size, strict=True)):
        return pool(x, window.size, window.stride, before)
    return pool(F.pad(x, _sides(before, after), value=float("-inf")), window.size, window.stride)


def _average(x: torch.Tensor, window: Window, exclusive: bool) -> torch.Tensor:
    """The divisor is the part of the window over the input, or over the padded input: never the part beyond it."""
    spatial = x.shape[2:]
    _, before, after = window.resolve(spatial)
    pool = _AVERAGE[len(window.size)]
    same = before == after == window.after
    if same and all(2 * p <= k for p, k in zip(before, window.size, strict=True)):
        return pool(x, window.size, window.stride, before, count_include_pad=not exclusive)
    counted = torch.ones((1, 1, *spatial))
    inner = (before, window.after if window.mode.startswith("EXPLICIT") else after)
    if not exclusive:
        counted = F.pad(counted, _sides(*inner), value=1.0)
        counted = F.pad(counted, _sides((0,) * len(after), tuple(a - b for a, b in zip(after, inner[1], strict=True))))
    else:
        counted = F.pad(counted, _sides(before, after))
    total = pool(F.pad(x, _sides(before, after)), window.size, window.stride, divisor_override=1)
    return total / pool(counted, window.size, window.stride, divisor_override=1)


def _sides(before: tuple[int, ...], after: tuple[int, ...]) -> list[int]:
    amounts: list[int] = []
    for b, e in zip(before, after, strict=True):
        amounts[:0] = [b, e]
    return amounts
