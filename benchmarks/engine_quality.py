"""TensorRT-RTX engines side by side: fp16, our int8 placements, and other quantizers' ONNX files, from one builder.

    python -m benchmarks.engine_quality --capability 8.9 --gpu "RTX 4090" --modelopt PYTHON

Kernels and bytes are read from the builder's own listing, and the roofline floor follows from them; nothing is run on a
GPU. `PYTHON` is the interpreter of an environment with `nvidia-modelopt[onnx]`, which wants other versions of onnx and
ONNX Runtime than this project; without it that row is left out. Quantized files are kept in `build/benchmarks/peers/`
and used again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import onnx
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from benchmarks.models import efficientnet_b0, input_of, mobilenet_v2, resnet50, vit_b_16
from benchmarks.peers import quantize_static, session_call
from benchmarks.photographs import calibration_crops, held_out_crops
from benchmarks.program import as_program
from benchmarks.results import FOLDER, publish
from fx_passes import convert_fx, fuse_fx, prepare_calibration_fx
from fx_passes.quantize.calibrate import calibrate
from fx_passes.quantize.place.overrides import decide
from lowering.compare import sqnr
from lowering.placement.search import search_placement, widened
from lowering.request.search import PlacementSearch
from lowering.request.settings import Settings
from lowering.roofline import engine_floor, gpu_named
from lowering.trt.backend import TensorRTBackend
from lowering.trt.bindings import BuilderLog, collect_log, flavour, logger, trt
from lowering.trt.builder.build import build_engine
from lowering.trt.builder.layers import LayerReport
from lowering.trt.define.definition import Network

MODELS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-50": resnet50,
    "MobileNet-V2": mobilenet_v2,
    "EfficientNet-B0": efficientnet_b0,
    "ViT-B/16": vit_b_16,
}
_TESTED = 4  # images that the outputs are compared on


def main() -> None:
    """Build, print, write `build/benchmarks/engine_quality.{json,csv}`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--capability", default="8.9")
    parser.add_argument("--gpu", default="RTX 4090", help="GPU of the floor and of the search")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--modelopt", metavar="PYTHON", help="interpreter that has nvidia-modelopt[onnx]")
    arguments = parser.parse_args()
    gpu_named(arguments.gpu)
    rows = []
    for name in arguments.models:
        case = _Case(name, MODELS[name](), arguments)
        for batch in arguments.batches:
            rows += case.rows(batch)
            publish("engine_quality", rows, title="Engines", note=_note(arguments))


def _note(arguments: argparse.Namespace) -> str:
    return (
        f"TensorRT-RTX for {arguments.capability}, from the builder's listing. Floor: on {arguments.gpu}, by the "
        "roofline of bytes, operations and 2 us a launch; a floor, no measurement. SQNR: outputs against the float "
        f"model's on {_TESTED} photographs that calibration did not see; of ours the converted graph in PyTorch, of "
        "the others their file in ONNX Runtime."
    )


