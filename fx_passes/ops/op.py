"""What the op table says about one op."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Amp", "Op", "Result", "Role", "Shape"]

Shape = tuple[int, ...]

Result = Literal["fresh", "view", "alias"]
"""What an op's result shares with its first tensor argument: new memory, always the same memory, or either of both
(`reshape`, `contiguous`, `to`, dropout in eval mode)."""

Amp = Literal["lower", "fp32", "promote", "follow"]
"""Under autocast: runs in the low precision, in float32, in the widest type of its inputs, or in its input's type."""


class Role(enum.Enum):
    """What an op is to quantization and fusing."""

    WEIGHTED = "weighted"  # convolution, transposed convolution, linear
    ELEMENTWISE_ADD = "elementwise_add"  # add and sub
    ELEMENTWISE_MUL = "elementwise_mul"  # mul and div
    ACTIVATION = "activation"  # one tensor in, elementwise
    POOL_MAX = "pool_max"  # picks values, so it commutes with quantization
    POOL_AVG = "pool_avg"
    RESHAPE = "reshape"  # moves data only: every output value is an input value
    CONCAT = "concat"
    NORM = "norm"
    MATMUL = "matmul"  # product of two activations
    SOFTMAX = "softmax"
    REDUCTION = "reduction"
    QUANTIZE = "quantize"
    DEQUANTIZE = "dequantize"
    SHAPE = "shape"  # the result is no tensor: sizes, dtypes, integer arithmetic on them
    CAST = "cast"
    FACTORY = "factory"
    OTHER = "other"


@dataclass(frozen=True)
class Op:
    """One op, however it is spelled.

    Attributes:
        name: canonical, aten-like name ("conv2d", "add", "adaptive_avg_pool2d").
        role: what it is to quantization and fusing.
        modules: exact module classes that compute it (a subclass may compute anything).
        functions: Python callables that compute it.
        methods: names of tensor methods that compute it.
        aten: qualified names of the `torch.ops` packets that compute it ("aten::conv2d").
        result: what the result may share with its first tensor argument.
        inplace: in-place spelling (callable, or method name) -> the out-of-place function, or method name, with the
            same arguments. In-place packets of `torch.ops` need no entry: `lookup.out_of_place` finds their twin.
        inplace_casts: the out-of-place result may have another dtype than the tensor that the in-place op writes to,
            whatever the operands are (comparisons write 0 and 1 into a float tensor).
        amp: what autocast does with it.
        input, weight, bias: positions of these arguments in the functional spelling, None where there is none.
        channel_axis: axis of the weight that runs over output channels. Of a grouped transposed convolution it runs
            over the channels of one group only: output channel = group * weight.shape[1] + index.
        effects: draws random numbers or updates statistics in training: never removed as dead code then.
        flops: FLOPs from (shapes of input and weight, or of all tensor operands; output shape); None counts as zero.
    """

    name: str
    role: Role
    modules: tuple[type, ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()
    methods: tuple[str, ...] = ()
    aten: tuple[str, ...] = ()
    result: Result = "fresh"
    inplace: Mapping[Callable[..., Any] | str, Callable[..., Any] | str] = field(default_factory=dict)
    inplace_casts: bool = False
    amp: Amp = "follow"
    input: int = 0
    weight: int | None = None
    bias: int | None = None
    channel_axis: int | None = None
    effects: bool = False
    flops: Callable[[tuple[Shape, ...], Shape], int] | None = None

    def __repr__(self) -> str:
        return f"Op({self.name!r}, {self.role.name})"
