"""From what the user has (a float module, or a graph at any stage) to the graph that is partitioned and exported."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.fx import GraphModule

from fx_passes.errors import InputError, StageError

if TYPE_CHECKING:
    from lowering.inputs import CalibrationData, ShapeRange
    from lowering.settings import Settings

__all__ = ["captured"]


def captured(
    model: nn.Module,
    sizes: ShapeRange,
    target: str,
    precision: str,
    data: CalibrationData,
    qconfig: Any,
    settings: Settings,
) -> GraphModule:
    """The model as a fused graph; for int8 and "auto" converted for `target`. Stages already passed are skipped.

    Raises:
        InputError: there is a quantization configuration that nothing would read.
        StageError: the graph was traced in train mode, converted for another target, or is int8 already while a
            float precision is asked for.
        CalibrationError: there is nothing to calibrate on, or a tensor's values give no range.
    """
    from fx_passes import convert_fx, fuse_fx, prepare_calibration_fx
    from fx_passes.quantize.calibrate import calibrate

    if qconfig is not None and precision not in ("int8", "auto"):
        raise InputError(f"qconfig is given with precision={precision!r}", hint="it is for precision='int8' or 'auto'")
    progress = sys.stderr.isatty() if settings.progress is None else settings.progress
    stage = model.meta.get("stage") if isinstance(model, GraphModule) else None
    if stage in ("prepared", "prepared_qat", "converted"):
        assert isinstance(model, GraphModule)
        if qconfig is not None:
            raise StageError(
                f"qconfig is given for a graph that is already {stage}", hint="give it to prepare_calibration_fx"
            )
        _check_target(model, target, precision)
        if stage == "prepared" and data:
            model = copy.deepcopy(model)
            calibrate(model, data, progress=progress)
        return model if stage == "converted" else convert_fx(model)
    inputs = sizes.opt.inputs()
    varying = (sizes.min.inputs(), sizes.max.inputs()) if sizes.dynamic else (inputs, inputs)
    fused = fuse_fx(model, sizes.export.inputs(), varying=varying)
    if precision not in ("int8", "auto"):
        return fused
    prepared = prepare_calibration_fx(fused, inputs, target=target, qconfig=qconfig)
    if not data:
        warnings.warn(
            "int8 is calibrated on the example inputs alone; pass calibration= with real data for usable accuracy",
            stacklevel=4,
        )
    calibrate(prepared, data if data else [inputs], progress=progress)
    return convert_fx(prepared)


def _check_target(model: GraphModule, target: str, precision: str) -> None:
    made_for = model.meta.get("target")
    if made_for != target:
        raise StageError(
            f"this graph was prepared for {made_for!r} and is lowered for {target!r}",
            hint=f"prepare the float model with target={target!r}",
        )
    if precision not in ("int8", "auto"):
        raise StageError(
            f"this graph is quantized, and precision={precision!r} is asked for",
            hint="lower the float model, or ask for precision='int8'",
        )
