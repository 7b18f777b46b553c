"""A network, or the part of it that some outputs need, as a list of steps in an order of execution.

Making a plan compiles each layer once, checks every type against NVIDIA's inference, folds what is constant (so the
weights of a quantized network are dequantized once, not at every run) and notes when a value is used for the last time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fx_passes.errors import InputError
from lowering.trt.reference import control, dtypes
from lowering.trt.reference.errors import ExecutionError, InferenceMismatchError
from lowering.trt.reference.kernel import Kernel, Layer
from lowering.trt.reference.records import LayerRecord, NetworkRecord, TensorRecord
from lowering.trt.reference.table import KERNELS

__all__ = ["Plan", "Step"]


@dataclass
class Step:
    """One executable unit: a layer, a whole loop or one output of a conditional.

    Attributes:
        layer: the layer that errors name.
        kernel: what runs.
        inputs: names of the values it takes; None where an optional input is absent.
        outputs: records of the values it gives.
        last_uses: names of the values that nothing needs afterwards.
    """

    layer: LayerRecord
    kernel: Kernel
    inputs: tuple[str | None, ...]
    outputs: tuple[TensorRecord, ...]
    last_uses: tuple[str, ...] = ()

    def __call__(self, values: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Runs the layer, rounds its outputs to their types and checks their shapes."""
        arguments = [None if name is None else values[name] for name in self.inputs]
        try:
            result = self.kernel.run(*arguments)
        except (RuntimeError, IndexError, ValueError, NotImplementedError) as error:
            shapes = [None if a is None else tuple(a.shape) for a in arguments]
            raise ExecutionError(f"{self._who()} failed on inputs of shapes {shapes}: {error}") from error
        produced = result if isinstance(result, tuple) else (result,)
        return tuple(self._finish(value, record) for value, record in zip(produced, self.outputs, strict=True))

    def _finish(self, value: torch.Tensor, record: TensorRecord) -> torch.Tensor:
        shape = value.shape
        if len(shape) != len(record.shape) or any(
            size != want and want >= 0 for size, want in zip(shape, record.shape, strict=True)
        ):
            raise InferenceMismatchError(
                f"{self._who()} gave tensor {record.name!r} the shape {tuple(shape)}, TensorRT infers {record.shape}"
            )
        if value.dtype != dtypes.CARRIER[record.dtype]:
            raise InferenceMismatchError(
                f"{self._who()} gave tensor {record.name!r} as {value.dtype}, TensorRT infers {record.dtype}"
            )
        return value if self.kernel.exact else dtypes.round_to(value, record.dtype)

    def _who(self) -> str:
        return f"layer {self.layer.name!r} ({self.layer.type})"


class Plan:
    """Steps that compute `outputs` from `given` tensors.

    Args:
        network: the network.
        outputs: names of the tensors wanted.
        given: names of the tensors whose values will be supplied; what only they depend on is not computed.
        producers: of the network, where they are at hand already.
        assertions: whether the network's assertions are checked too.

    Attributes:
        needs: those of `given` that the outputs depend on.

    Raises:
        UnsupportedOpError: a layer that the executor does not cover.
        InferenceMismatchError: a layer whose type disagrees with NVIDIA's inference.
    """

    def __init__(
        self,
        network: NetworkRecord,
        outputs: Sequence[str],
        given: Iterable[str],
        producers: control.Producers | None = None,
        *,
        assertions: bool = False,
    ):
        self.network = network
        self.outputs = tuple(outputs)
        given = frozenset(given)
        for name in self.outputs:
            if name not in network.tensors:
                raise InputError(f"the network has no tensor {name!r}", hint="names are in ReferenceNetwork.tensors")
        producers = producers or control.Producers(network)
        extra = producers.assertions() if assertions else ()
        units = control.order(producers, self.outputs, given, extra=extra)
        self.constants: dict[str, torch.Tensor] = {}
        self.steps: list[Step] = []
        for unit in units:
            self._add(unit)
        used = {name for step in self.steps for name in step.inputs if name is not None} | set(self.outputs)
        self.needs = tuple(sorted(used & given))
        self.constants = {name: value for name, value in self.constants.items() if name in used}
        self._note_last_uses()

    def _add(self, unit: control.Unit) -> None:
        kernel = _compile(unit, self.network)
        step = Step(unit.layer, kernel, unit.inputs, tuple(self.network.tensors[name] for name in unit.outputs))
        static = unit.layer.type == "SHAPE" and min(self.network.tensors[str(unit.inputs[0])].shape, default=0) >= 0
        if static:
            shape = torch.tensor(self.network.tensors[str(unit.inputs[0])].shape, dtype=torch.int64)
            self.constants[unit.outputs[0]] = shape
        elif kernel.constant and all(name is None or name in self.constants for name in unit.inputs):
            self.constants.update(zip(unit.outputs, step(self.constants), strict=True))
        else:
            self.steps.append(step)

    def _note_last_uses(self) -> None:
        kept = set(self.outputs) | self.constants.keys()
        seen: set[str] = set(kept)
        for step in reversed(self.steps):
            mentioned = {name for name in step.inputs if name is not None} | {t.name for t in step.outputs}
            step.last_uses = tuple(mentioned - seen)
            seen |= mentioned

    def run(self, given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Computes the outputs, as carriers.

        Args:
            given: carriers of at least the tensors in `needs`.
        """
        values: dict[str, torch.Tensor] = {**self.constants, **given}
        for step in self.steps:
            for record, value in zip(step.outputs, step(values), strict=True):
                values[record.name] = value
            for name in step.last_uses:
                del values[name]
        return [values[name] for name in self.outputs]


def _compile(unit: control.Unit, network: NetworkRecord) -> Kernel:
    if unit.compile is not None:
        kernel = unit.compile(Plan)
    else:
        make: Callable[[Layer], Kernel] = KERNELS[unit.layer.type]
        kernel = make(Layer(unit.layer, network))
    inferred = tuple(network.tensors[name].dtype for name in unit.outputs)
    if kernel.dtypes != inferred:
        raise InferenceMismatchError(
            f"layer {unit.layer.name!r} ({unit.layer.type}) gives the types {kernel.dtypes}, TensorRT infers {inferred}"
        )
    return kernel
