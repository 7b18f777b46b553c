"""A lowered module as a folder: plain engine or ONNX files, safetensors, JSON. No pickle; nothing in it is imported.

manifest.json             format version, glue graph, shapes, versions, SHA-256 of every other file
segment_0.engine | .onnx  as `trtexec` or ONNX Runtime take it
segment_0.network.json, segment_0.network.safetensors    the TensorRT network, for `simulate`
state.safetensors         tensors that the glue graph and stateful segments hold
summary.txt, report.json  for people and for scripts; `load` does not read them
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fx_passes.errors import ArtifactError
from lowering.glue_format import glue_from_plain, glue_to_plain
from lowering.module import LoweredModule, OpRow, Segment, SegmentInfo
from lowering.segments import Fallback

__all__ = ["FORMAT", "MANIFEST", "described", "load", "save"]

FORMAT = 1
MANIFEST = "manifest.json"
_STATE = "state.safetensors"


def save(lowered: LoweredModule, folder: str | Path, *, include_network: bool = True) -> Path:
    """Write `lowered` into `folder`; see `LoweredModule.save`."""
    folder = Path(folder)
    with _writing(folder) as write:
        segments = []
        for segment, info in zip(lowered.backend_segments(), lowered.segments, strict=True):
            for name, writer in segment.backend.artifact_files(info.name, include_network=include_network).items():
                write(name, writer)
            segments.append(_segment_to_plain(segment, info))
        glue, state = glue_to_plain(lowered.glue)
        for segment in lowered.backend_segments():
            for fqn, value in zip(segment.buffer_names, segment.state(), strict=True):
                state[f"{segment.name}:{fqn}"] = value
        if state:
            tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
            write(_STATE, lambda path: save_file(tensors, path))
        write("summary.txt", lambda path: path.write_text(lowered.summary(), encoding="utf-8"))
        write("report.json", lambda path: _write_json(path, lowered.report()))
        manifest = {
            "format": FORMAT,
            "details": lowered.details,
            "glue": glue,
            "segments": segments,
            "fallbacks": [asdict(f) for f in lowered.fallbacks],
        }
        write.finish(manifest)
    return folder


def load(
    folder: str | Path, model: nn.Module | None = None, fallbacks: dict[str, Callable[..., Any]] | None = None
) -> LoweredModule:
    """Read a saved artifact.

    Args:
        folder: what `LoweredModule.save` wrote; it may have been moved.
        model: the model that was lowered, if wrapped methods or leaf modules of it stay in Python.
        fallbacks: wrapped functions by name, for example `{"decode": decode}`.

    Raises:
        ArtifactError: a file is missing, truncated, altered or of a newer format, or a Python part is not supplied.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    _verify(folder, manifest["files"])
    try:
        state = load_file(folder / _STATE) if _STATE in manifest["files"] else {}
        segments = [_segment_from_plain(folder, plain, state) for plain in manifest["segments"]]
        glue = glue_from_plain(manifest["glue"], {s.name: s for s, _ in segments}, state, model, fallbacks or {})
        stays = [Fallback(**f) for f in manifest["fallbacks"]]
        return LoweredModule(glue, [info for _, info in segments], stays, manifest["details"])
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ArtifactError(
            f"the manifest of {folder.name} is not well-formed: {error!r}", hint="save the lowered module again"
        ) from error


def described(folder: str | Path) -> tuple[str, dict[str, Any]]:
    """What `summary()` and `report()` said when the artifact was saved.

    Every file is checked and none loaded, so that neither a runtime nor the model is needed.

    Raises:
        ArtifactError: as `load`.
    """
    folder = Path(folder)
    _verify(folder, _read_manifest(folder)["files"])
    summary = (folder / "summary.txt").read_text(encoding="utf-8")
    return summary, json.loads((folder / "report.json").read_text(encoding="utf-8"))


