"""Loops over the steps of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lowering.trt.bindings import trt
from lowering.trt.define.net.contraction import Contraction
from lowering.trt.define.net.core import Tensor, Value

__all__ = ["Loops"]

Body = Callable[[Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]


class Loops(Contraction):
    """Recurrence: one body of layers, run as often as the sequence is long."""

    def scan(
        self, sequence: Value, states: Sequence[Value], body: Body, *, backwards: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Run `body` on one step of a sequence after the other, with what the steps hand on.

        Args:
            sequence: [steps, ...]; the number of steps may be known only at run time.
            states: what the first step gets.
            body: (step, states) -> (result, new states), each state of the shape and dtype that it had.
            backwards: from the last step to the first; results stay in the order of the sequence.

        Returns:
            The results [steps, ...], and the states after the last step.
        """
        loop = self.definition.add_loop()
        self.check("loop", refused=loop is None)
        count = self._step_count(sequence)
        loop.add_trip_limit(count, trt.TripLimit.COUNT)
        self.check("trip limit")
        step = self.add("step", loop.add_iterator(self.tensor(sequence), 0, backwards))
        kept = [loop.add_recurrence(self.tensor(state)) for state in states]
        result, new = body(step, [self.add("state", layer) for layer in kept])
        for layer, state in zip(kept, new, strict=True):
            layer.set_input(1, state)
        self.check("recurrence")
        order = trt.LoopOutput.REVERSE if backwards else trt.LoopOutput.CONCATENATE
        results = loop.add_loop_output(result, order, 0)
        results.set_input(1, count)
        last = [loop.add_loop_output(layer.get_output(0), trt.LoopOutput.LAST_VALUE, 0) for layer in kept]
        return self.add("results", results), [self.add("last", layer) for layer in last]

    def _step_count(self, sequence: Value) -> Tensor:
        size = self.size(sequence, 0)
        return self.tensor(torch.tensor(size) if isinstance(size, int) else size, torch.int32, rank=0)
