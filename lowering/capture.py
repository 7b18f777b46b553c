"""From what the user has (a float module, or a graph at any stage) to the graph that is partitioned and exported."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import nn
from torch.fx import GraphModule

from fx_passes.errors import InputError, StageError
from fx_passes.graph.copies import deep_copy

if TYPE_CHECKING:
    from lowering.request.inputs import ShapeRange
    from lowering.request.request import Request

__all__ = ["captured", "warn_of_few"]


def captured(model: nn.Module, sizes: ShapeRange, request: Request) -> GraphModule:
    """The model as a fused graph; for int8 and "auto" converted for the target. Stages already passed are skipped.

    Raises:
        CaptureError: neither symbolic tracing nor `torch.export` makes a graph of the model.
        InputError: there is a quantization configuration that nothing would read.
        StageError: the graph was traced in train mode, converted for another target, or is int8 already while a
            float precision is asked for.
        CalibrationError: there is nothing to calibrate on, or a tensor's values give no range.
    """
    from fx_passes import fuse_fx, prepare_calibration_fx
    from fx_passes.capture.state import restored_state
    from fx_passes.quantize.calibrate import calibrate

    data, target, qconfig = request.data, request.backend.target, request.qconfig
    if qconfig is not None and not request.quantizes:
        raise InputError(
            f"qconfig is given with precision={request.precision!r}", hint="it is for precision='int8' or 'auto'"
        )
    stage = model.meta.get("stage") if isinstance(model, GraphModule) else None
    if stage in ("prepared", "prepared_qat", "converted"):
        assert isinstance(model, GraphModule)
        if qconfig is not None:
            raise StageError(
                f"qconfig is given for a graph that is already {stage}", hint="give it to prepare_calibration_fx"
            )
        _check_target(model, target, request)
        if stage == "prepared" and data:
            model = deep_copy(model)
            calibrate(model, data, progress=request.shows_progress)
        return model if stage == "converted" else _converted(model, sizes, request)
    inputs = sizes.opt.inputs()
    varying = (sizes.min.inputs(), sizes.max.inputs()) if sizes.dynamic else (inputs, inputs)
    fused = fuse_fx(model, sizes.export.inputs(), varying=varying)
    if not request.quantizes:
        return fused
    if request.search is not None:
        from lowering.placement.search import widened

        fused, qconfig = widened(fused, qconfig)
    prepared = prepare_calibration_fx(fused, inputs, target=target, qconfig=qconfig)
    if not data:
        warn_of_few(stacklevel=5)
    # Calls that calibrate are none of the caller's: a counter in a buffer stays, and one that a wrapped method keeps.
    with restored_state(prepared.__dict__.get("_self", model)):
        calibrate(prepared, request.batches(sizes.opt), progress=request.shows_progress)
        return _converted(prepared, sizes, request)


def _converted(prepared: GraphModule, sizes: ShapeRange, request: Request) -> GraphModule:
    """Converted as placed, or as a search places it anew."""
    from fx_passes import convert_fx

    if request.search is None:
        return convert_fx(prepared, request.batches(sizes.opt), progress=request.shows_progress)
    from lowering.placement.search import searched

    return searched(prepared, sizes, request)


def warn_of_few(stacklevel: int) -> None:
    """Say that there is no calibration data, to whoever is `stacklevel` calls above."""
    warnings.warn(
        "int8 is calibrated on the example inputs alone; pass calibration= with real data for usable accuracy",
        stacklevel=stacklevel,
    )


def _check_target(model: GraphModule, target: str, request: Request) -> None:
    made_for = model.meta.get("target")
    if made_for != target:
        raise StageError(
            f"this graph was prepared for {made_for!r} and is lowered for {target!r}",
            hint=f"prepare the float model with target={target!r}",
        )
    if not request.quantizes:
        raise StageError(
            f"this graph is quantized, and precision={request.precision!r} is asked for",
            hint="lower the float model, or ask for precision='int8'",
        )
