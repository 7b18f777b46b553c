"""TensorRT as a backend of the pipeline: casts, network, engine, layer report, and the float engine to compare with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from fx_passes.errors import UnsupportedOpError
from lowering.backend import install, segment_info
from lowering.records import SegmentInfo
from lowering.request.settings import FLOAT_TYPES, Settings
from lowering.segment.twin import float_twin, is_quantized
from lowering.summary import precision_text

if TYPE_CHECKING:
    from lowering.segment.program import AtenProgram
    from lowering.segment.segments import Segmented
    from lowering.trt.builder.build import Engine
    from lowering.trt.builder.layers import LayerReport
    from lowering.trt.define.definition import Network
    from lowering.trt.reference import ReferenceNetwork

__all__ = ["TensorRTBackend"]


class TensorRTBackend:
    """Lowers segments to TensorRT engines.

    Args:
        precision: as in `lower_to_trt`.
        compute_capabilities: as in `lower_to_trt`.
        settings: `float_type` and the builder's options are used.

    Raises:
        BackendUnavailableError: no TensorRT package can be used here.
        InputError: a compute capability that TensorRT does not know.
    """

    simulates = True
    threads = None

    def __init__(self, precision: str, compute_capabilities: Iterable[str | float] | str | None, settings: Settings):
        from lowering.trt import bindings
        from lowering.trt.builder.capabilities import resolve_capabilities

        self.precision, self.settings = precision, settings
        self.flavour = bindings.flavour()
        self.target = "tensorrt-rtx" if self.flavour == "rtx" else "tensorrt"
        self.description = f"{self.target} {bindings.version()}"
        self.capabilities = resolve_capabilities(compute_capabilities)
        self._defined: dict[int, tuple[AtenProgram, Network | None]] = {}

    def unsupported(self, name: str, program: AtenProgram) -> dict[Node, str]:
        """The nodes that no converter takes. The network is defined for real; `lower` builds it if none is refused."""
        from lowering.trt.define.network import supports

        if readers := _readers_of_foreign_inputs(program):
            return readers
        try:
            self._defined[id(program)] = (program, self._define(program, name))
        except UnsupportedOpError:
            # The definition stops at the first node that is refused; this goes on to the others.
            return supports(self._cast(program)) or supports(program)
        return {}

    def lower(self, parts: Segmented, name: str, program: AtenProgram) -> SegmentInfo:
        """Build one segment's engine; with "auto" the all-float one too, to keep the one that moves fewer bytes."""
        from lowering.trt.run.engine import TrtEngine

        engine, reference = self._build(program, name)
        quantized = self.precision in ("int8", "auto") and is_quantized(program)
        twin = compare = None
        if self.precision == "auto" and quantized:
            float_engine, float_reference = self._build(float_twin(program), name)
            twin = self._twin_report(float_engine)
            if _moved(float_engine) <= _moved(engine):
                engine, reference, quantized = float_engine, float_reference, False
        elif quantized:
            compare = partial(self._compare, program, name)
        info = segment_info(
            parts,
            name,
            backend=self.description,
            precision=precision_text("int8" if quantized else str(self.settings.float_type), self.settings),
            engines=[engine.report.as_dict()],
            float_twin=twin,
            compare=compare,
        )
        runs = TrtEngine(engine, reference, program.inputs, program.outputs, cuda_graphs=self.settings.cuda_graphs)
        install(parts.glue, name, runs, program)
        return info

    def listing(self, name: str, program: AtenProgram) -> LayerReport:
        """The kernels of a program's engine, static at its opt shapes."""
        from lowering.trt.builder.build import build_engine
        from lowering.trt.define.network import build_network

        network = self._define(program, name)
        if network.profiles:
            network = build_network(self._cast(program), name=name, static_at=network.profiles[0])
        quiet = replace(self.settings, progress=False)
        return build_engine(network, compute_capabilities=self.capabilities, settings=quiet).report

    def _compare(self, program: AtenProgram, name: str) -> dict[str, Any]:
        """The report of the engine that is float throughout. Its network is not executed, so it is not read back."""
        return self._twin_report(self._engine(self._define(float_twin(program), name)))

    def _twin_report(self, engine: Engine) -> dict[str, Any]:
        return {"precision": self.settings.float_type, **engine.report.as_dict()}

    def _build(self, program: AtenProgram, name: str) -> tuple[Engine, ReferenceNetwork]:
        from lowering.trt.reference import read_network

        _, network = self._defined.pop(id(program), (program, None))
        network = network or self._define(program, name)
        reference = read_network(network.definition, _made_here(network, program))
        return self._engine(network, reference), reference

    def _engine(self, network: Network, reference: ReferenceNetwork | None = None) -> Engine:
        from lowering.trt.builder.build import build_engine

        return build_engine(
            network, compute_capabilities=self.capabilities, settings=self.settings, reference=reference
        )

    def _define(self, program: AtenProgram, name: str) -> Network:
        from lowering.trt.define.network import build_network

        return build_network(self._cast(program), name=name)

    def _cast(self, program: AtenProgram) -> AtenProgram:
        from lowering.segment.to_aten import cast_float_part
        from lowering.trt.define.whole_products import keep_products_whole

        dtype = FLOAT_TYPES[self.settings.float_type or "fp16"]
        program = program if dtype == torch.float32 else cast_float_part(program, dtype)
        return keep_products_whole(program) if self.flavour == "rtx" else program


def _made_here(network: Network, program: AtenProgram) -> list[torch.Tensor]:
    """The network's weights that came about while it was cast and defined. The others may be the caller's own."""
    given = {value.untyped_storage().data_ptr() for _, value in program.constants.values()}
    return [value for value in network.kept if value.untyped_storage().data_ptr() not in given]


def _readers_of_foreign_inputs(program: AtenProgram) -> dict[Node, str]:
    """The nodes that read an input whose type or rank TensorRT does not have."""
    from lowering.trt.define.nodes import foreign

    found: dict[Node, str] = {}
    for node in program.input_nodes():
        if (what := foreign(node.meta["val"])) is not None:
            found |= {user: f"it reads {what}" for user in node.users if user.op == "call_function"}
    return found


def _moved(engine: Engine) -> int:
    """Bytes that one call moves: activations and weights."""
    return engine.report.activation_bytes + engine.report.weight_bytes
