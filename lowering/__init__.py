"""Lower a PyTorch model to int8 engines and sessions: `lower_to_trt`, `lower_to_onnx`, `load`.

Nothing heavy is imported here: TensorRT, ONNX Runtime and torch's exporter load when they are first needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowering.api import lower_to_onnx, lower_to_trt
    from lowering.artifact.load import load
    from lowering.artifact.merging import merge
    from lowering.module import LoweredModule
    from lowering.request.search import PlacementSearch
    from lowering.request.settings import Settings

__all__ = ["LoweredModule", "PlacementSearch", "Settings", "load", "lower_to_onnx", "lower_to_trt", "merge"]

_HOME = {
    "LoweredModule": "lowering.module",
    "PlacementSearch": "lowering.request.search",
    "Settings": "lowering.request.settings",
    "load": "lowering.artifact.load",
    "lower_to_onnx": "lowering.api",
    "lower_to_trt": "lowering.api",
    "merge": "lowering.artifact.merging",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lowering' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
