"""Which runtime runs an ONNX file fastest on this machine, and whether int8 pays: both by measurement."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fx_passes.errors import LoweringError
from lowering.compare import sqnr
from lowering.onnx.float_form import float_form
from lowering.onnx.openvino import OpenVinoSession, is_installed
from lowering.onnx.session import OnnxSession
from lowering.timing import Ratio, Round, contest, ratio_interval

if TYPE_CHECKING:
    from lowering.onnx.model import OnnxModel

__all__ = ["Choice", "choose_runtime"]

ONNXRUNTIME, OPENVINO, FLOAT = "ONNX Runtime", "OpenVINO", "float in ONNX Runtime"
SECONDS = 1.0
"""What the rounds of a choice may take, unless three of them take longer."""
WORTH = 0.98
"""A runtime has to take less than this share of ONNX Runtime's time, over the whole interval, to be kept instead."""
SHORT_MS = 0.2
"""Calls that are shorter are overhead for the most part, and stay in ONNX Runtime."""
LOSS_DB = 3.0
"""How much further from float another runtime's results on the example may be: half a bit."""
EQUAL_DB = 60.0
"""Results as close as this are as good as equal in float32."""


@dataclass(frozen=True)
class Choice:
    """What was measured, and what follows from it.

    Attributes:
        kept: the name of the candidate that was kept.
        reason: why, in a few words.
        clock: "CPU time" with one thread, which other work on the machine does not change, else "wall time".
        rounds: of every candidate.
        milliseconds: by candidate, the medians over rounds of "wall" and "cpu" time of one call on the example.
        ratios: by candidate, its time over ONNX Runtime's on the same file.
    """

    kept: str
    reason: str
    clock: str = ""
    rounds: int = 0
    milliseconds: dict[str, dict[str, float]] = field(default_factory=dict)
    ratios: dict[str, Ratio] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for reports and manifests."""
        ratios = {name: {"median": r.median, "low": r.low, "high": r.high} for name, r in self.ratios.items()}
        return {
            "kept": self.kept, "reason": self.reason, "clock": self.clock, "rounds": self.rounds,
            "milliseconds": self.milliseconds, "ratios": ratios,
        }  # fmt: skip


def choose_runtime(session: OnnxSession, example: Sequence[Tensor], *, quantized: bool) -> tuple[OnnxModel, Choice]:
    """Measure a file in the runtimes that are installed, and without its quantization.

    Args:
        session: of the file in ONNX Runtime.
        example: inputs of one call.
        quantized: whether the file has Q/DQ pairs, so that there is a float form to compare with.

    Returns:
        A session in the runtime to keep, and what was measured.
    """
    if _milliseconds(session, example) < SHORT_MS:
        return session, Choice(ONNXRUNTIME, f"a call takes less than {SHORT_MS:g} ms")
    floats = _float_session(session) if quantized else None
    other, reason = _in_openvino(session, floats, example)
    sessions: dict[str, OnnxModel] = {ONNXRUNTIME: session}
    if other is not None:
        sessions[OPENVINO] = other
    if floats is not None:
        sessions[FLOAT] = floats
    if len(sessions) == 1:
        return session, Choice(ONNXRUNTIME, reason)
    rounds = contest({name: _call(each, example) for name, each in sessions.items()}, seconds=SECONDS)
    choice = decided(rounds, session.threads, reason)
    return sessions[choice.kept], choice


def decided(rounds: Mapping[str, Sequence[Round]], threads: int, reason: str = "") -> Choice:
    """What the rounds say.

    Args:
        rounds: of ONNX Runtime and of other candidates, equally many.
        threads: of a call.
        reason: why OpenVINO is not among them, if it is not.
    """
    clock = "cpu" if threads == 1 else "wall"
    times = {name: [getattr(r, clock) for r in turns] for name, turns in rounds.items()}
    ratios = {name: ratio_interval(turns, times[ONNXRUNTIME]) for name, turns in times.items() if name != ONNXRUNTIME}
    kept = ONNXRUNTIME
    if (ratio := ratios.get(OPENVINO)) is not None:
        kept = OPENVINO if ratio.high < WORTH else ONNXRUNTIME
        if kept == OPENVINO:
            reason = "it is faster on the example"
        elif ratio.low > 1:
            reason = "OpenVINO is slower on the example"
        else:
            reason = "undecided: the intervals overlap"
    medians = {
        name: {each: statistics.median(getattr(r, each) for r in turns) for each in ("wall", "cpu")}
        for name, turns in rounds.items()
    }
    count = len(rounds[ONNXRUNTIME])
    return Choice(kept, reason, "CPU time" if clock == "cpu" else "wall time", count, medians, ratios)


def _in_openvino(
    session: OnnxSession, floats: OnnxSession | None, example: Sequence[Tensor]
) -> tuple[OpenVinoSession | None, str]:
    """The same file there, or why not."""
    if not is_installed():
        return None, "OpenVINO is not installed (pip install 'fx-trt-lowering[openvino]')"
    if any(spec.min != spec.max for spec in session.inputs):
        return None, "OpenVINO prepares its kernels anew for every size, and the sizes are free"
    if any(spec.dtype in (torch.float64, torch.int64) for spec in session.inputs):
        return None, "OpenVINO computes 64-bit types in 32 bits"
    try:
        other = OpenVinoSession(session.file, session.inputs, session.outputs, threads=session.threads, chosen=True)
        worse = _worse(session, other, floats, example)
    except LoweringError as error:
        return None, error.what
    return (None, worse) if worse else (other, "")


def _worse(session: OnnxModel, other: OnnxModel, floats: OnnxModel | None, example: Sequence[Tensor]) -> str:
    """How the results of `other` are further from float than those of `session`; empty if they are not."""
    ours, others = session(*example), other(*example)
    rights = ours if floats is None else floats(*example)
    for right, here, there in zip(rights, ours, others, strict=True):
        if not right.is_floating_point():
            if not torch.equal(here, there):
                return "OpenVINO's results on the example differ in a tensor of integers"
            continue
        before, after = min(sqnr(right, here), EQUAL_DB), sqnr(right, there)
        if not after >= before - LOSS_DB:  # not a number counts as worse
            return f"OpenVINO's results on the example are further from float: {after:.1f} against {before:.1f} dB"
    return ""


def _float_session(session: OnnxSession) -> OnnxSession | None:
    file = float_form(session.file)
    if file is None:
        return None
    try:
        # as a file for TensorRT is run: nothing is fused into int8 kernels
        return OnnxSession(file, session.inputs, session.outputs, threads=session.threads, target="tensorrt")
    except LoweringError:
        return None  # there is nothing to compare with: the file that matters was taken


def _call(session: OnnxModel, example: Sequence[Tensor]) -> Callable[[], Any]:
    return lambda: session(*example)


def _milliseconds(session: OnnxModel, example: Sequence[Tensor]) -> float:
    rounds = contest({"": _call(session, example)}, seconds=0.0, least=1, most=1)
    return rounds[""][0].wall
