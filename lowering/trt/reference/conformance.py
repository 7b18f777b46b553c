"""The executor against outside truth: the test data that the `onnx` package ships.

Each test case is parsed by NVIDIA's own parser, read back, executed, and compared with its recorded outputs. So what is
confirmed is the reader, the executor and, between them, our understanding of every layer the parser uses.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fx_passes.errors import BuildError, LoweringError
from lowering.trt.reference import dtypes, own_cases
from lowering.trt.reference.coverage import Use, uses
from lowering.trt.reference.exceptions import EXCEPTIONS
from lowering.trt.reference.parser import network_from_onnx
from lowering.trt.reference.run import ReferenceNetwork

__all__ = ["EXCEPTIONS", "KINDS", "Case", "Outcome", "cases", "light_models", "run_case", "run_light_model", "summary"]

#: Sets of test cases in the package: the operators' own, the same with every size of every input made unknown, those
#: exported from PyTorch, a few composed ones, and ours with ONNX Runtime's outputs.
KINDS = ("node", "node-dynamic", "pytorch-converted", "pytorch-operator", "simple", "own")

#: Recorded outputs in a reduced type were rounded at other places than ours: two units in the last place.
_UNITS = {"HALF": 2 * 2.0**-10, "BF16": 2 * 2.0**-7, "FP8": 2 * 2.0**-3}


@dataclass(frozen=True)
class Case:
    """One test case: a model, and for each data set its inputs and its recorded outputs."""

    name: str
    kind: str
    model: Any
    data_sets: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    rtol: float
    atol: float


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        name: of the case.
        accepted: whether NVIDIA's parser takes the model.
        failure: why the outputs are not the recorded ones; None where they are.
        uses: of layers, in the network; see `coverage`.
    """

    name: str
    accepted: bool
    failure: str | None
    uses: frozenset[Use] = frozenset()


@functools.cache
def cases(kind: str) -> tuple[Case, ...]:
    """All test cases of a kind, by name."""
    if kind == "node":
        from onnx.backend.test.case.node import collect_testcases

        found = [Case(c.name, kind, c.model, c.data_sets or (), c.rtol, c.atol) for c in collect_testcases()]
    elif kind == "own":
        found = [Case(name, kind, model, [(x, y)], 1e-4, 1e-5) for name, model, x, y in own_cases.make_cases()]
    elif kind == "node-dynamic":
        found = [_dynamic(case) for case in cases("node")]
    else:
        from onnx.backend.test.loader import load_model_tests

        found = [_stored(c, kind) for c in load_model_tests(kind=kind)]
    return tuple(sorted(found, key=lambda case: case.name))


def _dynamic(case: Case) -> Case:
    """The case with symbols for sizes, so that the parser has to compute them at run time.

    Vectors keep theirs: most are shapes, axes or counts, and NVIDIA's parser (RTX 1.7) crashes on a TopK or a
    NonMaxSuppression whose count is a vector of unknown size.
    """
    import onnx

    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for value in (*model.graph.input, *model.graph.output):
        sizes = value.type.tensor_type.shape.dim
        for position, size in enumerate(sizes if len(sizes) > 1 else ()):
            size.dim_param = f"{value.name}_{position}"
    return Case(case.name, "node-dynamic", model, case.data_sets, case.rtol, case.atol)


def _stored(case: Any, kind: str) -> Case:
    import onnx

    folder = Path(case.model_dir)
    model = onnx.load(folder / "model.onnx")
    sets = [
        (_protos(data, "input", model.graph.input), _protos(data, "output", model.graph.output))
        for data in sorted(folder.glob("test_data_set_*"))
    ]
    return Case(case.name, kind, model, sets, case.rtol, case.atol)


def _protos(folder: Path, prefix: str, values: Iterable[Any]) -> list[Any]:
    import onnx

    found: list[Any] = []
    for i, value in enumerate(values):
        path = folder / f"{prefix}_{i}.pb"
        if not value.type.HasField("tensor_type") or not path.exists():
            break  # sequences and optionals, which the parser refuses; inputs that the model itself initializes
        proto = onnx.TensorProto()
        proto.ParseFromString(path.read_bytes())
        found.append(proto)
    return found


def run_case(case: Case) -> Outcome:
    """Parses, executes and compares one case."""
    try:
        network = network_from_onnx(case.model)
    except BuildError as error:
        return Outcome(case.name, False, str(error))
    found = frozenset(uses(network.record))
    try:
        failure = next(
            filter(None, (_difference(network, case, inputs, outputs) for inputs, outputs in case.data_sets)), None
        )
    except LoweringError as error:
        failure = f"{type(error).__name__}: {error}"
    return Outcome(case.name, True, failure, found)


