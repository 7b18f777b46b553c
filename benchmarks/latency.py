"""Latency on the CPU: float PyTorch, this project's int8, and other ways to int8, in ONNX Runtime and in OpenVINO.

    python -m benchmarks.latency --models ResNet-50 MobileNet-V2 --threads 1 2

One process, all candidates interleaved, the same number of threads on all sides. NNCF and OpenVINO take part where they
are installed, `torch.compile` with --compiled (it needs a C++ compiler and some minutes).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import CLASSIFIERS, input_of
from benchmarks.peers import QUANTIZERS, available, export_float, installed, open_session
from benchmarks.photographs import Batches, calibration_batches
from benchmarks.results import publish
from lowering import lower_to_onnx
from lowering.timing import measure_interleaved, torch_threads

EAGER = "PyTorch float, eager"
ORT_FLOAT = "ONNX Runtime float"
ORT_INT8 = "ONNX Runtime quantize_static"  # one of QUANTIZERS
OURS = "this project, int8"
OURS_OPENVINO = "this project, int8, in OpenVINO"


def main() -> None:
    """Measure, print, write `build/benchmarks/latency.{json,csv}`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(CLASSIFIERS), default=list(CLASSIFIERS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--compiled", action="store_true", help="torch.compile of the float model too")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(name, arguments, Path(folder))
    note = (
        f"Batch {arguments.batch}; one process, interleaved, {arguments.rounds} rounds; same threads on all sides. "
        "ratio: median over rounds of this candidate's time over that of quantize_static (Q/DQ, uint8 activations, "
        "int8 weights per channel); below 1 is faster."
    )
    publish("latency", rows, title="Latency on the CPU", note=note)


def measure(name: str, arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """One row for each thread count and candidate."""
    model = CLASSIFIERS[name]()
    spec = input_of(model)
    example = spec.example(arguments.batch)
    data = calibration_batches(spec, per_photograph=3, batch_size=arguments.batch)
    files = {ORT_FLOAT: export_float(model, example, folder / "float.onnx")}
    files |= {peer: quantize(files[ORT_FLOAT], data) for peer, quantize in QUANTIZERS.items() if available(peer)}
    for count in arguments.threads:
        with torch_threads(count):
            calls = candidates(model, example, data, files, count)
            if arguments.compiled:
                calls["PyTorch float, compiled"] = partial(torch.compile(model), example)
            timings = measure_interleaved(calls, rounds=arguments.rounds)
        for run, timing in timings.items():
            low, high = timing.quartiles
            yield {
                "model": name,
                "threads": count,
                "run": run,
                "median ms": timing.median,
                "first quartile": low,
                "third quartile": high,
                "speed-up": 1 / timing.ratio(timings[EAGER]),
                "ratio": timing.ratio(timings[ORT_INT8]),
            }


def candidates(
    model: nn.Module, example: Tensor, data: Batches, files: dict[str, Path], threads: int
) -> dict[str, Callable[[], Any]]:
    """Name to one call."""
    calls: dict[str, Callable[[], Any]] = {EAGER: partial(model, example)}
    calls |= {name: raw_call(file, threads, example) for name, file in files.items()}
    calls[OURS] = partial(lower_to_onnx(model, example, calibration=data), example)
    if installed("openvino"):
        calls |= {
            f"{name}, in OpenVINO": openvino_call(file, threads, example)
            for name, file in files.items()
            if name in QUANTIZERS
        }
        lowered = lower_to_onnx(model, example, calibration=data, runtime="openvino")
        calls[OURS_OPENVINO] = partial(lowered, example)
    return calls


def raw_call(file: Path, threads: int, example: Tensor) -> Callable[[], Any]:
    """One call of a session with NumPy in and out, nothing around it."""
    session = open_session(file, threads)
    feed = {session.get_inputs()[0].name: example.numpy()}
    return lambda: session.run(None, feed)


def openvino_call(file: Path, threads: int, example: Tensor) -> Callable[[], Any]:
    """The same in OpenVINO, told to answer one request as fast as it can."""
    import openvino

    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    compiled = openvino.Core().compile_model(str(file), "CPU", options)
    request, pixels = compiled.create_infer_request(), example.numpy()
    return lambda: request.infer([pixels], share_inputs=True, share_outputs=True)


if __name__ == "__main__":
    main()
