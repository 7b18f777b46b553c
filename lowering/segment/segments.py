"""From a captured graph to a glue graph whose segments are tensor programs that a backend takes in full."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_passes.errors import ExportError, LoweringError, UnsupportedOpError
from fx_passes.graph.module import copy_graph_module, set_buffer
from fx_passes.graph.node_meta import source_line
from fx_passes.ops import Role, op_of
from fx_passes.partition.partition import partition
from fx_passes.partition.recording import record
from lowering.records import Fallback
from lowering.request.inputs import ShapeRange
from lowering.request.probes import alike
from lowering.segment.boundaries import Measured, measure
from lowering.segment.program import AtenProgram
from lowering.segment.segment import graph_of
from lowering.segment.to_aten import to_aten

if TYPE_CHECKING:
    from lowering.request.settings import Settings

__all__ = ["Segmented", "refuse_fallbacks", "segmented"]

Unsupported = Callable[[str, AtenProgram], dict[Node, str]]


@dataclass(frozen=True)
class Segmented:
    """A partitioned model, and each of its segments as an aten program.

    Args:
        glue: segments as `call_module` nodes, Python fallbacks as they were.
        programs: by segment name, in the order of `glue`.
        measured: shapes at the boundaries and FLOPs.
        fallbacks: all calls that stay in Python.
    """

    glue: GraphModule
    programs: dict[str, AtenProgram]
    measured: Measured
    fallbacks: list[Fallback]


def segmented(
    graph: GraphModule,
    sizes: ShapeRange,
    settings: Settings,
    unsupported: Unsupported,
    batches: Iterable[Any] = (),
) -> Segmented:
    """Partition `graph`, export every segment, and keep in Python what the backend cannot take.

    A refused operator is cut out at its node of the FX graph, together with the DequantizeLinear nodes that only it
    reads, so that no cut stands between a DQ and its consumer.

    Args:
        graph: captured, functional, perhaps converted.
        sizes: one call of the model at its smallest, usual and largest sizes.
        settings: `min_segment_nodes` and `require_full_lowering` are used.
        unsupported: the backend's own check of a named segment: aten nodes that it cannot take, each with the reason.
        batches: calibration batches, which tell what sizes follow from data.

    The Python of the model runs once to record it, and once per size that is measured each time it is partitioned
    anew, which is once more for every refusal; three times more if a segment reads what it gives.

    Raises:
        ExportError: a segment cannot be exported and the error does not say which node is at fault.
        UnsupportedOpError: `settings.require_full_lowering`, and something stays in Python.
    """
    graph = copy_graph_module(graph)
    recording = record(graph, sizes.opt.args, sizes.opt.kwargs)
    while True:
        glue = partition(
            graph,
            sizes.opt.args,
            sizes.opt.kwargs,
            min_segment_nodes=settings.min_segment_nodes,
            check=False,
            recording=recording,
        )
        measured = measure(glue, sizes, alike(sizes.opt, batches))
        programs: dict[str, AtenProgram] = {}
        refused: dict[str, str] = {}
        for name, boundary in measured.boundaries.items():
            try:
                programs[name] = to_aten(graph_of(glue, name), boundary.inputs, boundary.example)
            except ExportError as error:
                if error.node is None:
                    raise
                entered = error.node.meta.get("untraceable")
                refused[error.node.name] = error.what if entered is None else f"{entered}; {error.what}"
                continue
            for node, reason in unsupported(name, programs[name]).items():
                refused[str(node.meta.get("fx_node", node.name))] = reason
        if not refused:
            break
        _keep_in_python(graph, refused)
    fallbacks = [
        Fallback(node.name, source_line(node), str(node.meta["python"]))
        for node in glue.graph.nodes
        if node.meta.get("python")
    ]
    refuse_fallbacks(fallbacks, settings)
    if measured.refused:
        warnings.warn(
            "the smallest or the largest sizes take the model through code that is not that of the example, and calls "
            f"with such sizes are refused: {'; '.join(measured.refused)}",
            stacklevel=6,
        )
    _own_buffers(glue)
    return Segmented(glue, programs, measured, fallbacks)


def _own_buffers(glue: GraphModule) -> None:
    """Give the glue buffers of its own: what a call changes is never the caller's.

    Not where the user's own Python runs in it, which may look at the same buffers through the model.
    """
    if any(node.meta.get("python") and op_of(node, glue) is None for node in glue.graph.nodes):
        return
    owned: dict[int, Tensor] = {}
    for node in glue.graph.find_nodes(op="get_attr"):
        value = attrgetter(str(node.target))(glue)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            own = owned.setdefault(id(value), value.detach().clone())
            set_buffer(glue, str(node.target), own)
            owned[id(own)] = own


def refuse_fallbacks(fallbacks: list[Fallback], settings: Settings) -> None:
    """Raise if anything stays in Python although the settings forbid it.

    Raises:
        UnsupportedOpError: `settings.require_full_lowering`, and there is a fallback.
    """
    if settings.require_full_lowering and fallbacks:
        lines = "\n".join(f"  - {f.node} ({f.source}): {f.reason}" for f in fallbacks)
        raise UnsupportedOpError(
            f"{len(fallbacks)} calls stay in Python:\n{lines}",
            hint="drop settings.require_full_lowering, or rewrite these calls",
        )


def _keep_in_python(graph: GraphModule, refused: dict[str, str]) -> None:
    """Mark the refused nodes, and the dequantizations that only they read, as Python calls."""
    by_name = {node.name: node for node in graph.graph.nodes}
    marked = False
    for name, reason in refused.items():
        node = by_name.get(name)
        if node is None or node.op in ("placeholder", "output", "get_attr") or node.meta.get("python"):
            continue
        marked = True
        node.meta["python"] = reason
        for producer in _own_dequantizations(graph, node):
            producer.meta["python"] = f"belongs to {node.name}, which stays in Python"
    if not marked:
        details = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise LoweringError(
            f"a segment cannot be lowered, and the nodes at fault are not in the captured graph: {details}",
            hint="wrap() the function around these operators so that it stays in Python",
        )


def _own_dequantizations(graph: GraphModule, node: Node) -> Iterable[Node]:
    for producer in node.all_input_nodes:
        op = op_of(producer, graph)
        if op is not None and op.role is Role.DEQUANTIZE and set(producer.users) == {node}:
            yield producer
