"""What a program takes for granted about the sizes of its inputs: implied by their ranges, checked at each call, or
the reason why it is refused.

`torch.export` follows the model with one example. Where the model's code, or torch's own, decides by a size, it notes
the condition and goes on; the program is right where the condition holds. Some of torch's own conditions decide
nothing but how a tensor lies in memory: the program is run where they do not hold, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_passes.capture.conditions import Condition, UntranslatableError, worded
from fx_passes.capture.example_values import check_branch
from fx_passes.capture.export import Guard, guards_of
from fx_passes.capture.size_ranges import Comparison, Failures, SizeRanges
from fx_passes.capture.sources import line_text
from fx_passes.capture.state import restored_state
from fx_passes.errors import ExportError
from lowering.segment.program import AtenProgram, SizeCheck

if TYPE_CHECKING:
    from lowering.segment.normal_form.export import GuardLog

__all__ = ["all_checks", "set_checks"]

Run = Callable[..., Sequence[Tensor]]

# Relative difference, as a norm, of a program and its segment (a step of int8 here and there), and of a backend's form
# of it (other kernels, half precision). A frozen size gives another shape, or other numbers altogether.
_LIMIT, _LIMIT_OF_BACKENDS = 0.01, 0.1
_QUESTIONS = (check_branch, torch._assert)


def set_checks(program: AtenProgram, segment: GraphModule, example: tuple[Tensor, ...], log: GuardLog) -> None:
    """Give `program` its `checks`: what the ranges of its inputs do not imply.

    Args:
        program: exported from `segment`.
        segment: it is run at a few other sizes if torch's own code decided by sizes.
        example: what it was exported with.
        log: which node of the segment each condition comes from.

    Raises:
        ExportError: a condition is about something else than sizes of the inputs; or a part of the program works with
            the sizes of the example only: at the node, so that it stays in Python, where it is right for all sizes.
    """
    guards = _guards(program)
    program.example, program.assumed = example, frozenset(guard.condition for guard in guards)
    ranges = _ranges(program, guards)
    found = _open(program, guards, ranges, log)
    asked = [item.condition for item in found if item.is_asked]
    comparison = Comparison(_restored(segment), _with_buffers(program, program, segment), example, ranges, _LIMIT)
    found = [item for item in found if item.is_asked or not comparison.is_immaterial(item.failures, asked)]
    program.checks = [item.check for item in found]
    for item in found:
        _refuse_frozen(ranges, item)


def all_checks(program: AtenProgram, segment: nn.Module, run: Run) -> list[SizeCheck]:
    """The checks of a program, and what was taken for granted since, while a backend made its own form of it.

    Args:
        program: with its checks.
        segment: that it was exported from.
        run: the backend's form; it is run at a few other sizes if something else was taken for granted.

    Raises:
        ExportError: the backend's form works with the sizes of the example only.
    """
    guards = _guards(program)
    later = [guard for guard in guards if guard.condition not in program.assumed and not guard.relation]
    if not later:
        return program.checks
    ranges = _ranges(program, guards)
    original, other = (_with_buffers(form, program, segment) for form in (program, run))
    comparison = Comparison(original, other, program.example, ranges, _LIMIT_OF_BACKENDS)
    known = [check.condition for check in program.checks]
    found = _open(program, later, ranges, None)
    found = [item for item in found if not comparison.is_immaterial(item.failures, known)]
    for item in found:
        if ranges.fails_at_ends(item.condition) == 2:
            raise ExportError(
                f"what was made of the segment works only for sizes for which {item.check}",
                hint="narrow the dynamic range, make the dimension static, or wrap() what computes with it",
            )
    return program.checks + [item.check for item in found]


def _guards(program: AtenProgram) -> list[Guard]:
    try:
        return guards_of(program.exported, program.input_nodes())
    except UntranslatableError as what:
        raise ExportError(
            f"torch.export takes '{what}' for granted, which cannot be checked at a call",
            hint="wrap() the function that computes with it, or make the dimension static",
        ) from None


def _ranges(program: AtenProgram, guards: Iterable[Guard]) -> SizeRanges:
    given = [tuple(tensor.shape) for tensor in program.example]
    shapes = given + [spec.opt for spec in program.inputs[len(given) :]]  # the last inputs are buffers
    ends = ([spec.min for spec in program.inputs], [spec.max for spec in program.inputs])
    return SizeRanges(*ends, shapes, guards)


# -- conditions that may fail ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Open:
    """A condition that the ranges do not imply.

    Attributes:
        node: of the segment, which ran when torch noted it; None if that is not known.
        failures: where it does not hold.
        check: the same, as it is checked at a call.
    """

    guard: Guard
    node: Node | None
    failures: Failures
    check: SizeCheck

    @property
    def condition(self) -> Condition:
        return self.guard.condition

    @property
    def is_asked(self) -> bool:
        """Whether the traced graph asks, or the shapes of the inputs do, as opposed to the code of an operator."""
        return self.guard.relation or (self.node is not None and self.node.target in _QUESTIONS)


def _open(program: AtenProgram, guards: Iterable[Guard], ranges: SizeRanges, log: GuardLog | None) -> list[_Open]:
    found = []
    for guard in guards:
        failures = ranges.failures(guard.condition)
        if not failures.impossible:
            node = None if log is None else log.node_of(guard.index)
            text = worded(guard.condition, [spec.name for spec in program.inputs])
            found.append(_Open(guard, node, failures, SizeCheck(guard.condition, text, _line(guard, node))))
    return found


def _line(guard: Guard, node: Node | None) -> str | None:
    """The user's line: what a check of the graph says, where torch says it was asked, or the node's."""
    if node is not None and node.target is check_branch:
        return str(node.args[2])
    source = guard.source or (None if node is None else node.meta.get("source"))
    return None if source is None else line_text(*source)


def _refuse_frozen(ranges: SizeRanges, item: _Open) -> None:
    """Refuse a node that works with the sizes of the example only.

    A branch of the model's code is checked at each call where it holds at the smallest or the largest sizes. What an
    operator takes for granted must hold at both, and so must a size that the code took for a number.
    """
    failing = ranges.fails_at_ends(item.condition)
    if item.node is None or item.is_asked or not failing:
        return
    if failing == 2 or item.node.op != "call_module":
        raise ExportError(
            f"it works only for sizes for which {item.check}",
            node=item.node,
            hint="compute sizes with // and %, narrow the dynamic range, or make the dimension static",
        )


# -- the forms that are compared -------------------------------------------------------------------------------------


def _restored(segment: GraphModule) -> Run:
    """The segment, whose buffers stay as they are."""

    def run(*inputs: Tensor) -> Sequence[Tensor]:
        with restored_state(segment):
            return segment(*inputs)

    return run


def _with_buffers(run: Run, program: AtenProgram, segment: nn.Module) -> Run:
    """A form of the program that gets the buffers which it takes as its last inputs."""
    buffers = dict(segment.named_buffers())

    def with_buffers(*inputs: Tensor) -> Sequence[Tensor]:
        return run(*inputs, *(buffers[name].clone() for name in program.buffer_inputs))

    return with_buffers
