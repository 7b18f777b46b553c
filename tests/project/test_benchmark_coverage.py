"""The coverage benchmark: its list of models, a row, a model that takes its process with it, the page."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("timm")
coverage = pytest.importorskip("benchmarks.coverage")
from benchmarks import zoo  # noqa: E402
from benchmarks.coverage_case import COLUMNS, SHORT, row_of  # noqa: E402
from benchmarks.coverage_table import document, is_complete  # noqa: E402

pytestmark = pytest.mark.zoo

TINY = """
import os
import torch
from torch import nn

def tiny():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()

class Masked(nn.Module):
    def forward(self, x):
        return x[x > 0]

masked = Masked()

def fatal():
    os._exit(3)
"""


@pytest.fixture
def models(tmp_path: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(TINY)
    return str(path)


def test_every_family_of_timm_is_in_the_list() -> None:
    import timm
    from timm.models._registry import _model_to_module

    names = [spec.split(":")[1] for spec, _ in zoo.timm_models()]
    assert not set(names) - set(timm.list_models())
    assert {_model_to_module[name] for name in names} == set(timm.list_modules())


def test_every_classifier_of_torchvision_is_in_the_list() -> None:
    specs = [spec for spec, _ in zoo.torchvision_classifiers()]
    assert len(specs) == len(set(specs)) >= 80
    assert 15 < sum(not zoo.is_one_more(spec) for spec in specs) < 30


def test_a_row(models: str) -> None:
    """All columns of a model that goes through; what stands in the way of one that does not."""
    assert is_complete(row_of(f"{models}:tiny", 8))
    row = row_of(f"{models}:tiny", 8, short=True)
    assert [name for name in COLUMNS if row[name] == "-"] == [name for name in COLUMNS if name not in SHORT]
    masked = row_of(f"{models}:masked", 8)
    assert "boolean-mask" in masked["captured"] and not is_complete(masked)


def test_a_model_that_ends_its_process_is_a_row(models: str) -> None:
    row = coverage.run(f"{models}:fatal", 8, memory=8, timeout=60)
    assert row["captured"] == "the process ended with 3"


def test_the_page_counts_and_names_the_gaps() -> None:
    good = {"model": "timm:resnet18", "size": 64, **dict.fromkeys(COLUMNS, "yes")}
    bad = {"model": "timm:test_vit", "size": 160, **dict.fromkeys(COLUMNS, "yes"), "ONNX": "differs by 2.0e-01"}
    listed = [("timm:resnet18", 64), ("timm:test_vit", None), ("timm:vgg11", 64)]
    page = document({row["model"]: row for row in (good, bad)}, listed, {"torch": "2.14.1"})
    assert "| timm | 2 |" in page and "1 of 2" in page
    assert "- `timm:test_vit`, ONNX: differs by 2.0e-01" in page
    assert "1 models of the list have not been run: `timm:vgg11`." in page
