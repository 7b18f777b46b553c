"""Kernels and bytes of TensorRT-RTX engines: fp16 beside int8 with the placement of each target.

    python -m benchmarks.engine_quality --capability 8.9

Read from the builder's own listing of the engine; nothing is run on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from benchmarks.models import CLASSIFIERS, input_of
from benchmarks.photographs import Batches, calibration_batches
from benchmarks.program import aten_program
from benchmarks.results import publish
from lowering.aten import cast_float_part
from lowering.settings import FLOAT_TYPES, Settings
from lowering.trt.build import build_engine
from lowering.trt.capabilities import resolve_capabilities
from lowering.trt.network import build_network

CASES = (
    (None, "fp16"),
    ("tensorrt-rtx", "fp16"),
    ("tensorrt-rtx", "fp32"),
    ("tensorrt", "fp16"),
    ("tensorrt", "fp32"),
)  # target of the placement (None: no int8), type of what is not int8


def main() -> None:
    """Build, print, write `build/benchmarks/engine_quality.{json,csv}`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(CLASSIFIERS), default=list(CLASSIFIERS))
    parser.add_argument("--capability", default=None, help="for example 8.9; default: one portable engine")
    parser.add_argument("--batch", type=int, default=1)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        model = CLASSIFIERS[name]()
        spec = input_of(model)
        data = calibration_batches(spec, per_photograph=1)
        rows += measure(name, model, spec.example(arguments.batch), data, arguments.capability)
    note = (
        f"TensorRT-RTX, {arguments.capability or 'portable'}, batch {arguments.batch}, from the builder's listing. "
        "int8 / float compute: convolutions and matrix products by the type of their activation input. Activation "
        "bytes count every kernel's reads and writes."
    )
    publish("engine_quality", rows, title="Engines", note=note)


def measure(
    name: str, model: nn.Module, example: Tensor, data: Batches, capability: str | None
) -> Iterator[dict[str, Any]]:
    """One row for each case."""
    for target, float_type in CASES:
        program = aten_program(model, example, data, target)
        if FLOAT_TYPES[float_type] is not FLOAT_TYPES["fp32"]:
            program = cast_float_part(program, FLOAT_TYPES[float_type])
        network = build_network(program, name=name)
        engine = build_engine(network, compute_capabilities=resolve_capabilities(capability), settings=Settings())
        report = engine.report
        moved = report.activation_bytes + report.weight_bytes
        yield {
            "model": name,
            "int8 placement": target or "none",
            "float part": float_type,
            "kernels": report.kernels,
            "int8 compute": report.int8_compute,
            "float compute": report.float_compute,
            "activations MB": round(report.activation_bytes / 1e6, 1),
            "weights MB": round(report.weight_bytes / 1e6, 1),
            "moved MB": round(moved / 1e6, 1),
            "file MB": round(report.engine_bytes / 1e6, 1),
        }


if __name__ == "__main__":
    main()
