"""Capture by `torch.export`: the same kind of graph for a model whose own forward symbolic tracing refuses.

The graph is spelled in aten, over the model's own parameters and buffers. What a layer of `torch.nn` does in one op is
a call of that layer again, so that folding and quantizing give what they give for a traced model, under the same names.
"""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.fx.proxy import GraphAppendingTracer
from torch.utils import _pytree as pytree

from fx_passes.capture.arguments import ArgumentPlan
from fx_passes.capture.assumptions import assumptions
from fx_passes.capture.conditions import UntranslatableError
from fx_passes.capture.export import export_program, exporting
from fx_passes.capture.importer import ProgramImporter
from fx_passes.capture.patching import activate
from fx_passes.capture.sources import failure_reason
from fx_passes.capture.state import restored_state
from fx_passes.capture.tensor_indices import TensorIndices
from fx_passes.capture.wrap import records, wrapped_calls
from fx_passes.entry.ambient import refuse_global_hooks
from fx_passes.errors import CaptureError, LoweringError
from fx_passes.graph.copies import copied_inputs

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["exported_graph"]


def exported_graph(model: nn.Module, example_inputs: Any, varying: tuple[Any, Any] | None = None) -> Graph:
    """The graph of one call of `model`, over its parameters and buffers; the model stays as it is.

    Args:
        model: any module.
        example_inputs: a tensor, a tuple of positional or a dict of keyword arguments. Sizes of 0 and 1 are constants
            to `torch.export`.
        varying: two more examples; what differs in size between them may differ from call to call. None: all that the
            model's code leaves open. The graph checks at each call what was decided by a size.

    Returns:
        A graph for `GraphModuleWithAttr(model, graph)`, with the signature of the model's forward.

    Raises:
        CaptureError: `torch.export` refuses, something wrapped runs in the model (its Python would be lost), a varying
            dimension is a constant to the model's code, or the graph would hold sizes that depend on data.
    """
    refuse_global_hooks()
    plan = ArgumentPlan(model, None, example_inputs)
    _refuse_wrapped_calls(model, plan)
    ends = None if varying is None else [_tensors(ArgumentPlan(model, None, inputs)) for inputs in varying]
    free = None if ends is None else _differing(*ends)
    try:
        return _imported(model, plan, _export(model, plan, free), free, ends)
    except UntranslatableError as relation:
        if free is not None:
            raise CaptureError(
                f"torch.export relates dynamic sizes by '{relation}', which a graph cannot check"
            ) from None
        fixed = [frozenset[int]()] * len(_tensors(plan))
        return _imported(model, plan, _export(model, plan, fixed), fixed, ends)


def _imported(
    model: nn.Module,
    plan: ArgumentPlan,
    exported: ExportedProgram,
    varying: Sequence[frozenset[int]] | None,
    ends: Sequence[Sequence[Tensor]] | None,
) -> Graph:
    """The program as a graph over `model`, with the model's own signature and structure of results."""
    graph = Graph()
    arguments = plan.opened(GraphAppendingTracer(graph), lambda leaf: not isinstance(leaf, Tensor))
    call, shapes = plan.call(), None if ends is None else [[tuple(t.shape) for t in end] for end in ends]

    def original(*tensors: Tensor) -> Any:
        remaining = iter(tensors)
        args, kwargs = pytree.tree_map_only(Tensor, lambda _: next(remaining), (call.args, call.kwargs))
        with restored_state(model):
            return model(*args, **kwargs)

    guards = assumptions(exported, original, plan.leaves(plan.examples), shapes)
    program = ProgramImporter(graph, model, exported, plan.leaves(arguments), guards, varying)
    graph.output(_structure(graph, exported.call_spec.out_spec, iter(program.results())))
    program.erase_unread(())
    graph.lint()
    return graph


class _WrappedCallError(BaseException):
    """Unwinds out of user code, past its own handlers."""


