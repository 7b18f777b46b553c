"""Whether int8 pays: one sentence from what a lowering measured on the CPU, or from the floors of its engines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lowering.records import SegmentInfo
from lowering.roofline import LAUNCH_RANGE_US, Gpu, engine_floor, gpu_named, representative_gpu

__all__ = ["Verdict", "verdict_of"]

FLOAT_CANDIDATE = "float in ONNX Runtime"
_SURE = 0.98  # what takes more than this share of the other's time is not faster to speak of


@dataclass(frozen=True)
class Verdict:
    """The answer to "is it worth it".

    Attributes:
        winner: "int8", "float" or "undecided".
        measured: whether times of this machine decided; else it is the roofline floor of a GPU.
        int8: the least and the largest time of a call with int8, in `unit`.
        floating: the same in float.
        unit: "ms" or "us".
        device: what they are of: "this CPU, 2 threads", "RTX 4070".
        sentence: the whole in words.
        advice: what to try next; empty where int8 wins.
    """

    winner: str
    measured: bool
    int8: tuple[float, float]
    floating: tuple[float, float]
    unit: str
    device: str
    sentence: str
    advice: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def verdict_of(segments: list[SegmentInfo], details: dict[str, Any]) -> Verdict | None:
    """The verdict of a lowering; None where there is nothing to compare with.

    Args:
        segments: of one lowered module; those of engines get their float twin built.
        details: of the same module.
    """
    if all(segment.choice for segment in segments):
        return _measured(segments, details) if segments else None
    for segment in segments:
        segment.completed()
    if any(segment.float_twin for segment in segments):
        return _by_floors(segments, details)
    return None


def _measured(segments: list[SegmentInfo], details: dict[str, Any]) -> Verdict | None:
    """By the times of the example. Segments without a float form, or too short to measure, count on neither side."""
    int8, low, high = 0.0, 0.0, 0.0
    clock = ""
    for segment in segments:
        choice = segment.choice or {}
        times, kept = choice.get("milliseconds") or {}, choice.get("kept")
        if FLOAT_CANDIDATE not in times or kept not in times:
            continue
        clock = "cpu" if choice["clock"] == "CPU time" else "wall"
        # ratios are over ONNX Runtime's int8 time, the kept one's too
        base = times["ONNX Runtime"][clock]
        ratio = choice["ratios"][FLOAT_CANDIDATE]
        int8 += times[kept][clock]
        low, high = low + base * ratio["low"], high + base * ratio["high"]
    if not clock:
        return None
    threads = details.get("threads") or 1
    device = f"this CPU, {threads} thread{'s' if threads > 1 else ''}"
    figures = f"{int8:.3g} ms of {'CPU' if clock == 'cpu' else 'wall'} time a call against {(low + high) / 2:.3g} ms"
    where = f"measured on the example ({device})"
    if int8 < _SURE * low:
        winner, sentence, advice = "int8", f"int8 takes {figures} in float, {low / int8:.2f}x faster, {where}", ""
    elif int8 > high:
        winner, sentence = "float", f"int8 is slower than float here: {figures}, {where}"
        advice = 'lower with precision="auto", which keeps the faster, or with precision="fp32"'
    else:
        winner, sentence = "undecided", f"int8 gains nothing that could be measured: {figures} in float, {where}"
        advice = "repeat it on a quiet machine, or with the batch that will be served"
    return Verdict(winner, True, (int8, int8), (low, high), "ms", device, sentence, advice)


def _by_floors(segments: list[SegmentInfo], details: dict[str, Any]) -> Verdict | None:
    """By the roofline floors of all engines, at the ends of what starting a kernel may cost."""
    named = (details.get("placement") or {}).get("gpu")
    ends: list[tuple[float, float]] = []
    gpu: Gpu | None = None
    for launch_us in LAUNCH_RANGE_US:
        ours = theirs = 0.0
        for segment in segments:
            if not segment.engines or not _has_bytes(segment.engines[0]):
                return None
            engine, twin = segment.engines[0], segment.float_twin or segment.engines[0]
            if not _has_bytes(twin):
                return None
            gpu = gpu_named(named) if named else representative_gpu(engine["compute_capabilities"])
            ours += engine_floor(engine["rows"], gpu, launch_us).total_us
            theirs += engine_floor(twin["rows"], gpu, launch_us).total_us
        ends.append((ours, theirs))
    assert gpu is not None
    kind = next(segment.float_twin["precision"] for segment in segments if segment.float_twin)
    int8, floating = (ends[0][0], ends[-1][0]), (ends[0][1], ends[-1][1])
    figures = f"{_range(int8)} us in int8, {_range(floating)} us in {kind}"
    launches = "-".join(f"{end:g}" for end in LAUNCH_RANGE_US)
    floor = f"roofline floor on {gpu.name} (no measurement): {figures} (launches at {launches} us)"
    faster = [ours < _SURE * theirs for ours, theirs in ends]
    slower = [theirs < _SURE * ours for ours, theirs in ends]
    advice = 'placement="auto", a larger batch, or settings={"cuda_graphs": True}'
    if all(faster):
        winner, sentence, advice = "int8", f"int8 wins by the {floor}", ""
    elif all(slower):
        winner, sentence = "float", f"{kind} wins by the {floor}"
    else:
        why = "what starting a kernel costs decides" if any(faster) and any(slower) else "the two hardly differ"
        winner, sentence = "undecided", f"undecided by the {floor}: {why}"
    return Verdict(winner, False, int8, floating, "us", gpu.name, sentence, advice and f"try {advice}")


def _range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.1f}-{ends[1]:.1f}"


def _has_bytes(report: dict[str, Any]) -> bool:
    """Whether a layer report lists what its kernels move; artifacts of earlier versions do not."""
    return bool(report.get("rows")) and all("reads" in row for row in report["rows"])
