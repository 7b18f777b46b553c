"""The table of confirmed and unconfirmed uses of layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowering.trt.reference import LayerRecord, NetworkRecord, TensorRecord
from lowering.trt.reference.coverage import confirmed_uses, markdown, save_confirmed, unconfirmed, uses
from lowering.trt.reference.report import CONFIRMED

pytest.importorskip("tensorrt_rtx")

ROOT = Path(__file__).parents[2]


def test_every_emitted_use_is_confirmed_or_listed():
    from reference_uses import emitted_uses

    torch.set_num_threads(1)
    count, emitted = emitted_uses()
    assert count > 500
    page = (ROOT / "docs" / "reference_coverage.md").read_text(encoding="utf-8")
    listed = page.partition("## Unconfirmed")[2].partition("\n## ")[0]
    missing = [
        u for u in unconfirmed(emitted, confirmed_uses(ROOT / CONFIRMED)) if f"- {u[0]}, {u[1]}: {u[2]}\n" not in listed
    ]
    assert not missing, (
        "new uses that no outside case has: add a case to own_cases.py, or run scripts/coverage_reference"
    )


def test_uses_of_one_layer():
    tensors = {n: TensorRecord(n, s, "HALF") for n, s in (("x", (-1, 3)), ("y", (-1, 3)))}
    layer = LayerRecord("c", "ACTIVATION", ("x",), ("y",), {"type": "CLIP", "alpha": 0.0, "beta": 6.0})
    relu = LayerRecord("r", "ACTIVATION", ("x",), ("y",), {"type": "RELU", "alpha": 5.0, "beta": 0.0})
    found = uses(NetworkRecord("n", ("x",), ("y",), (layer,), tensors, {}))
    assert ("ACTIVATION", "sizes", "dynamic") in found
    assert ("ACTIVATION", "beta of CLIP", "positive") in found
    without = uses(NetworkRecord("n", ("x",), ("y",), (relu,), tensors, {}))
    assert not any(attribute.startswith(("alpha", "beta")) for _, attribute, _ in without)  # no effect on a ReLU


def test_table_marks_what_is_unconfirmed(tmp_path):
    known, new = ("CAST", "to_type", "HALF"), ("CAST", "to_type", "UINT8")
    save_confirmed(tmp_path / "c.json", [known])
    confirmed = confirmed_uses(tmp_path / "c.json")
    assert confirmed == {known}
    assert unconfirmed([known, new], confirmed) == [new]
    assert "| CAST | to_type | HALF; **UINT8** |" in markdown([known, new], confirmed)
