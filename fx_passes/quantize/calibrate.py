"""Running calibration data through a prepared module."""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fx_passes.entry.ambient import as_caller, plain_state
from fx_passes.entry.call import arguments_of, call_signature
from fx_passes.errors import CalibrationError, InputError, StageError
from fx_passes.quantize.prepare import observers_of

__all__ = ["calibrate", "call_with_batch", "check_batch", "checked", "shown", "synchronize"]


@plain_state()
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
        InputError: a batch of another type, that the module cannot be called with, or of other dtypes than the example.

    Warns:
        UserWarning: every batch is zero throughout, which gives no range.
    """
    if not isinstance(prepared, GraphModule) or prepared.meta.get("stage") != "prepared":
        raise StageError("only a prepared module can be calibrated", hint="call prepare_calibration_fx first")
    if prepared.training:
        raise StageError(
            "the prepared module is in train mode, where a BatchNorm or Dropout that was kept gives other values",
            hint="call prepared.eval() before calibrating",
        )
    count, example = 0, prepared.meta.get("example_inputs")
    with torch.no_grad():
        for batch in checked(shown(batches) if progress else batches, call_signature(prepared), example):
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


def checked(batches: Iterable[Any], signature: inspect.Signature, example: Any) -> Iterator[Any]:
    """The batches, each of which fits a signature and the example; after the last, a warning if all were zero.

    Args:
        batches: as `calibrate` takes them.
        signature: of what they are given to.
        example: inputs that it is known to take, or None.

    Raises:
        InputError: as `check_batch`.
    """
    zero: str | None = None
    alive = False
    for index, batch in enumerate(as_caller(batches)):
        given = check_batch(batch, index, signature, example)
        values = {name: t for name, value in given.items() for t in _tensors(value) if t.is_floating_point()}
        zero = zero or next(iter(values), None)
        alive = alive or any(bool(t.any()) for t in values.values())
        yield batch
    if zero is not None and not alive:
        warnings.warn(
            f"the input '{zero}' is zero in every calibration batch, which gives no range to quantize with; "
            "pass real data",
            stacklevel=3,
        )


def check_batch(batch: Any, index: int, signature: inspect.Signature, example: Any) -> dict[str, Any]:
    """The arguments of a batch by their names.

    Args:
        batch, signature, example: as in `checked`.
        index: number of the batch, for messages.

    Raises:
        InputError: the signature does not take these arguments, or an argument has floating point values where the
            example's has others (also of another width).
    """
    args, kwargs = arguments_of(batch)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise InputError(
            f"the model cannot be called with calibration batch {index}: {error} (its forward is forward{signature})",
            hint="pass one value for each argument; for a loader of (images, labels) pass only the images",
        ) from error
    if example is None:
        return given
    args, kwargs = arguments_of(example)
    for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
        for theirs, ours in zip(_tensors(value), _tensors(given.get(name)), strict=False):
            if theirs.dtype != ours.dtype and (theirs.is_floating_point() or ours.is_floating_point()):
                raise InputError(
                    f"'{name}' of calibration batch {index} is {ours.dtype}, and {theirs.dtype} in the example inputs",
                    hint=f"convert the batches: batch.to({theirs.dtype})",
                )
    return given


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


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
