"""ONNX as a backend of the pipeline: export, session, and the choice between int8 and float by measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.fx import Node

from fx_passes.errors import ExportError
from lowering.backend import install, segment_info
from lowering.module import SegmentInfo
from lowering.settings import FLOAT_TYPES, Settings
from lowering.summary import precision_text
from lowering.timing import measure_interleaved
from lowering.twin import float_twin

if TYPE_CHECKING:
    from lowering.aten import AtenProgram
    from lowering.onnx.expected import Expected
    from lowering.onnx.files import OnnxFile
    from lowering.onnx.model import OnnxModel
    from lowering.segments import Segmented

__all__ = ["OnnxBackend"]


class OnnxBackend:
    """Lowers segments to ONNX files, run by ONNX Runtime or OpenVINO.

    Args:
        precision: as in `lower_to_onnx`.
        runtime: "onnxruntime" or "openvino", which run the same files, or "tensorrt": whose scheme and placement the
            file has.
        settings: `float_type` and `threads` are used.

    Raises:
        BackendUnavailableError: OpenVINO is asked for and not installed.
    """

    simulates = False

    def __init__(self, precision: str, runtime: str, settings: Settings):
        self.precision, self.settings = precision, settings
        self.target = "onnxruntime" if runtime == "openvino" else runtime
        self.openvino = runtime == "openvino"
        if self.openvino:
            from lowering.onnx.openvino import runtime_module

            runtime_module()
        self.threads: int | None = settings.threads or torch.get_num_threads()
        self._exported: dict[int, tuple[AtenProgram, OnnxFile]] = {}

    def unsupported(self, name: str, program: AtenProgram) -> dict[Node, str]:
        """The node that torch's exporter refuses, with its words; `lower` takes the model if it refuses none."""
        try:
            self._exported[id(program)] = (program, self._export(program, name))
        except ExportError as error:
            if error.node is None:
                raise
            return {error.node: error.what}
        return {}

    def lower(self, parts: Segmented, name: str, program: AtenProgram) -> SegmentInfo:
        """Open a session on one segment; with "auto" on its float form too, and keep the faster."""
        example = parts.measured.boundaries[name].example
        _, model = self._exported.pop(id(program))
        session = self._session(model, program, example)
        precision = "int8" if self.precision == "auto" else self.precision
        if self.precision == "auto" and not program.buffer_inputs:
            other = self._session(self._export(float_twin(program), name), program, example)
            times = measure_interleaved({"int8": lambda: session(*example), "float": lambda: other(*example)}, rounds=5)
            if times["float"].median < times["int8"].median:
                session, precision = other, str(self.settings.float_type)
        info = segment_info(
            parts,
            name,
            backend=session.description,
            precision=precision_text(precision, self.settings),
            engines=[{"ops": dict(session.optimized_ops())}],
        )
        install(parts.glue, name, session, program)
        return info

    def _export(self, program: AtenProgram, name: str) -> OnnxFile:
        from lowering.aten import cast_float_part
        from lowering.onnx.files import exported_file

        dtype = FLOAT_TYPES[self.settings.float_type or "fp32"]
        return exported_file(cast_float_part(program, dtype) if dtype != torch.float32 else program, name)

    def _session(self, model: OnnxFile, program: AtenProgram, example: tuple[Tensor, ...]) -> OnnxModel:
        from lowering.onnx.session import OnnxSession
        from lowering.onnx.tensorrt_file import check_parser

        if self.openvino:
            from lowering.onnx.openvino import OpenVinoSession

            return OpenVinoSession(model, program.inputs, program.outputs, threads=self.threads)
        session = OnnxSession(
            model,
            program.inputs,
            program.outputs,
            threads=self.threads,
            target=self.target,
            probe=None if program.buffer_inputs else example,
        )
        if self.target == "tensorrt":
            check_parser(session.file)
            if not program.buffer_inputs:
                session.expected = self._expected(session, example)
        return session

    def _expected(self, session: OnnxModel, example: tuple[Tensor, ...]) -> Expected | None:
        from lowering.onnx.expected import expect

        precision = "int8" if self.precision in ("int8", "auto") else str(self.settings.float_type)
        return expect(session.inputs, session.outputs, example, session(*example), precision)
