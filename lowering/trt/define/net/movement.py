"""Primitives that move data: reshape, permute, slice, concatenate, gather, pad."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowering.trt.bindings import trt
from lowering.trt.define.net.core import Tensor, Value
from lowering.trt.define.net.scalar import Scalar
from lowering.trt.define.net.sizes import Size, Sizes, is_static

__all__ = ["Movement"]


class Movement(Sizes):
    """Data movement. Sizes may be ints or `Scalar`s; dimensions may be negative."""

    def reshape(self, x: Value, dims: Sequence[Size]) -> Tensor:
        """`x` with other sizes, same elements in the same order; at most one size may be -1, the rest."""
        if isinstance(x, torch.Tensor) and is_static(dims):
            return self.constant(x.reshape(tuple(dims)))
        x = self.tensor(x)
        if list(x.shape) == list(dims):
            return x
        layer = self.definition.add_shuffle(x)
        layer.zero_is_placeholder = False
        unknown = sum(not isinstance(d, int) or d < 0 for d in dims)
        if dims and (unknown == 0 or (unknown == 1 and 0 not in dims)):
            layer.reshape_dims = tuple(d if isinstance(d, int) else -1 for d in dims)
        else:
            layer.set_input(1, self.shape_tensor(dims))
        return self.add("reshape", layer)

    def unsqueeze(self, x: Value, dims: Sequence[int]) -> Tensor:
        """Insert size-1 dimensions at these positions of the *result*."""
        rank = self.rank(x) + len(dims)
        positions = {d % rank for d in dims}
        old = iter(self.dims(x)) if self.is_static(x) else None
        if old is not None:
            return self.reshape(x, [1 if i in positions else next(old) for i in range(rank)])
        axes = self.constant(torch.tensor(sorted(positions), dtype=torch.int64))
        return self.add("unsqueeze", self.definition.add_unsqueeze(x, axes))

    def squeeze(self, x: Value, dims: Sequence[int]) -> Tensor:
        """Remove these dimensions, each of size 1."""
        gone = {d % self.rank(x) for d in dims}
        if not gone:
            return self.tensor(x)
        if self.is_static(x):
            return self.reshape(x, [d for i, d in enumerate(self.dims(x)) if i not in gone])
        axes = self.constant(torch.tensor(sorted(gone), dtype=torch.int64))
        return self.add("squeeze", self.definition.add_squeeze(x, axes))

    def is_static(self, x: Value) -> bool:
        """Whether all sizes of `x` are known now."""
        return all(d >= 0 for d in x.shape)

    def permute(self, x: Value, order: Sequence[int]) -> Tensor:
        """Dimensions of `x` in another order."""
        rank = self.rank(x)
        order = [d % rank for d in order] if rank else []
        if isinstance(x, torch.Tensor):
            return self.constant(x.permute(order))
        if order == list(range(rank)):
            return x
        layer = self.definition.add_shuffle(x)
        layer.first_transpose = trt.Permutation(order)
        return self.add("permute", layer)

    def transpose(self, x: Value, a: int, b: int) -> Tensor:
        """Two dimensions exchanged."""
        order = list(range(self.rank(x)))
        if order:
            order[a], order[b] = order[b], order[a]
        return self.permute(x, order)

    def slice(
        self,
        x: Value,
        starts: Sequence[Size],
        sizes: Sequence[Size],
        strides: Sequence[Size] | None = None,
        mode: str = "STRICT_BOUNDS",
        fill: Value = None,
    ) -> Tensor:
        """Elements ``starts + i * strides`` for i below `sizes`, one entry per dimension.

        Args:
            x: the tensor.
            starts: first index per dimension; may be negative (before the tensor) in the out-of-bounds modes.
            sizes: sizes of the result.
            strides: steps; 0 repeats one element, a negative one walks backwards; 1 by default.
            mode: what lies outside: "STRICT_BOUNDS" (an error), "FILL", "CLAMP", "REFLECT" or "WRAP".
            fill: value outside for "FILL"; zero by default.
        """
        x = self.tensor(x)
        strides = [1] * len(starts) if strides is None else strides
        groups = (starts, sizes, strides)
        safe = [[d if isinstance(d, int) else 1 for d in group] for group in groups]
        # an attribute cannot hold a negative size or an empty result; such a value travels as a tensor
        layer = self.definition.add_slice(x, [0 if not is_static(starts) else d for d in safe[0]], safe[1], safe[2])
        for index, group in enumerate(groups, start=1):
            if not is_static(group):
                layer.set_input(index, self.shape_tensor(group))
        if mode != "STRICT_BOUNDS":
            layer.mode = getattr(trt.SampleMode, mode)
        if mode == "FILL" and fill is not None:
            layer.set_input(4, self.tensor(fill, self.dtype(x)))
        return self.add("slice", layer)

    def narrow(self, x: Value, dim: int, start: Size, length: Size, step: Size = 1) -> Tensor:
        """Part of one dimension: `length` elements from `start`, every `step`-th."""
        rank = self.rank(x)
        dim = dim % rank
        starts: list[Size] = [0] * rank
        steps: list[Size] = [1] * rank
        sizes = self.dims(x)
        starts[dim], sizes[dim], steps[dim] = start, length, step
        return self.slice(x, starts, sizes, steps)

    def select(self, x: Value, dim: int, index: Size) -> Tensor:
        """One index of a dimension, which disappears."""
        return self.squeeze(self.narrow(x, dim, index, 1), [dim % self.rank(x)])

    def expand(self, x: Value, sizes: Sequence[Size]) -> Tensor:
        """Broadcast to `sizes` (rank at least x's): size-1 dimensions repeat."""
        missing = len(sizes) - self.rank(x)
        x = self.unsqueeze(x, list(range(missing))) if missing else self.tensor(x)
        own = self.dims(x)
        if list(x.shape) == list(sizes):
            return x
        strides = [0 if d == 1 and isinstance(d, int) else 1 for d in own]
        wanted = [s if d == 1 and isinstance(d, int) else d for s, d in zip(sizes, own, strict=True)]
        return self.slice(x, [0] * len(sizes), wanted, strides)

    def concat(self, tensors: Sequence[Value], dim: int = 0) -> Tensor:
        """Tensors of one dtype joined along a dimension."""
        parts = [self.tensor(t) for t in tensors]
        if len(parts) == 1:
            return parts[0]
        layer = self.definition.add_concatenation(parts)
        layer.axis = dim % self.rank(parts[0])
        return self.add("concat", layer)

    def gather(self, x: Value, indices: Value, dim: int = 0) -> Tensor:
        """``x`` indexed along `dim` by an integer tensor of any rank, whose sizes take the dimension's place."""
        layer = self.definition.add_gather(self.tensor(x), self.tensor(indices), dim % self.rank(x))
        return self.add("gather", layer)

    def gather_elements(self, x: Value, indices: Value, dim: int) -> Tensor:
        """torch.gather: ``out[i][j] = x[index[i][j]][j]``."""
        layer = self.definition.add_gather_v2(self.tensor(x), self.tensor(indices), trt.GatherMode.ELEMENT)
        layer.axis = dim % self.rank(x)
        return self.add("gather", layer)

    def gather_nd(self, x: Value, indices: Value, batch_dims: int = 0) -> Tensor:
        """ONNX GatherND: the last dimension of `indices` holds coordinates."""
        layer = self.definition.add_gather_v2(self.tensor(x), self.tensor(indices), trt.GatherMode.ND)
        layer.num_elementwise_dims = batch_dims
        return self.add("gather", layer)

    def scatter(self, x: Value, indices: Value, updates: Value, mode: str, dim: int = 0) -> Tensor:
        """ScatterND ("ND") or ScatterElements ("ELEMENT", along `dim`): later writes win, no reduction."""
        layer = self.definition.add_scatter(
            self.tensor(x), self.tensor(indices), self.tensor(updates), getattr(trt.ScatterMode, mode)
        )
        if mode == "ELEMENT":
            layer.axis = dim % self.rank(x)
        return self.add("scatter", layer)

    def pad(
        self, x: Value, before: Sequence[Size], after: Sequence[Size], mode: str = "FILL", fill: Value = None
    ) -> Tensor:
        """Rows added (or, negative, cut) before and after each dimension; `mode` as in `slice`."""
        if all(isinstance(p, int) and p == 0 for p in (*before, *after)):
            return self.tensor(x)
        sizes = [b + d + a for b, d, a in zip(before, self.dims(x), after, strict=True)]
        starts = [-b for b in before]
        return self.slice(x, starts, sizes, None, mode, fill)

    def flatten(self, x: Value, start: int = 0, end: int = -1) -> Tensor:
        """Dimensions start..end made one."""
        rank = self.rank(x)
        if rank == 0:
            return self.reshape(x, [1])
        start, end = start % rank, end % rank
        dims = self.dims(x)
        merged: Size = 1
        for d in dims[start : end + 1]:
            merged = d * merged if isinstance(d, Scalar) else merged * d
        return self.reshape(x, [*dims[:start], merged, *dims[end + 1 :]])
