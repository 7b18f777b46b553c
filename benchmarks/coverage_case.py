"""One model through every route of the pipeline, each compared with eager: one row of the coverage table.

    python -m benchmarks.coverage_case timm:resnet18 64      prints the row as JSON

A cell is "yes" or what came instead. Work is shared: the float graph and the int8 graph are each exported once, and the
same program goes to our converters, to ONNX Runtime and to NVIDIA's parser.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from benchmarks.agreement import NetworkLayers, by_layer
from benchmarks.models import settle_batch_norm
from fx_passes import convert_fx, fuse_fx, prepare_calibration_fx
from fx_passes.errors import LoweringError
from fx_passes.quantize.accuracy.structure import strip_quantization
from lowering.command.loading import load_model
from lowering.compare import sqnr
from lowering.onnx.export import export_onnx
from lowering.request.images import InputSpec
from lowering.request.inputs import Example, ShapeRange
from lowering.request.settings import resolve_settings
from lowering.segment.program import AtenProgram
from lowering.segment.segments import Segmented, segmented
from lowering.segment.to_aten import cast_float_part
from lowering.trt.backend import TensorRTBackend
from lowering.trt.builder.build import build_engine
from lowering.trt.define.network import build_network
from lowering.trt.reference import ReferenceNetwork, read_network
from lowering.trt.reference.parser import network_from_onnx

__all__ = ["COLUMNS", "SHORT", "row_of"]

TOLERANCE = 1e-4  # of fp32 against eager, relative to the largest value
STRUCTURE = 1e-5  # of the converted graph without its Q/DQ pairs; fp32 rounding of a deep network where eager has more
_LAYERS = 12  # looked at alone where the whole differs
_IN_MEMORY = 400_000_000  # parameters of an ONNX model that protobuf can hold in one message
QUANTIZED = 30.0  # dB, of an int8 network with its float part in fp32 against the converted graph

#: Column -> what "yes" means.
COLUMNS = {
    "captured": "one graph without Python fallbacks, at least 99% of the FLOPs in segments that TensorRT takes",
    "fused": "the fused graph equals eager to 1e-4 of the largest value",
    "TensorRT": "our converters' fp32 network, executed, equals eager to 1e-4",
    "ONNX": "the fp32 ONNX file in ONNX Runtime equals eager to 1e-4",
    "parser": "the fp32 network that NVIDIA's parser makes of that file, executed, equals eager to 1e-4",
    "converted": "the int8 graph is finite, and without its Q/DQ pairs equals eager to 1e-4",
    "TensorRT int8": "our converters' int8 network, executed, is at 30 dB or more from the int8 graph, "
    "or none of twelve layers fed alone is more than one step off",
    "parser int8": "so is the network that NVIDIA's parser makes of the Q/DQ file, from ours or from the int8 graph",
    "engine": "the builder takes the int8 network with its float part in fp16",
}
#: What a larger model of a family is run for, of which a smaller one had every column; "-" stands in the others.
SHORT = ("captured", "fused", "TensorRT", "converted")


def main() -> None:
    """Print the row of one model as a line of JSON, the last one of the output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="as for fxtrt")
    parser.add_argument("size", nargs="?", type=int, help="side of the input in pixels; default: the declared one")
    arguments = parser.parse_args()
    print(json.dumps(row_of(arguments.model, arguments.size)))


def row_of(spec: str, size: int | None, short: bool = False) -> dict[str, Any]:
    """The row: model, size, seconds, and a cell for each of `COLUMNS`, or of those in `SHORT`."""
    start = time.perf_counter()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model, declared = load_model(spec)
        channels, *sides = (declared or InputSpec()).size
        shape = InputSpec(size=(channels, *(sides if size is None else (size, size))))
        _make_every_branch_count(model)
        settle_batch_norm(model, [shape.example(4, seed=seed) for seed in (1, 2)])
        subject = _Subject(model, shape.example())
        row = {"model": spec, "size": shape.size[-1], "parameters": sum(p.numel() for p in model.parameters())}
        row |= {name: "-" if short and name not in SHORT else _cell(step) for name, step in subject.steps()}
    return {**row, "seconds": round(time.perf_counter() - start, 1)}


def _make_every_branch_count(model: nn.Module) -> None:
    """Noise on parameters that are constant: one that starts at zero (the last BatchNorm of a residual branch, a layer
    scale, a position bias) hides whatever is computed before it."""
    for parameter in model.parameters():
        if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
            start = float(parameter.flatten()[0])
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (start if abs(start) > 0.01 else 0.2))


