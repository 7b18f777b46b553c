"""What the pipeline needs from a backend. TensorRT and ONNX each have one implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.fx import GraphModule, Node

from lowering.module import Segment, SegmentInfo
from lowering.summary import op_rows

if TYPE_CHECKING:
    from lowering.aten import AtenProgram
    from lowering.segments import Segmented

__all__ = ["Backend", "graph_of", "install", "segment_info"]


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


def graph_of(glue: GraphModule, name: str) -> GraphModule:
    """The graph of segment `name`, before a backend takes its place."""
    segment = glue.get_submodule(name)
    assert isinstance(segment, GraphModule), f"{name} is a {type(segment).__name__}"
    return segment


def segment_info(parts: Segmented, name: str, **found: Any) -> SegmentInfo:
    """What is known of a segment from its graph and its boundary, with what the backend `found`."""
    graph = graph_of(parts.glue, name)
    return SegmentInfo(
        name=name,
        nodes=sum(node.op.startswith("call_") for node in graph.graph.nodes),
        flops=parts.measured.boundaries[name].flops,
        ops=op_rows(graph),
        **found,
    )


def install(glue: GraphModule, name: str, backend: nn.Module, program: AtenProgram) -> None:
    """Replace the segment `name` of `glue` by `backend`, with the write-backs that `program` asks for.

    The buffers that the program updates become the segment's own copies: what a call changes is never the caller's.
    """
    values = dict(glue.get_submodule(name).named_buffers())
    buffers = {fqn: values[fqn] for fqn in program.buffer_inputs}
    setattr(glue, name, Segment(name, backend, program.writebacks, buffers))
