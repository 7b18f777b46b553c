"""ONNX as a backend of the pipeline: export, session, and the choice between int8 and float by measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from lowering.backend import install
from lowering.module import SegmentInfo
from lowering.settings import FLOAT_TYPES, Settings
from lowering.summary import op_rows, precision_text

if TYPE_CHECKING:
    from lowering.aten import AtenProgram
    from lowering.segments import Segmented

__all__ = ["OnnxBackend"]


class OnnxBackend:
    """Lowers segments to ONNX files, run by ONNX Runtime.

    Args:
        precision: as in `lower_to_onnx`.
        runtime: "onnxruntime" or "tensorrt": whose scheme and placement the file has.
        settings: `float_type` and `threads` are used.
    """

    simulates = False

    def __init__(self, precision: str, runtime: str, settings: Settings):
        self.precision, self.settings = precision, settings
        self.target = runtime
        self.threads: int | None = settings.threads or torch.get_num_threads()

    def unsupported(self, program: AtenProgram) -> dict[Node, str]:
        """Nothing is known beforehand: the exporter covers aten, and says so where it does not."""
        return {}

    def lower(self, parts: Segmented, name: str, program: AtenProgram) -> SegmentInfo:
        """Export one segment and open a session on it."""
        from lowering.aten import cast_float_part
        from lowering.onnx.export import export_onnx
        from lowering.onnx.session import OnnxSession

        graph = parts.glue.get_submodule(name)
        dtype = FLOAT_TYPES[self.settings.float_type or "fp32"]
        lowered = cast_float_part(program, dtype) if dtype != torch.float32 else program
        session = OnnxSession(
            export_onnx(lowered),
            program.inputs,
            program.outputs,
            threads=self.threads,
            target=self.target,
            probe=None if program.buffer_inputs else parts.measured.boundaries[name].example,
        )
        info = SegmentInfo(
            name=name,
            backend=session.description,
            precision=precision_text(self.precision, self.settings),
            nodes=sum(node.op.startswith("call_") for node in graph.graph.nodes),
            flops=parts.measured.boundaries[name].flops,
            ops=op_rows(graph),
            engines=[{"ops": dict(session.optimized_ops())}],
        )
        install(parts.glue, name, session, program)
        return info
