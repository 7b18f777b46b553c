"""The scripts that choose versions: tested ones for the README's commands, the newest, the oldest."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "constraints").glob("*.txt"))


def script(name: str) -> ModuleType:
    """A Python script of scripts/ as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def pinned(file: Path) -> dict[str, str]:
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert lines == sorted(lines)
    pairs = [re.fullmatch(r"([a-z0-9-]+)==(\d+[\w.!]*)", line) for line in lines]  # no host, no path, no build
    assert all(pairs), [line for line, pair in zip(lines, pairs, strict=True) if pair is None]
    return dict(pair.groups() for pair in pairs if pair is not None)


def test_some_versions_are_tested():
    assert FILES
    assert all(re.fullmatch(r"python3\.\d+\.txt", file.name) for file in FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_tested_versions_are_within_the_declared_ranges(file):
    versions = pinned(file)
    assert not [name for name in versions if name.startswith(("nvidia", "cuda", "triton"))]
    if sys.version_info >= (3, 11):
        for name, least in script("versions").ranges(("zoo", "test")).items():
            got = versions[re.sub(r"[-_.]+", "-", name).lower()]
            assert script("versions").numbers(re.match(r"[\d.]*\d", got)[0]) >= least, name


def test_what_is_written_down():
    installed = {
        "torch": "2.14.1+cpu", "Jinja2": "3.1.6", "ml_dtypes": "0.7.0", "tensorrt_rtx_cu13": "1.7.1.116",
        "pip": "26.3", "setuptools": "84.2", "fx-trt-lowering": "0.1.0", "nvidia-cublas": "13.1",
        "cuda-toolkit": "13.0", "nvidia-cudnn-cu13": "9.2", "triton": "3.8.0",
    }  # fmt: skip
    assert script("lock").constraints(installed) == [
        "jinja2==3.1.6",
        "ml-dtypes==0.7.0",
        "tensorrt-rtx-cu13==1.7.1.116",
        "torch==2.14.1",
    ]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the script needs tomllib")
def test_the_oldest_versions_are_the_least_that_the_registry_has(monkeypatch):
    versions = script("versions")
    listed = {"torch": "2.14.1, 2.10.0, 2.9.1, 2.9.0, 2.9.0rc1, 2.8.0", "numpy": "2.4.6, 1.26.4"}
    monkeypatch.setattr(versions, "ranges", lambda extras: {"torch": (2, 9), "numpy": (1, 26)})

    def index(command, **options):
        text = f"{command[-1]} (9)\nAvailable versions: {listed[command[-1]]}\n"
        return subprocess.CompletedProcess(command, 0, stdout=text)

    monkeypatch.setattr(versions.subprocess, "run", index)
    assert versions.oldest(Path("python")) == ["numpy==1.26.4", "torch==2.9.0"]


FAKE = """#!/bin/sh
case "$1" in
  -c) echo 3.11 ;;
  *) echo "$@" >> "$FXTRT_VENV/calls" ;;
esac
"""


@pytest.mark.parametrize(
    ("has_file", "variable", "expected"),
    [
        (True, None, "--constraint constraints/python3.11.txt "),
        (False, None, ""),
        (True, "", ""),
        (True, "other.txt", "--constraint other.txt "),
    ],
    ids=["tested", "python-without", "none", "another"],
)
def test_the_commands_install_tested_versions(has_file, variable, expected, tmp_path):
    def install() -> list[str]:
        subprocess.run(["bash", "-ceu", "source scripts/venv.sh; make_venv zoo"], cwd=tmp_path, env=env, check=True)
        return (tmp_path / "venv" / "calls").read_text().splitlines()

    for name in ("scripts/venv.sh", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE)
    python.chmod(0o755)
    tested, other = tmp_path / "constraints" / "python3.11.txt", tmp_path / "other.txt"
    if has_file:
        tested.parent.mkdir()
        tested.write_text("torch==2.14.1\n")
    other.write_text("torch==2.9.0\n")
    env = {"PATH": "/usr/bin:/bin", "FXTRT_VENV": "venv"}
    if variable is not None:
        env["FXTRT_CONSTRAINTS"] = variable
    command = f"-m pip install {expected}--editable .[zoo]"
    assert install() == [command]
    assert install() == [command]  # nothing to do
    for file in (tested, other):
        if file.exists() and file.name in expected:
            file.write_text("torch==2.15.0\n")  # renewed: installed again
            assert install() == [command] * 2
