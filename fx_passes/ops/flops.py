"""FLOPs of the ops that multiply and add: one multiply-add is 2 FLOPs, as `torch.utils.flop_counter` counts.

Every function takes the shapes of the tensor operands (input, weight, ...) and of the output. Biases, activations and
other elementwise work count as zero: their cost is the memory they move, which `estimate_cost` states in bytes.
"""

from __future__ import annotations

from math import prod

from fx_passes.ops.op import Shape

__all__ = ["addmm_flops", "attention_flops", "conv_flops", "conv_transpose_flops", "linear_flops", "matmul_flops"]


def conv_flops(operands: tuple[Shape, ...], output: Shape) -> int:
    """Weight is (out, in / groups, *kernel): every output value takes in / groups * kernel products."""
    return 2 * prod(output) * prod(operands[1][1:])


def conv_transpose_flops(operands: tuple[Shape, ...], output: Shape) -> int:
    """Weight is (in, out / groups, *kernel): every *input* value goes into out / groups * kernel products."""
    return 2 * prod(operands[0]) * prod(operands[1][1:])


def linear_flops(operands: tuple[Shape, ...], output: Shape) -> int:
    return 2 * prod(output) * operands[1][-1]


def matmul_flops(operands: tuple[Shape, ...], output: Shape) -> int:
    return 2 * prod(output) * operands[0][-1]


def addmm_flops(operands: tuple[Shape, ...], output: Shape) -> int:
    return 2 * prod(output) * operands[1][-1]


def attention_flops(operands: tuple[Shape, ...], output: Shape) -> int:
    """Query (..., L, E), key (..., S, E), value (..., S, Ev): the two products, without the softmax."""
    query, key = operands[0], operands[1]
    return 2 * prod(query) * key[-2] + 2 * prod(output) * key[-2]
