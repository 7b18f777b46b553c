"""What crosses the boundary of each segment: measured by running the partitioned model, never inferred."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from fx_passes.errors import ExportError, LoweringError
from fx_passes.partition import check_output
from fx_passes.recording import bind_inputs, positional
from fx_passes.state import restored_state
from lowering.aten import TensorSpec
from lowering.flop_counter import FlopCounter
from lowering.inputs import Example, ShapeRange

__all__ = ["Boundary", "Measured", "measure"]


@dataclass(frozen=True)
class Boundary:
    """The inputs of one segment.

    Args:
        inputs: name, dtype and range of shapes of each input.
        example: tensors to export the segment with.
        flops: floating-point operations of one call at the opt sizes (1 multiply-add = 2).
    """

    inputs: list[TensorSpec]
    example: tuple[Tensor, ...]
    flops: int


@dataclass(frozen=True)
class Measured:
    """What one run of the glue at each size showed."""

    boundaries: dict[str, Boundary]
    flops: int

    @property
    def flops_share(self) -> float:
        """Share of all FLOPs inside segments, 0 to 1. A model that computes nothing counts as lowered in full."""
        return sum(b.flops for b in self.boundaries.values()) / self.flops if self.flops else 1.0


def measure(glue: GraphModule, sizes: ShapeRange) -> Measured:
    """Run `glue` at min, opt, max and export sizes and record what enters each segment.

    Raises:
        ExportError: a segment's input changes its rank or its type between sizes, or is not reached by an example.
    """
    with restored_state(glue), torch.random.fork_rng(devices=[]), torch.no_grad():
        opt = _Recorder(glue).record(sizes.opt, count=True)
        if "expected_output" in glue.meta:
            check_output(glue.meta.pop("expected_output"), opt.result)
        runs = {id(sizes.opt): opt}
        for example in (sizes.min, sizes.max, sizes.export, *(e for profile in sizes.profiles for e in profile)):
            if id(example) not in runs:
                runs[id(example)] = _Recorder(glue).record(example)
    boundaries = {}
    for name in opt.inputs:
        if not all(name in run.inputs for run in runs.values()):
            raise ExportError(f"{name} is not reached at every size of the inputs", hint="narrow the dynamic range")
        specs = []
        for index, argument in enumerate(opt.names[name]):
            seen = {key: run.inputs[name][index] for key, run in runs.items()}
            specs.append(_spec(f"input {index} of {name}", argument, sizes, seen))
        boundaries[name] = Boundary(specs, runs[id(sizes.export)].inputs[name], opt.flops.get(name, 0))
    return Measured(boundaries, sum(opt.flops.values()))


def _spec(what: str, name: str, sizes: ShapeRange, seen: dict[int, Tensor]) -> TensorSpec:
    """The spec of one input of a segment; `seen` has its value in the run with each example of `sizes`, by identity."""
    opt = seen[id(sizes.opt)]
    if any(t.dim() != opt.dim() or t.dtype != opt.dtype for t in seen.values()):
        raise ExportError(
            f"{what} has another rank or type at other sizes",
            hint="keep the code before it in one form for all sizes, or wrap() it",
        )

    def at(example: Example) -> tuple[int, ...]:
        return tuple(seen[id(example)].shape)

    profiles = tuple((at(low), at(usual), at(high)) for low, usual, high in sizes.profiles)
    low, high = at(sizes.min), at(sizes.max)
    return TensorSpec(name, opt.dtype, low, at(sizes.opt), high, profiles=profiles if low != high else ())


class _Recorder(Interpreter):
    """Runs the glue; keeps each segment's inputs and, if asked, the FLOPs of every top-level node."""

    def __init__(self, glue: GraphModule):
        super().__init__(glue)
        self.glue = glue
        self.inputs: dict[str, tuple[Tensor, ...]] = {}
        self.names: dict[str, list[str]] = {}
        self.flops: dict[str, int] = {}
        self.result: Any = None
        self._counter: FlopCounter | None = None

    def record(self, example: Example, *, count: bool = False) -> _Recorder:
        self._counter = FlopCounter() if count else None
        args = positional(bind_inputs(self.glue, example.args, example.kwargs))
        self.result = self.run(*args)
        return self

    def run_node(self, node: torch.fx.Node) -> Any:
        if node.op == "call_module" and str(node.target).startswith("segment_"):
            values = tuple(self.fetch_args_kwargs_from_env(node)[0])
            self.inputs[str(node.target)] = tuple(v.detach().clone() for v in values)
            segment = self.fetch_attr(str(node.target))
            self.names[str(node.target)] = [p.name for p in segment.graph.find_nodes(op="placeholder")]
        try:
            if self._counter is None:
                return super().run_node(node)
            before = self._counter.total
            with self._counter:
                result = super().run_node(node)
            key = str(node.target) if node.op == "call_module" else node.name
            self.flops[key] = self.flops.get(key, 0) + self._counter.total - before
            return result
        except LoweringError:
            raise
        except Exception as error:
            raise ExportError(f"the captured model fails on these inputs: {error}", node=node) from error