class _Guard:
    """Stands in for a tracer in one run of the model: a wrapped call that gets tensors ends it."""

    def sees(self, arguments: Any) -> bool:
        return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(arguments))

    def call_wrapped(self, target: Any, original: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if records(target, args) and self.sees((args, kwargs)):
            raise _WrappedCallError(getattr(target, "__name__", str(target)))
        with activate(None):
            return original(*args, **kwargs)


def _differing(some: list[Tensor], others: list[Tensor]) -> list[frozenset[int]]:
    """The dimensions in which tensors differ, pair by pair."""
    return [
        frozenset(d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n)
        for a, b in zip(some, others, strict=True)
    ]


def _tensors(plan: ArgumentPlan) -> list[Tensor]:
    return [leaf for leaf in plan.leaves(plan.examples) if isinstance(leaf, Tensor)]


def _refuse_wrapped_calls(model: nn.Module, plan: ArgumentPlan) -> None:
    """Run the model once, up to the first wrapped call that gets a tensor.

    Not while `torch.export` runs: what stands in for a wrapped builtin must not be seen by torch itself.

    Raises:
        CaptureError: there is such a call, or the model fails.
    """
    call = plan.call()
    with restored_state(model), torch.random.fork_rng(devices=[]), torch.no_grad(), wrapped_calls(model):
        try:
            with activate(_Guard()):  # type: ignore[arg-type]
                args, kwargs = copied_inputs((call.args, call.kwargs))
                model(*args, **kwargs)
        except _WrappedCallError as found:
            raise CaptureError(
                f"torch.export would lose the Python of '{found}', which is wrapped and runs in {type(model).__name__}",
                hint="move the code that cannot be traced into the wrapped function too",
            ) from None
        except Exception as error:
            raise CaptureError(f"the model fails on the example inputs: {failure_reason(error)}") from error


def _export(model: nn.Module, plan: ArgumentPlan, varying: Sequence[frozenset[int]] | None) -> ExportedProgram:
    call = plan.call()
    forward = model.forward

    @functools.wraps(forward)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with TensorIndices():
            return forward(*args, **kwargs)

    with restored_state(model), torch.random.fork_rng(devices=[]), exporting(stack_traces=True):
        model.forward = traced
        try:
            return export_program(model, call.args, call.kwargs, dynamic_shapes=_dims(plan, varying))
        except Exception as error:
            raise CaptureError(f"torch.export refuses {type(model).__name__}: {_summary(error)}") from error


def _dims(plan: ArgumentPlan, varying: Sequence[frozenset[int]] | None) -> dict[str, Any]:
    from torch.export import Dim

    by_tensor = None if varying is None else dict(zip(map(id, _tensors(plan)), varying, strict=True))

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None
        free = frozenset(range(leaf.dim())) if by_tensor is None else by_tensor[id(leaf)]
        return {d: Dim.AUTO if d in free else Dim.STATIC for d in range(leaf.dim())}

    return {name: pytree.tree_map(of, value) for name, value in plan.call().arguments.items()}


def _summary(error: Exception) -> str:
    """The first sentence of what torch.export says, with the user's line."""
    message = failure_reason(error)
    return re.sub(r"\s+", " ", re.sub(r"(?:/[\w.\-+]+)+/([\w.\-]+)", r"\1", message))[:400]


def _structure(graph: Graph, spec: Any, leaves: Iterator[Any]) -> Any:
    """The model's own structure around the results."""
    if spec.is_leaf():
        return next(leaves)
    items = [_structure(graph, child, leaves) for child in spec.children()]
    kind = spec.type
    if kind in (list, tuple):
        return kind(items)
    if kind is dict:
        return dict(zip(spec.context, items, strict=True))
    if kind is OrderedDict:
        return graph.call_function(OrderedDict, (dict(zip(spec.context, items, strict=True)),))
    if kind is torch.Size:
        return graph.call_function(torch.Size, (tuple(items),))
    built = pytree.tree_unflatten([None] * spec.num_leaves, spec)
    if isinstance(built, tuple) and hasattr(built, "_fields"):
        return graph.call_function(type(built), tuple(items))
    if type(built).__module__ == "torch.return_types":
        return graph.call_function(type(built), (tuple(items),))
    if is_dataclass(built) and isinstance(built, dict):
        return graph.call_function(type(built), (), dict(zip(built, items, strict=True)))
    raise LoweringError(f"the model returns a {kind.__name__}, which a graph cannot build")
