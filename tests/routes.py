"""A model through every way that this project offers, each compared with the model itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fx_passes import convert_fx, fuse_fx, prepare_calibration_fx, prepare_qat_fx, trace
from fx_passes.graph.copies import copied_inputs
from lowering import LoweredModule, lower_to_onnx, lower_to_trt
from lowering.compare import sqnr

__all__ = ["LOWERINGS", "ROUTES", "agrees", "same_on"]

INT8_DB = 20.0  # a hook, a scale or a layer that is lost costs far more

Runs = Callable[..., Any]


def _ptq(model: nn.Module, inputs: Any) -> Runs:
    prepared = prepare_calibration_fx(model, inputs, target="onnxruntime")
    _call(prepared, inputs)
    return convert_fx(prepared)


def _qat(model: nn.Module, inputs: Any) -> Runs:
    trained = prepare_qat_fx(model, inputs, target="onnxruntime").train()
    _call(trained, inputs)
    return trained.eval()


def _lowering(lower: Callable[..., LoweredModule], precision: str) -> Callable[[nn.Module, Any], Runs]:
    def run(model: nn.Module, inputs: Any) -> Runs:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "int8 is calibrated on the example")
            lowered = lower(model, inputs, precision=precision)
        return lowered

    return run


LOWERINGS: dict[str, Callable[[nn.Module, Any], Runs]] = {
    f"{name} {precision}": _lowering(lower, precision)
    for name, lower in (("onnx", lower_to_onnx), ("trt", lower_to_trt))
    for precision in ("fp32", "int8")
}
ROUTES: dict[str, Callable[[nn.Module, Any], Runs]] = {
    "trace": trace,
    "fuse": fuse_fx,
    "ptq": _ptq,
    "qat": _qat,
    **LOWERINGS,
}


def agrees(route: str, model: nn.Module, inputs: Any, *, segments: int = 1, fallbacks: int = 0) -> Runs:
    """Take `model` through a route and compare what comes out with the model on these inputs.

    Args:
        route: a key of `ROUTES`.
        model: in eval mode.
        inputs: a tensor, a tuple of arguments, or a dict of keyword arguments.
        segments, fallbacks: how many a lowering must have.

    Returns:
        What the route gives.
    """
    result = ROUTES[route](model, inputs)
    if isinstance(result, LoweredModule):
        report = result.report()
        assert (len(report["segments"]), len(report["fallbacks"])) == (segments, fallbacks), result.summary()
        if fallbacks == 0:
            assert report["flops_share"] >= 0.99
    same_on(result, model, inputs, exact=route in ("trace", "fuse") or route.endswith("fp32"))
    return result


def same_on(result: Runs, model: nn.Module, inputs: Any, *, exact: bool) -> None:
    """Compare the outputs of `result` and `model` on these inputs, to 1e-4 or as int8 allows."""
    run = result.simulate if isinstance(result, LoweredModule) and _simulates(result) else result
    with torch.no_grad():
        expected, actual = _call(model, inputs), _call(run, inputs)
    pairs = list(zip(_tensors(expected), _tensors(actual), strict=True))
    assert pairs
    for wanted, found in pairs:
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        if exact:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        else:
            assert sqnr(wanted, found) >= INT8_DB


def _simulates(lowered: LoweredModule) -> bool:
    return any(hasattr(segment.backend, "simulate") for segment in lowered.backend_segments())


def _call(run: Callable[..., Any], inputs: Any) -> Any:
    inputs = copied_inputs(inputs)
    if isinstance(inputs, dict):
        return run(**inputs)
    return run(*inputs) if isinstance(inputs, tuple) else run(inputs)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
