"""The reference executor against the test data that the onnx package ships, parsed by NVIDIA's own parser."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorrt_rtx")
pytest.importorskip("onnx")

from lowering.trt.reference import conformance

CHUNKS = 10


def check(kind: str, outcomes: list[conformance.Outcome], least: int) -> None:
    """Exactly the listed exceptions fail, and the parser accepts enough for this to mean something."""
    print(conformance.summary(kind, outcomes))
    accepted = [outcome for outcome in outcomes if outcome.accepted]
    assert len(accepted) >= least
    failures = {outcome.name: outcome.failure for outcome in accepted if outcome.failure is not None}
    unlisted = {name: failure for name, failure in failures.items() if name not in conformance.EXCEPTIONS}
    assert not unlisted
    names = {outcome.name for outcome in outcomes}
    stale = sorted(name for name in conformance.EXCEPTIONS if name in names and name not in failures)
    assert not stale, "these listed exceptions pass now, or the parser refuses them: take them off the list"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_node_cases(chunk):
    """1,884 cases with onnx 1.23, of which the parser of TensorRT-RTX 1.7 accepts 1,013."""
    some = conformance.cases("node")[chunk::CHUNKS]
    check(f"node {chunk}", [conformance.run_case(case) for case in some], least=80)


@pytest.mark.parametrize(("kind", "least"), [("pytorch-converted", 60), ("pytorch-operator", 18), ("simple", 6)])
def test_stored_cases(kind, least):
    check(kind, [conformance.run_case(case) for case in conformance.cases(kind)], least)


@pytest.mark.parametrize("name", conformance.light_models())
def test_light_models(name):
    outcome = conformance.run_light_model(conformance.light_models()[name])
    assert outcome.accepted
    assert outcome.failure is None


def test_listed_exceptions_exist():
    names = {case.name for case in conformance.cases("node")}
    assert set(conformance.EXCEPTIONS) <= names
    assert len(conformance.EXCEPTIONS) <= 40
