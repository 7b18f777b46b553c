"""The files of an artifact: written so that a reader sees all of them or none, and checked before anything is read.

Nothing here knows what the files mean. A manifest may name files of its own folder only, which are plain files, whose
sizes and digests it states.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fx_passes.errors import ArtifactError
from lowering.artifact.schema import checked

__all__ = [
    "FORMAT",
    "MANIFEST",
    "STATE",
    "Writer",
    "check_files",
    "file_entry",
    "parse_json",
    "read_manifest",
    "write_json",
    "writing",
]

FORMAT = 3  # 1 has no children, 2 no checks of sizes
MANIFEST = "manifest.json"
STATE = "state.safetensors"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Writer:
    """Writes files under temporary names; `finish` puts all of them in place, the manifest last."""

    def __init__(self, folder: Path, scratch: Path):
        self._folder, self._scratch = folder, scratch
        self._files: dict[str, dict[str, Any]] = {}
        self._written: list[str] = []

    def __call__(self, name: str, writer: Callable[[Path], Any]) -> None:
        """Let `writer` write the file `name`."""
        path = self._scratch / name
        writer(path)
        self._files[name] = file_entry(path)
        self._written.append(name)

    def keep(self, files: dict[str, dict[str, Any]]) -> None:
        """Let files stay that are in the folder already, with what the manifest says of them."""
        self._files.update(files)

    def finish(self, manifest: dict[str, Any]) -> None:
        """Put everything in place; files of an artifact that was there before, and that this one lacks, go."""
        write_json(self._scratch / MANIFEST, {**manifest, "files": self._files})
        obsolete = _files_of(self._folder) - set(self._files)
        for name in [*self._written, MANIFEST]:
            os.replace(self._scratch / name, self._folder / name)
        for name in obsolete:
            (self._folder / name).unlink(missing_ok=True)


@contextmanager
def writing(folder: Path) -> Iterator[Writer]:
    """A `Writer` into `folder`, which is made if it is missing.

    Raises:
        ArtifactError: the folder cannot be written, or holds files and no manifest of this project.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_foreign(folder)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as scratch:
            yield Writer(folder, Path(scratch))
    except OSError as error:
        raise ArtifactError(
            f"cannot write to {folder}: {error.strerror or error}", hint="choose another folder, or free some space"
        ) from error


def _refuse_foreign(folder: Path) -> None:
    """Hidden files and folders do not count: no file of an artifact can be in their place."""
    if all(path.name.startswith(".") or path.is_dir() for path in folder.iterdir()):
        return
    try:
        read_manifest(folder)
    except ArtifactError as error:
        raise ArtifactError(
            f"{folder} holds files and is no artifact that could be replaced: {error.what}",
            hint="choose an empty or a new folder",
        ) from error


def write_json(path: Path, data: Any) -> None:
    """Write `data` as JSON that any reader takes: no NaN, no infinities."""
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def parse_json(text: str) -> Any:
    """JSON, strictly: NaN and infinities are refused.

    Raises:
        ValueError: it is not JSON, nested too deeply, or holds a number of thousands of digits.
    """

    def refused(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refused)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def file_entry(path: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"sha256": _sha256(path), "bytes": path.stat().st_size}


def _files_of(folder: Path) -> set[str]:
    """Files that an artifact already in `folder` lists; none if there is no readable one."""
    try:
        return set(read_manifest(folder)["files"])
    except ArtifactError:
        return set()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest in `folder`: a dict with an entry "files" that names plain files of this folder.

    Raises:
        ArtifactError: there is none, it is damaged, or of a newer format.
    """
    path = folder / MANIFEST
    _refuse_link(path)
    try:
        manifest = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(
            f"{folder} has no readable {MANIFEST}: {error.strerror or error}",
            hint="pass a folder that LoweredModule.save wrote",
        ) from error
    except ValueError as error:
        raise ArtifactError(f"{path} is not JSON: {error}", hint="save the lowered module again") from error
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ArtifactError(
            f"{path} is not a manifest of this project", hint="pass a folder that LoweredModule.save wrote"
        )
    if version > FORMAT:
        raise ArtifactError(
            f"{folder.name} has format {version}; this version reads up to {FORMAT}", hint="update fx-trt-lowering"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(_NAME.fullmatch(name) for name in files):
        raise ArtifactError(f"{path} lists files outside its folder, or none", hint="save the lowered module again")
    for name, entry in files.items():
        checked(entry, dict, f"the entry of {name}")
        checked(entry.get("bytes"), int, f"the size of {name}")
        if not _DIGEST.fullmatch(checked(entry.get("sha256"), str, f"the digest of {name}")):
            raise ArtifactError(f"the digest of {name} in {MANIFEST} is no SHA-256")
    return manifest


def check_files(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Hold every file to what the manifest says of it.

    Raises:
        ArtifactError: one is missing, a link, truncated or altered.
    """
    for name, expected in files.items():
        path = folder / name
        _refuse_link(path)
        if not path.is_file():
            raise ArtifactError(f"{folder.name} lacks {name}", hint="copy the whole folder, or save again")
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise ArtifactError(
                    f"{name} has {size} bytes; the manifest says {expected['bytes']}",
                    hint="the file is truncated or was replaced: copy it again, or save again",
                )
            digest = _sha256(path)
        except OSError as error:
            raise ArtifactError(f"{name} cannot be read: {error.strerror or error}") from error
        if digest != expected["sha256"]:
            raise ArtifactError(
                f"{name} is not the file that was saved (its SHA-256 differs)", hint="copy it again, or save again"
            )


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise ArtifactError(
            f"{path.name} is a symbolic link, which may lead out of the folder",
            hint="copy the folder with its links resolved, for example by cp -rL",
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
