"""Running calibration data through a prepared module."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fx_passes.errors import CalibrationError, InputError, StageError
from fx_passes.quantize.prepare import observers_of

__all__ = ["arguments_of", "calibrate", "call_with_batch", "shown", "synchronize"]


def calibrate(prepared: GraphModule, batches: Iterable[Any], progress: bool = False) -> int:
    """Run every batch through `prepared`, whose observers take in the values.

    Args:
        prepared: from `prepare_calibration_fx`.
        batches: any iterable; a batch is a tensor, a tuple or list of positional arguments, or a dict of keyword
            arguments. It is iterated once.
        progress: show a progress bar.

    Returns:
        The number of batches.

    Raises:
        StageError: not a prepared module, or one in train mode.
        CalibrationError: no batches, or NaN or infinity in a value, which is named.
        InputError: a batch of another type.
    """
    if not isinstance(prepared, GraphModule) or prepared.meta.get("stage") != "prepared":
        raise StageError("only a prepared module can be calibrated", hint="call prepare_calibration_fx first")
    if prepared.training:
        raise StageError(
            "the prepared module is in train mode, where a BatchNorm or Dropout that was kept gives other values",
            hint="call prepared.eval() before calibrating",
        )
    count = 0
    with torch.no_grad():
        for batch in shown(batches) if progress else batches:
            call_with_batch(prepared, batch)
            count += 1
    if not count:
        raise CalibrationError(
            "there are no calibration batches",
            hint="the iterable is empty; an exhausted generator is, too. Pass a list or a DataLoader",
        )
    synchronize(prepared)
    return count


def call_with_batch(model: torch.nn.Module, batch: Any) -> Any:
    """`model` called with a batch as `calibrate` takes it."""
    args, kwargs = arguments_of(batch)
    return model(*args, **kwargs)


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a batch as `calibrate` takes it."""
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, dict):
        return (), batch
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    raise InputError(
        f"a batch is a {type(batch).__name__}",
        hint="pass tensors, tuples of the model's positional arguments, or dicts of its keyword arguments",
    )


def synchronize(prepared: GraphModule, group: Any = None) -> None:
    """Merge the ranges of all ranks of a `torch.distributed` job (a collective call); without one, do nothing.

    `calibrate` does this by itself; needed where the module was called directly.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        for observer in observers_of(prepared).values():
            observer.synchronize(group)


def shown(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, with a progress bar."""
    from rich.progress import track

    yield from track(batches, description="calibrating", total=operator.length_hint(batches, 0) or None)
