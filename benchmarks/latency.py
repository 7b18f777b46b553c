"""Latency on the CPU: float PyTorch, this project's int8, and ONNX Runtime in float and with its own quantizer.

    python -m benchmarks.latency --models ResNet-50 MobileNet-V2 --threads 1 2

One process, all candidates interleaved, the same number of threads on all sides.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import CLASSIFIERS, input_of
from benchmarks.photographs import Batches, calibration_batches
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
    float_file, int8_file = peers(model, example, data, folder)
    for count in threads:
        with torch_threads(count):
            ours = lower_to_onnx(model, example, calibration=data)
            timings = measure_interleaved(
                {
                    EAGER: partial(model, example),
                    ORT_FLOAT: session_call(float_file, count, example),
                    ORT_INT8: session_call(int8_file, count, example),
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


def peers(model: nn.Module, example: Tensor, data: Batches, folder: Path) -> tuple[Path, Path]:
    """The model through `torch.onnx` in float, and that file through ONNX Runtime's own quantizer."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    exported, prepared, quantized = (folder / f"{kind}.onnx" for kind in ("float", "prepared", "int8"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.onnx warns about its own future
        torch.onnx.export(model, (example,), exported, dynamo=True, verbose=False, external_data=False)
    quant_pre_process(exported, prepared)  # what its documentation asks for first: shapes, and BatchNorm folded
    quantize_static(
        prepared,
        quantized,
        _Reader(data, _input_name(prepared)),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
    )
    return exported, quantized


def _input_name(file: Path) -> str:
    import onnx

    return onnx.load(file, load_external_data=False).graph.input[0].name


class _Reader:
    """Calibration batches as `quantize_static` reads them."""

    def __init__(self, data: Batches, name: str):
        self._feeds = iter([{name: batch.numpy()} for batch in data])

    def get_next(self) -> dict[str, Any] | None:
        return next(self._feeds, None)


def session_call(file: Path, threads: int, example: Tensor) -> Callable[[], Any]:
    """A call of an ONNX Runtime session with default options but for the threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: example.numpy()}
    return lambda: session.run(None, feed)


if __name__ == "__main__":
    main()
