"""What the report page says of one lowering: the cards, layers joined with their kernels, bytes by module."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowering.compare import Agreement

__all__ = ["Card", "Coverage", "cards", "coverage", "kept_float", "layers", "module_bytes"]

_HEAVY = ("conv", "linear", "matmul", "bmm", "addmm")
_GOOD_DB = 20.0  # a tenth of the signal's amplitude: below it a classifier loses answers
_DEPTH = 2  # parts of a module's path that name a row of `module_bytes`


@dataclass(frozen=True)
class Card:
    """One answer on the first screen.

    Attributes:
        title: the question.
        state: "good", "warn", "bad" or "unknown".
        figure: the answer, short.
        text: a sentence.
        step: what to do next; empty if nothing.
    """

    title: str
    state: str
    figure: str
    text: str
    step: str = ""


@dataclass(frozen=True)
class Coverage:
    """How many convolutions and matrix products of a segment take int8."""

    int8: int
    total: int

    @property
    def share(self) -> float:
        return self.int8 / self.total if self.total else 0.0


def cards(report: Mapping[str, Any], accuracy: Agreement | None) -> list[Card]:
    """The first screen.

    Args:
        report: what `LoweredModule.report()` says.
        accuracy: of the lowered model against float, if it was measured.
    """
    return [_lowered(report), _speed(report), _accuracy(accuracy), _size(report)]


def _lowered(report: Mapping[str, Any]) -> Card:
    share, segments, python = report["flops_share"], len(report["segments"]), len(report["fallbacks"])
    runs = f"{_count(segments, 'segment')} for {report['target']}, precision {report['precision']}"
    stays = f"{_count(python, 'call')} in Python" if python else "nothing stays in Python"
    state = "good" if share >= 0.99 else "warn" if share >= 0.9 else "bad"
    step = "see what stays in Python below" if python else ""
    return Card("Lowered", state, f"{100 * share:.4g}%", f"of the FLOPs, in {runs}; {stays}", step)


def _speed(report: Mapping[str, Any]) -> Card:
    verdict = report.get("verdict")
    if verdict is None:
        return Card("Speed", "unknown", "not compared", "nothing is in int8, or nothing was measured")
    state = {"int8": "good", "float": "bad"}.get(verdict["winner"], "warn")
    int8, floating = verdict["int8"], verdict["floating"]
    if verdict["measured"]:
        figure = f"{floating[0] / int8[0]:.2f}x"
    elif verdict["winner"] == "undecided":
        figure = "undecided"
    else:
        ratios = sorted(f / i for f, i in zip(floating, int8, strict=True))
        figure = f"{ratios[0]:.2f}-{ratios[1]:.2f}x"
    return Card("Speed", state, figure, verdict["sentence"], verdict["advice"])


def _accuracy(found: Agreement | None) -> Card:
    if found is None:
        step = "fxtrt compare MODEL, or fxtrt evaluate on labelled images"
        return Card("Accuracy", "unknown", "not measured", "against float", step)
    kept = "" if found.top1 is None else f"; {found.top1:.1%} of the top-1 answers kept"
    state = "good" if found.sqnr_db >= _GOOD_DB and (found.top1 is None or found.top1 > 0.97) else "warn"
    step = "" if state == "good" else "fx_passes.sensitivity names the layers that cost most"
    text = f"outputs against float over {_count(found.samples, 'sample')}, cosine {found.cosine:.4f}{kept}"
    return Card("Accuracy", state, f"{found.sqnr_db:.1f} dB", text, step)


def _size(report: Mapping[str, Any]) -> Card:
    stored = [segment.get("weights") for segment in report["segments"]]
    known = [weights for weights in stored if weights]
    if not known:
        return Card("Size", "unknown", "not known", "the artifact is of an earlier version")
    here, floats = (sum(weights[key] for weights in known) for key in ("stored", "float32"))
    files = sum(e.get("engine_bytes", 0) for segment in report["segments"] for e in segment["engines"])
    engine = f"; engine files of {_megabytes(files)}" if files else ""
    ratio = f", {floats / here:.1f}x smaller than float32" if here and floats > here else ""
    return Card("Size", "good", _megabytes(here), f"of weights{ratio}{engine}")


def coverage(segment: Mapping[str, Any]) -> Coverage | None:
    """Of a segment in `LoweredModule.report()`; None where placement decided nothing (float precisions)."""
    rows = [row for row in segment["ops"] if row["op"].startswith(_HEAVY)]
    return Coverage(sum(row["int8"] for row in rows), len(rows)) if rows else None


def kept_float(segment: Mapping[str, Any]) -> list[tuple[int, str, str]]:
    """Operators of a segment that stay float: how many, which, why; the most frequent first."""
    found = Counter((row["op"], row["reason"]) for row in segment["ops"] if not row["int8"])
    return [(count, op, reason) for (op, reason), count in found.most_common()]


def layers(segment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The operators of a segment, each with the kernels that its engine computes it with.

    Returns:
        For each the keys of `OpRow`, "kernels" (how many name it) and "bytes" (what these move, shared ones divided).
    """
    kernels: dict[str, int] = defaultdict(int)
    moved: dict[str, float] = defaultdict(float)
    for engine in segment["engines"][:1]:
        for row in engine.get("rows") or ():
            for module in row["modules"]:
                kernels[module] += 1
                moved[module] += row["bytes"] / len(row["modules"])
    listed = bool(kernels)
    return [
        {**row, "kernels": kernels.get(row["node"], 0) if listed else None, "bytes": moved.get(row["node"], 0.0)}
        for row in segment["ops"]
    ]


def module_bytes(engine: Mapping[str, Any], limit: int = 14) -> list[tuple[str, float, float]]:
    """Bytes of int8 kernels and of other ones by module, the largest first; what is left over in one row at the end."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in engine.get("rows") or ():
        names = row["modules"] or ["(no module)"]
        for name in names:
            found[".".join(name.split(".")[:_DEPTH])][0 if row["int8"] else 1] += row["bytes"] / len(names)
    ordered = sorted(((name, a, b) for name, (a, b) in found.items()), key=lambda item: -(item[1] + item[2]))
    if len(ordered) <= limit:
        return ordered
    rest: Sequence[tuple[str, float, float]] = ordered[limit - 1 :]
    others = (f"{len(rest)} others", sum(a for _, a, _ in rest), sum(b for *_, b in rest))
    return [*ordered[: limit - 1], others]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB"
