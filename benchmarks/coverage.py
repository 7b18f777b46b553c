"""How far each of a list of models gets: captured, quantized, lowered, and equal to eager when executed.

    python -m benchmarks.coverage                             every torchvision classifier
    python -m benchmarks.coverage timm:resnet18 my.py:make    these

One model at a time, random weights, batch 1. A cell is "yes" or the first line of the error; a model whose result
differs from eager, or of which less than 99% of the FLOPs were lowered, is no "yes".
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from benchmarks.models import settle_batch_norm
from benchmarks.results import publish
from fx_passes import convert_fx, fuse_fx, prepare_calibration_fx
from fx_passes.errors import LoweringError
from lowering import lower_to_onnx, lower_to_trt
from lowering.images import InputSpec
from lowering.loading import load_model

TOLERANCE = 1e-4  # of fp32 against eager, relative to the largest value


def main() -> None:
    """Try every model, print, write `build/benchmarks/coverage.{json,csv}`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="as for fxtrt; default: all torchvision classifiers")
    arguments = parser.parse_args()
    specs = arguments.models or torchvision_classifiers()
    rows = []
    for spec in track(specs, description="models"):
        rows.append(attempt(spec))
        gc.collect()
    complete = sum(all(value == "yes" for key, value in row.items() if key != "model") for row in rows)
    publish("coverage", rows, title=f"Coverage: {complete} of {len(rows)} models in every column")


def torchvision_classifiers() -> list[str]:
    """`torchvision:NAME` of everything that maps an image to classes."""
    import torchvision

    return [f"torchvision:{name}" for name in torchvision.models.list_models(module=torchvision.models)]


def attempt(spec: str) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = {"model": spec}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model, declared = load_model(spec)
        declared = declared or InputSpec()
        settle_batch_norm(model, [declared.example(2, seed=seed) for seed in (1, 2)])
        for name, step in steps(model, declared.example()).items():
            row[name] = verdict(step)
    return row


def steps(model: nn.Module, example: Tensor) -> dict[str, Callable[[], str]]:
    """Column name to what fills the cell."""
    with torch.no_grad():
        expected = model(example)

    def fuse() -> str:
        return equal(expected, fuse_fx(model)(example))

    def convert() -> str:
        prepared = prepare_calibration_fx(model, example, target="onnxruntime")
        prepared(example)
        return "yes" if torch.isfinite(convert_fx(prepared)(example)).all() else "not finite"

    def onnx(precision: str) -> str:
        lowered = lower_to_onnx(model, example, precision=precision, calibration=[example])
        return lowered_enough(lowered) or (equal(expected, lowered(example)) if precision == "fp32" else "yes")

    def trt(precision: str) -> str:
        lowered = lower_to_trt(model, example, precision=precision, calibration=[example])
        return lowered_enough(lowered) or (equal(expected, lowered.simulate(example)) if precision == "fp32" else "yes")

    return {
        "fused": fuse,
        "converted": convert,
        "ONNX fp32": lambda: onnx("fp32"),
        "ONNX int8": lambda: onnx("int8"),
        "TensorRT fp32": lambda: trt("fp32"),
        "TensorRT int8": lambda: trt("int8"),
    }


def verdict(step: Callable[[], str]) -> str:
    """The cell. An error of this project's own is a refusal, any other a bug; both are shown and the run goes on."""
    with torch.no_grad():
        try:
            return step()
        except LoweringError as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        except Exception as error:
            return f"CRASH {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def equal(expected: Tensor, found: Tensor) -> str:
    """ "yes", or how far apart they are."""
    difference = float((expected - found).abs().max() / expected.abs().max())
    return "yes" if difference <= TOLERANCE else f"differs by {difference:.1e}"


def lowered_enough(lowered: Any) -> str:
    """Empty, or what was not lowered."""
    report = lowered.report()
    if report["flops_share"] < 0.99 or report["fallbacks"]:
        return f"{report['flops_share']:.0%} of FLOPs, {len(report['fallbacks'])} fallback(s)"
    return ""


if __name__ == "__main__":
    main()
