"""The two entry points. Each reads as the pipeline it is: capture, quantize, partition, export, build."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import GraphModule

from fx_passes.capture.exclusive import exclusive
from fx_passes.entry.ambient import plain_state
from fx_passes.entry.call import call_signature
from fx_passes.errors import CaptureError, InputError
from lowering.module import LoweredModule
from lowering.request.inputs import CalibrationData, Example, ShapeRange, example_for, shape_range
from lowering.request.model_check import check_model
from lowering.request.request import Request
from lowering.request.settings import FLOAT_TYPES, PRECISIONS, Settings, resolve_settings

if TYPE_CHECKING:
    from fx_passes.quantize.qconfig import QConfig
    from lowering.request.search import PlacementSearch

__all__ = ["lower_to_onnx", "lower_to_trt"]

DynamicBatch = tuple[int, int, int] | list[tuple[int, int, int]] | None
RUNTIMES = ("auto", "onnxruntime", "openvino", "tensorrt")


def lower_to_trt(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    precision: str = "int8",
    calibration: Iterable[Any] | None = None,
    compute_capabilities: Iterable[str | float] | str | None = None,
    dynamic_batch: DynamicBatch = None,
    dynamic_shapes: dict[str, Any] | tuple[Any, ...] | None = None,
    qconfig: QConfig | Mapping[Any, Any] | str | os.PathLike[str] | None = None,
    placement: str | PlacementSearch = "default",
    settings: Settings | dict[str, Any] | None = None,
    dry_run: bool = False,
) -> LoweredModule:
    """Lower a model to TensorRT engines, with its wrapped post-processing as Python calls between them.

    Args:
        model: a float module, a traced or fused graph, a trained QAT module or a converted one. It stays as it is.
            Where its own forward cannot be captured as a graph, its submodules are lowered one by one.
        example_inputs: a tensor, a tuple of positional or a dict of keyword arguments. None: the first calibration
            batch, what a prepared model recorded, or the input size that a timm or torchvision model declares.
        precision: "fp32", "fp16", "bf16", "int8" (the rest in `settings.float_type`, fp16 by default) or "auto"
            (int8, and the float engine instead wherever its layers move fewer bytes).
        calibration: batches as `example_inputs` takes them. None with int8: the example alone, with a warning.
        compute_capabilities: "8.9", "sm89", "RTX 4090" or a list: one engine that holds them all. None: one portable
            engine (TensorRT-RTX) or an engine for this machine's GPU (TensorRT).
        dynamic_batch: (min, opt, max) for dimension 0 of every input that has the example's batch size; or a list of
            them, one for each optimization profile: the engine is optimised for every opt.
        dynamic_shapes: other dynamic dimensions, as `torch.export` takes them. Dims of one name are one size at every
            call, those of two names, and `Dim.AUTO` and `Dim.DYNAMIC`, are independent; all need a range.
        qconfig: with "int8" and "auto", what to quantize otherwise, and where: a `QConfig`, its dict, or the path of a
            TOML or JSON file. None: what the target wants.
        placement: "default" quantizes what the target's rules say, "auto" what lowers the roofline floor of a GPU and
            keeps the outputs' accuracy, found by building some engines. A `lowering.PlacementSearch` names the GPU and
            the limits.
        settings: a `lowering.Settings` or a dict of its fields.
        dry_run: capture, quantize, partition and check every operator, but build nothing. The module that comes back
            has its `summary()` and `report()`, without engines; calling it raises.

    Returns:
        A module that runs on a GPU, and with `simulate` on the CPU.

    Raises:
        LoweringError: a subclass that names the node, the user's source line and the next thing to try.

    Example:
        >>> import torch
        >>> from lowering import lower_to_trt
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> images = torch.randn(2, 3, 16, 16)
        >>> lowered = lower_to_trt(model, images, calibration=[images])
        >>> lowered.simulate(images).shape
        torch.Size([2, 8, 14, 14])
    """
    from lowering.trt.backend import TensorRTBackend

    options = _options(precision, settings, float_type="fp16")
    backend = TensorRTBackend(precision, compute_capabilities, options)
    data = CalibrationData(calibration, options.kept_batches)
    search = _search(placement, precision, backend.target, build=not dry_run)
    request = Request(backend, precision, data, qconfig, options, build=not dry_run, search=search)
    with exclusive():
        return _lower(model, example_inputs, (dynamic_batch, dynamic_shapes), request)


def lower_to_onnx(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    precision: str = "int8",
    calibration: Iterable[Any] | None = None,
    runtime: str = "auto",
    dynamic_batch: DynamicBatch = None,
    dynamic_shapes: dict[str, Any] | tuple[Any, ...] | None = None,
    qconfig: QConfig | Mapping[Any, Any] | str | os.PathLike[str] | None = None,
    settings: Settings | dict[str, Any] | None = None,
    dry_run: bool = False,
) -> LoweredModule:
    """Lower a model to ONNX files and sessions that run them.

    Args:
        model, example_inputs, precision, calibration, dynamic_batch, dynamic_shapes, qconfig, settings, dry_run: as in
            `lower_to_trt`; with "int8" the rest is fp32 by default. "auto" measures int8 and float and keeps the
            faster.
        runtime: "onnxruntime" (uint8 activations, for the CPU), "openvino" (the same file in OpenVINO's own runtime),
            "tensorrt" (a Q/DQ file with TensorRT's scheme and placement for `trtexec`, which ONNX Runtime also runs),
            or "auto": OpenVINO if it is installed and faster on the example beyond the noise, else ONNX Runtime. What
            was measured is in the summary and the report.

    Returns:
        A module that runs on this machine.

    Raises:
        LoweringError: a subclass that names the node, the user's source line and the next thing to try.

    Example:
        >>> import torch
        >>> from lowering import lower_to_onnx
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> images = torch.randn(2, 3, 16, 16)
        >>> lower_to_onnx(model, images, calibration=[images])(images).shape
        torch.Size([2, 8, 14, 14])
    """
    from lowering.onnx.backend import OnnxBackend

    if runtime not in RUNTIMES:
        raise InputError(f"runtime is {runtime!r}", hint=f"use one of {', '.join(RUNTIMES)}")
    options = _options(precision, settings, float_type="fp32")
    backend = OnnxBackend(precision, runtime, options)
    data = CalibrationData(calibration, options.kept_batches)
    request = Request(backend, precision, data, qconfig, options, build=not dry_run)
    with exclusive():
        return _lower(model, example_inputs, (dynamic_batch, dynamic_shapes), request)


def _lower(model: nn.Module, example_inputs: Any, dynamic: tuple[DynamicBatch, Any], request: Request) -> LoweredModule:
    """The pipeline shared by all backends, which differ in placement target, in what they take and what they build."""
    from fx_passes.capture.export import open_sizes
    from lowering.capture import captured
    from lowering.children.lower import lower_children

    with plain_state(), _collector_paused(), open_sizes():
        check_model(model)
        example = example_for(model, example_inputs, request.data)
        request.data.check_against(call_signature(model, example.args, example.kwargs), example)
        sizes = shape_range(model, example, *dynamic)
        try:
            graph = captured(model, sizes, request)
        except CaptureError as refusal:
            lowered = lower_children(model, sizes, request, refusal)
        else:
            lowered = _lower_graph(model, graph, sizes, request)
        if request.build:
            _check_smallest(lowered, request.backend, sizes)
        return lowered


def _lower_graph(model: nn.Module, graph: GraphModule, sizes: ShapeRange, request: Request) -> LoweredModule:
    """The model is one graph: its segments, the Python between them, and what can be lowered inside that Python."""
    from lowering.backend import built_segments
    from lowering.children.lower import lower_leaves
    from lowering.children.lowered import WithChildren
    from lowering.segment.segments import segmented
    from lowering.summary import details_of

    parts = segmented(graph, sizes, request.settings, request.backend.unsupported, request.data)
    infos, fallbacks = built_segments(parts, request), parts.fallbacks
    glue: nn.Module = parts.glue
    flops = parts.measured.flops * parts.measured.flops_share
    leaves = lower_leaves(model, parts, sizes, request)
    if leaves is not None:
        glue, infos, fallbacks = (
            WithChildren(glue, leaves.children, leaves.root),
            infos + leaves.infos,
            fallbacks + leaves.fallbacks,
        )
        flops += leaves.flops
    refused = graph.meta.get("exported")
    capture = {"route": "torch.export", "reason": refused} if refused else {"route": "symbolic tracing"}
    share = flops / parts.measured.flops if parts.measured.flops else 1.0
    details = details_of(request, parts.measured.flops, share, capture)
    if (found := graph.meta.get("placement")) is not None:
        details["placement"] = found
    return LoweredModule(glue, infos, fallbacks, details)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Graphs are many small objects that all stay alive: collecting garbage between them took a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_smallest(lowered: LoweredModule, backend: Any, sizes: Any) -> None:
    """Run a dynamic lowering once at its smallest sizes, batch 1 as a rule: a frozen size fails here, not later."""
    if not sizes.dynamic:
        return
    run = lowered.simulate if backend.simulates else lowered
    example: Example = sizes.min.map(torch.clone)
    try:
        run(*example.args, **example.kwargs)
    except InputError as error:
        if not error.other_sizes:  # else the model's code takes another branch there, which each call checks
            raise


def _search(placement: str | PlacementSearch, precision: str, target: str, build: bool) -> PlacementSearch | None:
    """What to search for; None for the target's own placement."""
    if placement == "default":
        return None
    from lowering.request.search import PlacementSearch

    if placement != "auto" and not isinstance(placement, PlacementSearch):
        raise InputError(f"placement is {placement!r}", hint='use "default", "auto" or a lowering.PlacementSearch')
    for wrong, why in (
        (precision not in ("int8", "auto"), f"precision={precision!r} places nothing in int8"),
        (target != "tensorrt-rtx", f"the search reads listings of TensorRT-RTX, and the target is {target!r}"),
        (not build, "a dry run builds nothing, and the search compares engines"),
    ):
        if wrong:
            raise InputError(f"placement={placement!r}: {why}", hint='use placement="default"')
    return placement if isinstance(placement, PlacementSearch) else PlacementSearch()


def _options(precision: str, settings: Settings | dict[str, Any] | None, float_type: str) -> Settings:
    if precision not in PRECISIONS:
        raise InputError(f"precision is {precision!r}", hint=f"use one of {', '.join(PRECISIONS)}")
    options = resolve_settings(settings)
    if precision in FLOAT_TYPES:
        if options.float_type not in (None, precision):
            raise InputError(
                f"precision={precision!r} and settings.float_type={options.float_type!r} contradict each other",
                hint="settings.float_type is for precision='int8' and 'auto'",
            )
        return options.with_float_type(precision)
    return options.with_float_type(float_type)
