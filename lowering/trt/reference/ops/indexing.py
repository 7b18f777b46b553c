"""GATHER, SCATTER, ONE_HOT, TOPK, NON_ZERO."""

from __future__ import annotations

import torch

from lowering.trt.reference.kernel import Kernel, Layer, axes_of

__all__ = ["gather", "non_zero", "one_hot", "scatter", "topk"]


def _wrapped(index: torch.Tensor, size: int) -> torch.Tensor:
    """Negative indices count from the end (TensorRT folds index -1 to the last element); beyond that is an error."""
    index = index.to(torch.int64)
    if index.numel() and (int(index.min()) < -size or int(index.max()) >= size):
        raise IndexError(f"an index in [{int(index.min())}, {int(index.max())}] is out of range for size {size}")
    return torch.where(index < 0, index + size, index)


def gather(layer: Layer) -> Kernel:
    """Inputs: data, indices; modes DEFAULT (one axis), ELEMENT (an index per element), ND (index tuples)."""
    mode, axis, batch_dims = layer["mode"], int(layer["axis"]), int(layer["num_elementwise_dims"])

    def default(data: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        index = _wrapped(indices, data.shape[axis])
        if batch_dims == 0:
            picked = data.index_select(axis, index.reshape(-1))
            return picked.reshape(data.shape[:axis] + index.shape + data.shape[axis + 1 :])
        moved = data.movedim(axis, 1)  # (batch, axis, rest)
        rows = torch.arange(data.shape[0]).reshape(-1, *(1,) * (index.ndim - 1))
        picked = moved[rows, index]  # (batch, *index dims, *rest)
        inner = index.ndim - 1
        return picked.movedim(tuple(range(1, 1 + inner)), tuple(range(axis, axis + inner)))

    def element(data: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return data.gather(axis, _wrapped(indices, data.shape[axis]))

    def nd(data: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return data[_tuple_index(data, indices, batch_dims)]

    return layer.same({"DEFAULT": default, "ELEMENT": element, "ND": nd}[mode], exact=True)


def _tuple_index(data: torch.Tensor, indices: torch.Tensor, batch_dims: int) -> tuple[torch.Tensor, ...]:
    """The last dimension of `indices` addresses the dimensions of `data` after the batch dimensions."""
    leading = indices.shape[:-1]
    index = [
        torch.arange(data.shape[i]).reshape([-1 if i == j else 1 for j in range(len(leading))])
        for i in range(batch_dims)
    ]
    index += [_wrapped(part, data.shape[batch_dims + i]) for i, part in enumerate(indices.unbind(-1))]
    return tuple(index)


def scatter(layer: Layer) -> Kernel:
    """Inputs: data, indices, updates; modes ELEMENT and ND. Which of two updates of one element wins is undefined."""
    mode, axis = layer["mode"], int(layer["axis"])
    layer.require_same_dtypes(0, 2)

    def element(data: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        return data.scatter(axis, _wrapped(indices, data.shape[axis]), updates)

    def nd(data: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        result = data.clone()
        result[_tuple_index(data, indices, 0)] = updates
        return result

    return layer.same({"ELEMENT": element, "ND": nd}[mode], exact=True)


def one_hot(layer: Layer) -> Kernel:
    """Inputs: indices, values [off, on], depth (0-D) → one more dimension at `axis`, in the values' type."""
    axis = int(layer["axis"])

    def run(indices: torch.Tensor, values: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
        n = int(depth)
        index = indices.to(torch.int64)
        index = torch.where(index < 0, index + n, index)
        position = axis % (index.ndim + 1)
        classes = torch.arange(n).reshape(-1, *(1,) * (index.ndim - position))
        return torch.where(index.unsqueeze(position) == classes, values[1], values[0])

    return Kernel(run, (layer.input(1).dtype,), exact=True)


def topk(layer: Layer) -> Kernel:
    """Input: data, and k (0-D) where it is computed → values, indices, sorted; of equal values the first one wins."""
    (axis,) = axes_of(layer["axes"])
    largest, static = layer["op"] == "MAX", layer["k"]

    def run(x: torch.Tensor, k: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.sort(x, dim=axis, descending=largest, stable=True)
        count = static if k is None else int(k)
        return values.narrow(axis, 0, count), indices.narrow(axis, 0, count).to(index_type)

    index_name = str(layer.record.attributes.get("indices_type", "INT32"))
    index_type = {"INT32": torch.int32, "INT64": torch.int64}[index_name]
    return Kernel(run, (layer.dtype, index_name), exact=True)


def non_zero(layer: Layer) -> Kernel:
    """Input: data → (rank, count) coordinates in row-major order."""
    name = str(layer.record.attributes.get("indices_type", "INT32"))
    index_type = {"INT32": torch.int32, "INT64": torch.int64}[name]
    return Kernel(lambda x: torch.nonzero(x).T.contiguous().to(index_type), (name,), exact=True)
