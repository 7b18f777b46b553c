"""Compute capabilities by any of their names: "8.9", "sm89", 8.9, (8, 9), "RTX 4090", "Ada"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from fx_passes.errors import InputError
from lowering.trt.bindings import flavour, trt

__all__ = ["gpu_capability", "offered", "parse_capability", "resolve_capabilities"]

# NVIDIA, "CUDA GPU compute capability" (developer.nvidia.com/cuda-gpus). Longest match wins.
_GPUS = {
    "turing": "7.5",
    "gtx 16": "7.5",
    "rtx 20": "7.5",
    "quadro rtx": "7.5",
    "titan rtx": "7.5",
    "t4": "7.5",
    "ampere": "8.6",
    "a100": "8.0",
    "a30": "8.0",
    "a2": "8.6",
    "a10": "8.6",
    "a16": "8.6",
    "a40": "8.6",
    "rtx a": "8.6",
    "rtx 30": "8.6",
    "ada": "8.9",
    "rtx 40": "8.9",
    "l4": "8.9",
    "l40": "8.9",
    "l40s": "8.9",
    "hopper": "9.0",
    "h100": "9.0",
    "h200": "9.0",
    "gh200": "9.0",
    "b200": "10.0",
    "gb200": "10.0",
    "blackwell": "12.0",
    "rtx 50": "12.0",
    "rtx pro": "12.0",
    "gb10": "12.1",
    "dgx spark": "12.1",
}
_SERIES = re.compile(r"\b((?:rtx|gtx) ?)(\d\d)\d\d\b")


def parse_capability(name: Any) -> str:
    """One capability as "major.minor".

    Args:
        name: "8.9", "sm89", "sm_89", "compute_89", 8.9, 89, (8, 9), a GPU's name, or an architecture's.

    Raises:
        InputError: it is none of these.

    Example:
        >>> parse_capability("NVIDIA GeForce RTX 4090"), parse_capability("sm_120"), parse_capability((8, 6))
        ('8.9', '12.0', '8.6')
    """
    if isinstance(name, tuple | list) and len(name) == 2 and all(isinstance(v, int) for v in name):
        return f"{name[0]}.{name[1]}"
    if isinstance(name, int | float) and not isinstance(name, bool):
        name = str(name)
    if not isinstance(name, str):
        raise InputError(f"{name!r} is no compute capability", hint='write it like "8.9", "sm89" or "RTX 4090"')
    text = name.strip().lower()
    if match := re.fullmatch(r"(?:sm_?|compute_?|cc ?)?(\d+)\.(\d)", text):
        return f"{int(match[1])}.{match[2]}"
    if match := re.fullmatch(r"(?:sm_?|compute_?|cc ?)?(\d{1,2})(\d)a?", text):
        return f"{int(match[1])}.{match[2]}"
    known = gpu_capability(text)
    if known is None:
        names = ", ".join(sorted(_GPUS))
        hint = f'write it like "8.9", "sm89" or "RTX 4090"; of the names of GPUs these are known: {names}'
        raise InputError(f"unknown compute capability {name!r}", hint=hint)
    return known


def gpu_capability(gpu: str) -> str | None:
    """The capability of a GPU by (part of) its marketing name, or None."""
    text = re.sub(r"[-_\s]+", " ", gpu.lower().replace("geforce", "").replace("nvidia", "")).strip()
    text = re.sub(r"\b(rtx|gtx)(\d)", r"\1 \2", text)
    text = _SERIES.sub(r"\1\2", text)
    words = [key for key in _GPUS if re.search(rf"\b{re.escape(key)}(?![0-9a-z])", text)]
    words += [key for key in ("rtx a", "gtx 16") if re.search(rf"\b{key}", text)]
    return _GPUS[max(words, key=len)] if words else None


def offered() -> dict[str, str]:
    """ "major.minor" -> member of `tensorrt.ComputeCapability`, for what the installed TensorRT-RTX builds for."""
    members = trt.ComputeCapability.__members__
    return {parse_capability(m): m for m in members if re.fullmatch(r"SM\d+", m)}


def resolve_capabilities(names: Any) -> tuple[str, ...] | None:
    """Distinct capabilities, sorted, that the installed TensorRT can build for; None stays None (one portable engine).

    Args:
        names: one capability or a list of them, in any of the forms of `parse_capability`.

    Raises:
        InputError: an unknown name, an empty list, or one that this TensorRT does not build for.
    """
    if names is None:
        return None
    single = isinstance(names, str | int | float) or (
        isinstance(names, tuple) and len(names) == 2 and all(isinstance(v, int) for v in names) and names[0] < 20
    )
    items: Sequence[Any] = [names] if single else list(names)
    if not items:
        raise InputError("compute_capabilities is empty", hint="None gives one portable engine")
    found = sorted({parse_capability(item) for item in items}, key=lambda c: tuple(map(int, c.split("."))))
    if flavour() == "rtx":
        _check_offered(found)
        return tuple(found)
    own = "{}.{}".format(*torch.cuda.get_device_capability())
    if found != [own]:
        raise InputError(
            f"TensorRT builds for this machine's GPU ({own}), not for {', '.join(found)}",
            hint="leave compute_capabilities at None, or use the tensorrt_rtx flavour",
        )
    return tuple(found)


def _check_offered(capabilities: Sequence[str]) -> None:
    known = offered()
    if missing := [c for c in capabilities if c not in known]:
        raise InputError(
            f"TensorRT-RTX builds for compute capabilities {', '.join(known)}, not for {', '.join(missing)}",
            hint="RTX engines are for RTX-class GPUs; for data-centre GPUs write a file for TensorRT with "
            'lower_to_onnx(..., runtime="tensorrt")',
        )
