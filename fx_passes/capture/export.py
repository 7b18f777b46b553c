"""The one door to `torch.export`, and what an exported program takes for granted about the sizes of its inputs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from fx_passes.capture.conditions import Condition, UntranslatableError, condition_of
from fx_passes.capture.quiet import quiet_torch
from fx_passes.capture.sources import is_user_file

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["Guard", "export_program", "exporting", "guards_of", "open_sizes", "shape_env_of"]

_users_lock = threading.Lock()
_users: list[int] = []  # of `open_sizes`
_before: list[bool] = []  # what the switch was before the first of them


@contextmanager
def open_sizes() -> Iterator[None]:
    """Make and edit programs of dynamic sizes in here: where sizes may be 1.

    By default torch takes a dynamic size for at least 2: `x.shape[0] == 1` is false without a guard, and whatever
    would be another size where one of them is 1 (``h // 2 != 1``) is a guard, though nothing depends on it.
    `backed_size_oblivious` makes guards of the first, and none of the second.

    It is the process's, from the first thread that wants it to the last: one that builds an engine is still in here
    when another one begins (see `let_others`), and may leave before it.
    """
    from torch.fx.experimental import _config

    with _users_lock:
        if not _users:
            _before.append(_config.backed_size_oblivious)  # type: ignore[attr-defined]
            _config.backed_size_oblivious = True  # type: ignore[attr-defined]
        _users.append(threading.get_ident())
    try:
        yield
    finally:
        with _users_lock:
            _users.pop()
            if not _users:
                _config.backed_size_oblivious = _before.pop()  # type: ignore[attr-defined]


@contextmanager
def exporting(*, stack_traces: bool = False) -> Iterator[None]:
    """Run torch.export in here: quiet, and with open sizes.

    Args:
        stack_traces: whether nodes get the stack trace of the code that made them (an eighth of the time).
    """
    with quiet_torch(stack_traces=stack_traces), open_sizes():
        yield


def export_program(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, dynamic_shapes: Any = None
) -> ExportedProgram:
    """`torch.export.export` in non-strict mode, without gradients. To be called inside of `exporting`.

    Raises:
        Exception: whatever torch.export raises.
    """
    with torch.no_grad():
        return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)


@dataclass(frozen=True)
class Guard:
    """One thing that a program takes for granted about the sizes of its inputs.

    Attributes:
        condition: it holds of the inputs that the program was exported with.
        source: file and line of the user's code that asked, where torch kept it.
        index: among the conditions that torch noted; None for others.
        relation: it says what one size of the inputs is, computed from others: ``("==", size, value)``.
    """

    condition: Condition
    source: tuple[str, int] | None = None
    index: int | None = None
    relation: bool = False


def shape_env_of(nodes: Iterator[Node] | Sequence[Node]) -> ShapeEnv | None:
    """Where torch keeps what it assumed while it made these nodes; None if all sizes are numbers."""
    for node in nodes:
        for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, Tensor) and (mode := getattr(value, "fake_mode", None)) is not None:
                return mode.shape_env
            if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return value.node.shape_env
    return None


def guards_of(exported: ExportedProgram, inputs: Sequence[Node]) -> list[Guard]:
    """Everything that an exported program takes for granted about the sizes of its inputs.

    That is: the sizes that are one symbol, or made of one (twice another size); what torch decided by a size, in the
    user's code or its own; ranges that are narrower for it; and assertions that are nodes of the graph.

    Args:
        exported: a program, perhaps edited since.
        inputs: placeholders of its tensor arguments; conditions name an input by its index here.

    Raises:
        UntranslatableError: a condition is about something else than these sizes.
    """
    shapes = [node.meta["val"].shape for node in inputs]
    if not any(_is_symbolic(size) for shape in shapes for size in shape):
        return []
    env = shape_env_of(inputs)
    if env is None:
        raise UntranslatableError("a size without a record of what was assumed of it")
    sizes, found = _symbols(shapes)
    for index, guard in enumerate(env.guards):
        if not guard.size_oblivious:  # asked as if no size were 1: the answer decides nothing about results
            found.append(Guard(condition_of(_settled(env, guard.expr), sizes), _user_line(guard.sloc), index))
    for node in exported.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        asked: Any = node.args[0]
        value = asked.meta["val"] if isinstance(asked, Node) else asked
        if isinstance(value, torch.SymBool) and not _unbacked(value):
            found.append(Guard(condition_of(_settled(env, value.node.expr), sizes)))
    return list(dict.fromkeys(found))


def _symbols(shapes: Sequence[Sequence[Any]]) -> tuple[dict[Any, Condition], list[Guard]]:
    """Each symbol as the first size that it is, and what the other sizes that it is in must then be."""
    sizes: dict[Any, Condition] = {}
    places = [
        (i, d, size.node.expr) for i, shape in enumerate(shapes) for d, size in enumerate(shape) if _is_symbolic(size)
    ]
    for i, d, expression in places:
        if expression.is_Symbol:
            sizes.setdefault(expression, ("size", i, d))
    for i, d, expression in places:
        if not expression.free_symbols <= sizes.keys():
            sizes |= _solved(expression, ("size", i, d), sizes)
    relations = [(("size", i, d), condition_of(expression, sizes)) for i, d, expression in places]
    return sizes, [Guard(("==", size, value), relation=True) for size, value in relations if size != value]


def _solved(expression: Any, size: Condition, known: dict[Any, Condition]) -> dict[Any, Condition]:
    """The one unknown symbol of ``4 * s + 1 == size``."""
    unknown = expression.free_symbols - known.keys()
    symbol = next(iter(unknown))
    slope = expression.coeff(symbol)
    rest = expression - slope * symbol
    if len(unknown) > 1 or not slope.is_Integer or rest.free_symbols:
        raise UntranslatableError(str(expression))
    return {symbol: ("//", ("-", size, int(rest)), int(slope))}


def _settled(env: ShapeEnv, expression: Any) -> Any:
    """`expression` in the symbols that are left: two of them may have been found to be one since."""
    return env.replace(expression)


def _user_line(sloc: Any) -> tuple[str, int] | None:
    frame: Any = sloc.framework_loc  # a summary of a frame, or a text where there is none
    name = getattr(frame, "filename", None)
    return (name, frame.lineno) if name is not None and is_user_file(name) else None


def _unbacked(value: torch.SymBool) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(value))


def _is_symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)
