"""Do all the ways to run a lowered model give the same numbers? The project's own evidence, as one table.

    python -m benchmarks.agreement --models ResNet-50

1  the converted graph without its Q/DQ pairs and with its float weights, against the float model
2  ONNX Runtime (unoptimised) and the executed TensorRT network, against the converted graph: int8 against int8, end
   to end and layer by layer, each layer fed the converted graph's own values
5  one Q/DQ file placed for TensorRT: in ONNX Runtime, through NVIDIA's parser, and as our converters' network
7  what share of the model was lowered at all
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node

from benchmarks.models import CLASSIFIERS, input_of
from benchmarks.photographs import Batches, calibration_batches, held_out_crops
from benchmarks.program import as_program, converted_graph
from benchmarks.results import publish
from fx_passes import fuse_fx
from fx_passes.quantize.accuracy.structure import strip_quantization
from fx_passes.quantize.decomposed import is_quantize
from lowering import LoweredModule, lower_to_onnx, lower_to_trt
from lowering.compare import sqnr
from lowering.segment.program import AtenProgram
from lowering.segment.to_aten import cast_float_part
from lowering.trt.define.network import build_network
from lowering.trt.reference import read_network


@dataclass(frozen=True)
class Subject:
    """One model with everything that the checks share."""

    name: str
    model: nn.Module
    example: Tensor
    data: Batches
    images: Tensor

    def expected(self) -> Tensor:
        """The float model's output."""
        with torch.no_grad():
            return self.model(self.images)


def main() -> None:
    """Check, print, write `build/benchmarks/agreement.{json,csv}`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(CLASSIFIERS), default=list(CLASSIFIERS))
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        model = CLASSIFIERS[name]()
        spec = input_of(model)
        images = held_out_crops(spec, 1)[1].pixels  # the cat
        subject = Subject(name, model, spec.example(), calibration_batches(spec, per_photograph=2), images)
        for checks in (structure, onnx_runtime, network, three_ways, coverage):
            rows += [{"model": name, **row} for row in checks(subject)]
    note = (
        "One photograph, batch 1. Differences end to end are the largest one over the largest value of the reference. "
        "A value on the boundary between two steps may round either way (x / scale in one program, x * (1 / scale) in "
        "another); a random network spreads one such step over everything behind it."
    )
    publish("agreement", rows, title="Agreement", note=note)


def row(point: int, what: str, value: float, unit: str, goal: str, met: bool) -> dict[str, Any]:
    """One line of the table."""
    return {"point": point, "check": what, "value": value, "unit": unit, "goal": goal, "met": "yes" if met else "NO"}


def structure(subject: Subject) -> Iterator[dict[str, Any]]:
    """Point 1."""
    fused = fuse_fx(subject.model)
    for target in ("onnxruntime", "tensorrt", "tensorrt-rtx"):
        converted = converted_graph(subject.model, subject.example, subject.data, target)
        found = strip_quantization(converted, fused)(subject.images)
        difference = relative(subject.expected(), found)
        yield row(1, f"{target}: without Q/DQ against float", difference, "", "<= 1e-5", difference <= 1e-5)


def onnx_runtime(subject: Subject) -> Iterator[dict[str, Any]]:
    """Point 2, the ONNX half."""
    converted = converted_graph(subject.model, subject.example, subject.data, "onnxruntime")
    program = as_program(converted, subject.example)
    file = exported(program)
    reference = converted(subject.images)
    yield from by_layer("ONNX Runtime, unoptimised", program, subject.images, OnnxLayers(file))
    difference = relative(reference, unoptimised(file, subject.images))
    yield row(2, "ONNX Runtime, unoptimised, end to end", difference, "", "<= 1e-5", difference <= 1e-5)
    lowered = lower_to_onnx(subject.model, subject.example, calibration=subject.data)
    value = sqnr(reference, lowered(subject.images))
    yield row(2, "ONNX Runtime, optimised, end to end", value, "dB", ">= 30", value >= 30)


def network(subject: Subject) -> Iterator[dict[str, Any]]:
    """Point 2, the TensorRT half."""
    for target in ("tensorrt-rtx", "tensorrt"):
        converted = converted_graph(subject.model, subject.example, subject.data, target)
        program = as_program(converted, subject.example)
        reference = converted(subject.images)
        layers = NetworkLayers(program, subject.name)
        yield from by_layer(f"{target} network, float part fp32", program, subject.images, layers)
        value = sqnr(reference, layers.executed.run(subject.images)[0])
        yield row(2, f"{target} network, float part fp32, end to end", value, "dB", ">= 30", value >= 30)
        half = NetworkLayers(cast_float_part(program, torch.float16), subject.name)
        value = sqnr(reference, half.executed.run(subject.images)[0].float())
        yield row(2, f"{target} network, float part fp16, end to end", value, "dB", "printed", True)


def three_ways(subject: Subject) -> Iterator[dict[str, Any]]:
    """Point 5."""
    from lowering.trt.reference.parser import network_from_onnx

    program = as_program(converted_graph(subject.model, subject.example, subject.data, "tensorrt"), subject.example)
    file = exported(program)
    outputs = {
        "ONNX Runtime": unoptimised(file, subject.images),
        "NVIDIA's parser": network_from_onnx(file).run(subject.images)[0],
        "our converters": NetworkLayers(program, subject.name).executed.run(subject.images)[0],
    }
    names = list(outputs)
    for first, second in ((0, 2), (1, 2), (0, 1)):
        value = sqnr(outputs[names[first]], outputs[names[second]])
        yield row(5, f"one Q/DQ file: {names[first]} against {names[second]}", value, "dB", ">= 30", value >= 30)


def coverage(subject: Subject) -> Iterator[dict[str, Any]]:
    """Point 7."""
    lowerings: dict[str, LoweredModule] = {
        "lower_to_trt": lower_to_trt(subject.model, subject.example, calibration=subject.data),
        "lower_to_onnx": lower_to_onnx(subject.model, subject.example, calibration=subject.data),
    }
    for name, lowered in lowerings.items():
        share, fallbacks = lowered.report()["flops_share"], len(lowered.fallbacks)
        what = f"{name}: share of FLOPs lowered, {fallbacks} fallback(s)"
        yield row(7, what, share, "", ">= 0.99, none", share >= 0.99 and fallbacks == 0)


def relative(reference: Tensor, found: Tensor) -> float:
    """The largest difference over the largest magnitude."""
    return float((reference - found).abs().max() / reference.abs().max())


class NetworkLayers:
    """Single layers of a TensorRT network, run by the reference executor."""

    def __init__(self, program: AtenProgram, name: str):
        self.network = build_network(program, name=name)  # kept: the definition points into its weights
        self.executed = read_network(self.network.definition)

    def run(self, images: Tensor, wanted: str, given: dict[str, Tensor]) -> Tensor:
        """The value of the aten node `wanted` from the values of others."""
        names = self.network.tensors
        overrides = {names[name]: value for name, value in given.items()}
        return self.executed.run(images, outputs=[names[wanted]], overrides=overrides)[0]


class OnnxLayers:
    """Single layers of an ONNX model, run by ONNX Runtime without optimization."""

    def __init__(self, file: Any):
        from onnx.utils import Extractor

        self.image = file.graph.input[0].name
        self.extractor = Extractor(file)

    def run(self, images: Tensor, wanted: str, given: dict[str, Tensor]) -> Tensor:
        """The value of the aten node `wanted` from the values of others; the exporter keeps the nodes' names."""
        feeds = given or {self.image: images}
        part = self.extractor.extract_model(list(feeds), [wanted])
        return unoptimised(part, *feeds.values())


