"""The models of public bug reports, lowered by every backend: fp32 equals eager, int8 is close, no stray fallback."""

from __future__ import annotations

import pytest
import reported_cases
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fx_passes import wrap
from fx_passes.errors import CalibrationError
from lowering import lower_to_onnx, lower_to_trt

BACKENDS = {"trt": lower_to_trt, "onnx": lower_to_onnx}
CASES = {case.name: case for case in reported_cases.CASES}
wrap(reported_cases.decode_boxes)


def _lower(case, backend, precision):
    batch = {"dynamic_batch": (1, 2, 8)} if case.dynamic else {}
    calibration = case.calibration() if case.calibration else [case.inputs()]
    model = case.model()
    lowered = BACKENDS[backend](model, case.inputs(), precision=precision, calibration=calibration, **batch)
    allowed = ["wrapped by the user"] if case.expect == "python" else []
    assert [f.reason for f in lowered.fallbacks] == allowed
    assert lowered.report()["flops_share"] >= 0.99
    return model, lowered, lowered.simulate if backend == "trt" else lowered


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_fp32_equals_eager(name, backend):
    case = CASES[name]
    model, _, run = _lower(case, backend, "fp32")
    for inputs in [case.inputs(), *(case.dynamic() if case.dynamic else [])]:
        expected, got = model(*inputs), run(*inputs)
        assert pytree.tree_structure(got) == pytree.tree_structure(expected)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.expect == "int8" and n != "NanInCalibration"])
def test_int8_stays_close_to_float(name, backend):
    case = CASES[name]
    model, _, run = _lower(case, backend, "int8")
    expected, got = model(*case.inputs()), run(*case.inputs())
    assert pytree.tree_structure(got) == pytree.tree_structure(expected)
    for e, g in zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True):
        assert g.shape == e.shape and g.dtype == e.dtype and g.isfinite().all()
        assert _cosine(e, g) >= case.min_cosine


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_calibration_names_the_tensor(backend):
    with pytest.raises(CalibrationError, match="NaN in the value of node 'x'"):
        _lower(CASES["NanInCalibration"], backend, "int8")


@pytest.mark.parametrize("backend", BACKENDS)
def test_relu_survives_int8(backend):
    case = CASES["ReluSurvivesInt8"]
    _, _, run = _lower(case, backend, "int8")
    assert run(*case.inputs()).min() == 0


def _cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0).item()
