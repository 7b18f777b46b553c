"""What the exported program of a model or a submodule is checked for at each call of the graph that it goes into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from fx_passes.capture.conditions import worded
from fx_passes.capture.export import Guard, guards_of
from fx_passes.capture.size_ranges import Comparison, SizeRanges
from fx_passes.capture.sources import line_text
from fx_passes.errors import CaptureError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["assumptions", "tensor_inputs"]

_LIMIT = 1e-3  # relative difference, as a norm, of the program's results and the model's
Ends = Sequence[Sequence[Sequence[int]]]


def assumptions(
    exported: ExportedProgram, original: Callable[..., Any], given: Sequence[Any], ends: Ends | None
) -> list[Guard]:
    """The conditions on sizes that may fail, and that something depends on.

    Args:
        exported: a program.
        original: what it was made of, as a function of the tensors; it is run at a few sizes where a condition fails.
        given: the program's inputs, flat: the tensors and constants that it was exported with.
        ends: shapes of all tensors in two more calls; sizes may be anything between them. None: nothing is known.

    Raises:
        CaptureError: the program works with the sizes of the example only, though they are meant to vary.
        UntranslatableError: a condition is about something else than these sizes.
    """
    inputs = tensor_inputs(exported)
    guards = guards_of(exported, inputs)
    if ends is None or not guards:
        return guards
    tensors = [value for value in given if isinstance(value, Tensor)]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    low, high = ([tuple(map(pick, *rows)) for rows in zip(*ends, shapes, strict=True)] for pick in (min, max))
    ranges = SizeRanges(low, high, shapes, guards)
    comparison = Comparison(original, _runs(exported, given), tensors, ranges, _LIMIT)
    kept = []
    for guard in guards:
        failures = ranges.failures(guard.condition)
        if failures.impossible or (not guard.relation and comparison.is_immaterial(failures)):
            continue
        if ranges.fails_at_ends(guard.condition) == 2:
            line = "" if guard.source is None else f" ({line_text(*guard.source)})"
            names = [node.name for node in inputs]
            raise CaptureError(f"it works only for sizes for which {worded(guard.condition, names)}{line}")
        kept.append(guard)
    return kept


def tensor_inputs(exported: ExportedProgram) -> list[Node]:
    """The placeholders of a program's inputs that are tensors."""
    names = set(exported.graph_signature.user_inputs)
    nodes = exported.graph.find_nodes(op="placeholder")
    return [node for node in nodes if node.name in names and isinstance(node.meta.get("val"), Tensor)]


def _runs(exported: ExportedProgram, given: Sequence[Any]) -> Callable[..., Any]:
    """The program as a function of its tensors, which changes no buffer."""
    from torch.export.graph_signature import InputKind

    specs = exported.graph_signature.input_specs
    held = exported.state_dict | exported.constants

    def run(*tensors: Tensor) -> Sequence[Any]:
        values, remaining = iter(given), iter(tensors)
        arguments = []
        for spec in specs:
            if spec.kind is InputKind.USER_INPUT:
                value = next(values)
                arguments.append(next(remaining) if isinstance(value, Tensor) else value)
            else:
                value = held[str(spec.target)]
                arguments.append(value.clone() if spec.kind is InputKind.BUFFER else value)
        interpreter = torch.fx.Interpreter(exported.graph_module)
        results = interpreter.run(*arguments, enable_io_processing=False)
        return results[len(results) - exported.call_spec.out_spec.num_leaves :]  # type: ignore[union-attr]

    return run
