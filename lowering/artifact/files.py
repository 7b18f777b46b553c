"""The files of an artifact, and the manifest that lists them: checked before anything is read.

Nothing here knows what the files mean. A manifest may name files of its own folder only, which are plain files, whose
sizes and digests it states; its own digest is its last entry, and its text the one way in which its data is written.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from fx_passes.errors import ArtifactError
from lowering.artifact.plain import checked

__all__ = [
    "FORMAT",
    "MANIFEST",
    "STATE",
    "check_files",
    "file_entry",
    "manifest_text",
    "names_of",
    "parse_json",
    "read_manifest",
    "write_json",
]

FORMAT = 3  # 1 has no children, 2 no digest of the manifest itself and no checks of sizes
MANIFEST = "manifest.json"
STATE = "state.safetensors"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LARGEST_MANIFEST = 1 << 28  # bytes; one of 4,000 nodes and 1,000 operators has 2 million


def write_json(path: Path, data: Any) -> None:
    """Write `data` as JSON that any reader takes: no NaN, no infinities."""
    path.write_bytes(_json(data))


def _json(data: Any) -> bytes:
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def manifest_text(manifest: dict[str, Any]) -> bytes:
    """The file that `manifest` is: its last entry is the SHA-256 of the file without that entry."""
    plain = {key: value for key, value in manifest.items() if key != "sha256"}
    return _json({**plain, "sha256": hashlib.sha256(_json(plain)).hexdigest()})


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


def names_of(path: Path) -> set[str]:
    """The files that the manifest at `path` lists. It may be damaged or older, as what is to be replaced may.

    Raises:
        ArtifactError: it is no manifest of this project, or one of a newer format.
    """
    files = _parsed(path)[0].get("files")
    return {name for name in files if _NAME.fullmatch(name)} if isinstance(files, dict) else set()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest in `folder`: a dict with an entry "files" that names plain files of this folder.

    Raises:
        ArtifactError: there is none, it is damaged, or of a newer or older format.
    """
    path = folder / MANIFEST
    manifest, text = _parsed(path)
    if manifest["format"] < FORMAT:
        raise ArtifactError(
            f"{folder.name} has format {manifest['format']}, which says nothing by which damage of {MANIFEST} is found",
            hint="save the lowered module again",
        )
    if text != manifest_text(manifest):
        raise ArtifactError(
            f"{MANIFEST} is not the file that was saved (its SHA-256 differs)", hint="copy it again, or save again"
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


def _parsed(path: Path) -> tuple[dict[str, Any], bytes]:
    """Data and text of a manifest of this format or an older one."""
    try:
        _refuse_link(path)
        if path.exists() and not path.is_file():
            raise ArtifactError(f"{path} is no plain file", hint="pass a folder that LoweredModule.save wrote")
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise ArtifactError(f"{path} is too large for a manifest", hint="save the lowered module again")
        text = path.read_bytes()
        manifest = parse_json(text.decode("utf-8"))
    except OSError as error:
        raise ArtifactError(
            f"{path.parent} has no readable {path.name}: {error.strerror or error}",
            hint="saving into it was broken off: save again"
            if _was_broken_off(path.parent)
            else "pass a folder that LoweredModule.save wrote",
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
            f"{path.parent.name} has format {version}; this version reads up to {FORMAT}", hint="update fx-trt-lowering"
        )
    return manifest, text


def _was_broken_off(folder: Path) -> bool:
    try:
        return any(folder.glob(".saving-*"))
    except OSError:  # it cannot be read at all
        return False


def check_files(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Hold every file to what the manifest says of it.

    Raises:
        ArtifactError: one is missing, a link, truncated or altered.
    """
    for name, expected in files.items():
        path = folder / name
        try:
            _refuse_link(path)
            if not path.is_file():
                raise ArtifactError(f"{folder.name} lacks {name}", hint="copy the whole folder, or save again")
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
