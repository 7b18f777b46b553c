"""EfficientNet-Lite0 with its ImageNet weights on photographs: how much of float's answers int8 keeps, per target.

    python -m benchmarks.accuracy

Calibrated on mirrored random crops, tested on upright ones (`benchmarks.photographs`). Every target is run the ways
it can be without a GPU: the converted graph in PyTorch, the ONNX file in ONNX Runtime, the TensorRT network executed by
the reference executor.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import efficientnet_lite0, input_of
from benchmarks.photographs import Batches, Crop, calibration_batches, held_out_crops
from benchmarks.results import publish
from fx_passes import convert_fx, prepare_calibration_fx
from fx_passes.quantize.calibrate import calibrate
from lowering import lower_to_onnx, lower_to_trt
from lowering.compare import agreement

MARGIN = 0.15  # of the two largest float probabilities; a closer call than that may tip


def main() -> None:
    """Measure, print, write `build/benchmarks/accuracy.{json,csv}`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--crops", type=int, default=5, help="test crops of each photograph")
    parser.add_argument("--calibration-crops", type=int, default=8, help="calibration crops of each photograph")
    arguments = parser.parse_args()
    model = efficientnet_lite0()
    spec = input_of(model)
    crops = held_out_crops(spec, arguments.crops)
    data = calibration_batches(spec, per_photograph=arguments.calibration_crops)
    expected = logits(model, crops)
    rows = [
        {"target": target, "run": run, **score(expected, logits(call, crops))}
        for target, run, call in candidates(model, spec.example(), data)
    ]
    note = (
        f"{len(crops)} crops of {len({c.name.split('/')[0] for c in crops})} photographs, calibrated on "
        f"{len(data.crops)} other crops of them. clear: crops whose two likeliest classes are more than {MARGIN} apart "
        "in float; kept: of those, where int8 has the same first class. Cosine and SQNR are of the logits, against "
        "float's."
    )
    publish("accuracy", rows, title="EfficientNet-Lite0: int8 against float", note=note)


def candidates(
    model: nn.Module, example: Tensor, data: Batches
) -> Iterator[tuple[str, str, Callable[[Tensor], Tensor]]]:
    """(target, how it is run, a call that gives logits)."""
    for target in ("onnxruntime", "tensorrt", "tensorrt-rtx"):
        prepared = prepare_calibration_fx(model, example, target=target)
        calibrate(prepared, data)
        yield target, "PyTorch, converted graph", convert_fx(prepared)
    yield "onnxruntime", "ONNX Runtime", lower_to_onnx(model, example, calibration=data)
    yield "tensorrt", "ONNX Runtime", lower_to_onnx(model, example, calibration=data, runtime="tensorrt")
    for float_type in ("fp32", "fp16"):
        engine = lower_to_trt(model, example, calibration=data, settings={"float_type": float_type})
        yield "tensorrt-rtx", f"network, float part {float_type}", engine.simulate


def logits(call: Callable[[Tensor], Any], crops: list[Crop]) -> Tensor:
    """(crops, 1000), float32; one call for each crop."""
    with torch.no_grad():
        return torch.cat([call(crop.pixels).float() for crop in crops])


def score(expected: Tensor, found: Tensor) -> dict[str, Any]:
    """How the logits `found` agree with float's."""
    overall = agreement(expected, found)
    first, second = expected.softmax(1).topk(2).values.unbind(1)
    clear = (first - second) > MARGIN
    same = expected.argmax(1) == found.argmax(1)
    return {
        "clear": int(clear.sum()),
        "kept": int((same & clear).sum()),
        "top-1 of all": f"{int(same.sum())} of {overall.samples}",
        "cosine": overall.cosine,
        "SQNR dB": overall.sqnr_db,
    }


if __name__ == "__main__":
    main()
