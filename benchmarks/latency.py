"""Latency on the CPU: float PyTorch, this project's int8, and ONNX Runtime in float and with its own quantizer.

    python -m benchmarks.latency --models ResNet-50 MobileNet-V2 --threads 1 2

One process, all candidates interleaved, the same number of threads on all sides.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.models import CLASSIFIERS, input_of
from benchmarks.peers import export_float, open_session, quantize_static
from benchmarks.photographs import calibration_batches
from benchmarks.results import publish
from lowering import lower_to_onnx
from lowering.timing import measure_interleaved, torch_threads

EAGER = "PyTorch float, eager"
ORT_FLOAT = "ONNX Runtime float"
ORT_INT8 = "ONNX Runtime quantize_static"
OURS = "this project, int8"


def main() -> None:
    """Measure, print, write `build/benchmarks/latency.{json,csv}`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(CLASSIFIERS), default=list(CLASSIFIERS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(name, arguments.threads, arguments.batch, arguments.rounds, Path(folder))
    note = (
        f"Batch {arguments.batch}; one process, interleaved, {arguments.rounds} rounds; same threads on all sides. "
        "ratio: median over rounds of this candidate's time over that of quantize_static (Q/DQ, uint8 activations, "
        "int8 weights per channel); below 1 is faster."
    )
    publish("latency", rows, title="Latency on the CPU", note=note)


def measure(name: str, threads: list[int], batch: int, rounds: int, folder: Path) -> Iterator[dict[str, Any]]:
    """One row for each thread count and candidate."""
    model = CLASSIFIERS[name]()
    spec = input_of(model)
    example = spec.example(batch)
    data = calibration_batches(spec, per_photograph=3, batch_size=batch)
    float_file = export_float(model, example, folder / "float.onnx")
    int8_file = quantize_static(float_file, data)
    for count in threads:
        with torch_threads(count):
            ours = lower_to_onnx(model, example, calibration=data)
            timings = measure_interleaved(
                {
                    EAGER: partial(model, example),
                    ORT_FLOAT: raw_call(float_file, count, example),
                    ORT_INT8: raw_call(int8_file, count, example),
                    OURS: partial(ours, example),
                },
                rounds=rounds,
            )
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


def raw_call(file: Path, threads: int, example: Tensor) -> Callable[[], Any]:
    """One call of a session with NumPy in and out, nothing around it."""
    session = open_session(file, threads)
    feed = {session.get_inputs()[0].name: example.numpy()}
    return lambda: session.run(None, feed)


if __name__ == "__main__":
    main()
