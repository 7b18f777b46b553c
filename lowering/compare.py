"""How far the outputs of a lowered model are from those of another run of the same model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fx_passes.errors import InputError

__all__ = ["Agreement", "agreement", "compare", "sqnr"]


@dataclass(frozen=True)
class Agreement:
    """Two runs of a model over the same batches.

    Args:
        samples: rows compared (dimension 0 of the first output).
        sqnr_db: signal to quantization-noise ratio in dB, over all values; infinite where they are equal.
        cosine: mean over rows of the cosine between the two, all dimensions but the first flattened.
        worst: largest absolute difference.
        top1: share of rows whose largest value is at the same place; None if rows have a single value.
    """

    samples: int
    sqnr_db: float
    cosine: float
    worst: float
    top1: float | None


def sqnr(reference: Tensor, other: Tensor) -> float:
    """10 log10(|reference|² / |reference - other|²) in dB; infinite if they are equal, 0-dim and empty tensors too.

    >>> round(sqnr(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.9])), 1)
    23.0
    """
    reference, other = reference.double(), other.double()
    noise = float((reference - other).square().sum())
    signal = float(reference.square().sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def agreement(reference: Tensor, other: Tensor) -> Agreement:
    """Compare two floating point tensors of the same shape (n, ...).

    Raises:
        InputError: their shapes differ.
    """
    if reference.shape != other.shape:
        raise InputError(f"outputs have shapes {tuple(reference.shape)} and {tuple(other.shape)}")
    rows = reference.double().reshape(reference.shape[0] if reference.dim() else 1, -1)
    others = other.double().reshape(rows.shape)
    # Equal rows have cosine 1, all-zero ones too, where the quotient is 0 / 0.
    norms = rows.norm(dim=1) * others.norm(dim=1)
    equal = (rows == others).all(dim=1)
    cosines = torch.where(equal, torch.ones_like(norms), (rows * others).sum(1) / norms.clamp_min(1e-300))
    top1 = float((rows.argmax(1) == others.argmax(1)).double().mean()) if rows.shape[1] > 1 else None
    return Agreement(
        samples=rows.shape[0],
        sqnr_db=sqnr(reference, other),
        cosine=float(cosines.mean()),
        worst=float((rows - others).abs().max()) if rows.numel() else 0.0,
        top1=top1,
    )


def compare(
    reference: Callable[..., Any], candidates: Mapping[str, Callable[..., Any]], batches: Iterable[Any]
) -> dict[str, list[Agreement]]:
    """Run `reference` and every candidate over the same batches and compare each floating point output.

    Args:
        reference: usually the float model, in eval mode.
        candidates: name to a lowered module, its `simulate`, a converted graph, ...
        batches: tensors, tuples of positional or dicts of keyword arguments; read once.

    Returns:
        For every candidate one `Agreement` per floating point tensor of the output, in the order of the output.

    Raises:
        InputError: no batch, or a candidate's output has another structure than the reference's.
    """
    expected: list[list[Tensor]] = []
    found: dict[str, list[list[Tensor]]] = {name: [] for name in candidates}
    with torch.no_grad():
        for batch in batches:
            expected.append(_floats(_call(reference, batch)))
            for name, candidate in candidates.items():
                outputs = _floats(_call(candidate, batch))
                if len(outputs) != len(expected[-1]):
                    raise InputError(f"{name} returns {len(outputs)} tensors, the reference {len(expected[-1])}")
                found[name].append(outputs)
    if not expected:
        raise InputError("there is nothing to compare on", hint="pass at least one batch")
    return {
        name: [
            agreement(_stacked(reference_parts), _stacked(other_parts))
            for reference_parts, other_parts in zip(
                zip(*expected, strict=True), zip(*outputs, strict=True), strict=True
            )
        ]
        for name, outputs in found.items()
    }


def _call(run: Callable[..., Any], batch: Any) -> Any:
    from lowering.request.inputs import Example

    example = Example.of(batch)
    return run(*example.args, **example.kwargs)


def _floats(output: Any) -> list[Tensor]:
    return [
        leaf.detach().float()
        for leaf in pytree.tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def _stacked(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([part.reshape(1, *part.shape) if part.dim() == 0 else part for part in parts])
