"""What the documentation shows runs: the README's Python, the examples, docstrings; its links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)(?:#[^)]*)?\)")
COMMAND = re.compile(r"^\$ (.+)$", re.MULTILINE)


def run_program(arguments: list[str], folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def modules() -> list[str]:
    names = ["fx_passes", "lowering"]
    for package in ("fx_passes", "lowering"):
        names += [module.name for module in pkgutil.walk_packages([str(ROOT / package)], f"{package}.")]
    return names


def with_examples() -> list[str]:
    """The modules that have a docstring example, without importing any."""
    found = []
    for name in modules():
        path = ROOT / name.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if ">>> " in file.read_text(encoding="utf-8"):
            found.append(name)
    return found


@pytest.mark.parametrize("name", with_examples())
def test_docstring_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    given = {"torch": torch, "nn": torch.nn}  # what every reader has imported
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(module, extraglobs=given, optionflags=flags)
    assert result.attempted > 0
    assert result.failed == 0


def test_there_are_docstring_examples():
    assert len(with_examples()) > 5


@pytest.mark.zoo
@pytest.mark.parametrize("index", range(len(BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8")))))
def test_the_readmes_python_runs(index, tmp_path):
    pytest.importorskip("torchvision")
    code = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))[index]
    (tmp_path / "example.py").write_text(code)
    assert run_program(["example.py"], tmp_path).strip()


def test_the_readme_has_python():
    assert len(BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))) >= 2


@pytest.mark.parametrize("name", ["postprocessing.py", "step_by_step.py", "training.py"])
def test_the_examples_run(name, tmp_path):
    assert run_program([str(ROOT / "examples" / name)], tmp_path).strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), target


def test_the_readmes_commands_exist():
    """Every script is there and executable, and every option of `fxtrt` that is shown is one."""
    from typer.main import get_command

    from lowering.command.cli import app

    command = get_command(app)
    seen = set()
    for line in COMMAND.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        program, *words = line.split()
        seen.add(program)
        if program == "fxtrt":
            known = {option for parameter in command.commands[words[0]].params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known, line
        else:
            assert os.access(ROOT / program, os.X_OK), line
    assert seen == {"scripts/quickstart", "scripts/test", "fxtrt"}


def test_pages_speak_of_files_that_exist():
    """`docs/architecture.md` names a file for every stage."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:fx_passes|lowering)/[\w/.]+)`", text))
    packages = {"fx_passes/", "lowering/"}
    assert len(named) > 10
    assert [name for name in sorted(named - packages) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("script", ["scripts/quickstart", "scripts/test", "scripts/compare_latency", ".ci/run"])
def test_scripts_are_valid_shell(script):
    assert os.access(ROOT / script, os.X_OK)
    result = subprocess.run(["bash", "-n", str(ROOT / script)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_continuous_integration_runs_the_readmes_command():
    assert "$ scripts/test\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "scripts/test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