def by_layer(
    what: str, program: AtenProgram, images: Tensor, layers: NetworkLayers | OnnxLayers, most: int | None = None
) -> Iterator[dict[str, Any]]:
    """Every quantized value, computed from the converted graph's own quantized values before it.

    With `most`, so many of them, spread over the depth of the graph.
    """
    values = node_values(program, images)
    worst = differing = total = count = 0
    chosen = [node for node in program.graph.nodes if is_quantize(node)]
    chosen = chosen[:: max(1, len(chosen) // most)] if most else chosen
    for node in chosen:
        before = {n.name: values[n] for n in quantized_before(node)}
        steps = (layers.run(images, node.name, before).int() - values[node].int()).abs()
        worst, count = max(worst, int(steps.max())), count + 1
        differing, total = differing + int((steps > 0).sum()), total + steps.numel()
    yield row(2, f"{what}: worst of {count} layers fed alone", worst, "steps", "<= 1", worst <= 1)
    yield row(2, f"{what}: values that differ, of {total}", differing, "values", "printed", True)


def node_values(program: AtenProgram, images: Tensor) -> dict[Node, Tensor]:
    """The value of every node of the program, computed by torch."""

    class Recorder(Interpreter):
        def run_node(self, node: Node) -> Any:
            values[node] = super().run_node(node)
            return values[node]

    values: dict[Node, Any] = {}
    lifted = [value for _, value in program.constants.values()]
    with torch.no_grad():
        Recorder(program.exported.graph_module).run(*lifted, images, enable_io_processing=False)
    return values


def quantized_before(node: Node) -> list[Node]:
    """The quantized values that `node` is computed from, with nothing quantized between."""
    found: list[Node] = []
    waiting, seen = list(node.all_input_nodes), set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        if is_quantize(current):
            found.append(current)
        else:
            waiting += current.all_input_nodes
    return found


def exported(program: AtenProgram) -> Any:
    """The program as an ONNX model."""
    from lowering.onnx.export import export_onnx

    return export_onnx(program)


def unoptimised(file: Any, *inputs: Tensor) -> Tensor:
    """The first output of an ONNX model in ONNX Runtime with every graph optimization off."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(file.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    feed = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
    return torch.from_numpy(session.run(None, feed)[0])


if __name__ == "__main__":
    main()
