"""The float graph that quantization starts from."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import GraphModule

from fx_passes.errors import InputError, StageError
from fx_passes.fuse.fuse import fuse_fx

__all__ = ["fused_float"]


def fused_float(model: nn.Module, example_inputs: Any = None) -> GraphModule:
    """The fused eval graph of `model`, whatever float stage it is at; example inputs as for `trace`."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}", hint="pass a torch.nn.Module or a torch.fx.GraphModule")
    stage = model.meta.get("stage") if isinstance(model, GraphModule) else None
    if stage in ("prepared", "prepared_qat", "converted"):
        raise StageError(f"this graph is already {stage}", hint="start from the float model")
    return model if stage == "fused" else fuse_fx(model, example_inputs)  # type: ignore[return-value]
