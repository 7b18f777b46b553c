"""How the executor holds each TensorRT type.

The reduced types (Half, BFloat16, Int8 and the 4- and 8-bit ones) are held in float32 *carriers* whose values are
always representable in the type. So a Half convolution is computed in float32 and rounded once, its consumer reads the
rounded values without a conversion, and an Int8 tensor can go through any layer that moves data. The conversion to the
real type happens where a tensor leaves the executor.
"""

from __future__ import annotations

import torch

from fx_passes.errors import InputError

__all__ = ["CARRIER", "FLOATING", "INTEGER", "TORCH", "round_to", "to_carrier", "to_network"]

#: The torch type of a tensor as users give and get it, by TensorRT's name.
TORCH: dict[str, torch.dtype] = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "FP8": torch.float8_e4m3fn,
    "INT4": torch.int8,  # torch has no 4-bit types that compute: one value an element
    "FP4": torch.float32,
}

#: The torch type inside the executor.
CARRIER: dict[str, torch.dtype] = {
    "FLOAT": torch.float32,
    "HALF": torch.float32,
    "BF16": torch.float32,
    "INT8": torch.float32,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "FP8": torch.float32,
    "INT4": torch.float32,
    "FP4": torch.float32,
}

FLOATING = frozenset({"FLOAT", "HALF", "BF16", "FP8", "FP4"})
INTEGER = frozenset({"INT8", "INT32", "INT64", "UINT8", "INT4"})

_ROUNDED = {"HALF": torch.float16, "BF16": torch.bfloat16, "FP8": torch.float8_e4m3fn}


def round_to(value: torch.Tensor, dtype: str) -> torch.Tensor:
    """Rounds a carrier to the values that `dtype` can represent (round half to even, as IEEE 754 does)."""
    if dtype == "FP4":
        return _round_fp4(value)
    narrow = _ROUNDED.get(dtype)
    return value if narrow is None else value.to(narrow).to(torch.float32)


def _round_fp4(value: torch.Tensor) -> torch.Tensor:
    """To E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), half to even, saturating; NaN gives 6."""
    size = torch.nan_to_num(value.abs(), nan=6.0).clamp(max=6.0)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign(torch.round(size / step) * step, value)


def to_carrier(value: torch.Tensor, dtype: str) -> torch.Tensor:
    """Takes a tensor in the network's type into the executor."""
    if dtype not in CARRIER:
        raise InputError(f"the reference executor does not hold tensors of type {dtype}")
    return value.to(CARRIER[dtype])


def to_network(value: torch.Tensor, dtype: str) -> torch.Tensor:
    """Takes a carrier out of the executor, in the network's type."""
    return value.to(TORCH[dtype])
