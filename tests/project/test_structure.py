"""The layout breaks no rule of its own but those that are listed as known."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "structure"


@pytest.fixture(scope="module")
def structure():
    return runpy.run_path(str(SCRIPT))


def test_no_rule_is_broken_anew():
    result = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_circles_are_found_whatever_the_length(structure):
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set(), "f": {"g"}, "g": {"f"}}
    assert sorted(structure["circles"](arrows)) == [["a", "b", "c"], ["f", "g"]]
    assert structure["circles"]({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_floors_count_the_longest_way_down(structure):
    arrows = {"top": {"mid", "ground"}, "mid": {"ground"}, "ground": set(), "x": {"y"}, "y": {"x", "ground"}}
    assert structure["floors"](arrows) == {"top": 3, "mid": 2, "ground": 1, "x": 2, "y": 2}


def test_imports_inside_functions_and_for_type_checking_count(structure, tmp_path):
    file = tmp_path / "one.py"
    file.write_text("if TYPE_CHECKING:\n    from pkg import two\ndef f():\n    import pkg.three\n")
    known = {"pkg": file, "pkg.two": file, "pkg.three": file, "pkg.one": file}
    found = {(i.module, i.late) for i in structure["imports"]("pkg.one", known)}
    assert found == {("pkg.two", False), ("pkg.three", True)}
