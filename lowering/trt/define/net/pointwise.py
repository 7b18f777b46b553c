"""Elementwise primitives: promotion, broadcasting, arithmetic, comparison, activation."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from lowering.trt.bindings import trt
from lowering.trt.define.net.core import Tensor, Value
from lowering.trt.define.net.movement import Movement
from lowering.trt.define.net.scalar import Scalar

__all__ = ["Pointwise"]

_INT_UNARY = frozenset({"ABS", "NEG", "SIGN"})


class Pointwise(Movement):
    """Elementwise primitives. Operands are any `Value`; the result is always a network tensor."""

    def result_type(self, *values: Value) -> torch.dtype:
        """torch's promoted dtype of tensors (by dtype and whether 0-dim), scalars and numbers."""
        if len(values) == 2:
            return torch.result_type(*(self._shadow(v) for v in values))
        return reduce(torch.promote_types, [self.dtype(v) for v in values])

    def _shadow(self, value: Value) -> Any:
        if isinstance(value, bool | int | float):
            return value
        if isinstance(value, Scalar):
            return 1.0 if value.dtype.is_floating_point else (True if value.dtype == torch.bool else 1)
        # only the dtype and whether there are dimensions matter to promotion
        return torch.empty((1,) if self.rank(value) else (), dtype=self.dtype(value), device="meta")

    def align(self, *values: Value, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Values as tensors of one rank (size-1 dimensions in front) and, if given, one dtype."""
        rank = max(self.rank(v) for v in values)
        return [self._aligned(v, rank, dtype) for v in values]

    def _aligned(self, value: Value, rank: int, dtype: torch.dtype | None) -> Tensor:
        if isinstance(value, bool | int | float | Scalar):
            return self.tensor(value, dtype, rank=rank)
        missing = rank - self.rank(value)
        if isinstance(value, torch.Tensor):
            value = value if dtype is None else self.host_cast(value, dtype)
            return self.constant(value.reshape((1,) * missing + tuple(value.shape)) if missing else value)
        value = value if dtype is None else self.cast(value, dtype)
        return self.unsqueeze(value, list(range(missing))) if missing else value

    def binary(self, op: str, a: Value, b: Value, dtype: torch.dtype | None = None) -> Tensor:
        """An `ElementWiseOperation` by name, with broadcasting.

        Args:
            op: member of `ElementWiseOperation`, such as "SUM".
            a: left operand.
            b: right operand.
            dtype: type to compute in; torch's promoted type by default.
        """
        x, y = self.align(a, b, dtype=dtype or self.result_type(a, b))
        return self.add(op.lower(), self.definition.add_elementwise(x, y, getattr(trt.ElementWiseOperation, op)))

    def sum(self, a: Value, b: Value, dtype: torch.dtype | None = None) -> Tensor:
        """a + b"""
        return self.binary("SUM", a, b, dtype)

    def sub(self, a: Value, b: Value, dtype: torch.dtype | None = None) -> Tensor:
        """a - b"""
        return self.binary("SUB", a, b, dtype)

    def mul(self, a: Value, b: Value, dtype: torch.dtype | None = None) -> Tensor:
        """a * b"""
        return self.binary("PROD", a, b, dtype)

    def div(self, a: Value, b: Value, dtype: torch.dtype | None = None) -> Tensor:
        """a / b; integers truncate."""
        return self.binary("DIV", a, b, dtype)

    def floor_div(self, a: Value, b: Value, dtype: torch.dtype | None = None) -> Tensor:
        """Quotient rounded down, for integers and floats."""
        return self.binary("FLOOR_DIV", a, b, dtype)

    def pow(self, a: Value, b: Value, dtype: torch.dtype | None = None) -> Tensor:
        """a ** b"""
        return self.binary("POW", a, b, dtype)

    def minimum(self, a: Value, b: Value, dtype: torch.dtype | None = None) -> Tensor:
        """Elementwise minimum."""
        return self.binary("MIN", a, b, dtype)

    def maximum(self, a: Value, b: Value, dtype: torch.dtype | None = None) -> Tensor:
        """Elementwise maximum."""
        return self.binary("MAX", a, b, dtype)

    def equal(self, a: Value, b: Value) -> Tensor:
        """a == b"""
        return self.binary("EQUAL", a, b)

    def _ordered(self, a: Value, b: Value) -> torch.dtype:
        # TensorRT orders numbers only; torch orders bools as 0 < 1
        dtype = self.result_type(a, b)
        return torch.int32 if dtype in (torch.bool, torch.uint8, torch.int8) else dtype

    def greater(self, a: Value, b: Value) -> Tensor:
        """a > b"""
        return self.binary("GREATER", a, b, self._ordered(a, b))

    def less(self, a: Value, b: Value) -> Tensor:
        """a < b"""
        return self.binary("LESS", a, b, self._ordered(a, b))

    def logical(self, op: str, a: Value, b: Value) -> Tensor:
        """AND, OR or XOR of truth values (anything is cast to bool first)."""
        return self.binary(op, a, b, torch.bool)

    def logical_not(self, x: Value) -> Tensor:
        """Logical negation."""
        return self.unary("NOT", self.cast(x, torch.bool))

    def unary(self, op: str, x: Value) -> Tensor:
        """A `UnaryOperation` by name, in x's own dtype."""
        return self.add(op.lower(), self.definition.add_unary(self.tensor(x), getattr(trt.UnaryOperation, op)))

    def activation(self, op: str, x: Value, alpha: float | None = None, beta: float | None = None) -> Tensor:
        """An `ActivationType` by name with its two parameters."""
        layer = self.definition.add_activation(self.tensor(x), getattr(trt.ActivationType, op))
        if alpha is not None:
            layer.alpha = alpha
        if beta is not None:
            layer.beta = beta
        return self.add(op.lower(), layer)

    def relu(self, x: Value) -> Tensor:
        """max(x, 0)"""
        return self.activation("RELU", x)

    def sigmoid(self, x: Value) -> Tensor:
        """1 / (1 + exp(-x))"""
        return self.activation("SIGMOID", x)

    def tanh(self, x: Value) -> Tensor:
        """Hyperbolic tangent."""
        return self.activation("TANH", x)

    def hard_sigmoid(self, x: Value, alpha: float = 1 / 6, beta: float = 0.5) -> Tensor:
        """max(0, min(1, alpha * x + beta))"""
        return self.activation("HARD_SIGMOID", x, alpha, beta)

    def clamp(self, x: Value, low: Value | None, high: Value | None) -> Tensor:
        """x limited to [low, high]; either may be None."""
        dtype = self.dtype(x)
        if dtype.is_floating_point and isinstance(low, int | float) and isinstance(high, int | float):
            if low > high:  # torch: everything becomes `high`
                low = high
            return self.activation("CLIP", x, float(low), float(high))
        if low is not None:
            x = self.maximum(x, low, dtype)
        return self.tensor(x) if high is None else self.minimum(x, high, dtype)

    def where(self, condition: Value, a: Value, b: Value, dtype: torch.dtype | None = None) -> Tensor:
        """a where the condition holds, else b; all three broadcast."""
        dtype = dtype or self.result_type(a, b)
        rank = max(self.rank(v) for v in (condition, a, b))
        test = self._aligned(condition, rank, torch.bool)
        x, y = self._aligned(a, rank, dtype), self._aligned(b, rank, dtype)
        return self.add("select", self.definition.add_select(test, x, y))

    def in_dtype(self, dtype: torch.dtype, x: Value, function: Callable[[Tensor], Tensor]) -> Tensor:
        """`function(x)` computed in `dtype`, the result in x's own dtype."""
        own = self.dtype(x)
        return self.cast(function(self.cast(x, dtype)), own)
