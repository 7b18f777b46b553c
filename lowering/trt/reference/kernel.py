"""What a layer looks like to the function that executes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from fx_passes.errors import UnsupportedOpError
from lowering.trt.reference.records import LayerRecord, NetworkRecord, TensorRecord

__all__ = ["Kernel", "Layer", "Result", "axes_of"]

Result = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Kernel:
    """An executable layer.

    Attributes:
        run: carriers in (None for an absent input), one carrier out, or a tuple of them.
        dtypes: the TensorRT types that the outputs have by the layer's own definition. The plan compares them with
            NVIDIA's inference.
        exact: every output value is one of the input values (data movement, maximum, comparison): no rounding.
        constant: the same inputs give the same outputs, so a layer with constant inputs is computed once.
    """

    run: Callable[..., Result]
    dtypes: tuple[str, ...]
    exact: bool = False
    constant: bool = True


class Layer:
    """A view of one layer with what it needs of its network.

    Attributes:
        record: the layer itself.
        inputs: records of its input tensors, None for an absent one.
        outputs: records of its output tensors.
    """

    def __init__(self, record: LayerRecord, network: NetworkRecord):
        self.record = record
        self.network = network
        self.inputs: list[TensorRecord | None] = [None if n is None else network.tensors[n] for n in record.inputs]
        self.outputs: list[TensorRecord] = [network.tensors[n] for n in record.outputs]

    def __getitem__(self, attribute: str) -> Any:
        """The value of an attribute."""
        return self.record.attributes[attribute]

    def axis_list(self, attribute: str) -> tuple[int, ...]:
        """An attribute that holds one integer per dimension."""
        return tuple(cast("tuple[int, ...]", self.record.attributes[attribute]))

    def input(self, index: int) -> TensorRecord:
        """The record of an input that must be there."""
        record = self.inputs[index] if index < len(self.inputs) else None
        if record is None:
            raise self.unsupported(f"needs input {index}, which is absent")
        return record

    def has(self, index: int) -> bool:
        """Whether an optional input is there."""
        return index < len(self.inputs) and self.inputs[index] is not None

    @property
    def dtype(self) -> str:
        """The type of the first input."""
        return self.input(0).dtype

    @property
    def rank(self) -> int:
        """The rank of the first input."""
        return len(self.input(0).shape)

    def weight(self, role: str) -> torch.Tensor | None:
        """Weights of the layer as a flat carrier, or None where they are empty."""
        key = self.record.weights.get(role)
        return None if key is None else to_weight_carrier(self.network.weights[key])

    def weight_dtype(self, role: str) -> torch.dtype | None:
        """The torch type of the stored weights."""
        key = self.record.weights.get(role)
        return None if key is None else self.network.weights[key].dtype

    def unsupported(self, why: str) -> UnsupportedOpError:
        """The error that names this layer."""
        return UnsupportedOpError(
            f"the reference executor can't run layer {self.record.name!r} ({self.record.type}): it {why}",
            hint="see lowering/trt/reference/table.py for what it covers",
        )

    def same(self, run: Callable[..., Result], *, exact: bool = False) -> Kernel:
        """A kernel whose outputs all have the type of the first input."""
        return Kernel(run, (self.dtype,) * len(self.outputs), exact)

    def require_same_dtypes(self, *indices: int) -> None:
        """Strongly typed networks promote nothing: the inputs must share one type."""
        present = [self.input(i).dtype for i in (indices or range(len(self.inputs))) if self.has(i)]
        if len(set(present)) > 1:
            raise self.unsupported(f"mixes the types {present}")


def to_weight_carrier(weights: torch.Tensor) -> torch.Tensor:
    """Stored weights as the executor computes with them: reduced types in float32."""
    reduced = (torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
    return weights.to(torch.float32) if weights.dtype in reduced else weights


def axes_of(bitmask: int) -> tuple[int, ...]:
    """The dimensions of a TensorRT axes bit mask, ascending."""
    return tuple(i for i in range(bitmask.bit_length()) if bitmask >> i & 1)
