"""ELEMENTWISE, UNARY, ACTIVATION, PARAMETRIC_RELU, SCALE, SELECT, IDENTITY, CAST."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from lowering.trt.reference.dtypes import CARRIER, INTEGER
from lowering.trt.reference.kernel import Kernel, Layer

__all__ = ["activation", "cast", "elementwise", "identity", "parametric_relu", "scale", "select", "unary"]

Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Unary = Callable[[torch.Tensor], torch.Tensor]


def _divide(integer: bool) -> Binary:
    if integer:  # C semantics: truncates (TensorRT folds -7 / 2 to -3)
        return lambda a, b: torch.div(a, b, rounding_mode="trunc")
    return torch.div


def elementwise(layer: Layer) -> Kernel:
    """Inputs: two tensors of one type and rank; dimensions of size 1 broadcast."""
    layer.require_same_dtypes()
    op, integer = layer["op"], layer.dtype in INTEGER
    if layer.rank != len(layer.input(1).shape):
        raise layer.unsupported("has inputs of different ranks")
    comparisons: dict[str, Binary] = {"EQUAL": torch.eq, "GREATER": torch.gt, "LESS": torch.lt}
    if op in comparisons:
        return Kernel(comparisons[op], ("BOOL",), exact=True)
    exact: dict[str, Binary] = {
        "MAX": torch.maximum,
        "MIN": torch.minimum,
        "AND": torch.logical_and,
        "OR": torch.logical_or,
        "XOR": torch.logical_xor,
    }
    if op in exact:
        return layer.same(exact[op], exact=True)
    arithmetic: dict[str, Binary] = {
        "SUM": torch.add,
        "SUB": torch.sub,
        "PROD": torch.mul,
        "DIV": _divide(integer),
        "POW": torch.pow,
        "FLOOR_DIV": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    }
    return layer.same(arithmetic[op])


_UNARY: dict[str, Unary] = {
    "EXP": torch.exp,
    "LOG": torch.log,
    "SQRT": torch.sqrt,
    "RECIP": torch.reciprocal,
    "ABS": torch.abs,
    "NEG": torch.neg,
    "SIN": torch.sin,
    "COS": torch.cos,
    "TAN": torch.tan,
    "SINH": torch.sinh,
    "COSH": torch.cosh,
    "ASIN": torch.asin,
    "ACOS": torch.acos,
    "ATAN": torch.atan,
    "ASINH": torch.asinh,
    "ACOSH": torch.acosh,
    "ATANH": torch.atanh,
    "CEIL": torch.ceil,
    "FLOOR": torch.floor,
    "ERF": torch.erf,
    "NOT": torch.logical_not,
    "SIGN": torch.sign,
    "ROUND": torch.round,
    "ISINF": torch.isinf,
    "ISNAN": torch.isnan,
}


def unary(layer: Layer) -> Kernel:
    """Input: one tensor."""
    op = layer["op"]
    if op in ("ISINF", "ISNAN"):
        return Kernel(_UNARY[op], ("BOOL",), exact=True)
    return layer.same(_UNARY[op])


def activation(layer: Layer) -> Kernel:
    """Input: one tensor; `alpha` and `beta` as NVIDIA's documentation of `ActivationType` defines them."""
    alpha, beta, kind = float(layer["alpha"]), float(layer["beta"]), layer["type"]
    if kind == "CLIP" and layer.dtype in ("INT32", "INT64"):
        raise layer.unsupported(f"clips {layer.dtype}")
    functions: dict[str, Unary] = {
        "RELU": torch.relu,
        "SIGMOID": torch.sigmoid,
        "TANH": torch.tanh,
        "LEAKY_RELU": lambda x: F.leaky_relu(x, alpha),
        "ELU": lambda x: F.elu(x, alpha),
        "SELU": lambda x: beta * torch.where(x > 0, x, alpha * torch.expm1(torch.clamp(x, max=0))),
        "SOFTSIGN": F.softsign,
        "SOFTPLUS": lambda x: alpha * F.softplus(beta * x, threshold=float("inf")),
        "CLIP": lambda x: torch.clamp(x, alpha, beta),
        "HARD_SIGMOID": lambda x: torch.clamp(alpha * x + beta, 0, 1),
        "SCALED_TANH": lambda x: alpha * torch.tanh(beta * x),
        "THRESHOLDED_RELU": lambda x: torch.where(x > alpha, x, 0.0),
        "GELU_ERF": F.gelu,
        "GELU_TANH": lambda x: F.gelu(x, approximate="tanh"),
    }
    return layer.same(functions[kind], exact=kind == "RELU")


def parametric_relu(layer: Layer) -> Kernel:
    """Inputs: data, and slopes that broadcast to it."""
    layer.require_same_dtypes()
    return layer.same(lambda x, slope: torch.where(x < 0, x * slope, x))


def scale(layer: Layer) -> Kernel:
    """Input: (*leading, channel, *inner) → (x * scale + shift) ** power."""
    axis, mode, rank = int(layer["channel_axis"]), layer["mode"], layer.rank

    def coefficient(role: str) -> torch.Tensor | None:
        value = layer.weight(role)
        if value is None or mode == "UNIFORM":
            return value
        if mode == "CHANNEL":
            return value.reshape(-1, *(1,) * (rank - 1 - axis))
        return value.reshape(layer.input(0).shape[axis:])

    factor, shift, power = coefficient("scale"), coefficient("shift"), coefficient("power")

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x if factor is None else x * factor
        x = x if shift is None else x + shift
        return x if power is None else torch.pow(x, power)

    return layer.same(run)


def select(layer: Layer) -> Kernel:
    """Inputs: a bool condition, the values where it holds, the values where it does not; all of one rank."""
    if layer.dtype != "BOOL":
        raise layer.unsupported(f"has a condition of type {layer.dtype}")
    layer.require_same_dtypes(1, 2)
    return Kernel(torch.where, (layer.input(1).dtype,), exact=True)


def identity(layer: Layer) -> Kernel:
    """Input: one tensor. Where the network gives the output another type, it converts."""
    target = layer.outputs[0].dtype
    return Kernel(converter(layer, layer.dtype, target), (target,), exact=layer.dtype == target)


def cast(layer: Layer) -> Kernel:
    """Input: one tensor → the type `to_type`."""
    target = layer["to_type"]
    return Kernel(converter(layer, layer.dtype, target), (target,), exact=layer.dtype == target)


def converter(layer: Layer, source: str, target: str) -> Unary:
    """Converts carriers as C does: to integers by truncation (TensorRT's constant folding), to bool by != 0."""
    if target not in CARRIER:
        raise layer.unsupported(f"converts to {target}")
    if source == target:
        return lambda x: x
    if target == "BOOL":
        return lambda x: x != 0
    if target == "INT8":  # wraps from integers, as int -> uint8 was seen to; held in float32
        return lambda x: x.to(torch.int64).to(torch.int8).to(torch.float32)
    if target == "INT4":
        return lambda x: ((x.to(torch.int64) + 8) % 16 - 8).to(torch.float32)
    if target == "UINT8":
        return lambda x: x.to(torch.int64).to(torch.uint8)
    return lambda x: x.to(CARRIER[target])
