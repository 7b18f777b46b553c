"""A saved artifact read back: every file checked, every name and type looked at before anything is made of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from fx_passes.errors import ArtifactError, LoweringError
from lowering.artifact.children import checked_children, children_from_plain, supplied_model
from lowering.artifact.files import STATE, check_files, parse_json, read_manifest
from lowering.artifact.glue import glue_from_plain
from lowering.artifact.glue_checks import check_nodes
from lowering.artifact.glue_values import structures_named
from lowering.artifact.plain import checked
from lowering.artifact.schema import check_from_plain
from lowering.children.lowered import WithChildren
from lowering.module import LoweredModule
from lowering.records import Fallback, OpRow, SegmentInfo
from lowering.segment.segment import Segment

__all__ = ["described", "load"]

_SEGMENT = re.compile(r"[A-Za-z_]\w*(\.\w+)*", re.ASCII)


def load(
    folder: str | Path, model: nn.Module | None = None, fallbacks: dict[str, Callable[..., Any]] | None = None
) -> LoweredModule:
    """Read a saved artifact.

    Args:
        folder: what `LoweredModule.save` wrote; it may have been moved.
        model: the model that was lowered, if wrapped methods or leaf modules of it stay in Python. If the model itself
            stays in Python: one made in the same way, which gets the parameters that were saved, in a copy.
        fallbacks: wrapped functions, and NamedTuples and dataclasses of the model's results, by name, for example
            `{"decode": decode}`. Those in the source file of `model`, and class and static methods of `model` and its
            submodules, are found without.

    Raises:
        ArtifactError: a file is missing, truncated, altered or of a newer format, or a Python part is not supplied.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    check_files(folder, manifest["files"])
    try:
        _check_supplied(_checked_nodes(manifest), fallbacks or {})
        state = load_file(folder / STATE) if STATE in manifest["files"] else {}
        plain_segments = checked(manifest.get("segments"), list, "the list of segments")
        segments = [_segment_from_plain(folder, plain, state, manifest["files"]) for plain in plain_segments]
        by_name = {segment.name: segment for segment, _ in segments}
        glue = _glue(manifest, by_name, state, model, fallbacks or {})
        stays = [Fallback(**f) for f in checked(manifest.get("fallbacks"), list, "the list of fallbacks")]
        lowered = LoweredModule(glue, [info for _, info in segments], stays, manifest["details"])
        lowered.summary()  # what is missing for it is missing here, not when somebody asks
        return lowered
    except LoweringError:
        raise
    except Exception as error:  # a damaged manifest can fail anywhere in the building of what it describes
        raise ArtifactError(
            f"the manifest of {folder.name} is not well-formed: {error!r}", hint="save the lowered module again"
        ) from error


def _checked_nodes(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The nodes of the glue graph and of those of lowered children; a model that stays Python itself has none."""
    glue, children = manifest.get("glue"), manifest.get("children")
    lowered = [] if children is None else checked_children(children)
    if glue is not None or children is None:
        check_nodes(glue)
    return [*(glue or ()), *(node for child in lowered for node in child["glue"])]


def _glue(
    manifest: dict[str, Any],
    segments: dict[str, Segment],
    state: dict[str, Tensor],
    model: nn.Module | None,
    fallbacks: dict[str, Callable[..., Any]],
) -> nn.Module:
    """What calls the segments: the glue graph, the caller's model, or a graph around parts of the caller's model."""
    children = manifest.get("children")
    if children is None:
        return glue_from_plain(manifest["glue"], segments, state, model, fallbacks)
    root = supplied_model(children, model, state)
    lowered = children_from_plain(children, segments, state, root, fallbacks)
    if manifest["glue"] is None:
        return WithChildren(root, lowered)
    return WithChildren(glue_from_plain(manifest["glue"], segments, state, root, fallbacks), lowered, root)


def _check_supplied(nodes: list[dict[str, Any]], fallbacks: dict[str, Callable[..., Any]]) -> None:
    wanted = {plain["target"]["fallback"] for plain in nodes if isinstance(plain["target"], dict)}
    wanted.update(name for plain in nodes for name in structures_named(plain))
    if unknown := sorted(set(fallbacks) - wanted):
        names = f"it calls {', '.join(sorted(wanted))}" if wanted else "it calls none"
        raise ArtifactError(
            f"the artifact calls no function {', '.join(map(repr, unknown))} of the caller's", hint=names
        )


def described(folder: str | Path) -> tuple[str, dict[str, Any]]:
    """What `summary()` and `report()` said when the artifact was saved.

    Every file is checked and none loaded, so that neither a runtime nor the model is needed.

    Raises:
        ArtifactError: as `load`.
    """
    folder = Path(folder)
    files = read_manifest(folder)["files"]
    check_files(folder, files)
    if not {"summary.txt", "report.json"} <= files.keys():
        raise ArtifactError(f"{folder.name} has no summary and report", hint="save the lowered module again")
    try:
        summary = (folder / "summary.txt").read_text(encoding="utf-8")
        return summary, checked(parse_json((folder / "report.json").read_text(encoding="utf-8")), dict, "the report")
    except (ValueError, OSError) as error:
        raise ArtifactError(f"{folder.name} has no readable summary and report: {error!r}") from error


def _segment_from_plain(
    folder: Path, plain: dict[str, Any], state: dict[str, Tensor], files: dict[str, Any]
) -> tuple[Segment, SegmentInfo]:
    from lowering.segment.program import WriteBack

    checked(plain, dict, "a segment")
    described = checked(plain.get("info"), dict, "what is known of a segment")
    info = SegmentInfo(**{**described, "ops": [OpRow(**row) for row in described["ops"]]})
    if not _SEGMENT.fullmatch(checked(info.name, str, "the name of a segment")):
        raise ArtifactError(f"a segment is called {info.name!r}, which is no name that a graph may use")
    record = checked(plain.get("backend"), dict, f"the backend of {info.name}")
    kind = record.get("kind")
    backend_class: Any
    if kind == "onnx":
        from lowering.onnx.runtimes import runtime_class

        runtime = checked(record.get("runtime"), str, f"the runtime of {info.name}")
        backend_class = runtime_class(runtime, chosen=record.get("chosen") is True)
    elif kind == "tensorrt":
        from lowering.trt.run.engine import TrtEngine as backend_class
    else:
        raise ArtifactError(
            f"{info.name} is of the unknown kind {kind!r}", hint="load it with the version that saved it"
        )
    for name in backend_class.artifact_needs(info.name, record):
        if name not in files:  # the files that are listed, and only these, have been checked
            raise ArtifactError(f"the manifest of {folder.name} does not list {name}", hint="save again")
    backend = backend_class.from_artifact(folder, info.name, record)
    buffers = {fqn: state[f"{info.name}:{fqn}"] for fqn in plain["buffers"]}
    ranks = [len(spec.min) for spec in backend.inputs]
    plain_checks = checked(plain.get("checks", []), list, f"the checks of {info.name}")
    checks = [check_from_plain(check, info.name, ranks) for check in plain_checks]
    return Segment(info.name, backend, [WriteBack(**w) for w in plain["writebacks"]], buffers, checks), info
