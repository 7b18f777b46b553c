"""What crosses the boundary of each segment: measured by running the partitioned model, never inferred."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fx_passes.capture.example_values import noted_branches
from fx_passes.capture.state import restored_state
from fx_passes.errors import ExportError, LoweringError
from fx_passes.graph.copies import copied_inputs
from fx_passes.graph.resized import brought_to
from fx_passes.partition.partition import check_output
from fx_passes.partition.recording import bind_inputs, positional
from lowering.request.inputs import Example, ShapeRange
from lowering.request.probes import HEADROOM
from lowering.segment.flop_counter import FlopCounter
from lowering.segment.program import TensorSpec

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
    """What one run of the glue at each size showed.

    Args:
        boundaries: by segment name.
        flops: of one call at the opt sizes.
        refused: lines at which the model takes another branch at the smallest or the largest sizes.
    """

    boundaries: dict[str, Boundary]
    flops: int
    refused: list[str] = field(default_factory=list)

    @property
    def flops_share(self) -> float:
        """Share of all FLOPs inside segments, 0 to 1. A model that computes nothing counts as lowered in full."""
        return sum(b.flops for b in self.boundaries.values()) / self.flops if self.flops else 1.0


def measure(glue: GraphModule, sizes: ShapeRange, others: Iterable[Example] = ()) -> Measured:
    """Run `glue` at min, opt, max and export sizes and record what enters each segment.

    Args:
        glue: a partitioned graph.
        sizes: calls of it.
        others: more calls, of the opt sizes. They are made if a segment reads what Python gave, whose size may follow
            from the data (a number of boxes): where it differs, the segment takes 1 to twice the largest seen.

    At other sizes than the opt ones, the code that was captured runs even if the model would take another branch of its
    code there: such sizes are refused at each call, and others between them are not.

    Raises:
        ExportError: a segment's input changes its rank or its type between sizes, or is not reached by an example.
    """
    with restored_state(glue), torch.random.fork_rng(devices=[]), torch.no_grad():
        opt = _Recorder(glue).record(sizes.opt, count=True)
        if "expected_output" in glue.meta:
            check_output(glue.meta.pop("expected_output"), opt.result)
        runs = {id(sizes.opt): opt}
        refused: list[str] = []
        for example in (sizes.min, sizes.max, sizes.export, *(e for profile in sizes.profiles for e in profile)):
            if id(example) not in runs:
                with noted_branches() as lines:
                    runs[id(example)] = _Recorder(glue).record(example)
                refused += lines
        probes = [opt, *_probes(glue, others)] if _reads_python(glue) else []
        apart = list(_apart(glue, sizes))
    boundaries = {}
    for name in opt.inputs:
        if not all(name in run.inputs for run in runs.values()):
            raise ExportError(f"{name} is not reached at every size of the inputs", hint="narrow the dynamic range")
        reached = {key: run.inputs[name] for key, run in runs.items()}
        reached |= {key: entered[name] for key, entered in apart if name in entered}
        specs = []
        for index, argument in enumerate(opt.names[name]):
            seen = {key: tensors[index] for key, tensors in reached.items()}
            spec = _spec(f"input {index} of {name}", argument, sizes, seen)
            shapes = [tuple(run.inputs[name][index].shape) for run in probes if name in run.inputs]
            specs.append(_with_headroom(spec, shapes))
        specs = _with_symbols(specs, sizes, reached)
        tensors = runs[id(sizes.export)].inputs[name]
        fitted = tuple(brought_to(t, _sizes_of_export(t, spec)) for t, spec in zip(tensors, specs, strict=True))
        boundaries[name] = Boundary(specs, fitted, opt.flops.get(name, 0))
    return Measured(boundaries, sum(opt.flops.values()), list(dict.fromkeys(refused)))


def _apart(glue: GraphModule, sizes: ShapeRange) -> Iterator[tuple[int, dict[str, tuple[Tensor, ...]]]]:
    """What enters each segment where independent dimensions are at different ends of their ranges.

    Nothing where the model needs them to be equal. Without a run where the segments take inputs of the glue alone.
    """
    calls = [node for node in glue.graph.nodes if node.meta.get("segment") and node.op == "call_module"]
    computed = any(argument.op != "placeholder" for call in calls for argument in call.all_input_nodes)
    placeholders = [node.name for node in glue.graph.find_nodes(op="placeholder")]
    for example in sizes.apart:
        if not computed:
            given = positional(bind_inputs(glue, example.args, example.kwargs))
            values = dict(zip(placeholders, given, strict=False))
            yield id(example), {str(c.target): tuple(values[a.name] for a in c.all_input_nodes) for c in calls}
            continue
        try:
            with noted_branches():
                yield id(example), _Recorder(glue).record(example).inputs
        except LoweringError as error:
            logging.getLogger(__name__).debug("dimensions cannot be told apart: %s", error)


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
    # A size that is a difference of two others is smallest where these are at different ends.
    low, high = (tuple(map(pick, *(t.shape for t in seen.values()), at(sizes.opt))) for pick in (min, max))
    return TensorSpec(name, opt.dtype, low, at(sizes.opt), high, profiles=profiles if low != high else ())


def _with_symbols(specs: list[TensorSpec], sizes: ShapeRange, seen: dict[int, tuple[Tensor, ...]]) -> list[TensorSpec]:
    """`specs` with a name for each dynamic dimension: those that were equal in every run are one.

    A dimension that was always a named one of the user is that one. Of others, two of one tensor (height and width) may
    still differ from call to call, and only the first of each tensor are one.
    """
    names = next(iter(sizes.named.values()), {})
    named = {tuple(sizes.named[key][name] for key in seen): name for name in names}
    known: dict[tuple[Any, ...], str] = {}
    found = []
    for index, spec in enumerate(specs):
        symbols: list[str | None] = []
        for d in range(len(spec.opt)):
            measured = tuple(tensors[index].shape[d] for tensors in seen.values())
            ends = (spec.min[d], spec.opt[d], spec.max[d])
            if not spec.is_dynamic(d):
                symbols.append(None)
            elif measured in named:
                symbols.append(named[measured])
            else:
                before = sum(1 for e in range(d) if (spec.min[e], spec.opt[e], spec.max[e]) == ends)
                own = f"{spec.name}_{d}" if f"{spec.name}_{d}" not in names else f"{spec.name}_{d}_"
                symbols.append(known.setdefault((measured, ends, before), own))
        found.append(replace(spec, symbols=tuple(symbols)))
    return found


def _reads_python(glue: GraphModule) -> bool:
    """Whether a segment takes what was computed from the result of a Python call."""
    after: set[Node] = set()
    for node in glue.graph.nodes:
        if node.meta.get("python") or not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    return any(node.meta.get("segment") and not node.meta.get("python") for node in after)


def _probes(glue: GraphModule, examples: Iterable[Example]) -> Iterator[_Recorder]:
    for example in examples:
        try:
            yield _Recorder(glue).record(example)
        except LoweringError as error:  # shuffled values and zeros may be no input that the model's Python expects
            logging.getLogger(__name__).debug("a probe failed: %s", error)


def _with_headroom(spec: TensorSpec, shapes: list[tuple[int, ...]]) -> TensorSpec:
    """`spec`, wider in each dimension that has several sizes in `shapes`, those of inputs of one size."""
    shapes = [shape for shape in shapes if len(shape) == len(spec.opt)]
    varying = [d for d in range(len(spec.opt)) if len({shape[d] for shape in shapes}) > 1]
    if not varying:
        return spec
    most = {d: max(spec.max[d], *(shape[d] for shape in shapes)) for d in varying}

    def at(sizes: tuple[int, ...], values: dict[int, int]) -> tuple[int, ...]:
        return tuple(values.get(d, n) for d, n in enumerate(sizes))

    low, high = dict.fromkeys(varying, 1), {d: HEADROOM * n for d, n in most.items()}
    usual = {d: spec.opt[d] or n for d, n in most.items()}
    profiles = tuple((at(a, low), at(b, usual), at(c, high)) for a, b, c in spec.profiles)
    changed = (at(spec.min, low), at(spec.opt, usual), at(spec.max, high))
    return TensorSpec(spec.name, spec.dtype, *changed, symbols=spec.symbols, profiles=profiles)


def _sizes_of_export(tensor: Tensor, spec: TensorSpec) -> tuple[int, ...]:
    """At least 2 where a size varies: `torch.export` takes 0 and 1 for constants."""
    return tuple(max(n, 2) if spec.is_dynamic(d) else n for d, n in enumerate(tensor.shape))


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
        args = positional(bind_inputs(self.glue, *copied_inputs((example.args, example.kwargs))))
        self.result = self.run(*args)
        return self

    def run_node(self, node: Node) -> Any:
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
