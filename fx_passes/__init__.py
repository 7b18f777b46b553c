"""Passes over `torch.fx` graphs: capture, functionalize, fuse, quantize, partition. Imports torch alone.

The names below are the public ones; each is loaded from its module when it is first asked for.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

_HOME = {
    "trace": "fx_passes.capture.trace",
    "QuantizationTracer": "fx_passes.capture.tracer",
    "wrap": "fx_passes.capture.wrap",
    "GraphModuleWithAttr": "fx_passes.graph.module",
    "QuantStub": "fx_passes.capture.stubs",
    "DeQuantStub": "fx_passes.capture.stubs",
    "functionalize": "fx_passes.functional.functional",
    "fuse_fx": "fx_passes.fuse.fuse",
    "prepare_calibration_fx": "fx_passes.quantize.prepare",
    "prepare_qat_fx": "fx_passes.quantize.prepare",
    "convert_fx": "fx_passes.quantize.convert",
    "sensitivity": "fx_passes.quantize.accuracy.sensitivity",
    "search_mixed_precision": "fx_passes.quantize.accuracy.mixed",
    "equalize_fx": "fx_passes.quantize.channels.equalize",
    "QConfig": "fx_passes.quantize.qconfig",
    "propagate_shapes": "fx_passes.analysis.shapes",
    "estimate_cost": "fx_passes.analysis.cost",
    "profile_nodes": "fx_passes.analysis.profile",
    "draw": "fx_passes.analysis.draw",
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
    from fx_passes.analysis.cost import estimate_cost
    from fx_passes.analysis.draw import draw
    from fx_passes.analysis.profile import profile_nodes
    from fx_passes.analysis.shapes import propagate_shapes
    from fx_passes.capture.stubs import DeQuantStub, QuantStub
    from fx_passes.capture.trace import trace
    from fx_passes.capture.tracer import QuantizationTracer
    from fx_passes.capture.wrap import wrap
    from fx_passes.functional.functional import functionalize
    from fx_passes.fuse.fuse import fuse_fx
    from fx_passes.graph.module import GraphModuleWithAttr
    from fx_passes.quantize.accuracy.mixed import search_mixed_precision
    from fx_passes.quantize.accuracy.sensitivity import sensitivity
    from fx_passes.quantize.channels.equalize import equalize_fx
    from fx_passes.quantize.convert import convert_fx
    from fx_passes.quantize.prepare import prepare_calibration_fx, prepare_qat_fx
    from fx_passes.quantize.qconfig import QConfig


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
