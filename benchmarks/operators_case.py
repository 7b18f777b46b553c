"""One sample of torch's operator database, lowered and executed beside eager: one row of the operator table.

The database (`torch.testing._internal.common_methods_invocations.op_db`) has, for each of torch's operators and each
dtype, calls with all kinds of arguments. A sample becomes a module whose inputs are the tensors of the call; everything
else in it is a constant of the module. What is compared: values, shapes, dtypes, structure, where NaN and infinities
stand, and what the call has made of its inputs. Of random numbers only shapes and dtypes are.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fx_passes.errors import LoweringError
from lowering import LoweredModule, lower_to_onnx, lower_to_trt

__all__ = [
    "BACKENDS",
    "DTYPES",
    "SIZES",
    "VERDICTS",
    "Sample",
    "operators",
    "row_of",
    "sample_counts",
    "samples_of",
]

TOLERANCE = 1e-4  # absolute and relative, of fp32 against eager
BACKENDS: dict[str, Callable[..., LoweredModule]] = {"TensorRT": lower_to_trt, "ONNX": lower_to_onnx}
DTYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}
SIZES = ("static", "dynamic")

#: What a row can say, and what it means.
VERDICTS = {
    "equal": "lowered in full, and equal to eager",
    "python": "equal to eager, with the operator or a part of it left in Python, for the reason given",
    "refused": "a LoweringError, by its reason",
    "wrong": "another result than eager's, without an error",
    "raw": "an error that is no LoweringError, a crash, or no end within the limit",
    "none": "no case: no tensor among the arguments, eager itself fails, or no size of it can vary",
}

# What these give is whatever was in memory.
_UNINITIALISED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_")


class Call(nn.Module):
    """`function` of the tensors of a sample, with the rest of the sample's arguments in their places.

    Args:
        function: an operator of torch as its user calls it.
        leaves: the flat arguments; a `None` of `places` is replaced by the next input.
        spec: structure of (args, kwargs).
        places: for each leaf, whether it is an input.
    """

    def __init__(self, function: Callable[..., Any], leaves: Sequence[Any], spec: Any, places: Sequence[bool]):
        super().__init__()
        self.function, self.spec = function, spec
        self.leaves, self.places = tuple(leaves), tuple(places)

    def forward(self, *tensors: Tensor) -> Any:
        given = iter(tensors)
        leaves = [next(given) if place else leaf for leaf, place in zip(self.leaves, self.places, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Sample:
    """One call of one operator.

    Args:
        op: name in the database, its variant after a point.
        dtype: key of `DTYPES`.
        index: its place among the samples of that operator and dtype.
        model: the call as a module.
        inputs: its tensors.
    """

    op: str
    dtype: str
    index: int
    model: nn.Module
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class _Sizes:
    """The inputs at other sizes, and what `dynamic_shapes` says of it."""

    dynamic_shapes: Any
    inputs: tuple[tuple[Tensor, ...], ...]


@cache
def operators() -> dict[str, Any]:
    """Name -> entry of torch's operator database."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}


