"""Matrix products and quantization."""

from __future__ import annotations

import torch

from fx_passes.errors import UnsupportedOpError
from lowering.trt.bindings import trt, trt_dtype
from lowering.trt.define.net.core import Tensor, Value
from lowering.trt.define.net.windows import Windows

__all__ = ["Contraction"]


class Contraction(Windows):
    """Matrix products, einsum, quantize and dequantize."""

    def matmul(self, a: Value, b: Value, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
        """Batched matrix product of tensors of rank 2 and up, batch dimensions broadcast; one float dtype."""
        dtype = self.result_type(a, b)
        x, y = self.align(a, b, dtype=dtype)
        none, swap = trt.MatrixOperation.NONE, trt.MatrixOperation.TRANSPOSE
        layer = self.definition.add_matrix_multiply(x, swap if transpose_a else none, y, swap if transpose_b else none)
        return self.add("matmul", layer)

    def quantize(self, x: Value, scale: Value, axis: int | None = None) -> Tensor:
        """round(x / scale), half to even, limited to [-128, 127], as int8.

        Args:
            x: float tensor.
            scale: float32, 0-dim for one scale, (n,) for one per index of `axis`.
            axis: the channel dimension of a vector scale.
        """
        layer = self.definition.add_quantize(self.tensor(x), self._scale(scale), trt_dtype(torch.int8))
        self.check("quantize", refused=layer is None)
        if axis is not None:
            layer.axis = axis % self.rank(x)
        return self.add("quantize", layer)

    def dequantize(self, x: Value, scale: Value, axis: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """x * scale as `dtype`; `scale` and `axis` as in `quantize`, x int8."""
        x = self.constant(x, quantized=True) if isinstance(x, torch.Tensor) else self.cast(x, torch.int8)
        layer = self.definition.add_dequantize(x, self._scale(scale), trt_dtype(dtype))
        self.check("dequantize", refused=layer is None)
        if axis is not None:
            layer.axis = axis % self.rank(x)
        return self.add("dequantize", layer)

    def _scale(self, scale: Value) -> Tensor:
        # float32 whatever the float part: half-precision scales underflow ("Scale coefficients must all be positive")
        known = torch.as_tensor(scale) if isinstance(scale, float | int | torch.Tensor) else None
        if known is not None and not bool(((known > 0) & torch.isfinite(known)).all()):
            raise UnsupportedOpError("a quantization scale is not a positive finite number", node=self.node)
        if isinstance(scale, torch.Tensor) and scale.dim() == 1 and scale.numel() == 1:
            scale = scale.reshape(())
        return self.tensor(scale, torch.float32)

    def einsum(self, equation: str, operands: list[Value]) -> Tensor:
        """Einstein summation of float tensors of one dtype."""
        dtype = self.result_type(*operands)
        tensors = [self.cast(v, dtype) for v in operands]
        return self.add("einsum", self.definition.add_einsum(tensors, equation))
