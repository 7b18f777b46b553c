"""The reference executor: a TensorRT network, run on the CPU with torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fx_passes.errors import InputError
from lowering.trt.reference import dtypes, store
from lowering.trt.reference.plan import Plan
from lowering.trt.reference.records import NetworkRecord, TensorRecord

__all__ = ["ReferenceNetwork"]


class ReferenceNetwork:
    """Executes a network record.

    Reduced precision is simulated: Half and BFloat16 layers are computed in float32 and each layer's output is rounded
    to the network's type, Int8 values are rounded half to even and saturated. Device kernels may differ in the order
    of sums and keep more precision inside fused layers.

    Args:
        record: the network, from `read_record` or `load`.

    Example:
        >>> from lowering.trt.reference.records import LayerRecord, NetworkRecord, TensorRecord
        >>> tensors = {n: TensorRecord(n, (2,), "FLOAT") for n in ("x", "y")}
        >>> layer = LayerRecord("r", "ACTIVATION", ("x",), ("y",), {"type": "RELU", "alpha": 0.0, "beta": 0.0})
        >>> network = ReferenceNetwork(NetworkRecord("n", ("x",), ("y",), (layer,), tensors, {}))
        >>> network.run(torch.tensor([-1.0, 2.0]))
        (tensor([0., 2.]),)
    """

    def __init__(self, record: NetworkRecord):
        self.record = record
        self._plans: dict[tuple[tuple[str, ...], frozenset[str]], Plan] = {}

    @property
    def inputs(self) -> list[TensorRecord]:
        """The network inputs, in order."""
        return [self.record.tensors[name] for name in self.record.inputs]

    @property
    def outputs(self) -> list[TensorRecord]:
        """The network outputs, in order."""
        return [self.record.tensors[name] for name in self.record.outputs]

    @property
    def tensors(self) -> Mapping[str, TensorRecord]:
        """Every tensor of the network, by name."""
        return self.record.tensors

    def run(
        self,
        *inputs: torch.Tensor,
        outputs: Sequence[str] | None = None,
        overrides: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Executes the network, or the part of it that gives some of its tensors.

        Args:
            *inputs: the network inputs, in order, in the network's types. Inputs that the outputs don't depend on may
                be left away at the end.
            outputs: names of any tensors of the network; the network outputs by default.
            overrides: values to use for named tensors instead of computing them, in the network's types: feeds one
                layer alone.

        Returns:
            The outputs in the network's types, sharing no memory with the inputs or the network.

        Raises:
            InputError: a missing input, or one with a wrong type or shape.
            ExecutionError: a layer fails on these values.
            InferenceMismatchError: a layer gives another shape than TensorRT infers.
            UnsupportedOpError: a layer that the executor does not cover.
        """
        wanted = tuple(self.record.outputs if outputs is None else outputs)
        given = self._given(inputs, overrides or {})
        with torch.no_grad():
            plan = self._plan(wanted, frozenset(given) | set(self.record.inputs))
            missing = [name for name in plan.needs if name not in given]
            if missing:
                raise InputError(f"no value was given for the network inputs {missing}")
            carriers = {
                name: dtypes.to_carrier(value, self.record.tensors[name].dtype)
                for name, value in given.items()
                if name in plan.needs
            }
            results = plan.run(carriers)
            foreign = {_storage(value) for value in (*given.values(), *plan.constants.values())}
            return tuple(self._export(value, name, foreign) for value, name in zip(results, wanted, strict=True))

    def _plan(self, outputs: tuple[str, ...], given: frozenset[str]) -> Plan:
        key = (outputs, given)
        if key not in self._plans:
            whole = outputs == self.record.outputs and given == frozenset(self.record.inputs)
            self._plans[key] = Plan(self.record, outputs, given, assertions=whole)
        return self._plans[key]

    def _given(self, inputs: Sequence[torch.Tensor], overrides: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = self.record.inputs
        if len(inputs) > len(names):
            raise InputError(f"the network takes {len(names)} inputs, {len(inputs)} were given")
        for name in overrides:
            if name not in self.record.tensors:
                raise InputError(f"the network has no tensor {name!r} to override")
        given = dict(zip(names, inputs, strict=False)) | dict(overrides)
        for name, value in given.items():
            self._check(name, value)
        return given

    def _check(self, name: str, value: torch.Tensor) -> None:
        record = self.record.tensors[name]
        if not isinstance(value, torch.Tensor):
            raise InputError(f"the value for {name!r} is a {type(value).__name__}, not a tensor")
        if record.dtype not in dtypes.TORCH:
            raise InputError(f"the reference executor does not hold tensors of type {record.dtype} ({name!r})")
        if value.dtype != dtypes.TORCH[record.dtype]:
            raise InputError(f"{name!r} is {dtypes.TORCH[record.dtype]} in the network, but a {value.dtype} was given")
        shape = tuple(value.shape)
        if len(shape) != len(record.shape) or any(
            want not in (size, -1) for size, want in zip(shape, record.shape, strict=True)
        ):
            raise InputError(f"{name!r} has the shape {record.shape} in the network, but {shape} was given")

    def _export(self, value: torch.Tensor, name: str, foreign: set[int]) -> torch.Tensor:
        result = dtypes.to_network(value, self.record.tensors[name].dtype)
        if result is value and _storage(value) in foreign:
            return result.clone()
        return result.contiguous()

    def save(self, folder: str | Path) -> None:
        """Writes `network.json` and `network.safetensors` into a folder; see `store.save`."""
        store.save(self.record, folder)

    @classmethod
    def load(cls, folder: str | Path) -> ReferenceNetwork:
        """Reads what `save` wrote. Needs no TensorRT.

        Raises:
            ArtifactError: a file is missing, truncated or not what it should be.
        """
        return cls(store.load(folder))


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