def _difference(network: ReferenceNetwork, case: Case, inputs: Sequence[Any], recorded: Sequence[Any]) -> str | None:
    names = [value.name for value in case.model.graph.input]
    feed = dict(zip(names, inputs, strict=False))
    arguments = []
    for index, tensor in enumerate(network.inputs):
        # Inputs of a loop's body give the network's inputs their names: then the order tells.
        value = feed[tensor.name] if tensor.name in feed else inputs[index]
        arguments.append(_as_torch(value).to(dtypes.TORCH[tensor.dtype]))
    for tensor, got, want in zip(network.outputs, network.run(*arguments), map(_as_torch, recorded), strict=True):
        if got.shape != want.shape:
            return f"{tensor.name} has the shape {tuple(got.shape)}, recorded is {tuple(want.shape)}"
        rtol = max(case.rtol, _UNITS.get(tensor.dtype, 0.0))
        if (defined := _defined(case, inputs)) is not None:
            got, want = got[defined], want[defined]
        if worst := _worst(got, want, rtol, case.atol):
            return f"{tensor.name}: {worst}"
    return None


def _defined(case: Case, inputs: Sequence[Any]) -> torch.Tensor | None:
    """Where ONNX says what a case gives, by element of its one output; None: everywhere.

    "Casting from floating point to fixed point: undefined if OOR (out of range)" (Cast, and CastLike by it). The
    recorded values of those elements are what numpy and ml_dtypes happen to give: ml_dtypes 0.6 wraps 8 around to -8 as
    an INT4, 0.7 makes it 0. Integers that are cast to narrower ones are defined, and so is what saturates to 8 bits.
    """
    import onnx

    if [node.op_type for node in case.model.graph.node] not in (["Cast"], ["CastLike"]):
        return None
    name = onnx.TensorProto.DataType.Name(case.model.graph.output[0].type.tensor_type.elem_type)
    bits = re.fullmatch(r"(U?)INT(\d+)", name)
    value = _as_torch(inputs[0])
    if bits is None or not value.is_floating_point():
        return None
    unsigned, width = bool(bits[1]), int(bits[2])
    least, beyond = (0.0, 2.0**width) if unsigned else (-(2.0 ** (width - 1)), 2.0 ** (width - 1))
    whole = value.double().trunc()
    return (whole >= least) & (whole < beyond)  # false for NaN


def _worst(got: torch.Tensor, want: torch.Tensor, rtol: float, atol: float) -> str | None:
    a, b = got.to(torch.float64), want.to(torch.float64)
    close = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    if bool(close.all()):
        return None
    excess = torch.where(close, 0.0, torch.nan_to_num((a - b).abs(), nan=float("inf")))
    index = int(excess.flatten().argmax())
    return (
        f"{int((~close).sum())} of {close.numel()} elements differ; at {index}: {a.flatten()[index]:.6g}, "
        f"recorded is {b.flatten()[index]:.6g}"
    )


def _as_torch(value: Any) -> torch.Tensor:
    """A recorded value, an ONNX tensor or an array, in the nearest torch type."""
    if hasattr(value, "SerializeToString"):
        from onnx import numpy_helper

        value = numpy_helper.to_array(value)
    array = np.asarray(value)
    views = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    if array.dtype.name in views:
        dtype = views[array.dtype.name]
        raw = np.ascontiguousarray(array).view(np.int16 if dtype == torch.bfloat16 else np.int8)
        return torch.from_numpy(raw.copy()).view(dtype).reshape(array.shape)
    if array.dtype.name.startswith(("float4", "float8")):
        array = array.astype(np.float32)
    elif array.dtype.name.startswith(("int4", "uint4", "int2", "uint2")):
        array = array.astype(np.int8)
    return torch.from_numpy(np.ascontiguousarray(array).copy()).reshape(array.shape)


def light_models() -> dict[str, Path]:
    """The package's real architectures with generated weights, by name."""
    import onnx.backend.test

    folder = Path(onnx.backend.test.__file__).parent / "data" / "light"
    return {path.stem: path for path in sorted(folder.glob("light_*.onnx"))}


def run_light_model(path: Path) -> Outcome:
    """Parses, executes and compares one of the light models on the input that its output was recorded for.

    The input is n equal steps from 0 to 1 (`onnx.backend.test.runner.Runner.generate_dummy_data`).
    """
    import onnx

    model = onnx.load(path)
    constants = {initializer.name for initializer in model.graph.initializer}
    (data,) = (value for value in model.graph.input if value.name not in constants)
    shape = [dim.dim_value if dim.HasField("dim_value") else 1 for dim in data.type.tensor_type.shape.dim]
    count = int(np.prod(shape))
    x = (np.arange(count).reshape(shape) / count).astype(np.float32)
    recorded = onnx.TensorProto()
    recorded.ParseFromString((path.parent / f"{path.stem}_output_0.pb").read_bytes())
    return run_case(Case(path.stem, "light", model, [([x], [recorded])], rtol=1e-3, atol=1e-7))


def summary(kind: str, outcomes: Sequence[Outcome]) -> str:
    """One line: how many cases there are, are accepted, and pass."""
    accepted = [outcome for outcome in outcomes if outcome.accepted]
    passed = [outcome for outcome in accepted if outcome.failure is None]
    types = {use[0] for outcome in accepted for use in outcome.uses}
    return (
        f"{kind}: {len(outcomes)} cases, NVIDIA's parser accepts {len(accepted)} (with {len(types)} layer types), "
        f"the executor gives the recorded outputs of {len(passed)}"
    )