def samples_of(name: str, dtype: str, most: int | None) -> list[Sample]:
    """Samples of one operator, evenly chosen from those that the database has: the same ones each time."""
    found = _all_samples(name, dtype)
    count = len(found) if most is None else min(most, len(found))
    chosen = sorted({i * (len(found) - 1) // max(count - 1, 1) for i in range(count)})
    return [_sample(operators()[name].op, name, dtype, index, found[index]) for index in chosen]


def _all_samples(name: str, dtype: str) -> list[Any]:
    entry = operators()[name]
    if not entry.supports_dtype(DTYPES[dtype], "cpu"):
        return []
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        random.seed(0)
        return list(entry.sample_inputs("cpu", DTYPES[dtype], requires_grad=False))


def sample_counts() -> dict[tuple[str, str], int]:
    """How many samples the database has of each operator and dtype."""
    return {(name, dtype): len(_all_samples(name, dtype)) for name in operators() for dtype in DTYPES}


def _sample(function: Callable[..., Any], name: str, dtype: str, index: int, found: Any) -> Sample:
    leaves, spec = pytree.tree_flatten(((found.input, *found.args), found.kwargs))
    places = [isinstance(leaf, Tensor) for leaf in leaves]
    kept = [None if place else leaf for leaf, place in zip(leaves, places, strict=True)]
    inputs = tuple(leaf.detach() for leaf in leaves if isinstance(leaf, Tensor))
    return Sample(name, dtype, index, Call(function, kept, spec, places), inputs)


def row_of(sample: Sample, backend: str, sizes: str) -> dict[str, Any]:
    """The row of one sample: what it is, the verdict and its detail, the seconds it took."""
    start = time.perf_counter()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        verdict, detail = _verdict(sample, backend, sizes)
    key = {"op": sample.op, "dtype": sample.dtype, "sample": sample.index, "backend": backend, "sizes": sizes}
    return {**key, "verdict": verdict, "detail": detail, "seconds": round(time.perf_counter() - start, 2)}


def _verdict(sample: Sample, backend: str, sizes: str) -> tuple[str, str]:
    if not sample.inputs:
        return "none", "no tensor among the arguments"
    try:
        exact = not _is_random(sample)
        calls = _Sizes(None, (sample.inputs,)) if sizes == "static" else next(_dynamic(sample), None)
    except Exception as error:
        return "none", f"eager: {_first_line(error)}"
    if calls is None:
        return "none", "no size can vary"
    try:
        example = tuple(x.clone() for x in sample.inputs)
        lowered = BACKENDS[backend](sample.model, example, precision="fp32", dynamic_shapes=calls.dynamic_shapes)
        run = lowered.simulate if backend == "TensorRT" else lowered
        for inputs in calls.inputs:
            if differs := _difference(sample.model, run, inputs, exact):
                return "wrong", differs
    except LoweringError as error:
        return "refused", f"{type(error).__name__}: {_first_line(error)}"
    except Exception as error:
        return "raw", f"{type(error).__name__}: {_first_line(error)}"
    reasons = [fallback["reason"] for fallback in lowered.report()["fallbacks"]]
    return ("python", "; ".join(reasons)[:300]) if reasons else ("equal", "")


class _Randomness(TorchDispatchMode):
    """Sees whether random numbers are drawn while it is on. (The database seeds them anew in each call.)"""

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drawn |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        return func(*args, **(kwargs or {}))


def _is_random(sample: Sample) -> bool:
    """Whether values of eager follow from nothing that could be lowered: then only shapes and dtypes are compared."""
    with _Randomness() as randomness:
        sample.model(*(x.clone() for x in sample.inputs))
    return randomness.drawn or sample.op.split(".")[0] in _UNINITIALISED


def _dynamic(sample: Sample) -> Iterator[_Sizes]:
    """Ways to vary one size of the inputs, as far as eager takes both a smaller and a larger one.

    The first tensor's dimensions are tried in order, for every other sample from the last one on: alone, then with the
    same dimension of the others, then wherever that size stands.
    """
    at = next((i for i, x in enumerate(sample.inputs) if x.dim()), None)
    if at is None:
        return
    dims = [d for d, n in enumerate(sample.inputs[at].shape) if n > 1]
    for dim in dims if sample.index % 2 == 0 else dims[::-1]:
        size = sample.inputs[at].shape[dim]
        for among in (
            lambda i, d, dim=dim: i == at and d == dim,
            lambda i, d, dim=dim: d == dim,
            lambda i, d: True,
        ):
            varied = [
                [d for d, n in enumerate(x.shape) if n == size and among(i, d)] for i, x in enumerate(sample.inputs)
            ]
            if (found := _varied(sample, size, varied)) is not None:
                yield found


def _varied(sample: Sample, size: int, dims: Sequence[Sequence[int]]) -> _Sizes | None:
    """Calls with other numbers in place of `size`; None where eager does not take them, or gives another structure."""
    calls = tuple(
        tuple(_resized(x, d, n) for x, d in zip(sample.inputs, dims, strict=True)) for n in (size, size - 1, size + 2)
    )
    try:
        results = [sample.model(*(x.clone() for x in inputs)) for inputs in calls]
    except Exception:
        return None  # the sample has the size as a number too, say
    if len({pytree.tree_structure(result) for result in results}) != 1:
        return None
    free = torch.export.Dim("n", min=size - 1, max=size + 2)
    return _Sizes({"tensors": tuple(dict.fromkeys(d, free) or None for d in dims)}, calls)


def _resized(x: Tensor, dims: Sequence[int], size: int) -> Tensor:
    """`x` repeated or cut to `size` in each of `dims`.

    Floats that are repeated change a little: which of two equal ones an operator names is nobody's promise.
    """
    for d in dims:
        places, n = torch.arange(size), x.shape[d]
        x = x.index_select(d, places % n)
        if x.dtype.is_floating_point:
            x = x * (1 + 0.01 * (places // n)).reshape([-1 if e == d else 1 for e in range(x.dim())])
    return x


def _difference(model: nn.Module, run: Callable[..., Any], inputs: Sequence[Tensor], exact: bool) -> str:
    """What is not as in eager, or an empty text."""
    ours, theirs = ([x.clone() for x in inputs] for _ in range(2))
    wanted = model(*theirs)
    found = run(*ours)
    if differs := _unlike(found, wanted, exact):
        return differs
    if exact and (differs := _unlike(ours, theirs, exact)):
        return f"the inputs afterwards: {differs}"
    return ""


def _unlike(found: Any, wanted: Any, exact: bool) -> str:
    have, want = pytree.tree_flatten(found), pytree.tree_flatten(wanted)
    if have[1] != want[1]:
        return f"structure {have[1]} instead of {want[1]}"[:300]
    for index, (a, b) in enumerate(zip(have[0], want[0], strict=True)):
        if not isinstance(b, Tensor):
            differs = "" if type(a) is type(b) and (a == b or not exact) else f"{a!r} instead of {b!r}"
        else:
            differs = _unlike_tensor(a, b, exact)
        if differs:
            return f"result {index}: {differs}" if len(have[0]) > 1 else differs
    return ""


def _unlike_tensor(found: Any, wanted: Tensor, exact: bool) -> str:
    if not isinstance(found, Tensor):
        return f"a {type(found).__name__} instead of a tensor"
    for what in ("shape", "dtype", "layout"):
        a, b = getattr(found, what), getattr(wanted, what)
        if a != b:
            return f"{what} {tuple(a) if what == 'shape' else a} instead of {tuple(b) if what == 'shape' else b}"
    if not exact or not wanted.numel():
        return ""
    a, b = found, wanted
    if wanted.layout != torch.strided or wanted.is_complex():
        return "" if torch.allclose(a.to_dense(), b.to_dense(), TOLERANCE, TOLERANCE, equal_nan=True) else "values"
    if not b.dtype.is_floating_point:
        wrong = (a != b).sum()
        return f"{int(wrong)} of {b.numel()} elements differ" if wrong else ""
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, 0.0, (a - b).abs() / (1 + b.abs())).nan_to_num(nan=float("inf"))
    worst = error.argmax()
    if error.max() <= TOLERANCE:
        return ""
    return f"{float(a.flatten()[worst]):.6g} instead of {float(b.flatten()[worst]):.6g}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:240]
