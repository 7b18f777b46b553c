"""What int8 costs in accuracy, by target, method and way of running it, beside other quantizers.

    python -m benchmarks.accuracy                      both parts
    python -m benchmarks.accuracy digits               labelled digits: two networks trained here, right answers counted
    python -m benchmarks.accuracy photographs          EfficientNet-Lite0 with its ImageNet weights, against float

The methods are configurations (`QConfig`); what runs without a GPU runs: the converted graph in PyTorch, ONNX Runtime,
and the TensorRT networks under the reference executor. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from benchmarks import peers
from benchmarks.digits import NETWORKS, QAT_EPOCHS, Digits, accuracy, digits, predictions, train
from benchmarks.models import efficientnet_lite0, input_of
from benchmarks.photographs import PHOTOGRAPHS, Batches, Crop, calibration_batches, held_out_crops
from benchmarks.results import publish
from fx_passes import convert_fx, prepare_calibration_fx, prepare_qat_fx
from fx_passes.quantize.calibrate import calibrate
from fx_passes.quantize.channels.equalize import equalize_fx
from fx_passes.quantize.qat.prepare import freeze_batch_norm, set_qat_state
from lowering import lower_to_onnx, lower_to_trt
from lowering.compare import agreement

TARGETS = ("onnxruntime", "tensorrt", "tensorrt-rtx")
METHODS: dict[str, dict[str, Any]] = {
    "minmax, no bias correction": {"observer": "minmax", "bias_correction": False},
    "minmax": {"observer": "minmax"},
    "moving average": {"observer": "moving_average"},
    "histogram": {"observer": "histogram"},
    "percentile": {"observer": "percentile"},
    "entropy": {"observer": "entropy"},
    "mse": {"observer": "mse"},
    "per-tensor weights": {"weight": "per_tensor"},
    "per-tensor weights, equalized": {"weight": "per_tensor", "equalize": True},
    "equalized": {"equalize": True},
    "learned rounding": {"rounding": "learned"},
}
DEFAULT = "minmax"  # what nothing but a target gives
MARGIN = 0.15  # of the two largest float probabilities; a closer call than that may tip
_BATCH = 64


def main() -> None:
    """Measure, print, write `build/benchmarks/accuracy_*.{json,csv}`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["digits", "photographs"], help="digits, photographs")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--crops", type=int, default=45, help="test crops of each photograph")
    parser.add_argument("--calibration-crops", type=int, default=8, help="calibration crops of each photograph")
    arguments = parser.parse_args()
    for part in arguments.parts:
        {"digits": digits_part, "photographs": photographs_part}[part](arguments)


def quantized(
    model: nn.Module, example: Tensor, data: Iterable[Tensor], target: str, options: dict[str, Any]
) -> GraphModule:
    """`model` calibrated and converted with `options` for the whole of it."""
    prepared = prepare_calibration_fx(model, example, target=target, qconfig={"": options})
    calibrate(prepared, data)
    return convert_fx(prepared, data)


# -- digits ------------------------------------------------------------------------------------------------------------


def digits_part(arguments: argparse.Namespace) -> None:
    """Right answers on the test half of the digits."""
    data = digits()
    rows: list[dict[str, Any]] = []
    for name, make in NETWORKS.items():
        model = make(data)
        expected = predictions(model, data.test_images)
        right = accuracy(expected, data.test_labels)
        rows.append(_digit_row(name, "", "float", "PyTorch", right, right, 100.0))
        for target, method, run, found in digit_runs(model, data, arguments):
            same = accuracy(found, expected)
            rows.append(_digit_row(name, target, method, run, accuracy(found, data.test_labels), right, same))
        rows += [{**row, "network": name} for row in four_ways(model, data)]
    note = (
        f"{len(data.test_labels)} test images (one is {100 / len(data.test_labels):.2f} points), calibrated on "
        f"{len(data.calibration().images)} training images; QAT: {QAT_EPOCHS} epochs. points: right answers, against "
        "the float network's. as float: share of images with the float network's answer. QAT is trained further, so "
        "it may differ from float more often and still be right more often. The rows 'all four' say how often the "
        "network before conversion (QAT: the validated one), the converted graph, ONNX Runtime and the executed "
        "TensorRT network give one answer."
    )
    publish("accuracy_digits", rows, title="Digits: right answers in int8", note=note)


def _digit_row(
    network: str, target: str, method: str, run: str, right: float | None, float_right: float | None, same: float
) -> dict[str, Any]:
    known = right is not None and float_right is not None
    return {
        "network": network,
        "target": target,
        "method": method,
        "run": run,
        "right %": None if right is None else round(right, 2),
        "points": round(right - float_right, 2) if known else None,
        "as float %": round(same, 2),
    }


