"""The reference executor against the test data that the onnx package ships, parsed by NVIDIA's own parser."""

from __future__ import annotations

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
