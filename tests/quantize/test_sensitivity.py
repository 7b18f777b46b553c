"""Sensitivity: the operator made hard to quantize is named first, and quantizing nothing else costs nothing."""

from __future__ import annotations

import csv
import json
import math
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from fx_passes import prepare_calibration_fx, sensitivity
from fx_passes.errors import InputError, StageError
from fx_passes.quantize.accuracy.sensitivity import Sensitivity, SensitivityRow


class HardInTheMiddle(nn.Module):
    """Three convolutions; the second has one input channel a thousand times larger than the rest."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            self.a.weight[0] *= 1000
            self.b.weight[:, 0] /= 1000

    def forward(self, x):
        return self.c(torch.tanh(self.b(self.a(x))))


BATCHES = [torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(i)) for i in range(2)]


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt-rtx", "onnxruntime"])
def test_the_hard_layer_comes_first(target):
    report = sensitivity(HardInTheMiddle(), BATCHES, target=target)
    assert report.rows[0].node == "b"
    assert {"a", "b", "c"} <= {row.node for row in report.rows}
    assert report.rows[0].sqnr_db < min(row.sqnr_db for row in report.rows if row.node in ("a", "c")) - 6
    assert [row.sqnr_db for row in report.rows] == sorted(row.sqnr_db for row in report.rows)


def test_the_last_cumulative_value_is_the_whole_model_for_weighted_placement():
    report = sensitivity(HardInTheMiddle(), BATCHES, target="tensorrt-rtx")
    last = next(row for row in report.rows if row.node == "c")
    assert last.cumulative_sqnr_db == pytest.approx(report.sqnr_db, abs=1e-6)


def test_the_model_stays_as_it_is_and_the_table_names_lines():
    model = HardInTheMiddle().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = sensitivity(model, BATCHES)
    assert model.training and all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert "test_sensitivity.py" in report.table()
    assert report.as_dict()["rows"][0]["node"] == report.rows[0].node


def test_no_batches():
    with pytest.raises(InputError, match="no batches"):
        sensitivity(HardInTheMiddle(), [])


def test_a_prepared_graph_is_refused():
    with pytest.raises(StageError, match="prepared"):
        sensitivity(prepare_calibration_fx(HardInTheMiddle()), BATCHES)


def test_own_error_is_that_of_the_operator_itself():
    report = sensitivity(HardInTheMiddle(), BATCHES, target="tensorrt-rtx")
    by_name = {row.node: row for row in report.rows}
    # Of a network's last operator the result is the model's.
    assert by_name["c"].local_sqnr_db == pytest.approx(by_name["c"].sqnr_db)
    assert by_name["b"].local_sqnr_db < by_name["a"].local_sqnr_db
    assert 0 < by_name["c"].worst_steps < 8


def test_files(tmp_path):
    report = sensitivity(HardInTheMiddle(), BATCHES)
    for suffix in (".csv", ".json", ".svg", ".txt"):
        report.save(tmp_path / f"report{suffix}")
    with (tmp_path / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["node"] for row in rows] == [row.node for row in report.rows]
    assert float(rows[0]["sqnr_db"]) == pytest.approx(report.rows[0].sqnr_db)
    assert json.loads((tmp_path / "report.json").read_text())["rows"][0]["node"] == report.rows[0].node
    chart = ElementTree.parse(tmp_path / "report.svg").getroot()
    bars = [e for e in chart.iter("{http://www.w3.org/2000/svg}rect") if float(e.get("height")) == 8]
    lengths = [float(bar.get("width")) for bar in bars]
    assert len(bars) == len(report.rows) and lengths == sorted(lengths, reverse=True)


def test_unknown_file(tmp_path):
    with pytest.raises(InputError, match="no report is written as"):
        sensitivity(HardInTheMiddle(), BATCHES).save(tmp_path / "report.png")


def test_infinite_numbers_are_null_in_json():
    row = SensitivityRow("a", None, math.inf, 1.0, 0.0, 0.0, math.inf, math.inf, 1.0)
    report = Sensitivity("tensorrt", [row], math.inf)
    assert json.loads(report.json())["rows"][0]["sqnr_db"] is None
    assert report.svg().endswith("</svg>")


@pytest.mark.parametrize("option", ["equalize", "smooth"])
def test_scaled_models_are_compared_with_what_they_were(option):
    """The float weights that go back into the graph are the scaled ones."""
    value = {"equalize": True, "smooth": 0.5}[option]
    plain = sensitivity(HardInTheMiddle(), BATCHES, target="tensorrt", qconfig={"": {"weight": "per_channel"}})
    scaled = sensitivity(HardInTheMiddle(), BATCHES, target="tensorrt", qconfig={"": {option: value}})
    assert min(row.sqnr_db for row in scaled.rows) > min(row.sqnr_db for row in plain.rows) + 6
