"""CONVOLUTION and DECONVOLUTION."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from lowering.trt.reference.kernel import Kernel, Layer
from lowering.trt.reference.ops.windows import Window

__all__ = ["convolution", "deconvolution"]

_CONVOLVE = {2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., torch.Tensor]] = {2: F.conv_transpose2d, 3: F.conv_transpose3d}


def convolution(layer: Layer) -> Kernel:
    """Inputs: (N, C, *spatial), and kernel (K, C/groups, *window) and bias (K,) where they are no weights."""
    window, parameters = _geometry(layer), _parameters(layer, transposed=False)
    groups = int(layer["num_groups"])
    convolve = _CONVOLVE[len(window.size)]

    def run(x: torch.Tensor, kernel: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> torch.Tensor:
        kernel, bias = parameters(kernel, bias)
        _, before, after = window.resolve(x.shape[2:])
        if before != after:
            x, before = _pad(x, before, after), (0,) * len(before)
        return convolve(x, kernel, bias, window.stride, before, window.dilation, groups)

    return layer.same(run)


def deconvolution(layer: Layer) -> Kernel:
    """Inputs: (N, C, *spatial), and kernel (C, K/groups, *window) and bias (K,) where they are no weights."""
    window, parameters = _geometry(layer), _parameters(layer, transposed=True)
    groups = int(layer["num_groups"])
    convolve = _TRANSPOSED[len(window.size)]

    def run(x: torch.Tensor, kernel: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> torch.Tensor:
        kernel, bias = parameters(kernel, bias)
        full = convolve(x, kernel, bias, window.stride, 0, 0, groups, window.dilation)
        crops: list[int] = []
        for n, size, s, b, e in zip(
            full.shape[2:], x.shape[2:], window.stride, window.before, window.after, strict=True
        ):
            if window.mode.startswith("SAME"):  # the output is size * stride
                total = n - size * s
                b, e = (
                    (total // 2, total - total // 2)
                    if window.mode == "SAME_UPPER"
                    else (total - total // 2, total // 2)
                )
            crops[:0] = [-b, -e]
        return F.pad(full, crops) if any(crops) else full

    return layer.same(run)


def _geometry(layer: Layer) -> Window:
    return Window(
        layer.axis_list("kernel_size_nd"),
        layer.axis_list("stride_nd"),
        layer.axis_list("dilation_nd"),
        layer["padding_mode"],
        layer.axis_list("pre_padding"),
        layer.axis_list("post_padding"),
    )


def _parameters(layer: Layer, *, transposed: bool) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Gives kernel and bias in torch's layout, from the weights of the layer or its inputs 1 and 2."""
    size = layer.axis_list("kernel_size_nd")
    if layer.rank != len(size) + 2:
        raise layer.unsupported(f"has a {len(size)}-D window on an input of rank {layer.rank}")
    layer.require_same_dtypes()
    maps, groups = int(layer["num_output_maps"]), int(layer["num_groups"])
    kernel, bias = layer.weight("kernel"), layer.weight("bias")
    if kernel is not None:
        kernel = kernel.reshape(-1, maps // groups, *size) if transposed else kernel.reshape(maps, -1, *size)

    def parameters(k: torch.Tensor | None, b: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        chosen = k if k is not None else kernel
        assert chosen is not None, "a convolution has a kernel as weights or as input 1"
        return chosen, b if b is not None else bias

    return parameters


def _pad(x: torch.Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> torch.Tensor:
    amounts: list[int] = []
    for b, e in zip(before, after, strict=True):
        amounts[:0] = [b, e]
    return F.pad(x, amounts)
