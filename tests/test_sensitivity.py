"""Sensitivity: the operator made hard to quantize is named first, and quantizing nothing else costs nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fx_passes import prepare_calibration_fx, sensitivity
from fx_passes.errors import InputError, StageError


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
