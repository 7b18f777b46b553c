"""Several engines in one artifact: for different GPUs, or different lists of GPUs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fx_passes.errors import ArtifactError
from lowering.artifact.files import check_files, read_manifest, write_json
from lowering.artifact.plain import checked
from lowering.artifact.writing import Writer, writing
from lowering.records import Described, Fallback, OpRow, SegmentInfo
from lowering.summary import report_data, summary_text

__all__ = ["merge"]


@dataclass(frozen=True)
class _Artifact:
    folder: Path
    manifest: dict[str, Any]

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        return self.manifest["files"]

    @property
    def segments(self) -> list[dict[str, Any]]:
        return self.manifest["segments"]


def merge(folder: str | Path, other: str | Path) -> Path:
    """Add the engines of another artifact of the same lowering to the one in `folder`.

    Lower the same model once for each GPU (TensorRT) or list of GPUs (TensorRT-RTX), save each, and merge them: the
    engine that fits is chosen when the artifact runs. Both must hold their networks, which must be equal.

    Args:
        folder: an artifact; it is changed in place, its manifest last.
        other: the artifact whose engines are copied. An engine for what one in `folder` is for already is left out.

    Returns:
        `folder`.

    Raises:
        ArtifactError: one of them is damaged, or they are not of the same lowering; the text says what differs.

    Example:
        >>> from lowering import merge
        >>> merge("build/net-for-a100", "build/net-for-h100")  # doctest: +SKIP
    """
    base, source = _read(Path(folder)), _read(Path(other))
    _check_same(base, source)
    try:
        with writing(base.folder) as write:
            write.keep(base.files)
            for mine, theirs in zip(base.segments, source.segments, strict=True):
                _add_engines(write, mine, source.folder, theirs)
            _write_told(write, base.manifest)
            write.finish(base.manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(
            f"the manifest of {base.folder.name} or {source.folder.name} is damaged: {error!r}"
        ) from error
    return base.folder


def _read(folder: Path) -> _Artifact:
    manifest = read_manifest(folder)
    check_files(folder, manifest["files"])
    for segment in checked(manifest.get("segments"), list, "the list of segments"):
        checked(segment, dict, "a segment")
        info, record = checked(segment.get("info"), dict, "'info'"), checked(segment.get("backend"), dict, "'backend'")
        if record.get("kind") != "tensorrt":
            raise ArtifactError(f"{folder.name} holds no TensorRT engines, so there is nothing to merge")
        checked(info.get("name"), str, "the name of a segment")
        checked(info.get("engines"), list, "the reports of a segment")
        checked(record.get("engines"), list, "the engines of a segment")
    return _Artifact(folder, manifest)


def _check_same(base: _Artifact, other: _Artifact) -> None:
    def differ(what: str, hint: str) -> ArtifactError:
        return ArtifactError(f"{base.folder.name} and {other.folder.name} differ in {what}", hint=hint)

    again = "merge artifacts of one model, lowered with the same arguments but for the GPU"
    for key in ("glue", "fallbacks", "children"):
        if base.manifest.get(key) != other.manifest.get(key):
            raise differ(f"their {key}", again)
    names = [[segment["info"]["name"] for segment in artifact.segments] for artifact in (base, other)]
    if names[0] != names[1]:
        raise differ("their segments", again)
    for mine, theirs in zip(base.segments, other.segments, strict=True):
        for key in ("inputs", "outputs", "network"):
            if mine["backend"].get(key) != theirs["backend"].get(key):
                raise differ(f"the {key} of {mine['info']['name']}", again)
        if mine.get("checks") != theirs.get("checks"):
            raise differ(f"the sizes that {mine['info']['name']} takes", again)
        if not mine["backend"].get("network"):
            raise ArtifactError(
                f"{mine['info']['name']} was saved without its network, so nothing shows that the engines are of one",
                hint="save both with include_network=True",
            )
    engines = {name for artifact in (base, other) for name in artifact.files if name.endswith(".engine")}
    told = {"summary.txt", "report.json"}
    for name in (base.files.keys() | other.files.keys()) - engines - told:
        if base.files.get(name) != other.files.get(name):
            raise differ(name, again)


def _add_engines(write: Writer, mine: dict[str, Any], source: Path, theirs: dict[str, Any]) -> None:
    from lowering.trt.run.engine import engine_file

    name, targets = mine["info"]["name"], mine["backend"]["engines"]
    reports = zip(theirs["backend"]["engines"], theirs["info"]["engines"], strict=True)
    for index, (target, report) in enumerate(reports):
        if target not in targets:
            write(engine_file(name, len(targets)), partial(shutil.copyfile, source / engine_file(name, index)))
            targets.append(target)
            mine["info"]["engines"].append(report)


def _write_told(write: Writer, manifest: dict[str, Any]) -> None:
    """The summary and the report, with all engines in them."""
    infos = [
        SegmentInfo(**{**segment["info"], "ops": [OpRow(**row) for row in segment["info"]["ops"]]})
        for segment in manifest["segments"]
    ]
    stays = [Fallback(**plain) for plain in manifest["fallbacks"]]
    told = Described(manifest["details"], infos, stays)
    write("summary.txt", lambda path: path.write_text(summary_text(told), encoding="utf-8"))
    write("report.json", lambda path: write_json(path, report_data(told)))
