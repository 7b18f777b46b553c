"""Numbers known only at run time: sizes of dynamic dimensions and what is computed from them."""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["Scalar"]


class Arithmetic(Protocol):
    """What a scalar asks of its network: a layer that computes with numbers."""

    def scalar_op(self, op: str, a: Any, b: Any, dtype: torch.dtype | None = None) -> Any: ...


class Scalar:
    """A number that the engine computes at run time, held as a tensor of shape (1,).

    Behaves like a Python number in arithmetic, so that shape formulas read the same for static and dynamic sizes:
    ``(size + 2 * pad - kernel) // stride + 1``. Comparison operators are methods of `Net` (`Net.compare_scalars`), and
    two scalars are equal only if they are the same object.

    Attributes:
        net: the network it belongs to, a `Net`.
        tensor: int64, float32 or bool tensor of shape (1,).
        dtype: torch dtype of `tensor`.
    """

    __slots__ = ("dtype", "net", "tensor")

    def __init__(self, net: Arithmetic, tensor: Any, dtype: torch.dtype = torch.int64):
        self.net, self.tensor, self.dtype = net, tensor, dtype

    def __add__(self, other: Any) -> Any:
        return self if _is(other, 0) else self.net.scalar_op("SUM", self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self if _is(other, 0) else self.net.scalar_op("SUB", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self.net.scalar_op("SUB", other, self)

    def __mul__(self, other: Any) -> Any:
        return self if _is(other, 1) else self.net.scalar_op("PROD", self, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        return self if _is(other, 1) else self.net.scalar_op("FLOOR_DIV", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self.net.scalar_op("FLOOR_DIV", other, self)

    def __truediv__(self, other: Any) -> Any:
        return self.net.scalar_op("DIV", self, other, dtype=torch.float32)

    def __rtruediv__(self, other: Any) -> Any:
        return self.net.scalar_op("DIV", other, self, dtype=torch.float32)

    def __mod__(self, other: Any) -> Any:
        return self - (self // other) * other

    def __rmod__(self, other: Any) -> Any:
        return other - (other // self) * self

    def __pow__(self, other: Any) -> Any:
        return self.net.scalar_op("POW", self, other)

    def __rpow__(self, other: Any) -> Any:
        return self.net.scalar_op("POW", other, self)

    def __neg__(self) -> Any:
        return 0 - self

    def __bool__(self) -> bool:
        raise TypeError("the value of a run-time scalar is not known while the network is defined")

    def __repr__(self) -> str:
        return f"Scalar({self.tensor.name}, {self.dtype})"


def _is(value: Any, number: int) -> bool:
    return isinstance(value, int) and value == number
