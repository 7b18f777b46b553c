"""What the plan treats as one unit of execution: a layer, a whole loop, or one output of a conditional.

A loop is the layers that name it (iterators, recurrences, trip limits, outputs) and every layer between them that
depends on an iterator or a recurrence. A branch of a conditional is every layer upstream of it, up to the conditional's
inputs. Both are executed as plans of their own, so nesting needs nothing special.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fx_passes.errors import InputError
from lowering.trt.reference import dtypes
from lowering.trt.reference.errors import ExecutionError
from lowering.trt.reference.kernel import Kernel, Result
from lowering.trt.reference.records import LayerRecord, NetworkRecord

if TYPE_CHECKING:
    from lowering.trt.reference.plan import Plan

__all__ = ["Producers", "Unit", "order"]

#: Layers that produce nothing by themselves: a loop or a conditional supplies their outputs.
_SUPPLIED = frozenset({"ITERATOR", "RECURRENCE", "CONDITIONAL_INPUT"})


@dataclass(frozen=True, eq=False)
class Unit:
    """Something that takes named values and gives named values.

    Attributes:
        layer: the layer it stands for in errors.
        inputs: names of the tensors it reads; None where an optional input is absent.
        outputs: names of the tensors it produces.
        compile: makes the kernel of a compound unit out of plans of its parts; None for a plain layer.
    """

    layer: LayerRecord
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    compile: Callable[[type[Plan]], Kernel] | None = None


class Producers:
    """The unit that produces each tensor of a network, made when first asked for."""

    def __init__(self, network: NetworkRecord):
        self.network = network
        self._layer_of = {name: layer for layer in network.layers for name in layer.outputs}
        self._units: dict[str, Unit] = {}

    def get(self, name: str) -> Unit | None:
        """The unit that produces a tensor; None for a network input and for what a loop or conditional supplies."""
        if name not in self._units:
            layer = self._layer_of.get(name)
            if layer is None or layer.type in _SUPPLIED:
                return None
            unit = self._make(layer)
            self._units.update(dict.fromkeys(unit.outputs, unit))
        return self._units[name]

    def assertions(self) -> list[Unit]:
        """The layers that only check: they produce nothing, so no output asks for them."""
        return [Unit(layer, layer.inputs, ()) for layer in self.network.layers if layer.type == "ASSERTION"]

    def _make(self, layer: LayerRecord) -> Unit:
        if layer.type == "LOOP_OUTPUT":
            return _Loop(self, str(layer.attributes["loop"])).unit()
        if layer.type == "CONDITIONAL_OUTPUT":
            return _conditional(self, layer)
        return Unit(layer, layer.inputs, layer.outputs)


def order(
    producers: Producers,
    outputs: Iterable[str],
    given: frozenset[str],
    *,
    extra: Sequence[Unit] = (),
    leaves: list[str] | None = None,
) -> list[Unit]:
    """The units that the outputs need, each after those it depends on.

    Args:
        producers: of the network.
        outputs: names of the tensors wanted.
        given: names of tensors that are not computed.
        extra: units without outputs that are to run too.
        leaves: collects the tensors that nothing produces; without it, such a tensor is an error.

    Raises:
        InputError: a tensor that nothing produces, or that depends on itself.
    """
    found: list[Unit] = []
    done: set[int] = set()
    started: set[int] = set()

    def visit(root: Unit) -> None:
        stack: list[tuple[Unit, bool]] = [(root, False)]
        while stack:
            unit, expanded = stack.pop()
            if id(unit) in done:
                continue
            if expanded:
                done.add(id(unit))
                found.append(unit)
                continue
            if id(unit) in started:
                raise InputError(f"layer {unit.layer.name!r} depends on itself")
            started.add(id(unit))
            stack.append((unit, True))
            stack.extend((needed, False) for name in reversed(unit.inputs) if (needed := resolve(name)) is not None)

    def resolve(name: str | None) -> Unit | None:
        if name is None or name in given:
            return None
        unit = producers.get(name)
        if unit is None:
            if leaves is None:
                raise InputError(f"no layer produces tensor {name!r}, and no value was given for it")
            leaves.append(name)
        return unit

    for name in outputs:
        unit = resolve(name)
        if unit is not None:
            visit(unit)
    for unit in extra:
        visit(unit)
    return found


class _Loop:
    """One loop of a network."""

    def __init__(self, producers: Producers, name: str):
        self.producers = producers
        layers = [layer for layer in producers.network.layers if layer.attributes.get("loop") == name]
        self.iterators = [layer for layer in layers if layer.type == "ITERATOR"]
        self.recurrences = [layer for layer in layers if layer.type == "RECURRENCE"]
        self.limits = [layer for layer in layers if layer.type == "TRIP_LIMIT"]
        self.outputs = [layer for layer in layers if layer.type == "LOOP_OUTPUT"]
        self.seeds = frozenset(layer.outputs[0] for layer in (*self.iterators, *self.recurrences))

    def unit(self) -> Unit:
        conditions = [str(limit.inputs[0]) for limit in self.limits if limit.attributes["kind"] == "WHILE"]
        counts = [str(limit.inputs[0]) for limit in self.limits if limit.attributes["kind"] == "COUNT"]
        targets = [*conditions, *(str(layer.inputs[1]) for layer in self.recurrences)]
        targets += [str(layer.inputs[0]) for layer in self.outputs]
        outer = self._outer(targets)
        needs = [*counts, *(str(layer.inputs[0]) for layer in (*self.iterators, *self.recurrences)), *outer]
        needs += [str(layer.inputs[1]) for layer in self.outputs if len(layer.inputs) > 1]
        inputs = tuple(dict.fromkeys(needs))
        outputs = tuple(layer.outputs[0] for layer in self.outputs)

        def compiled(plan: type[Plan]) -> Kernel:
            given = self.seeds | set(outer)
            body = plan(self.producers.network, targets[len(conditions) :], given, self.producers)
            test = plan(self.producers.network, conditions, given, self.producers)

            def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return self._run(dict(zip(inputs, values, strict=True)), counts, test, body)

            tensors = self.producers.network.tensors
            return Kernel(run, tuple(tensors[str(layer.inputs[0])].dtype for layer in self.outputs), exact=True)

        return Unit(self.outputs[0], inputs, outputs, compiled)

    def _outer(self, targets: Sequence[str]) -> list[str]:
        """The tensors from outside that the body reads: those that depend on no iterator and no recurrence."""
        leaves: list[str] = []
        inner = set(self.seeds)
        outer: dict[str, None] = {}
        for unit in order(self.producers, targets, self.seeds, leaves=leaves):
            names = [name for name in unit.inputs if name is not None]
            if inner.intersection(names):
                inner.update(unit.outputs)
                outer.update(dict.fromkeys(name for name in names if name not in inner))
        outer.update(dict.fromkeys(name for name in targets if name not in inner))
        return list(outer)

    def _run(
        self, values: dict[str, torch.Tensor], counts: Sequence[str], test: Plan, body: Plan
    ) -> tuple[torch.Tensor, ...]:
        """Iterates while every WHILE holds for the present state, at most as often as every COUNT says."""
        limit = min((int(values[name]) for name in counts), default=None)
        state = dict(values)
        state.update({layer.outputs[0]: values[str(layer.inputs[0])] for layer in self.recurrences})
        rows: list[list[torch.Tensor]] = [[] for _ in self.outputs]
        step = 0
        while (limit is None or step < limit) and all(bool(value) for value in test.run(state)):
            for layer in self.iterators:
                source, axis = values[str(layer.inputs[0])], int(layer.attributes["axis"])  # type: ignore[arg-type]
                index = (limit or source.shape[axis]) - 1 - step if layer.attributes["reverse"] else step
                state[layer.outputs[0]] = source.select(axis, index)
            results = body.run(state)
            following, produced = results[: len(self.recurrences)], results[len(self.recurrences) :]
            for row, value in zip(rows, produced, strict=True):
                row.append(value)
            state.update({layer.outputs[0]: v for layer, v in zip(self.recurrences, following, strict=True)})
            step += 1
        return tuple(self._output(layer, row, state) for layer, row in zip(self.outputs, rows, strict=True))

    def _output(self, layer: LayerRecord, row: list[torch.Tensor], state: dict[str, torch.Tensor]) -> torch.Tensor:
        """The last value (of a recurrence: its state when the loop ends), or all values stacked."""
        source = str(layer.inputs[0])
        if layer.attributes["kind"] == "LAST_VALUE":
            if source in state and source in self.seeds:
                return state[source]
            if not row:
                raise ExecutionError(f"loop output {layer.name!r} has no value: the loop ran no iteration")
            return row[-1]
        axis = int(layer.attributes["axis"])  # type: ignore[arg-type]
        length = int(state[str(layer.inputs[1])]) if len(layer.inputs) > 1 else len(row)
        record = self.producers.network.tensors[source]
        shape = row[0].shape if row else tuple(max(size, 0) for size in record.shape)
        blank = torch.zeros(shape, dtype=dtypes.CARRIER[record.dtype])
        stacked = [*row[:length], *[blank] * (length - len(row))]
        if layer.attributes["kind"] == "REVERSE":
            stacked.reverse()
        return torch.stack(stacked, axis) if stacked else blank.unsqueeze(axis).narrow(axis, 0, 0)


def _conditional(producers: Producers, layer: LayerRecord) -> Unit:
    """Runs the branch that the condition chooses, and that branch only: the other may not be executable."""
    network, name = producers.network, layer.attributes["conditional"]
    own = [other for other in network.layers if other.attributes.get("conditional") == name]
    condition = next(str(other.inputs[0]) for other in own if other.type == "CONDITION")
    entries = {other.outputs[0]: str(other.inputs[0]) for other in own if other.type == "CONDITIONAL_INPUT"}
    branches = [str(source) for source in layer.inputs]
    leaves: list[str] = []
    given = frozenset(entries)
    units = order(producers, branches, given, leaves=leaves)
    used = {name for unit in units for name in unit.inputs} | set(branches)
    through = {inside: outside for inside, outside in entries.items() if inside in used}
    inputs = tuple(dict.fromkeys((condition, *through.values(), *leaves)))

    def compiled(plan: type[Plan]) -> Kernel:
        plans = [plan(network, [branch], given | set(leaves), producers) for branch in branches]

        def run(*arguments: torch.Tensor) -> Result:
            values = dict(zip(inputs, arguments, strict=True))
            values.update({inside: values[outside] for inside, outside in through.items()})
            return plans[0 if bool(values[condition]) else 1].run(values)[0]

        return Kernel(run, (network.tensors[branches[0]].dtype,), exact=True)

    return Unit(layer, inputs, layer.outputs, compiled)
