"""Quantization configurations as TOML or JSON files: one table for each place, its name as in Python."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fx_passes.errors import ArtifactError, BackendUnavailableError, InputError

__all__ = ["read_entries", "write_entries"]

_NONE = "default"


def read_entries(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The entries of a file, unchecked; an option "default" is None, for TOML has no null.

    Raises:
        InputError: no such file, a suffix other than .toml and .json, or contents that are no table of tables.
        BackendUnavailableError: a TOML file on Python 3.10, which cannot read them by itself.
    """
    file = Path(path)
    kind = _kind(file)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"the quantization configuration '{file.name}' cannot be read: {error.strerror}", hint="check the path"
        ) from error
    try:
        entries = json.loads(text) if kind == ".json" else _toml(text)
    except ValueError as error:  # of which both decoders' errors are subclasses
        raise InputError(f"'{file.name}' is no valid {kind[1:].upper()}: {error}") from error
    if not isinstance(entries, dict):
        raise InputError(f"'{file.name}' holds a {type(entries).__name__}", hint="write one table for each place")
    return {
        place: {name: None if value == _NONE else value for name, value in options.items()}
        if isinstance(options, dict)
        else options
        for place, options in entries.items()
    }


def write_entries(path: str | os.PathLike[str], entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Write entries that `read_entries` gives back; an option that is None is "default" in a TOML file.

    Raises:
        InputError: a suffix other than .toml and .json.
        ArtifactError: the file cannot be written.
    """
    file = Path(path)
    text = json.dumps(entries, indent=1) if _kind(file) == ".json" else "\n".join(_tables(entries))
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ArtifactError(
            f"the quantization configuration cannot be written to '{file.name}': {error.strerror}",
            hint="check that the folder exists and may be written to",
        ) from error


def _kind(file: Path) -> str:
    if file.suffix not in (".toml", ".json"):
        raise InputError(f"'{file.name}' is no quantization configuration", hint="use a .toml or a .json file")
    return file.suffix


def _toml(text: str) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError as error:
        raise BackendUnavailableError(
            "Python 3.10 has no TOML reader", hint="use a newer Python, or write the configuration as JSON"
        ) from error
    return tomllib.loads(text)


def _tables(entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of TOML. Its basic strings, booleans and numbers are written as JSON's are."""
    lines = []
    for place, options in entries.items():
        lines.append(f"[{json.dumps(place)}]")
        lines += [f"{name} = {json.dumps(_NONE if value is None else value)}" for name, value in options.items()]
        lines.append("")
    return lines[:-1]
