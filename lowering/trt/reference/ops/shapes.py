"""CONSTANT, SHAPE, FILL, ASSERTION."""

from __future__ import annotations

import torch

from lowering.trt.reference.dtypes import CARRIER, TORCH
from lowering.trt.reference.kernel import Kernel, Layer

__all__ = ["assertion", "constant", "fill", "shape"]


def constant(layer: Layer) -> Kernel:
    """No input → the weights in their shape. The type of the output is that of the weights."""
    dtype = layer.outputs[0].dtype
    value, stored = layer.weight("weights"), layer.weight_dtype("weights")
    if value is None:
        value = torch.empty(0, dtype=CARRIER[dtype])
    elif stored != TORCH[dtype]:
        raise layer.unsupported(f"has weights of {stored}, but gives {dtype}")
    shaped = value.reshape(layer.axis_list("shape"))
    return Kernel(lambda: shaped, (dtype,), exact=True)


def shape(layer: Layer) -> Kernel:
    """Input: any tensor → its shape, (rank,), int64."""
    return Kernel(lambda x: torch.tensor(x.shape, dtype=torch.int64), ("INT64",), exact=True)


def fill(layer: Layer) -> Kernel:
    """Inputs: shape (1-D), start (0-D) and delta (1-D, one per dimension), each where it is computed.

    LINSPACE gives start + delta · index. The random operations have no reference value.
    """
    operation, dtype = layer["operation"], str(layer["to_type"])
    if operation != "LINSPACE":
        raise layer.unsupported(f"fills with {operation}, whose values depend on the device")
    static, alpha, beta = layer["shape"], layer["alpha"], layer["beta"]
    carrier = CARRIER[dtype]

    def run(
        dims: torch.Tensor | None = None, start: torch.Tensor | None = None, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        size = tuple(static) if dims is None else tuple(dims.tolist())
        first = torch.tensor(alpha, dtype=carrier) if start is None else start.reshape(()).to(carrier)
        steps = torch.tensor([beta], dtype=carrier) if delta is None else delta.reshape(-1).to(carrier)
        value = first
        for dimension, (n, step) in enumerate(zip(size, steps, strict=True)):
            ramp = torch.arange(n, dtype=carrier) * step
            value = value + ramp.reshape(-1, *(1,) * (len(size) - 1 - dimension))
        return value.expand(size).to(carrier)

    return Kernel(run, (dtype,))


def assertion(layer: Layer) -> Kernel:
    """Input: a bool tensor that must hold → nothing."""
    message = layer["message"]

    def run(condition: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not bool(condition.all()):
            raise ValueError(f"assertion failed: {message}")
        return ()

    return Kernel(run, ())