class _Case:
    """One model, in all its runs."""

    def __init__(self, name: str, model: nn.Module, arguments: argparse.Namespace):
        self.name, self.model, self.arguments = name, model, arguments
        self.folder = FOLDER / "peers" / model.__class__.__name__
        self.folder.mkdir(parents=True, exist_ok=True)
        spec = input_of(model)
        self.calibration = [crop.pixels for crop in calibration_crops(spec, per_photograph=1)]
        self.images = [crop.pixels for crop in held_out_crops(spec, per_photograph=1)][:_TESTED]
        settings = Settings(float_type="fp16", progress=False)
        self.backend = TensorRTBackend("int8", arguments.capability, settings)
        self.fused = fuse_fx(model, self.images[0])
        self.default = convert_fx(self._prepared(self.fused, None))
        self.wide = self._prepared(*widened(self.fused, None))
        with torch.no_grad():
            self.expected = torch.cat([model(image) for image in self.images])

    def _prepared(self, graph: GraphModule, qconfig: Any) -> GraphModule:
        prepared = prepare_calibration_fx(graph, self.images[0], qconfig=qconfig)
        calibrate(prepared, self.calibration)
        return prepared

    def rows(self, batch: int) -> Iterator[dict[str, Any]]:
        """Five engines of one batch size."""
        example = self.images[0].expand(batch, -1, -1, -1).contiguous()
        for run, graph in (
            ("fp16", self.fused),
            ("ours, default", self.default),
            ("ours, auto", self._searched(example)),
        ):
            decibels = None if graph is self.fused else self._sqnr(graph)
            yield self._row(batch, run, self.backend.listing(self.name, as_program(graph, example)), decibels)
        for run, quantizer in (("modelopt", self._modelopt), ("ONNX Runtime", self._onnxruntime)):
            if run == "modelopt" and not self.arguments.modelopt:
                print("modelopt is left out: give --modelopt PYTHON", file=sys.stderr)
                continue
            file = quantizer()
            network = _parsed(self.name, _with_batch(file, batch))
            engine = build_engine(network, compute_capabilities=self.arguments.capability)
            yield self._row(batch, run, engine.report, self._sqnr(session_call(file, 1)))

    def _searched(self, example: Tensor) -> GraphModule:
        wish = PlacementSearch(gpu=self.arguments.gpu)
        programs = {self.name: as_program(convert_fx(self.wide), example)}
        gpu = gpu_named(self.arguments.gpu)
        found = search_placement(self.wide, programs, self.backend.listing, self.calibration, wish, gpu)
        return convert_fx(decide(self.wide, found.decisions)) if found.int8_layers else self.fused

    def _row(self, batch: int, run: str, report: LayerReport, decibels: float | None) -> dict[str, Any]:
        floor = engine_floor(report.rows, self.arguments.gpu)
        return {
            "model": self.name,
            "batch": batch,
            "run": run,
            "kernels": report.kernels,
            "int8": f"{report.int8_compute} of {report.int8_compute + report.float_compute}",
            "activations MB": round(report.activation_bytes / 1e6, 1),
            "weights MB": round(report.weight_bytes / 1e6, 1),
            "memory us": round(floor.memory_us, 2),
            "compute us": round(floor.compute_us, 2),
            "launches us": round(floor.launch_us, 2),
            "floor us": round(floor.total_us, 2),
            "SQNR dB": None if decibels is None else round(decibels, 1),
        }

    def _sqnr(self, run: Callable[[Tensor], Tensor]) -> float:
        with torch.no_grad():
            return sqnr(self.expected, torch.cat([run(image) for image in self.images]))

    def _float_file(self) -> Path:
        file = self.folder / "float.onnx"
        if not file.exists():
            pair = torch.cat(self.images[:2])  # torch.export takes a batch of 1 for a constant
            torch.onnx.export(
                self.model, (pair,), file, dynamo=True, external_data=False, verbose=False,
                input_names=["image"], dynamic_shapes=({0: torch.export.Dim("batch")},),
            )  # fmt: skip
        return file

    def _modelopt(self) -> Path:
        data, file = self.folder / "calibration.npy", self.folder / "modelopt.onnx"
        if file.exists():
            return file
        numpy.save(data, torch.cat(self.calibration).numpy())
        script = Path(__file__).with_name("modelopt_quantize.py")
        command = [self.arguments.modelopt, script, self._float_file(), file, data]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"modelopt fails on {self.name}:\n{done.stderr[-2000:]}")
        return file

    def _onnxruntime(self) -> Path:
        file = self._float_file().with_suffix(".static.onnx")
        if file.exists():
            return file
        return quantize_static(self._float_file(), self.calibration, symmetric=True, float_bias=True)


def _with_batch(file: Path, batch: int) -> bytes:
    """An ONNX file, its first dimension fixed."""
    model = onnx.load(file)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    return model.SerializeToString()


def _parsed(name: str, data: bytes) -> Network:
    """The network that NVIDIA's parser makes of an ONNX file."""
    log = BuilderLog()
    with collect_log(log):
        builder = trt.Builder(logger())
        definition = builder.create_network(0)
        definition.name = name
        if not trt.OnnxParser(definition, logger()).parse(data):
            raise SystemExit(f"NVIDIA's parser refuses the file of {name}: {log.errors[:1]}")
    return Network(name, definition, builder, log, [], [], flavour())


if __name__ == "__main__":
    main()
