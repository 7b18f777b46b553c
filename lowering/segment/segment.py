"""`Segment`: one tensor program of a lowered module, as a module that its glue calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_passes.capture.conditions import holds
from fx_passes.errors import InputError
from lowering.segment.program import SizeCheck, WriteBack

__all__ = ["Segment", "graph_of", "simulating"]

_mode = threading.local()
_REMEMBERED = 64


@contextmanager
def simulating() -> Iterator[None]:
    before = getattr(_mode, "simulate", False)
    _mode.simulate = True
    try:
        yield
    finally:
        _mode.simulate = before


class Segment(nn.Module):
    """One tensor program: a backend, the buffers it updates and the inputs it changes in place.

    Args:
        name: name of the segment in the glue graph.
        backend: takes and returns tensors; `backend(*inputs, *buffers)` gives outputs, then write-backs.
        writebacks: which extra output is copied back into which input or buffer.
        buffers: the current values of the buffers that the program updates, by qualified name.
        checks: what the program takes for granted about the sizes of its inputs.
    """

    backend: Any  # a TrtEngine or an OnnxSession; both write their part of an artifact

    def __init__(
        self,
        name: str,
        backend: nn.Module,
        writebacks: list[WriteBack],
        buffers: dict[str, Tensor],
        checks: Sequence[SizeCheck] = (),
    ):
        super().__init__()
        self.name = name
        self.backend = backend
        self.writebacks = writebacks
        self.buffer_names = list(buffers)
        self.checks = list(checks)
        self._fitting: set[tuple[torch.Size, ...]] = set()  # shapes for which they hold: most calls are alike
        for index, value in enumerate(buffers.values()):
            self.register_buffer(f"state_{index}", value.detach().clone())

    def state(self) -> list[Tensor]:
        """The buffers that the program updates, in the order the backend takes them."""
        return [getattr(self, f"state_{i}") for i in range(len(self.buffer_names))]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        run = self.backend.simulate if getattr(_mode, "simulate", False) else self.backend
        if self.checks:
            self._check_sizes(inputs)
        if any(value.numel() == 0 for value in inputs):
            return self._of_nothing(run, inputs)
        state = self.state()
        outputs = tuple(run(*inputs, *state))
        for write in self.writebacks:
            into_input = write.kind == "input"
            target = inputs[int(write.target)] if into_input else state[self.buffer_names.index(str(write.target))]
            target.copy_(outputs[write.output])
        return outputs[: len(outputs) - len(self.writebacks)]

    def _check_sizes(self, inputs: tuple[Tensor, ...]) -> None:
        """Hold the sizes of one call to what the program takes for granted.

        Raises:
            InputError: names the condition and the user's line.
        """
        shapes = tuple(value.shape for value in inputs)
        if shapes in self._fitting:
            return
        for check in self.checks:
            if not holds(check.condition, shapes):
                given = ", ".join(str(tuple(shape)) for shape in shapes)
                raise InputError(
                    f"{self.name} was lowered for sizes for which {check}, and its inputs are now {given}",
                    hint="lower with example inputs of these sizes, or rewrite this line so that it does not decide by "
                    "a size",
                    other_sizes=True,
                )
        if len(self._fitting) >= _REMEMBERED:
            self._fitting.clear()
        self._fitting.add(shapes)

    def _of_nothing(self, run: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Results for inputs of which one has no elements, which no backend takes: no detections, for example.

        Where they have none either, only their sizes are asked for: those at 1 and 2 in place of 0 tell them.

        Raises:
            InputError: a result has elements, which would have to be computed from nothing.
        """
        some = [
            run(*(v.new_zeros([n or size for n in v.shape]) if v.numel() == 0 else v for v in inputs), *self.state())
            for size in (1, 2)
        ]
        results = [
            a.new_empty([2 * m - n for m, n in zip(a.shape, b.shape, strict=True)]) for a, b in zip(*some, strict=True)
        ]
        if self.writebacks or any(value.numel() for value in results):
            raise InputError(
                f"{self.name} gets an empty tensor, and its results are not empty",
                hint="let the Python before it handle that case, for example by returning early",
            )
        return tuple(results)


def graph_of(glue: GraphModule, name: str) -> GraphModule:
    """The graph of segment `name`, before a backend takes its place."""
    segment = glue.get_submodule(name)
    assert isinstance(segment, GraphModule), f"{name} is a {type(segment).__name__}"
    return segment
