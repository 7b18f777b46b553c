"""torch's operator database as a suite: its rows tell right from wrong, and outlive what ends a process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import operators as suite
from benchmarks import operators_case as case
from benchmarks.operators_table import counted, document
from fx_passes.errors import LoweringError

ROOT = Path(__file__).resolve().parents[2]
LOWERED = (
    "add",
    "argmax",
    "cat",
    "cumsum",
    "index_select",
    "matmul",
    "nn.functional.linear",
    "nn.functional.cosine_similarity",
    "nn.functional.pad.reflect",
    "softmax",
    "var_mean",
    "where",
)


def test_some_operators(tmp_path: Path) -> None:
    """The command, on operators that are lowered in full, one that depends on data and one that is random.

    In a process of its own: what the database imports changes flags of torch for good.
    """
    pytest.importorskip("expecttest", reason="torch's operator database imports it; the extra [test] has it")
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.operators", *LOWERED, "nonzero", "rand_like", "--rows", str(rows)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--dtypes", "float32", "--samples", "1"], cwd=ROOT, env=environment, check=True)
    found = suite.recorded(rows)
    assert len(found) == (len(LOWERED) + 2) * len(case.BACKENDS) * len(case.SIZES)
    partly = [row for op in LOWERED for row in found.values() if row["op"] == op and row["verdict"] != "equal"]
    assert [row for row in partly if row["verdict"] != "none" or row["sizes"] == "static"] == []
    assert {found["nonzero", "float32", 0, "TensorRT", sizes]["verdict"] for sizes in case.SIZES} <= {"python", "none"}
    assert {row["verdict"] for row in found.values() if row["op"] == "rand_like"} <= {"equal", "python", "none"}


# -- verdicts ---------------------------------------------------------------------------------------------------------


class Answer:
    """A lowered module that answers `answer` to everything."""

    def __init__(self, answer: Any):
        self.answer = answer

    def __call__(self, *inputs: Any) -> Any:
        return self.answer(*inputs)

    simulate = __call__

    def report(self) -> dict[str, Any]:
        return {"fallbacks": []}


def _fails(error: Exception) -> Any:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def _writes(x: torch.Tensor) -> torch.Tensor:
    result = x + 1
    x.zero_()
    return result


ANSWERS = [
    ("right", lambda x: x + 1, "equal"),
    ("within tolerance", lambda x: x + 1 + 1e-6, "equal"),
    ("another value", lambda x: x + 1.01, "wrong"),
    ("another dtype", lambda x: (x + 1).double(), "wrong"),
    ("another shape", lambda x: (x + 1).unsqueeze(0), "wrong"),
    ("another structure", lambda x: (x + 1,), "wrong"),
    ("a number", lambda x: 1.0, "wrong"),
    ("NaN", lambda x: torch.where(x > x.min(), x + 1, torch.nan), "wrong"),
    ("an input that was changed", _writes, "wrong"),
    ("an error of the project", _fails(LoweringError("no")), "refused"),
    ("another error", _fails(ValueError("no")), "raw"),
]


@pytest.mark.parametrize(("answer", "verdict"), [row[1:] for row in ANSWERS], ids=[row[0] for row in ANSWERS])
def test_verdicts(answer: Any, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(case.BACKENDS, "TensorRT", lambda *_, **__: Answer(answer))
    sample = case.Sample("plus one", "float32", 0, PlusOne(), (torch.arange(6.0).reshape(2, 3),))
    assert case.row_of(sample, "TensorRT", "static")["verdict"] == verdict


class PlusOne(nn.Module):
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0] + 1


def test_a_size_that_varies_is_checked_at_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right at the example's sizes, wrong beside them."""
    monkeypatch.setitem(case.BACKENDS, "ONNX", lambda *_, **__: Answer(lambda x: x + (1 if len(x) == 2 else 2)))
    sample = case.Sample("plus one", "float32", 0, PlusOne(), (torch.arange(6.0).reshape(2, 3),))
    assert case.row_of(sample, "ONNX", "static")["verdict"] == "equal"
    assert case.row_of(sample, "ONNX", "dynamic")["verdict"] == "wrong"


# -- processes --------------------------------------------------------------------------------------------------------


class Entry:
    """An entry of the database with two samples, of which the first may be fatal."""

    def __init__(self, fatal: Any = None):
        self.fatal = fatal

    def op(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        if first and self.fatal is not None:
            self.fatal()
        return x + 1

    def supports_dtype(self, dtype: torch.dtype, device: str) -> bool:
        return dtype == torch.float32

    def sample_inputs(self, *_: Any, **__: Any) -> list[Any]:
        return [SimpleNamespace(input=torch.ones(3), args=(first,), kwargs={}) for first in (True, False)]


@pytest.mark.parametrize(
    ("fatal", "detail"),
    [(lambda: os._exit(3), "the process ended with 3"), (lambda: time.sleep(60), "not finished after 4 s")],
    ids=["ends the process", "does not end"],
)
def test_the_rest_goes_on(fatal: Any, detail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case, "operators", lambda: {"bad": Entry(fatal), "good": Entry()})
    monkeypatch.setitem(case.BACKENDS, "ONNX", lambda *_, **__: Answer(lambda x: x + 1))
    job = suite.Job((("bad", "float32"), ("good", "float32")), (("ONNX", "static"),), None, frozenset())
    rows = [row for row in suite.run([job], suite.Limits(memory=8 * 10**9, seconds=4), workers=1) if row is not None]
    assert [(row["op"], row["sample"], row["verdict"]) for row in rows] == [
        ("bad", 0, "raw"),
        ("bad", 1, "equal"),
        ("good", 0, "equal"),
        ("good", 1, "equal"),
    ]
    assert rows[0]["detail"] == detail


def test_rows_that_are_there_are_not_made_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case, "operators", lambda: {"good": Entry()})
    row = {"op": "good", "dtype": "float32", "sample": 0, "backend": "ONNX", "sizes": "static", "verdict": "equal"}
    suite.record(row, tmp_path / "rows.jsonl")
    known = suite.recorded(tmp_path / "rows.jsonl")
    monkeypatch.setitem(case.BACKENDS, "ONNX", lambda *_, **__: Answer(lambda x: x + 1))
    job = suite.Job((("good", "float32"),), (("ONNX", "static"),), None, frozenset(known))
    rows = [row for row in suite.run([job], suite.Limits(8 * 10**9, 60), 1) if row is not None]
    assert [row["sample"] for row in rows] == [1]


def test_the_page() -> None:
    key = {"dtype": "float32", "sample": 0, "sizes": "static", "seconds": 1.0}
    rows = [
        {**key, "op": "add", "backend": "ONNX", "verdict": "equal", "detail": ""},
        {**key, "op": "sort", "backend": "ONNX", "verdict": "equal", "detail": ""},
        {**key, "op": "sort", "backend": "TensorRT", "verdict": "python", "detail": "no | for shape (2, 3)"},
    ]
    page = document(rows, {"torch": "2.14"}, {("add", "float32"): 7, ("sort", "float32"): 5})
    assert "2 of the 12" in page
    assert "| float32 | ONNX | static | 2 | 2 (100.0%) | 0 | 0 | 0 | 0 |" in page
    assert "| sort | TensorRT | 0 of 1 | python x 1: no \\| for shape … |" in page
    assert "## Lowered in full, on both backends: 1\n\nadd." in page
    assert counted(rows) == "2 equal, 1 python, 0 refused, 0 wrong, 0 raw, 0 none"
