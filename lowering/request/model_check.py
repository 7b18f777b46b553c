"""What can be lowered at all: a module in Python, whose weights are there."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn

from fx_passes.entry.ambient import refuse_global_hooks
from fx_passes.errors import InputError

__all__ = ["check_model"]


def check_model(model: Any) -> None:
    """Refuse a model that has no Python forward to capture, or no values for its weights.

    Raises:
        InputError: no module, a scripted one, or one with a parameter or buffer that is on the meta device or waits for
            a first call (`nn.LazyLinear`); the message names it.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}", hint="pass a torch.nn.Module or a torch.fx.GraphModule")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            f"model is a {type(model).__name__}, which has no Python forward to capture",
            hint="pass the nn.Module it was scripted or traced from",
        )
    refuse_global_hooks()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise InputError(
                f"'{name}' has no shape yet: its lazy module was never called",
                hint="call the model once with example inputs before lowering it",
            )
        if tensor.is_meta:
            raise InputError(
                f"'{name}' is on the meta device and has no values",
                hint="model.to_empty(device='cpu'), then load its weights",
            )
