"""Peak memory of lowering a large model to a TensorRT engine: ViT-L/16, 304 million parameters, random weights.

    python -m benchmarks.memory --precisions fp16 int8

Each lowering runs in a process of its own, whose peak resident set the operating system reports.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

__all__ = ["peak"]

_MB = 1e6


def main() -> None:
    """Measure, print, write `build/benchmarks/memory.{json,csv}`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_l_16", help="a classifier of torchvision")
    parser.add_argument("--precisions", nargs="+", default=["fp16", "int8"])
    parser.add_argument("--save", action="store_true", help="save the artifact too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(lower(arguments.model, arguments.child, arguments.save)))
        return
    from benchmarks.results import publish

    rows = [peak(arguments.model, precision, arguments.save) for precision in arguments.precisions]
    note = "Peak resident set of the whole process, from importing torch to the lowered module; batch 1, 224 x 224."
    publish("memory", rows, title="Memory while lowering", note=note)


def peak(model: str, precision: str, save: bool) -> dict[str, Any]:
    """One row, measured in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.memory", "--model", model, "--child", precision]
    done = subprocess.run([*command, "--save"] if save else command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def lower(name: str, precision: str, save: bool) -> dict[str, Any]:
    """Lower the model in this process and say how much memory that took."""
    import tempfile

    import torch
    import torchvision

    from lowering import lower_to_trt

    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None).eval()
    image = torch.randn(1, 3, 224, 224)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    lowered = lower_to_trt(model, image, precision=precision, calibration=[image])
    seconds = time.perf_counter() - start
    if save:
        with tempfile.TemporaryDirectory() as folder:
            lowered.save(folder)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "model": name,
        "precision": precision,
        "parameters": parameters,
        "weights fp32 MB": parameters * 4 / _MB,
        "engine MB": sum(e["engine_bytes"] for s in lowered.segments for e in s.engines) / _MB,
        "peak before MB": before * 1024 / _MB,
        "peak MB": after * 1024 / _MB,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
