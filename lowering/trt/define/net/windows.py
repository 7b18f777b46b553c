"""Sliding-window primitives: convolution, transposed convolution, pooling, resizing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowering.trt.bindings import trt
from lowering.trt.define.net.core import Tensor, Value
from lowering.trt.define.net.reduction import Reduction

__all__ = ["Windows"]


class Windows(Reduction):
    """Convolution, pooling and resize on (N, C, spatial...) tensors with 2 or 3 spatial dimensions."""

    def convolution(
        self,
        x: Value,
        weight: Value,
        bias: Value | None,
        stride: Sequence[int],
        padding: Sequence[tuple[int, int]],
        dilation: Sequence[int],
        groups: int,
    ) -> Tensor:
        """Cross-correlation.

        Args:
            x: (N, C, ...) with 2 or 3 spatial dimensions, float.
            weight: (C_out, C / groups, kernel...): a host constant of x's dtype, or a tensor (dequantized, computed).
            bias: (C_out,) of x's dtype, or None.
            stride: step per spatial dimension.
            padding: zeros (before, after) per spatial dimension, not negative.
            dilation: distance of kernel elements.
            groups: number of channel groups.
        """
        kernel = tuple(weight.shape)
        x = self.tensor(x)
        layer = self.definition.add_convolution_nd(
            x, kernel[0], kernel[2:], self._own_weights(weight, x), self._own_weights(bias, x)
        )
        return self._finish_window("convolution", layer, x, weight, bias, stride, padding, dilation, groups)

    def deconvolution(
        self,
        x: Value,
        weight: Value,
        bias: Value | None,
        stride: Sequence[int],
        padding: Sequence[tuple[int, int]],
        groups: int,
    ) -> Tensor:
        """Transposed convolution; weight (C, C_out / groups, kernel...); `padding` is cut from the full result.

        In bfloat16 it is computed in float32: TensorRT-RTX 1.7 has no kernel for it ("Could not infer output types").
        """
        if self.dtype(x) == torch.bfloat16:
            wide = [None if v is None else self._widened(v) for v in (weight, bias)]
            result = self.deconvolution(self.cast(x, torch.float32), wide[0], wide[1], stride, padding, groups)
            return self.cast(result, torch.bfloat16)
        kernel = tuple(weight.shape)
        x = self.tensor(x)
        layer = self.definition.add_deconvolution_nd(
            x, kernel[1] * groups, kernel[2:], self._own_weights(weight, x), self._own_weights(bias, x)
        )
        ones = [1] * len(stride)
        return self._finish_window("deconvolution", layer, x, weight, bias, stride, padding, ones, groups)

    def _widened(self, value: Value) -> Value:
        """A host constant or a tensor in float32."""
        return value.float() if isinstance(value, torch.Tensor) else self.cast(value, torch.float32)

    def _own_weights(self, value: Value | None, x: Tensor) -> object:
        if isinstance(value, torch.Tensor) and value.numel():
            return self.weights(self.host_cast(value, self.dtype(x)))
        return trt.Weights()

    def _finish_window(self, kind, layer, x, weight, bias, stride, padding, dilation, groups) -> Tensor:  # type: ignore[no-untyped-def]
        self.check(kind, refused=layer is None)
        layer.stride_nd = tuple(stride)
        layer.pre_padding = tuple(p for p, _ in padding)
        layer.post_padding = tuple(p for _, p in padding)
        if any(d != 1 for d in dilation):
            layer.dilation_nd = tuple(dilation)
        layer.num_groups = groups
        for index, value in ((1, weight), (2, bias)):
            if value is not None and not isinstance(value, torch.Tensor):
                layer.set_input(index, self.cast(value, self.dtype(x)))
        return self.add(kind, layer)

    def pool(
        self,
        op: str,
        x: Value,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[tuple[int, int]],
        count_padding: bool = True,
    ) -> Tensor:
        """Pooling windows: "MAX" or "AVERAGE".

        Args:
            op: member of `PoolingType`.
            x: (N, C, ...) float tensor with 2 or 3 spatial dimensions.
            kernel: window sizes.
            stride: steps.
            padding: (before, after) per spatial dimension.
            count_padding: whether an average divides by the whole window, padding included.
        """
        layer = self.definition.add_pooling_nd(self.tensor(x), getattr(trt.PoolingType, op), tuple(kernel))
        self.check("pooling", refused=layer is None)
        layer.stride_nd = tuple(stride)
        layer.pre_padding = tuple(p for p, _ in padding)
        layer.post_padding = tuple(p for _, p in padding)
        if op == "AVERAGE":
            layer.average_count_excludes_padding = not count_padding
        return self.add("pooling", layer)
