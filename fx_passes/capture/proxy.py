"""The proxy that `QuantizationTracer` hands through a model: like `torch.fx.Proxy`, and records what that one cannot.

Recorded besides: item assignment, augmented assignment under its own operator (so that `functionalize` sees the
aliasing), assertions, and the shapes of parameters and buffers as the constants they are.
"""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.fx import Node, Proxy
from torch.fx.proxy import Attribute, TraceError

__all__ = ["TensorAttribute", "TracedAttribute", "TracedValue", "contains_traced"]

_INTERNAL = {"tracer", "node", "_node", "root", "attr", "_tensor"}
_AUGMENTED = (
    "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub",
    "itruediv", "ixor",
)  # fmt: skip


class TracedValue(Proxy):
    """A value of the traced program."""

    tracer: Any  # a QuantizationTracer

    def __getattr__(self, name: str) -> Any:
        return TracedAttribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _INTERNAL:
            raise TraceError(f"assignment to the attribute '{name}' of a traced value is not recorded")
        object.__setattr__(self, name, value)

    def __getitem__(self, index: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.getitem, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __delitem__(self, index: Any) -> None:
        raise TraceError("deleting an item of a traced value is not recorded")

    def __iter__(self) -> Iterator[Any]:
        count = _unpack_count(sys._getframe(1))
        if count is None:
            return self.tracer.iter(self)
        return iter([self[i] for i in range(count)])

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, list) and self.tracer.is_instance(self, tuple):
            other.extend(self)  # `parts += tuple`: a list and a tuple have no sum
            return other
        return self.tracer.create_proxy("call_function", operator.add, (other, self), {})

    def __len__(self) -> int:
        return self.tracer.length(self)

    def __int__(self) -> int:
        return int(self.tracer.number(self))

    def __float__(self) -> float:
        return float(self.tracer.number(self))

    def __index__(self) -> int:
        return operator.index(self.tracer.number(self))

    def __bool__(self) -> bool:
        if _in_assertion(sys._getframe(1)):
            self.tracer.asserted(self)
            return True
        return self.tracer.to_bool(self)


class TracedAttribute(TracedValue, Attribute):
    """An attribute of a traced value, or the method about to be called on it."""

    def __init__(self, root: Proxy, attr: str):
        Attribute.__init__(self, root, attr)
        self.tracer.lazy_attributes.append(self)


class TensorAttribute(TracedValue):
    """A parameter or buffer of the model: its shape is a constant, so code may branch on it."""

    def __init__(self, node: Node, tracer: Any, tensor: torch.Tensor):
        super().__init__(node, tracer)
        self._tensor = tensor

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape

    @property
    def ndim(self) -> int:
        return self._tensor.ndim

    @property
    def requires_grad(self) -> bool:
        return self._tensor.requires_grad

    def size(self, dim: int | None = None) -> Any:
        return self._tensor.size() if dim is None else self._tensor.size(dim)

    def dim(self) -> int:
        return self._tensor.dim()

    def numel(self) -> int:
        return self._tensor.numel()

    def is_floating_point(self) -> bool:
        return self._tensor.is_floating_point()

    def __len__(self) -> int:
        return len(self._tensor)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self._tensor))])


def _augmented(name: str) -> Any:
    target = getattr(operator, name)

    def record(self: TracedValue, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    record.__name__ = f"__{name}__"
    return record


for _name in _AUGMENTED:
    setattr(TracedValue, f"__{_name}__", _augmented(_name))


def contains_traced(value: Any) -> bool:
    """Whether a Proxy is anywhere in nested tuples, lists, dicts, sets, slices and dataclass instances."""
    if isinstance(value, Proxy):
        return True
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(contains_traced(item) for item in value)
    if isinstance(value, dict):
        return any(contains_traced(item) for item in value.values())
    if isinstance(value, slice):
        return any(contains_traced(item) for item in (value.start, value.stop, value.step))
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None and not isinstance(value, type):
        return any(contains_traced(getattr(value, name, None)) for name in fields)
    return False


def _instructions(frame: FrameType) -> tuple[list[dis.Instruction], int]:
    """The frame's instructions and the index of the one that runs (`f_lasti` is a byte offset on every version)."""
    found = [i for i in dis.get_instructions(frame.f_code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    index = next((k for k, i in enumerate(found) if i.offset == frame.f_lasti), -1)
    return found, index


def _unpack_count(frame: FrameType) -> int | None:
    """How many names `a, b, c = value` unpacks into in the running instruction, or None for another iteration."""
    instructions, index = _instructions(frame)
    if index >= 0 and instructions[index].opname == "UNPACK_SEQUENCE":
        return instructions[index].arg
    return None


def _in_assertion(frame: FrameType) -> bool:
    """Whether the truth value asked for in the running instruction decides nothing but an `assert`.

    True means that the program goes on (or looks at the next part of `assert a and b`), false that it raises.
    """
    instructions, index = _instructions(frame)
    if index >= 0 and instructions[index].opname in ("TO_BOOL", "UNARY_NOT"):
        if instructions[index].opname == "UNARY_NOT":
            return False  # `assert not x`: returning True here would make the assertion fail
        index += 1
    if index < 0 or index + 1 >= len(instructions):
        return False
    jump = instructions[index]
    if not jump.opname.startswith("POP_JUMP"):
        return False
    if jump.opname.endswith("IF_TRUE"):
        return _raises_assertion(instructions[index + 1])
    if jump.opname.endswith("IF_FALSE"):
        target = next((i for i in instructions if i.offset == jump.argval), None)
        return target is not None and _raises_assertion(target)
    return False


def _raises_assertion(instruction: dis.Instruction) -> bool:
    return instruction.opname == "LOAD_ASSERTION_ERROR" or (
        instruction.opname in ("LOAD_COMMON_CONSTANT", "LOAD_GLOBAL") and "AssertionError" in str(instruction.argval)
    )
