"""Input specs and checks of sizes in a manifest, read back with every type checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from fx_passes.capture.conditions import ARITY, Condition
from fx_passes.errors import ArtifactError
from lowering.artifact.plain import checked, lists, shape_from_plain
from lowering.segment.program import SizeCheck, TensorSpec

__all__ = [
    "check_from_plain",
    "check_to_plain",
    "dtype_from_plain",
    "spec_from_plain",
    "spec_to_plain",
]

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_DEEPEST = 200  # operations inside each other in one condition


def spec_to_plain(spec: TensorSpec) -> dict[str, Any]:
    """Plain data for a manifest."""
    return lists({**asdict(spec), "dtype": str(spec.dtype).removeprefix("torch.")})


def spec_from_plain(plain: Any) -> TensorSpec:
    """The spec that `spec_to_plain` wrote.

    Raises:
        ArtifactError: it is none.
    """
    checked(plain, dict, "an input")
    name = checked(plain.get("name"), str, "the name of an input")
    dtype = dtype_from_plain(plain.get("dtype"), name)
    sizes = {key: shape_from_plain(plain.get(key), name) for key in ("min", "opt", "max")}
    if len({len(shape) for shape in sizes.values()}) != 1:
        raise ArtifactError(f"input '{name}' has min, opt and max sizes of different ranks")
    symbols = plain.get("symbols")
    if symbols is not None:
        symbols = tuple(checked(s, str | None, f"a dimension of '{name}'") for s in checked(symbols, list, "symbols"))
    profiles = tuple(
        tuple(shape_from_plain(shape, name) for shape in checked(profile, list, f"a profile of '{name}'"))
        for profile in checked(plain.get("profiles", []), list, f"the profiles of '{name}'")
    )
    if any([len(shape) for shape in profile] != [len(sizes["opt"])] * 3 for profile in profiles):
        raise ArtifactError(f"a profile of input '{name}' is not three shapes of its rank")
    return TensorSpec(name, dtype, **sizes, symbols=symbols, profiles=profiles)  # type: ignore[arg-type]


def check_to_plain(check: SizeCheck) -> dict[str, Any]:
    """Plain data for a manifest."""
    return lists(asdict(check))


def check_from_plain(plain: Any, name: str, ranks: Sequence[int]) -> SizeCheck:
    """The check that `check_to_plain` wrote.

    Args:
        plain: from a file.
        name: of the segment.
        ranks: of the segment's inputs.

    Raises:
        ArtifactError: it is none, or names a size that no input has.
    """
    checked(plain, dict, f"a check of {name}")
    text = checked(plain.get("text"), str, f"a check of {name}")
    line = checked(plain.get("line"), str | None, f"the line of a check of {name}")
    return SizeCheck(_condition(plain.get("condition"), name, ranks, _DEEPEST), text, line)


def _condition(plain: Any, name: str, ranks: Sequence[int], depth: int) -> Condition:
    if isinstance(plain, (bool, int, float)):
        return plain
    operation, *operands = checked(plain, list, f"a condition of {name}") or [None]
    if operation == "size":
        if len(operands) == 2 and all(isinstance(n, int) and n >= 0 for n in operands):
            index, dim = operands
            if index < len(ranks) and dim < ranks[index]:
                return ("size", index, dim)
    elif isinstance(operation, str) and ARITY.get(operation) == len(operands) and depth:
        return (operation, *(_condition(operand, name, ranks, depth - 1) for operand in operands))
    raise ArtifactError(f"{name} has a check that is not understood: {operation!r}", hint="update fx-trt-lowering")


def dtype_from_plain(value: Any, name: str) -> torch.dtype:
    """The type of the input `name`, which has to be one that an input can have.

    Raises:
        ArtifactError: it is none.
    """
    dtype = checked(value, str, f"the type of input '{name}'")
    if dtype not in _DTYPES:
        raise ArtifactError(f"input '{name}' has the unknown type {dtype!r}", hint="update fx-trt-lowering")
    return _DTYPES[dtype]