def digit_runs(model: nn.Module, data: Digits, arguments: argparse.Namespace) -> Iterator[tuple[str, str, str, Tensor]]:
    """(target, method, how it is run, predictions)."""
    images = data.test_images
    example = images[:_BATCH]
    for target in arguments.targets:
        for method in arguments.methods:
            graph = quantized(model, example, data.calibration(), target, METHODS[method])
            yield target, method, "PyTorch", predictions(graph, images)
            if method == DEFAULT:
                yield from ((target, method, run, predictions(call, images)) for run, call in backends(graph, target))
        graph = convert_fx(quantization_aware(model, data, target))
        yield target, "QAT", "PyTorch", predictions(graph, images)
        yield from ((target, "QAT", run, predictions(call, images)) for run, call in backends(graph, target))
        graph = convert_fx(quantization_aware(equalize_fx(model), data, target))
        yield target, "equalized, then QAT", "PyTorch", predictions(graph, images)
    for name, call in peer_calls(model, example, data.calibration()):
        yield "onnxruntime", name, "ONNX Runtime", predictions(call, images)


def quantization_aware(model: nn.Module, data: Digits, target: str) -> GraphModule:
    """The model trained further with fake quantization, in its validating state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start = model if isinstance(model, GraphModule) else copy.deepcopy(model).train()
        qat = prepare_qat_fx(start, data.test_images[:_BATCH], target=target)
        set_qat_state(qat, "calibrate")
        with torch.no_grad():
            for batch in data.calibration():
                qat(batch)
        set_qat_state(qat, "train")
        freeze_batch_norm(qat)
        train(qat, data, epochs=QAT_EPOCHS, rate=1e-4)
        set_qat_state(qat, "validate")
    return qat


def backends(graph: GraphModule, target: str) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """How a converted graph runs outside PyTorch: name and call."""
    from lowering.trt.reference.parser import network_from_onnx

    if target == "tensorrt-rtx":
        yield "executed network", lower_to_trt(graph, settings={"float_type": "fp32"}).simulate
        return
    lowered = lower_to_onnx(graph, runtime=target)
    yield "ONNX Runtime", lowered
    if target == "tensorrt":
        (segment,) = lowered.backend_segments()
        network = network_from_onnx(segment.backend.bytes)
        yield "executed network", lambda images: network.run(images)[0]


def four_ways(model: nn.Module, data: Digits) -> Iterator[dict[str, Any]]:
    """How often a model before its conversion and three ways to run the converted one give the same answer."""
    images = data.test_images
    calibrated = quantized(model, images[:_BATCH], data.calibration(), "tensorrt", METHODS[DEFAULT])
    qat = quantization_aware(model, data, "tensorrt")
    for method, before, graph in ((DEFAULT, model, calibrated), ("QAT", qat, convert_fx(qat))):
        calls = [before, graph, *(call for _, call in backends(graph, "tensorrt"))]
        runs = torch.stack([predictions(call, images) for call in calls])
        same = (runs == runs[0]).all(0)
        yield _digit_row("", "tensorrt", method, "all four", None, None, 100 * float(same.double().mean()))


def peer_calls(
    model: nn.Module, example: Tensor, data: Iterable[Tensor]
) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Other quantizers' models, run by ONNX Runtime; those whose package is not installed are named and left out."""
    with tempfile.TemporaryDirectory() as folder:
        file = peers.export_float(model, example, Path(folder) / "float.onnx")
        for name, quantize in peers.QUANTIZERS.items():
            if peers.available(name):
                yield name, peers.session_call(quantize(file, data), torch.get_num_threads())
            else:
                print(f"{name} is not installed and is left out")


# -- photographs -------------------------------------------------------------------------------------------------------


def photographs_part(arguments: argparse.Namespace) -> None:
    """Agreement with the float model on held-out crops."""
    model = efficientnet_lite0()
    spec = input_of(model)
    crops = held_out_crops(spec, arguments.crops)
    data = calibration_batches(spec, per_photograph=arguments.calibration_crops)
    expected = logits(model, crops)
    rows = []
    for target, method, run, call in photograph_runs(model, spec.example(), data, arguments):
        start = time.perf_counter()
        rows.append({"target": target, "method": method, "run": run, **score(expected, logits(call, crops))})
        print(f"{target}, {method}, {run}: {rows[-1]['SQNR dB']:.1f} dB, {time.perf_counter() - start:.0f} s")
    note = (
        f"{len(crops)} crops of {len(PHOTOGRAPHS)} photographs, calibrated on {len(data.crops)} other, mirrored crops "
        f"of them. clear: crops whose two likeliest classes are more than {MARGIN} apart in float; kept: of those, "
        "where int8 has the same first class. Cosine and SQNR are of the logits, against float's."
    )
    publish("accuracy_photographs", rows, title="EfficientNet-Lite0: int8 against float", note=note)


def photograph_runs(
    model: nn.Module, example: Tensor, data: Batches, arguments: argparse.Namespace
) -> Iterator[tuple[str, str, str, Callable[[Tensor], Tensor]]]:
    """(target, method, how it is run, a call that gives logits)."""
    for target in arguments.targets:
        for method in arguments.methods:
            graph = quantized(model, example, data, target, METHODS[method])
            yield target, method, "PyTorch", graph
            if method == DEFAULT:
                yield from ((target, method, run, call) for run, call in backends(graph, target))
    for name, call in peer_calls(model, example, [image[None] for batch in data for image in batch]):
        yield "onnxruntime", name, "ONNX Runtime", call


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
        "top-1 as float %": round(100 * float(same.double().mean()), 1),
        "cosine": overall.cosine,
        "SQNR dB": overall.sqnr_db,
    }


if __name__ == "__main__":
    main()
