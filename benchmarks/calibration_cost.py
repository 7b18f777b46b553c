"""What calibrating ResNet-50 costs beside the plain float forward, for every observer and target.

    python -m benchmarks.calibration_cost

The float model and the prepared ones take turns on every batch, so that a busy machine slows all of them alike; the
median over the batches is compared. `ranges` is the time in which all observers' ranges are then chosen.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import CLASSIFIERS, input_of
from benchmarks.results import publish
from fx_passes import fuse_fx, prepare_calibration_fx
from fx_passes.quantize.prepare import observers_of
from fx_passes.quantize.ranges.names import OBSERVERS


def main() -> None:
    """Measure, print, write `build/benchmarks/calibration_cost.{json,csv}`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(CLASSIFIERS), default="ResNet-50")
    parser.add_argument("--batch", type=int, default=8, help="images in a batch")
    parser.add_argument("--batches", type=int, default=5, help="batches, after one that is not counted")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--observer", action="append", choices=list(OBSERVERS), help="default: all of them")
    parser.add_argument("--target", action="append", help="default: tensorrt-rtx and onnxruntime")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = CLASSIFIERS[arguments.model]()
    size = input_of(model).example().shape[1:]
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(arguments.batch, *size, generator=generator) for _ in range(arguments.batches + 1)]
    rows = []
    for target in arguments.target or ("tensorrt-rtx", "onnxruntime"):
        names = arguments.observer or list(OBSERVERS)
        prepared = {n: prepare_calibration_fx(model, target=target, qconfig={"": {"observer": n}}) for n in names}
        seconds = interleaved({"float": fuse_fx(model), **prepared}, images)
        for name, gm in prepared.items():
            rows.append({"target": target, "observer": name, **_row(gm, seconds["float"], seconds[name])})
    note = (
        f"{arguments.batches} batches of {arguments.batch} images, {arguments.threads} threads. added: time of a batch "
        "through the prepared model over that through the fused float model, minus 1."
    )
    publish("calibration_cost", rows, title=f"Calibrating {arguments.model}", note=note)


def interleaved(calls: dict[str, Callable[[Tensor], Any]], images: list[Tensor]) -> dict[str, list[float]]:
    """Seconds of every call on every batch but the first, the calls taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for index, batch in enumerate(images):
            for name, call in calls.items():
                start = time.perf_counter()
                call(batch)
                if index:
                    seconds[name].append(time.perf_counter() - start)
    return seconds


def _row(gm: Any, plain: list[float], observed: list[float]) -> dict[str, Any]:
    observers = observers_of(gm)
    start = time.perf_counter()
    for observer in observers.values():
        observer.range()
    chosen = time.perf_counter() - start
    ratios = [b / a for a, b in zip(plain, observed, strict=True)]
    return {
        "observed values": len(observers),
        "float ms": 1e3 * statistics.median(plain),
        "calibrating ms": 1e3 * statistics.median(observed),
        "added %": 100 * (statistics.median(ratios) - 1),
        "ranges s": chosen,
    }


if __name__ == "__main__":
    main()
