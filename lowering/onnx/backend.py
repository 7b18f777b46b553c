"""ONNX as a backend of the pipeline: export, session, and the choice between int8 and float by measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from fx_passes.errors import ExportError
from lowering.backend import install, segment_info
from lowering.records import SegmentInfo
from lowering.request.settings import FLOAT_TYPES, Settings
from lowering.segment.twin import float_twin
from lowering.summary import precision_text
from lowering.timing import measure_interleaved

if TYPE_CHECKING:
    from lowering.onnx.expected import Expected
    from lowering.onnx.files import OnnxFile
    from lowering.onnx.model import OnnxModel
    from lowering.segment.program import AtenProgram
    from lowering.segment.segments import Segmented

__all__ = ["OnnxBackend"]


class OnnxBackend:
    """Lowers segments to ONNX files, run by ONNX Runtime or OpenVINO.

    Args:
        precision: as in `lower_to_onnx`.
        runtime: "onnxruntime" or "openvino", which run the same files, "auto" for the faster of them, or "tensorrt":
            whose scheme and placement the file has.
        settings: `float_type` and `threads` are used.

    Raises:
        BackendUnavailableError: OpenVINO is asked for and not installed.
    """

    simulates = False

    def __init__(self, precision: str, runtime: str, settings: Settings):
        self.precision, self.settings = precision, settings
        self.target = "tensorrt" if runtime == "tensorrt" else "onnxruntime"
        self.openvino, self.measures = runtime == "openvino", runtime == "auto"
        if self.openvino:
            from lowering.onnx.openvino import runtime_module

            runtime_module()
        self.threads: int | None = settings.threads or torch.get_num_threads()
        self._made: dict[str, OnnxModel] = {}  # by segment; a new partition replaces what an old one left

    def unsupported(self, name: str, program: AtenProgram) -> dict[Node, str]:
        """The node that torch's exporter or the runtime refuses, with its words; `lower` takes what was made here.

        Exporter and runtime stop at the first such node: the others come when the model is partitioned anew.
        """
        from lowering.onnx.export import named_node
        from lowering.onnx.model import RefusedModelError

        try:
            model = self._export(program, name)
        except ExportError as error:
            if error.node is None:
                raise
            return {error.node: error.what}
        try:
            session = self._session(model, program)
        except RefusedModelError as error:
            node = named_node(program, error.operator)
            if node is None:
                raise
            return {node: error.what}
        self._made[name] = session
        return {}

    def lower(self, parts: Segmented, name: str, program: AtenProgram) -> SegmentInfo:
        """Keep the session on one segment; with "auto" open one on its float form too, and keep the faster."""
        example = parts.measured.boundaries[name].example
        session = self._made.pop(name)
        self._settle(session, program, example)
        precision = "int8" if self.precision == "auto" else self.precision
        if self.precision == "auto" and not program.buffer_inputs:
            other = self._session(self._export(float_twin(program), name), program)
            times = measure_interleaved({"int8": lambda: session(*example), "float": lambda: other(*example)}, rounds=5)
            if times["float"].median < times["int8"].median:
                session, precision = other, str(self.settings.float_type)
        session, choice = self._chosen(session, program, example, quantized=precision == "int8")
        info = segment_info(
            parts,
            name,
            backend=session.description,
            precision=precision_text(precision, self.settings),
            engines=[{"ops": dict(session.optimized_ops())}],
            choice=choice,
        )
        install(parts.glue, name, session, program)
        return info

    def _chosen(
        self, session: OnnxModel, program: AtenProgram, example: tuple[Tensor, ...], *, quantized: bool
    ) -> tuple[OnnxModel, dict[str, Any] | None]:
        """The session to keep, and what was measured; the example has no values for buffers that are written."""
        from lowering.onnx.choice import choose_runtime
        from lowering.onnx.session import OnnxSession

        if not self.measures or program.buffer_inputs or not isinstance(session, OnnxSession):
            return session, None
        kept, choice = choose_runtime(session, example, quantized=quantized)
        return kept, choice.as_dict()

    def _export(self, program: AtenProgram, name: str) -> OnnxFile:
        from lowering.onnx.files import exported_file
        from lowering.segment.to_aten import cast_float_part

        dtype = FLOAT_TYPES[self.settings.float_type or "fp32"]
        return exported_file(cast_float_part(program, dtype) if dtype != torch.float32 else program, name)

    def _session(self, model: OnnxFile, program: AtenProgram) -> OnnxModel:
        from lowering.onnx.openvino import OpenVinoSession
        from lowering.onnx.session import OnnxSession

        if self.openvino:
            return OpenVinoSession(model, program.inputs, program.outputs, threads=self.threads)
        return OnnxSession(model, program.inputs, program.outputs, threads=self.threads, target=self.target)

    def _settle(self, session: OnnxModel, program: AtenProgram, example: tuple[Tensor, ...]) -> None:
        """What takes a call, or another parser, to know."""
        from lowering.onnx.session import OnnxSession
        from lowering.onnx.tensorrt_file import check_parser

        if self.target == "tensorrt":
            check_parser(session.file)
        if program.buffer_inputs:  # the example has no values for them
            return
        if isinstance(session, OnnxSession):
            session.settle_exactness(example)
        if self.target == "tensorrt":
            session.expected = self._expected(session, example)

    def _expected(self, session: OnnxModel, example: tuple[Tensor, ...]) -> Expected | None:
        from lowering.onnx.expected import expect

        precision = "int8" if self.precision in ("int8", "auto") else str(self.settings.float_type)
        return expect(session.inputs, session.outputs, example, session(*example), precision)