class _Subject:
    """One model with what the steps share; each shared thing is made when a step first needs it."""

    def __init__(self, model: nn.Module, example: Tensor):
        self.model, self.example = model, example
        self.settings = resolve_settings(None).with_float_type("fp32")
        self.expected = model(example)
        self._folder = tempfile.TemporaryDirectory()

    def steps(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Column, and what fills the cell."""
        steps = (
            self.capture,
            self.fuse,
            self.network,
            self.onnx,
            self.parser,
            self.convert,
            self.network_int8,
            self.parser_int8,
            self.engine,
        )
        return zip(COLUMNS, steps, strict=True)

    @cached_property
    def fused(self) -> GraphModule:
        return fuse_fx(self.model, (self.example,))

    @cached_property
    def parts(self) -> Segmented:
        return self._segments(self.fused, "fp32")

    @cached_property
    def converted(self) -> GraphModule:
        prepared = prepare_calibration_fx(self.fused, (self.example,), target="tensorrt")
        prepared(self.example)
        return convert_fx(prepared)

    @cached_property
    def quantized(self) -> Tensor:
        return self.converted(self.example)

    @cached_property
    def program(self) -> AtenProgram:
        return _only(self.parts)

    @cached_property
    def program_int8(self) -> AtenProgram:
        return _only(self._segments(self.converted, "int8"))

    @cached_property
    def file(self) -> Any:
        return self._exported(self.program)

    def _exported(self, program: AtenProgram) -> tuple[Any, Path | None]:
        """The ONNX model, and where it lies if it is too large to be passed around."""
        if sum(p.numel() for p in self.model.parameters()) < _IN_MEMORY:
            return export_onnx(program), None
        path = Path(self._folder.name) / f"{id(program)}.onnx"
        return export_onnx(program, path), path

    def _segments(self, graph: GraphModule, precision: str) -> Segmented:
        example = Example((self.example,))
        backend = TensorRTBackend(precision, None, self.settings)
        return segmented(graph, ShapeRange(example, example, example, example), self.settings, backend.unsupported)

    def capture(self) -> str:
        fallbacks, share = self.parts.fallbacks, self.parts.measured.flops_share
        if fallbacks or share < 0.99:
            reasons = "; ".join(f"{f.node}: {f.reason}" for f in fallbacks)
            return f"{share:.0%} of the FLOPs lowered; {reasons}"
        return "yes"

    def fuse(self) -> str:
        return self.equal(self.fused(self.example))

    def network(self) -> str:
        network = build_network(self.program, name="coverage")
        return self.equal(read_network(network.definition).run(self.example)[0])

    def onnx(self) -> str:
        import onnxruntime

        file, path = self.file
        source = str(path) if path else file.SerializeToString()
        session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
        outputs = session.run(None, {file.graph.input[0].name: self.example.numpy()})
        return self.equal(torch.from_numpy(outputs[0]))

    def parser(self) -> str:
        return self.equal(self._parsed(self.file).run(self.example)[0])

    def _parsed(self, file: tuple[Any, Path | None]) -> ReferenceNetwork:
        model, path = file
        return network_from_onnx(model if path is None else path.read_bytes(), path=path)

    def convert(self) -> str:
        if not bool(torch.isfinite(self.quantized).all()):
            return "not finite"
        return self.equal(strip_quantization(self.converted, self.fused)(self.example))

    def network_int8(self) -> str:
        layers = NetworkLayers(self.program_int8, "coverage")
        self.found_int8 = layers.executed.run(self.example)[0]
        distance = sqnr(self.quantized, self.found_int8)
        if distance >= QUANTIZED:
            return "yes"
        steps = next(by_layer("", self.program_int8, self.example, layers, most=_LAYERS))["value"]
        return "yes" if steps <= 1 else f"{distance:.0f} dB, a layer {steps} steps off"

    def parser_int8(self) -> str:
        found = self._parsed(self._exported(self.program_int8)).run(self.example)[0]
        references = [self.quantized, *filter(lambda v: v is not None, [getattr(self, "found_int8", None)])]
        distance = max(sqnr(reference, found) for reference in references)
        return "yes" if distance >= QUANTIZED else f"{distance:.0f} dB"

    def engine(self) -> str:
        network = build_network(cast_float_part(self.program_int8, torch.float16), name="coverage")
        return "yes" if build_engine(network, report=False).data else "no engine"

    def equal(self, found: Tensor) -> str:
        """ "yes", or how far from eager it is."""
        if found.shape != self.expected.shape:
            return f"shape {tuple(found.shape)} instead of {tuple(self.expected.shape)}"
        difference = float((self.expected - found).abs().max() / self.expected.abs().max())
        return "yes" if difference <= TOLERANCE else f"differs by {difference:.1e}"


def _only(parts: Segmented) -> AtenProgram:
    if len(parts.programs) != 1 or parts.fallbacks:
        raise LoweringError(f"{len(parts.programs)} segments and {len(parts.fallbacks)} fallbacks, not one program")
    return next(iter(parts.programs.values()))


def _cell(step: Callable[[], str]) -> str:
    """An error of this project's own is a refusal, any other a bug; both are shown and the run goes on."""
    try:
        return step()
    except LoweringError as error:
        return f"{type(error).__name__}: {_first_line(error)}"
    except Exception as error:
        return f"CRASH {type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


if __name__ == "__main__":
    main()
