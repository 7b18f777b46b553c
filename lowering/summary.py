"""What a lowered module tells about itself: text for people, plain data for programs."""

from __future__ import annotations

import platform
from collections import Counter
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from fx_passes.graph.node_meta import source_line
from fx_passes.ops import is_size
from lowering.records import Described, OpRow, SegmentInfo
from lowering.roofline import engine_floor, gpu_named, representative_gpu
from lowering.verdict import verdict_of

if TYPE_CHECKING:
    from lowering.request.request import Request
    from lowering.request.settings import Settings

__all__ = ["details_of", "op_rows", "placement_text", "precision_text", "report_data", "summary_text", "versions"]

_PACKAGES = ("torch", "onnx", "onnxruntime", "openvino", "tensorrt_rtx_cu13", "tensorrt")
_LISTED_ROWS = 12


def details_of(request: Request, flops: int, flops_share: float, capture: dict[str, str]) -> dict[str, Any]:
    """The details that hold for the whole lowering.

    Args:
        request: what was asked for.
        flops: of one call of the model at the opt sizes.
        flops_share: share of them inside segments, 0 to 1.
        capture: "route", and "reason" why it was not symbolic tracing.
    """
    return {
        "target": request.backend.target,
        "precision": request.precision,
        "flops_share": flops_share,
        "flops": flops,
        "threads": request.backend.threads,
        "capture": capture,
        "versions": versions(),
        "settings": request.settings.as_dict(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a lowering depends on, those that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def precision_text(precision: str, settings: Settings) -> str:
    """ "int8 + fp16" for int8, which leaves a float part; the precision itself otherwise."""
    return f"int8 + {settings.float_type}" if precision == "int8" else precision


def op_rows(segment: GraphModule) -> list[OpRow]:
    """The operators of a converted segment that placement decided on, with its reasons."""
    rows = []
    for node in segment.graph.nodes:
        annotation = node.meta.get("quantization")
        if annotation is not None and node.op != "get_attr" and not is_size(node):
            name = node.meta.get("module_path") or node.name
            rows.append(OpRow(str(name), annotation.op, annotation.quantized, annotation.reason, source_line(node)))
    return rows


def report_data(lowered: Described) -> dict[str, Any]:
    """Plain data: strings, numbers, lists and dicts only."""
    verdict = verdict_of(lowered.segments, lowered.details)
    return {
        **{key: lowered.details[key] for key in ("target", "precision", "flops_share", "flops")},
        "segments": [segment.as_dict() for segment in lowered.segments],
        "fallbacks": [asdict(f) for f in lowered.fallbacks],
        "capture": lowered.details.get("capture", _SYMBOLIC),
        "outside": {path: dict(reasons) for path, reasons in lowered.outside.items() if reasons},
        "placement": lowered.details.get("placement"),
        "verdict": None if verdict is None else verdict.as_dict(),
        "threads": lowered.details["threads"],
        "versions": lowered.details["versions"],
        "settings": lowered.details["settings"],
    }


def summary_text(lowered: Described) -> str:
    """The summary that `LoweredModule.summary` returns."""
    details = lowered.details
    lines = [
        *_verdict_lines(lowered),
        f"Lowered for {details['target']}, precision {details['precision']}: {len(lowered.segments)} segment(s), "
        f"{details['flops_share']:.1%} of {details['flops'] / 1e9:.2f} GFLOPs, "
        f"{len(lowered.fallbacks)} Python fallback(s)",
        *_capture_lines(details.get("capture", _SYMBOLIC)),
    ]
    if details.get("placement"):
        lines += placement_text(details["placement"], details["settings"]["float_type"])
    for segment in lowered.segments:
        lines += ["", *_segment_lines(segment.completed(), (details.get("placement") or {}).get("gpu"))]
    if lowered.fallbacks:
        lines += ["", "Stays in Python:"]
        lines += [f"  {f.node} ({f.source or 'no source line'}): {f.reason}" for f in lowered.fallbacks]
    outside = [(path, item) for path, reasons in lowered.outside.items() for item in reasons.items()]
    if outside:
        lines += ["", "Calls that PyTorch ran, as they are outside of what was lowered:"]
        lines += [f"  {path}: {count} x {reason}" for path, (reason, count) in outside]
    return "\n".join(lines) + "\n"


_SYMBOLIC = {"route": "symbolic tracing"}  # what an artifact of an earlier version does not say


def _verdict_lines(lowered: Described) -> list[str]:
    verdict = verdict_of(lowered.segments, lowered.details)
    if verdict is None:
        return []
    start = "Verdict" if verdict.winner == "int8" else "WARNING"
    return [f"{start}: {verdict.sentence}" + (f"; {verdict.advice}" if verdict.advice else "")]


def _capture_lines(capture: dict[str, str]) -> list[str]:
    if capture["route"] == "torch.export":
        return [f"Captured by torch.export: {capture['reason']}"]
    if capture["route"] == "children":
        return ["The model itself stays Python (see below); its submodules are lowered one by one"]
    return []


def placement_text(placement: dict[str, Any], float_type: str) -> list[str]:
    """What a summary says of a placement, given as plain data."""
    floors = {name: f"{floor['total_us']:.1f}" for name, floor in placement["floors"].items()}
    others = f"{floors['float']} us in {float_type}, {floors['int8 wherever possible']} us with int8 wherever possible"
    start = f"Placement searched for {placement['gpu']}, {placement['builds']} engines built: "
    if not placement["int8_layers"]:
        noisy = any(decision["reason"].startswith("with it") for decision in placement["decisions"].values())
        within = f" within {placement['limit_db']:g} dB" if noisy else ""
        return [f"{start}int8 does not lower the roofline floor{within} (a floor, no measurement): {others}"]
    return [
        f"{start}{placement['int8_layers']} of {placement['layers']} layers in int8, outputs at "
        f"{placement['sqnr_db']:.1f} dB; roofline floor (no measurement) {floors['placed']} us; {others}"
    ]


def _segment_lines(segment: SegmentInfo, gpu: str | None) -> list[str]:
    lines = [
        f"{segment.name}: {segment.backend}, {segment.precision}, {segment.nodes} operators, "
        f"{segment.flops / 1e9:.2f} GFLOPs"
    ]
    if segment.checks:
        lines += ["  for sizes for which:", *(f"    {check}" for check in segment.checks)]
    if segment.ops:
        lines += _coverage_lines(segment.ops)
    if segment.choice:
        lines += _choice_lines(segment.choice)
    for engine in segment.engines:
        lines += _engine_lines(engine, segment.float_twin)
        lines += _floor_lines(engine, segment.float_twin, gpu)
    return lines


def _coverage_lines(rows: list[OpRow]) -> list[str]:
    heavy = [row for row in rows if row.op.startswith(("conv", "linear", "matmul", "bmm", "addmm"))]
    lines = [f"  int8: {sum(r.int8 for r in heavy)} of {len(heavy)} convolutions and matmuls"]
    reasons = Counter((row.op, row.reason) for row in rows if not row.int8)
    for (op, reason), count in reasons.most_common(_LISTED_ROWS):
        lines.append(f"    float: {count} x {reason if reason.startswith(op) else f'{op}: {reason}'}")
    if len(reasons) > _LISTED_ROWS:
        lines.append(f"    and {len(reasons) - _LISTED_ROWS} more kinds: report()['segments'][i]['ops'] has them all")
    return lines


def _choice_lines(choice: dict[str, Any]) -> list[str]:
    lines = [f"  runtime: {choice['kept']}" + (f" ({choice['reason']})" if choice["reason"] else "")]
    clock = "cpu" if choice["clock"] == "CPU time" else "wall"
    for name, times in choice["milliseconds"].items():
        ratio = choice["ratios"].get(name)
        against = ""
        if ratio is not None:
            against = f", {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) of ONNX Runtime's"
        lines.append(f"    {name}: {times[clock]:.3g} ms of {choice['clock']}{against}, {choice['rounds']} rounds")
    return lines


def _engine_lines(engine: dict[str, Any], twin: dict[str, Any] | None) -> list[str]:
    if "kernels" not in engine:
        ops = ", ".join(f"{count} {op}" for op, count in sorted(engine["ops"].items(), key=lambda item: -item[1]))
        return [f"  operators as optimised: {ops}"]
    target = ", ".join(engine["compute_capabilities"] or ()) or "portable"
    lines = [
        f"  engine ({target}): {engine['kernels']} kernels; {engine['int8_compute']} convolutions and matmuls in int8, "
        f"{engine['float_compute']} float; moves {engine['activation_bytes'] / 1e6:.1f} MB of activations and "
        f"{engine['weight_bytes'] / 1e6:.1f} MB of weights a call; {engine['engine_bytes'] / 1e6:.1f} MB file"
    ]
    if twin is not None:
        ours, other = _moved(engine), _moved(twin)
        verdict = "int8 moves fewer bytes" if ours < other else f"WARNING: {twin['precision']} moves fewer bytes"
        lines.append(
            f"    the same in {twin['precision']}: {twin['kernels']} kernels, {twin['activation_bytes'] / 1e6:.1f} + "
            f"{twin['weight_bytes'] / 1e6:.1f} MB. {verdict}: {min(ours, other) / 1e6:.1f} against "
            f"{max(ours, other) / 1e6:.1f} MB"
        )
    return lines


def _floor_lines(engine: dict[str, Any], twin: dict[str, Any] | None, gpu: str | None) -> list[str]:
    """The roofline floor of an engine on a GPU, by default one that stands for what it was built for."""
    if not all("reads" in row for row in engine.get("rows") or [{}]):
        return []  # a session, or an artifact of an earlier version
    known = gpu_named(gpu) if gpu else representative_gpu(engine["compute_capabilities"])
    floor = engine_floor(engine["rows"], known)
    line = (
        f"    roofline floor on {known.name} (no measurement): {floor.total_us:.1f} us "
        f"({floor.memory_us:.1f} bytes, {floor.compute_us:.1f} operations, {floor.launch_us:.0f} launches)"
    )
    if twin is not None and twin.get("rows"):
        line += f"; {engine_floor(twin['rows'], known).total_us:.1f} us in {twin['precision']}"
    return [line]


def _moved(engine: dict[str, Any]) -> int:
    return engine["activation_bytes"] + engine["weight_bytes"]
