"""Passes over `torch.fx` graphs: capture, functionalize, fuse, quantize, partition. Imports torch alone.

The names below are the public ones; each is loaded from its module when it is first asked for.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

_HOME = {
    "trace": "fx_passes.trace",
    "QuantizationTracer": "fx_passes.tracer",
    "wrap": "fx_passes.wrap",
    "GraphModuleWithAttr": "fx_passes.graph_module",
    "QuantStub": "fx_passes.stubs",
    "DeQuantStub": "fx_passes.stubs",
    "functionalize": "fx_passes.functional",
    "fuse_fx": "fx_passes.fuse",
    "prepare_calibration_fx": "fx_passes.quantize.prepare",
    "prepare_qat_fx": "fx_passes.quantize.prepare",
    "convert_fx": "fx_passes.quantize.convert",
    "sensitivity": "fx_passes.quantize.sensitivity",
    "search_mixed_precision": "fx_passes.quantize.mixed",
    "equalize_fx": "fx_passes.quantize.equalize",
    "QConfig": "fx_passes.quantize.qconfig",
    "propagate_shapes": "fx_passes.shapes",
    "estimate_cost": "fx_passes.cost",
    "profile_nodes": "fx_passes.profile",
    "draw": "fx_passes.draw",
    "autocast_fx": "fx_passes.amp",
}

__all__ = [
    "DeQuantStub",
    "GraphModuleWithAttr",
    "QConfig",
    "QuantStub",
    "QuantizationTracer",
    "autocast_fx",
    "convert_fx",
    "draw",
    "equalize_fx",
    "estimate_cost",
    "functionalize",
    "fuse_fx",
    "prepare_calibration_fx",
    "prepare_qat_fx",
    "profile_nodes",
    "propagate_shapes",
    "search_mixed_precision",
    "sensitivity",
    "trace",
    "wrap",
]

if TYPE_CHECKING:
    from fx_passes.amp import autocast_fx
    from fx_passes.cost import estimate_cost
    from fx_passes.draw import draw
    from fx_passes.functional import functionalize
    from fx_passes.fuse import fuse_fx
    from fx_passes.graph_module import GraphModuleWithAttr
    from fx_passes.profile import profile_nodes
    from fx_passes.quantize.convert import convert_fx
    from fx_passes.quantize.equalize import equalize_fx
    from fx_passes.quantize.mixed import search_mixed_precision
    from fx_passes.quantize.prepare import prepare_calibration_fx, prepare_qat_fx
    from fx_passes.quantize.qconfig import QConfig
    from fx_passes.quantize.sensitivity import sensitivity
    from fx_passes.shapes import propagate_shapes
    from fx_passes.stubs import DeQuantStub, QuantStub
    from fx_passes.trace import trace
    from fx_passes.tracer import QuantizationTracer
    from fx_passes.wrap import wrap


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fx_passes' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # Loading fx_passes/trace.py would bind the name of the function `trace` to the module.
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
