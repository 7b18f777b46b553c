"""A lowered module as a folder: plain engine or ONNX files, safetensors, JSON. No pickle; nothing in it is imported.

manifest.json             format version, glue graph, lowered children, shapes, versions, SHA-256 of every other file
segment_0.engine | .onnx  (or named like the child, backbone.engine) as `trtexec` or ONNX Runtime take it
segment_0.network.json, segment_0.network.safetensors    the TensorRT network, for `simulate`
state.safetensors         tensors that the glue graph, stateful segments and a model that stays Python hold
summary.txt, report.json  for people and for scripts; `load` does not read them
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import save_file
from torch import Tensor, nn
from torch.fx import GraphModule

from lowering.artifact.children import children_to_plain
from lowering.artifact.files import FORMAT, STATE, write_json
from lowering.artifact.glue import glue_to_plain
from lowering.artifact.schema import check_to_plain
from lowering.artifact.writing import writing
from lowering.children.lowered import WithChildren
from lowering.records import Fallback, SegmentInfo
from lowering.segment.segment import Segment

__all__ = ["save"]


class Saved(Protocol):
    """What is saved: a `LoweredModule`."""

    glue: nn.Module
    segments: list[SegmentInfo]
    fallbacks: list[Fallback]
    details: dict[str, Any]

    def backend_segments(self) -> list[Segment]: ...
    def summary(self) -> str: ...
    def report(self) -> dict[str, Any]: ...


def save(lowered: Saved, folder: str | Path, *, include_network: bool = True) -> Path:
    """Write `lowered` into `folder`; see `LoweredModule.save`."""
    folder = Path(folder)
    with writing(folder) as write:
        segments = []
        for segment, info in zip(lowered.backend_segments(), lowered.segments, strict=True):
            for name, writer in segment.backend.artifact_files(info.name, include_network=include_network).items():
                write(name, writer)
            segments.append(_segment_to_plain(segment, info, include_network))
        glue = children = None
        state: dict[str, Tensor] = {}
        module = lowered.glue
        if isinstance(module, WithChildren):
            children, state = children_to_plain(module)
            module = module.module
        if isinstance(module, GraphModule):  # else the model itself, which is the caller's
            glue, tensors = glue_to_plain(module)
            state |= tensors
        for segment in lowered.backend_segments():
            for fqn, value in zip(segment.buffer_names, segment.state(), strict=True):
                state[f"{segment.name}:{fqn}"] = value
        if state:
            tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
            write(STATE, lambda path: save_file(tensors, path))
        write("summary.txt", lambda path: path.write_text(lowered.summary(), encoding="utf-8"))
        write("report.json", lambda path: write_json(path, lowered.report()))
        manifest = {
            "format": FORMAT,
            "details": lowered.details,
            "glue": glue,
            "children": children,
            "segments": segments,
            "fallbacks": [asdict(f) for f in lowered.fallbacks],
        }
        write.finish(manifest)
    return folder


def _segment_to_plain(segment: Segment, info: SegmentInfo, include_network: bool) -> dict[str, Any]:
    return {
        "info": info.as_dict(),
        "backend": segment.backend.artifact_record(include_network=include_network),
        "writebacks": [asdict(w) for w in segment.writebacks],
        "buffers": segment.buffer_names,
        "checks": [check_to_plain(check) for check in segment.checks],
    }
