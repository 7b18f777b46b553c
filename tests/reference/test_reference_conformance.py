"""The reference executor against the test data that the onnx package ships, parsed by NVIDIA's own parser."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from lowering.trt.reference import conformance
from lowering.trt.reference.exceptions import EXCEPTIONS_DYNAMIC

pytest.importorskip("tensorrt_rtx")


def check(kind: str, outcomes: list[conformance.Outcome], least: int) -> None:
    """Exactly the listed exceptions fail, and the parser accepts enough for this to mean something."""
    print(conformance.summary(kind, outcomes))
    accepted = [outcome for outcome in outcomes if outcome.accepted]
    assert len(accepted) >= least
    listed = conformance.EXCEPTIONS | (EXCEPTIONS_DYNAMIC if kind == "node-dynamic" else {})
    failures = {outcome.name: outcome.failure for outcome in accepted if outcome.failure is not None}
    unlisted = {name: failure for name, failure in failures.items() if name not in listed}
    assert not unlisted
    passing = [outcome.name for outcome in accepted if outcome.failure is None]
    stale = sorted(set(passing) & set(listed))
    assert not stale, "these listed exceptions pass now: take them off the list"


@pytest.mark.filterwarnings("ignore::RuntimeWarning:onnx")
def test_operator_cases():
    """Of 1,884 cases in onnx 1.23, the parser of TensorRT-RTX 1.7 accepts 1,013; 966 with unknown sizes.

    One test, because making the cases takes ten seconds in every process that asks for them.
    """
    check("node", [conformance.run_case(case) for case in conformance.cases("node")], least=900)
    check("node-dynamic", [conformance.run_case(case) for case in conformance.cases("node-dynamic")], least=850)
    names = {case.name for case in conformance.cases("node")}
    assert set(conformance.EXCEPTIONS) | set(EXCEPTIONS_DYNAMIC) <= names


def _cast(to: str, x: np.ndarray, recorded: np.ndarray, op: str = "Cast") -> conformance.Case:
    """A case of one node, or of two for another `op` behind the cast."""
    kinds = [onnx.helper.np_dtype_to_tensor_dtype(x.dtype), getattr(onnx.TensorProto, to)]
    nodes = [onnx.helper.make_node("Cast", ["x"], ["y" if op == "Cast" else "cast"], to=kinds[1])]
    if op != "Cast":
        nodes.append(onnx.helper.make_node(op, ["cast"], ["y"]))
    values = [onnx.helper.make_tensor_value_info(name, kind, x.shape) for name, kind in zip("xy", kinds, strict=True)]
    graph = onnx.helper.make_graph(nodes, "cast", values[:1], values[1:])
    return conformance.Case("cast", "node", onnx.helper.make_model(graph), [([x], [recorded])], 1e-3, 1e-7)


_FLOATS = np.array([-9.0, -8.9, -8, -1.5, 0.5, 7.9, 8, 1e9, np.inf, np.nan], np.float32)
_FITS = [False, True, True, True, True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (_cast("INT4", _FLOATS, _FLOATS), _FITS),
        (_cast("UINT8", np.array([-1, -0.9, 255.9, 256], np.float32), _FLOATS), [False, True, True, False]),
        (_cast("INT64", np.array([-(2.0**63), 2.0**63], np.float64), _FLOATS), [True, False]),
        (_cast("INT8", np.array([200], np.int16), _FLOATS), None),  # defined: the higher bits are discarded
        (_cast("FLOAT16", np.array([1e9], np.float32), _FLOATS), None),  # defined: infinity
        (_cast("INT8", _FLOATS, _FLOATS, op="Neg"), None),  # not a cast alone
    ],
    ids=["float-int4", "float-uint8", "double-int64", "int-int", "float-half", "behind"],
)
def test_where_a_cast_is_defined(case, expected):
    defined = conformance._defined(case, case.data_sets[0][0])
    assert (None if defined is None else defined.tolist()) == expected


@pytest.mark.parametrize(("at", "fails"), [(5, True), (6, False)], ids=["in-range", "out-of-range"])
def test_a_wrong_cast_in_range_is_found(at, fails):
    recorded = np.array([0, -8, -8, -1, 0, 7, 0, 0, 0, 0], np.int8)
    recorded[at] = 3
    failure = conformance.run_case(_cast("INT4", _FLOATS, recorded)).failure
    assert bool(failure) == fails, failure


@pytest.mark.parametrize(
    ("kind", "least"), [("pytorch-converted", 60), ("pytorch-operator", 18), ("simple", 6), ("own", 60)]
)
def test_stored_cases(kind, least):
    check(kind, [conformance.run_case(case) for case in conformance.cases(kind)], least)


@pytest.mark.parametrize("name", conformance.light_models())
def test_light_models(name):
    outcome = conformance.run_light_model(conformance.light_models()[name])
    assert outcome.accepted
    assert outcome.failure is None
