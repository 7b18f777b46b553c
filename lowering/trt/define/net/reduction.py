"""Primitives along axes: reductions, softmax, top-k, cumulative sums, normalization."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowering.trt.bindings import trt
from lowering.trt.define.net.core import Tensor, Value
from lowering.trt.define.net.pointwise import Pointwise

__all__ = ["Reduction"]


class Reduction(Pointwise):
    """Everything that needs a set of axes; converters pass dimension lists, bitmasks are made here."""

    def axes(self, x: Value, dims: Sequence[int] | int | None) -> list[int]:
        """Dimensions as sorted non-negative numbers; None or an empty list means all."""
        rank = self.rank(x)
        if dims is None or (not isinstance(dims, int) and not list(dims)):
            return list(range(rank))
        return sorted({d % rank for d in ([dims] if isinstance(dims, int) else dims)}) if rank else []

    def reduce(self, op: str, x: Value, dims: Sequence[int] | int | None, keepdim: bool = False) -> Tensor:
        """A `ReduceOperation` by name: SUM, PROD, MAX, MIN or AVG; dims None means all. A 0-dim tensor stays."""
        axes = self.axes(x, dims)
        if not axes:
            return self.tensor(x)
        mask = sum(1 << a for a in axes)
        layer = self.definition.add_reduce(self.tensor(x), getattr(trt.ReduceOperation, op), mask, keepdim)
        return self.add("reduce_" + op.lower(), layer)

    def mean(self, x: Value, dims: Sequence[int] | int | None, keepdim: bool = False) -> Tensor:
        """Mean along dimensions."""
        return self.reduce("AVG", x, dims, keepdim)

    def softmax(self, x: Value, dim: int) -> Tensor:
        """exp(x) / sum(exp(x)) along one dimension, any rank above 0."""
        rank = self.rank(x)
        if rank < 2:  # the layer wants two dimensions
            return self.squeeze(self.softmax(self.unsqueeze(x, [0]), -1), [0])
        layer = self.definition.add_softmax(self.tensor(x))
        layer.axes = 1 << (dim % rank)
        return self.add("softmax", layer)

    def topk(self, x: Value, k: int, dim: int, largest: bool = True) -> tuple[Tensor, Tensor]:
        """The k largest (or smallest) values along a dimension, sorted, and their int64 indices."""
        rank = self.rank(x)
        if rank < 2:
            values, indices = self.topk(self.unsqueeze(x, [0]), k, -1, largest)
            return self.squeeze(values, [0]), self.squeeze(indices, [0])
        operation = trt.TopKOperation.MAX if largest else trt.TopKOperation.MIN
        layer = self.definition.add_topk(self.tensor(x), operation, k, 1 << (dim % rank))
        values = self.add("topk", layer)
        return values, self.cast(layer.get_output(1), torch.int64)

    def cumsum(self, x: Value, dim: int) -> Tensor:
        """Running sum along a dimension."""
        axis = self.constant(torch.tensor(dim % self.rank(x), dtype=torch.int64))
        operation = trt.CumulativeOperation.SUM
        layer = self.definition.add_cumulative(self.tensor(x), axis, operation, False, False)
        return self.add("cumsum", layer)

    def normalization(self, x: Value, scale: Value, bias: Value, dims: Sequence[int], eps: float) -> Tensor:
        """``(x - mean) / sqrt(var + eps) * scale + bias`` over `dims` (biased variance).

        Args:
            x: float tensor.
            scale: same rank as x, sizes 1 outside `dims`-complement as broadcasting needs.
            bias: like scale.
            dims: the dimensions that mean and variance run over.
            eps: added to the variance.
        """
        dtype = self.dtype(x)
        scale, bias = (self._aligned(v, self.rank(x), dtype) for v in (scale, bias))
        mask = sum(1 << a for a in self.axes(x, dims))
        layer = self.definition.add_normalization(self.tensor(x), scale, bias, mask)
        layer.epsilon = eps
        return self.add("normalization", layer)
