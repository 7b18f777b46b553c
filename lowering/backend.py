"""What the pipeline needs from a backend. TensorRT and ONNX each have one implementation."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fx_passes.errors import ArtifactError, BackendUnavailableError
from lowering.records import SegmentInfo
from lowering.segment.checks import all_checks
from lowering.segment.segment import Segment, graph_of
from lowering.summary import op_rows, precision_text

if TYPE_CHECKING:
    from lowering.request.request import Request
    from lowering.segment.program import AtenProgram
    from lowering.segment.segments import Segmented

__all__ = ["Backend", "Unbuilt", "built_segments", "install", "segment_info"]


class Backend(Protocol):
    """Turns one aten program into something that runs.

    Attributes:
        target: whose quantization scheme and placement it wants: "tensorrt", "tensorrt-rtx" or "onnxruntime".
        simulates: whether its segments run on this machine only by `simulate`.
        threads: threads of its sessions, or None where that means nothing.
    """

    target: str
    simulates: bool
    threads: int | None

    def unsupported(self, name: str, program: AtenProgram) -> dict[Node, str]:
        """The nodes of segment `name` that it cannot take, each with the reason."""

    def lower(self, parts: Segmented, name: str, program: AtenProgram) -> SegmentInfo:
        """Build the segment `name`, put it into `parts.glue` in place of the graph, and say what came out."""


def segment_info(parts: Segmented, name: str, **found: Any) -> SegmentInfo:
    """What is known of a segment from its graph and its boundary, with what the backend `found`."""
    graph = graph_of(parts.glue, name)
    return SegmentInfo(
        name=name,
        nodes=sum(node.op.startswith("call_") for node in graph.graph.nodes),
        flops=parts.measured.boundaries[name].flops,
        ops=op_rows(graph),
        weights=_weights(parts.programs[name]),
        **found,
    )


def _weights(program: AtenProgram) -> dict[str, int]:
    """Bytes of the constants of a program, as they are and in float32; one that two nodes read counts once."""
    values = {id(value): value for _, value in program.constants.values()}.values()
    widths = [4 if value.is_floating_point() or value.dtype == torch.int8 else value.element_size() for value in values]
    floats = sum(value.numel() * width for value, width in zip(values, widths, strict=True))
    return {"stored": sum(value.nbytes for value in values), "float32": floats}


def install(glue: GraphModule, name: str, backend: nn.Module, program: AtenProgram) -> None:
    """Replace the segment `name` of `glue` by `backend`, with the write-backs that `program` asks for.

    The buffers that the program updates become the segment's own copies: what a call changes is never the caller's.
    """
    segment = glue.get_submodule(name)
    values = dict(segment.named_buffers())
    buffers = {fqn: values[fqn] for fqn in program.buffer_inputs}
    checks = all_checks(program, segment, getattr(backend, "simulate", backend))
    setattr(glue, name, Segment(name, backend, program.writebacks, buffers, checks))


def built_segments(parts: Segmented, request: Request) -> list[SegmentInfo]:
    """Build every segment in its place in `parts.glue`, or put in its place what says that nothing was built."""
    lower = request.backend.lower if request.build else partial(_unbuilt, request)
    infos = []
    for name, program in parts.programs.items():
        info = lower(parts, name, program)
        info.checks = [str(check) for check in parts.glue.get_submodule(name).checks]  # type: ignore[union-attr]
        infos.append(info)
    return infos


def _unbuilt(request: Request, parts: Segmented, name: str, program: AtenProgram) -> SegmentInfo:
    precision = precision_text("int8" if request.precision == "auto" else request.precision, request.settings)
    info = segment_info(parts, name, backend=f"{request.backend.target} (dry run)", precision=precision)
    install(parts.glue, name, Unbuilt(), program)
    return info


class Unbuilt(nn.Module):
    """Stands for the engine or session of a segment after a dry run."""

    def forward(self, *inputs: Any) -> Any:
        raise BackendUnavailableError(
            "a dry run builds nothing that could be called", hint="lower again without dry_run=True"
        )

    simulate = forward

    def artifact_files(self, name: str, **options: Any) -> Any:
        raise ArtifactError(f"a dry run built nothing of {name} to save", hint="lower again without dry_run=True")
