"""`fxtrt inspect`: what an engine adds up to, beside its float twin, with a roofline floor where a GPU is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fx_passes.errors import InputError
from lowering import lower_to_trt
from lowering.command.cli import main
from lowering.command.engine_facts import engine_facts

ROWS: list[dict[str, Any]] = [
    {"inputs": ["Float[1]"], "int8": False, "operations": 0, "overhead": "quantize", "bytes": 3_000_000,
     "reads": [["image", 3_000_000]], "constants": [], "writes": []},
    {"inputs": ["Int8[1]"], "int8": True, "operations": 660_600, "overhead": None, "bytes": 0,
     "reads": [], "constants": [], "writes": []},
]  # fmt: skip
REPORT = {
    "kernels": 2,
    "int8_compute": 1,
    "float_compute": 0,
    "activation_bytes": 3_000_000,
    "weight_bytes": 25_000_000,
    "rows": ROWS,
}


def test_the_facts_are_sums_over_the_rows() -> None:
    facts = engine_facts(REPORT, "RTX 4090")
    assert facts == {
        "kernels": "2",
        "convolutions and matmuls in int8": "1 of 1",
        "kernels that only quantize": "1, 3.00 MB",
        "kernels that only move or cast": "0, 0.00 MB",
        "activations moved": "3.0 MB",
        "weights": "25.0 MB",
        "floor on RTX 4090": "7.0 us",  # 3 MB at 1008 GB/s, and two launches
        "  to move the bytes": "3.0 us",
        "  to do the operations": "0.0 us",
        "  to launch the kernels": "4.0 us",
    }


def test_without_a_gpu_there_is_no_floor() -> None:
    assert not [name for name in engine_facts(REPORT) if "floor" in name]


def test_rows_of_an_older_version_have_no_floor() -> None:
    old = {**REPORT, "rows": [{"bytes": 4, "int8": True}]}
    assert engine_facts(old)["kernels that only quantize"] == "0, 0.00 MB"
    with pytest.raises(InputError, match="lower the model again"):
        engine_facts(old, "L4")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    image = torch.randn(1, 3, 16, 16)
    lowered = lower_to_trt(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), image, calibration=[image])
    return lowered.save(tmp_path_factory.mktemp("inspect") / "out")


def test_the_command_shows_both_engines_and_the_floor(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(artifact), "--gpu", "rtx4090"])
    assert not ended.value.code
    out = capsys.readouterr().out
    for text in ("segment_0: engine", "int8 + fp16", "the same in fp16", "1 of 1", "0 of 1", "floor on RTX 4090"):
        assert text in out


def test_the_command_names_the_gpus_it_knows(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(artifact), "--gpu", "GTX 1"])
    assert ended.value.code == 1
    assert "RTX 4070" in capsys.readouterr().err


def test_the_summary_gives_the_floor_of_both(artifact: Path) -> None:
    line = next(
        line for line in (artifact / "summary.txt").read_text().splitlines() if line.startswith("    roofline floor")
    )
    assert "on RTX 4070 (no measurement)" in line
    assert line.count(" us") == 2
    assert line.endswith("us in fp16")
