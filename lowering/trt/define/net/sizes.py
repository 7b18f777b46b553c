"""Sizes and shapes, static and dynamic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from lowering.trt.bindings import trt, trt_dtype
from lowering.trt.define.net.core import Core, Tensor, Value
from lowering.trt.define.net.scalar import Scalar

__all__ = ["Size", "Sizes", "is_static"]

Size: TypeAlias = Any  # int or Scalar


def is_static(dims: Sequence[Size]) -> bool:
    """Whether all sizes are known now."""
    return all(isinstance(d, int) for d in dims)


class Sizes(Core):
    """Primitives on sizes: reading them, computing with them, and making shape tensors of them."""

    def dims(self, x: Value) -> list[Size]:
        """The sizes of `x`: ints, and a `Scalar` for each dynamic dimension."""
        if isinstance(x, torch.Tensor):
            return list(x.shape)
        return [d if d >= 0 else self._dynamic(x, i) for i, d in enumerate(x.shape)]

    def size(self, x: Value, dim: int) -> Size:
        """One size of `x`; `dim` may be negative."""
        dim = dim % self.rank(x)
        d = x.shape[dim]
        return d if d >= 0 else self._dynamic(x, dim)

    def _dynamic(self, x: Tensor, dim: int) -> Scalar:
        key = (x.name, dim)
        if key not in self._sizes:
            shape = self._shapes.get(x.name)
            if shape is None:
                shape = self._shapes[x.name] = self.add("shape", self.definition.add_shape(x))
            index = self.constant(self._indices.setdefault(dim, torch.tensor([dim])))
            size = self.add("size", self.definition.add_gather(shape, index, 0))
            self._sizes[key] = Scalar(self, size)  # type: ignore[arg-type]
        return self._sizes[key]

    def numel(self, x: Value) -> Size:
        """Number of elements."""
        return product(self.dims(x))

    def shape_tensor(self, dims: Sequence[Size]) -> Tensor:
        """Sizes as an int64 tensor of shape (len(dims),); runs of ints become constants, the rest is concatenated."""
        parts: list[Tensor] = []
        run: list[int] = []
        for d in [*dims, None]:
            if isinstance(d, int):
                run.append(d)
                continue
            if run:
                parts.append(self.constant(torch.tensor(run, dtype=torch.int64)))
                run = []
            if d is not None:
                parts.append(d.tensor)
        if not parts:
            return self.constant(torch.empty(0, dtype=torch.int64))
        if len(parts) == 1:
            return parts[0]
        layer = self.definition.add_concatenation(parts)
        layer.axis = 0
        return self.add("shape_concat", layer)

    def scalar(self, x: Value, dtype: torch.dtype | None = None) -> Scalar:
        """A 0-dim or one-element tensor, or a number, as a `Scalar` (shape (1,))."""
        if isinstance(x, Scalar):
            tensor = x.tensor if dtype is None else self.cast(x.tensor, dtype)
            return Scalar(self, tensor, dtype or x.dtype)  # type: ignore[arg-type]
        dtype = dtype or self.dtype(x)
        if isinstance(x, bool | int | float):
            return Scalar(self, self.tensor(x, dtype, rank=1), dtype)  # type: ignore[arg-type]
        tensor = self.tensor(x, dtype)
        if len(tensor.shape) != 1:
            layer = self.definition.add_shuffle(tensor)
            layer.reshape_dims = (1,)
            tensor = self.add("scalar", layer)
        return Scalar(self, tensor, dtype)  # type: ignore[arg-type]

    def scalar_op(self, op: str, a: Any, b: Any, dtype: torch.dtype | None = None) -> Scalar:
        """Arithmetic on run-time numbers: an `ElementWiseOperation` by name; float32 if either is a float."""
        if dtype is None:
            floats = any(self.dtype(v) in (torch.float32, torch.float64) for v in (a, b))
            dtype = torch.float32 if floats else torch.int64
        x, y = self.scalar(a, dtype).tensor, self.scalar(b, dtype).tensor
        layer = self.definition.add_elementwise(x, y, getattr(trt.ElementWiseOperation, op))
        return Scalar(self, self.add("scalar_" + op.lower(), layer), dtype)  # type: ignore[arg-type]

    def compare_scalars(self, op: str, a: Any, b: Any) -> Scalar:
        """EQUAL, GREATER or LESS on run-time numbers: a bool scalar."""
        floats = any(self.dtype(v).is_floating_point for v in (a, b))
        dtype = torch.float32 if floats else torch.int64
        x, y = self.scalar(a, dtype).tensor, self.scalar(b, dtype).tensor
        layer = self.definition.add_elementwise(x, y, getattr(trt.ElementWiseOperation, op))
        return Scalar(self, self.add("scalar_" + op.lower(), layer), torch.bool)  # type: ignore[arg-type]

    def minimum_size(self, a: Size, b: Size) -> Size:
        """min of two sizes."""
        if isinstance(a, int) and isinstance(b, int):
            return min(a, b)
        return a if a is b else self.scalar_op("MIN", a, b)

    def maximum_size(self, a: Size, b: Size) -> Size:
        """max of two sizes."""
        if isinstance(a, int) and isinstance(b, int):
            return max(a, b)
        return a if a is b else self.scalar_op("MAX", a, b)

    def iota(self, length: Size, start: Value, step: Value, dtype: torch.dtype) -> Tensor:
        """``start + step * [0, 1, ..., length - 1]`` as a 1-D tensor of int32, int64 or float32."""
        static = isinstance(length, int)
        layer = self.definition.add_fill((length if static else 1,), trt.FillOperation.LINSPACE, trt_dtype(dtype))
        if not static:
            layer.set_input(0, self.shape_tensor([length]))
        layer.set_input(1, self.tensor(start, dtype))
        layer.set_input(2, self.tensor(step, dtype, rank=1))
        return self.add("arange", layer)


def product(sizes: Sequence[Size]) -> Size:
    """Product of sizes; 1 if there are none."""
    total: Size = 1
    for size in sizes:
        total = size * total
    return total
