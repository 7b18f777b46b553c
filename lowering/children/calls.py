"""What the submodules of a Python root are called with: recorded while the root runs, as shapes, never as tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fx_passes.graph.copies import copied_inputs
from lowering.request.arguments import bound_arguments, leaves_of
from lowering.request.inputs import Example
from lowering.segment.flop_counter import FlopCounter

__all__ = ["Call", "Opaque", "Shape", "record_calls", "replaced_forwards"]


@dataclass(frozen=True)
class Shape:
    """A tensor among the arguments of a call."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Opaque:
    """An argument that is neither a tensor nor None, a boolean, a number or a string."""

    kind: str


@dataclass
class Call:
    """One call of a submodule.

    Attributes:
        path: qualified name of the submodule.
        parents: qualified names of the modules in whose calls it happened, outermost first.
        arguments: by name, defaults filled in; a `Shape` for each tensor, `Opaque` for what a program cannot take.
        flops, heavy: FLOPs of the call, and those of its convolutions, matmuls and attention.
    """

    path: str
    parents: tuple[str, ...]
    arguments: dict[str, Any]
    flops: int = 0
    heavy: int = 0
    leaves: list[tuple[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.leaves = leaves_of(self.arguments)

    @classmethod
    def of(cls, path: str, parents: tuple[str, ...], arguments: dict[str, Any]) -> Call:
        """From the arguments themselves."""
        return cls(path, parents, pytree.tree_map(_described, arguments))

    @property
    def form(self) -> tuple[Any, ...]:
        """What calls of one program have in common: where tensors are, their ranks and types, and all other values."""
        return tuple(
            (where, len(leaf.sizes), leaf.dtype) if isinstance(leaf, Shape) else (where, type(leaf), repr(leaf))
            for where, leaf in self.leaves
        )

    def shapes(self) -> list[Shape]:
        """The tensors, in order."""
        return [leaf for _, leaf in self.leaves if isinstance(leaf, Shape)]


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Shape(tuple(leaf.shape), leaf.dtype)
    return leaf if isinstance(leaf, (type(None), bool, int, float, str)) else Opaque(type(leaf).__name__)


@contextmanager
def replaced_forwards(
    root: nn.Module, make: Callable[[str, Callable[..., Any]], Callable[..., Any] | None]
) -> Iterator[None]:
    """Let `make(path, forward)` stand in for the forward of each submodule of `root` until the context ends.

    A forward is replaced on the instance, so that the submodule stays what it is: its class, its attributes, its hooks
    and its own submodules are all there for the code around it.
    """
    before: list[tuple[nn.Module, Any]] = []
    try:
        for path, module in root.named_modules():
            if path and not isinstance(module, torch.jit.ScriptModule):
                stand_in = make(path, module.forward)
                if stand_in is not None:
                    before.append((module, module.__dict__.get("forward")))
                    module.__dict__["forward"] = stand_in
        yield
    finally:
        for module, forward in before:
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward


def record_calls(root: nn.Module, example: Example) -> tuple[list[Call], int]:
    """Run `root` once and record every call of a submodule.

    Returns:
        The calls, in the order in which they began, and the FLOPs of the whole run.
    """
    calls: list[Call] = []
    running: list[Call] = []
    counter = FlopCounter()

    def make(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(forward)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            call = Call.of(path, tuple(c.path for c in running), bound_arguments(signature, args, kwargs))
            calls.append(call)
            running.append(call)
            before = counter.total, counter.heavy
            try:
                return forward(*args, **kwargs)
            finally:
                call.flops, call.heavy = counter.total - before[0], counter.heavy - before[1]
                running.pop()

        return recorded

    with replaced_forwards(root, make), counter:
        args, kwargs = copied_inputs((example.args, example.kwargs))
        root(*args, **kwargs)
    return calls, counter.total
