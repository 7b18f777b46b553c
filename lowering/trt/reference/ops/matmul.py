"""MATRIX_MULTIPLY and EINSUM."""

from __future__ import annotations

import torch

from lowering.trt.reference.kernel import Kernel, Layer

__all__ = ["einsum", "matrix_multiply"]


def matrix_multiply(layer: Layer) -> Kernel:
    """Inputs: two stacks of matrices, of their transposes, or of vectors; leading dimensions broadcast."""
    layer.require_same_dtypes()
    op0, op1 = layer["op0"], layer["op1"]

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        left = a.mT if op0 == "TRANSPOSE" else a.unsqueeze(-2) if op0 == "VECTOR" else a
        right = b.mT if op1 == "TRANSPOSE" else b.unsqueeze(-1) if op1 == "VECTOR" else b
        result = torch.matmul(left, right)
        if op1 == "VECTOR":
            result = result.squeeze(-1)
        if op0 == "VECTOR":
            result = result.squeeze(-1 if op1 == "VECTOR" else -2)
        return result

    return layer.same(run)


def einsum(layer: Layer) -> Kernel:
    """Inputs: tensors of one type, contracted by an equation in NumPy's notation."""
    layer.require_same_dtypes()
    equation = layer["equation"].replace(" ", "")
    return layer.same(lambda *tensors: torch.einsum(equation, *tensors))