def _segment_to_plain(segment: Segment, info: SegmentInfo) -> dict[str, Any]:
    return {
        "info": info.as_dict(),
        "backend": segment.backend.artifact_record(),
        "writebacks": [asdict(w) for w in segment.writebacks],
        "buffers": segment.buffer_names,
    }


def _segment_from_plain(folder: Path, plain: dict[str, Any], state: dict[str, Tensor]) -> tuple[Segment, SegmentInfo]:
    from lowering.aten import WriteBack

    info = SegmentInfo(**{**plain["info"], "ops": [OpRow(**row) for row in plain["info"]["ops"]]})
    record = plain["backend"]
    if record["kind"] == "onnx":
        from lowering.onnx.session import OnnxSession as backend_class
    elif record["kind"] == "tensorrt":
        from lowering.trt.engine import TrtEngine as backend_class  # type: ignore[assignment]
    else:
        raise ArtifactError(
            f"{info.name} is of the unknown kind {record['kind']!r}", hint="load it with the version that saved it"
        )
    backend = backend_class.from_artifact(folder, info.name, record)
    buffers = {fqn: state[f"{info.name}:{fqn}"] for fqn in plain["buffers"]}
    return Segment(info.name, backend, [WriteBack(**w) for w in plain["writebacks"]], buffers), info


class _Writer:
    """Writes files under temporary names; `finish` puts all of them in place, the manifest last."""

    def __init__(self, folder: Path, scratch: Path):
        self._folder, self._scratch = folder, scratch
        self._files: dict[str, dict[str, Any]] = {}

    def __call__(self, name: str, writer: Callable[[Path], Any]) -> None:
        path = self._scratch / name
        writer(path)
        self._files[name] = {"sha256": _sha256(path), "bytes": path.stat().st_size}

    def finish(self, manifest: dict[str, Any]) -> None:
        _write_json(self._scratch / MANIFEST, {**manifest, "files": self._files})
        obsolete = _files_of(self._folder) - set(self._files)
        for name in [*self._files, MANIFEST]:
            os.replace(self._scratch / name, self._folder / name)
        for name in obsolete:
            (self._folder / name).unlink(missing_ok=True)


@contextmanager
def _writing(folder: Path) -> Iterator[_Writer]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as scratch:
            yield _Writer(folder, Path(scratch))
    except OSError as error:
        raise ArtifactError(
            f"cannot write to {folder}: {error.strerror or error}", hint="choose another folder, or free some space"
        ) from error


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _files_of(folder: Path) -> set[str]:
    """Files that an artifact already in `folder` lists; none if there is no readable one."""
    try:
        return set(_read_manifest(folder)["files"])
    except ArtifactError:
        return set()


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(
            f"{folder} has no readable {MANIFEST}: {error.strerror or error}",
            hint="pass a folder that LoweredModule.save wrote",
        ) from error
    except ValueError as error:
        raise ArtifactError(f"{path} is not JSON: {error}", hint="save the lowered module again") from error
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(version, int) or version < 1:
        raise ArtifactError(
            f"{path} is not a manifest of this project", hint="pass a folder that LoweredModule.save wrote"
        )
    if version > FORMAT:
        raise ArtifactError(
            f"{folder.name} has format {version}; this version reads up to {FORMAT}", hint="update fx-trt-lowering"
        )
    names = manifest.get("files")
    if not isinstance(names, dict) or any(os.path.basename(name) != name for name in names):
        raise ArtifactError(f"{path} lists files outside its folder, or none", hint="save the lowered module again")
    return manifest


def _verify(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise ArtifactError(f"{folder.name} lacks {name}", hint="copy the whole folder, or save again")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise ArtifactError(
                f"{name} has {size} bytes; the manifest says {expected['bytes']}",
                hint="the file is truncated or was replaced: copy it again, or save again",
            )
        if _sha256(path) != expected["sha256"]:
            raise ArtifactError(
                f"{name} is not the file that was saved (its SHA-256 differs)", hint="copy it again, or save again"
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()
