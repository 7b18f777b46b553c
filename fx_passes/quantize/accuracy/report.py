"""What `sensitivity` found, as a table, a bar chart, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from html import escape
from pathlib import Path
from typing import Any

from fx_passes.errors import ArtifactError, InputError

__all__ = ["Sensitivity", "SensitivityRow"]

_BAR, _ROW, _LEFT, _TOP, _RIGHT = 420.0, 18.0, 260.0, 64.0, 70.0
_ALONE, _SO_FAR, _TEXT = "#c2410c", "#94a3b8", "#334155"


@dataclass(frozen=True)
class SensitivityRow:
    """What quantizing one operator does.

    Attributes:
        node: name of the operator in the converted graph.
        source: "file.py:12" of the user's line, or None.
        sqnr_db: signal to quantization noise of the model's outputs with this operator alone in int8, in dB.
        cosine: cosine similarity of the same outputs.
        worst: largest absolute error of an output value.
        worst_steps: largest error of the operator's own result, in steps of an int8 with the range of that result.
        local_sqnr_db: SQNR of the operator's own result.
        cumulative_sqnr_db: the SQNR of the outputs with this operator and all before it in int8.
        cumulative_cosine: their cosine similarity.
    """

    node: str
    source: str | None
    sqnr_db: float
    cosine: float
    worst: float
    worst_steps: float
    local_sqnr_db: float
    cumulative_sqnr_db: float
    cumulative_cosine: float


@dataclass(frozen=True)
class Sensitivity:
    """The operators of a model, the most sensitive first.

    Attributes:
        target: whose scheme and placement was measured.
        rows: sorted by `sqnr_db`, lowest first.
        sqnr_db: SQNR of the outputs with every placed operator in int8, in dB.
    """

    target: str
    rows: Sequence[SensitivityRow]
    sqnr_db: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def table(self) -> str:
        """Aligned text, one line per operator."""
        lines = [
            f"{'operator':40} {'alone dB':>9} {'cosine':>9} {'worst':>10} {'own dB':>7} {'own steps':>9} "
            f"{'so far dB':>10}  source"
        ]
        for r in self.rows:
            numbers = (
                f"{r.sqnr_db:9.1f} {r.cosine:9.6f} {r.worst:10.3g} {r.local_sqnr_db:7.1f} {r.worst_steps:9.1f} "
                f"{r.cumulative_sqnr_db:10.1f}"
            )
            lines.append(f"{r.node:40} {numbers}  {r.source or ''}".rstrip())
        return "\n".join([*lines, f"all in int8 for {self.target}: {self.sqnr_db:.1f} dB"])

    def csv(self) -> str:
        """Comma-separated values with a header, one line per operator."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(f.name for f in fields(SensitivityRow))
        writer.writerows(astuple(row) for row in self.rows)
        return text.getvalue()

    def json(self) -> str:
        """`as_dict()` as JSON; numbers that are not finite are null."""
        return json.dumps(_finite(self.as_dict()), indent=1)

    def svg(self, *, rows: int = 40) -> str:
        """A bar chart of the noise that each operator adds, most sensitive first: the longer, the worse.

        Args:
            rows: how many operators to draw.
        """
        return _chart(self, self.rows[:rows])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as its suffix says: .svg, .csv, .json or .txt.

        Raises:
            InputError: another suffix.
            ArtifactError: the file cannot be written.
        """
        file = Path(path)
        forms = {".svg": self.svg, ".csv": self.csv, ".json": self.json, ".txt": self.table}
        if file.suffix not in forms:
            raise InputError(f"no report is written as '{file.suffix}'", hint=f"use one of {', '.join(forms)}")
        try:
            file.write_text(forms[file.suffix](), encoding="utf-8")
        except OSError as error:
            raise ArtifactError(
                f"the report cannot be written to '{file.name}': {error.strerror}",
                hint="check that the folder exists and may be written to",
            ) from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _chart(report: Sensitivity, rows: Sequence[SensitivityRow]) -> str:
    """Noise in dB below the signal, drawn from the quietest that is shown (short) to the loudest (long)."""
    shown = [v for row in rows for v in (row.sqnr_db, row.cumulative_sqnr_db) if math.isfinite(v)] or [0.0]
    quiet, loud = max(shown) + 1.0, min(*shown, report.sqnr_db) - 1.0
    height = _TOP + _ROW * len(rows) + 12
    width = _LEFT + _BAR + _RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="11" fill="{_TEXT}">',
        f'<text x="12" y="20" font-size="14">int8 for {escape(report.target)}: {report.sqnr_db:.1f} dB with all '
        f"operators</text>",
        f'<rect x="12" y="32" width="10" height="10" fill="{_ALONE}"/>'
        '<text x="28" y="41">noise of this operator alone, dB of the signal over it</text>',
        f'<rect x="{_LEFT + 100:g}" y="32" width="10" height="10" fill="{_SO_FAR}"/>'
        f'<text x="{_LEFT + 116:g}" y="41">with all before it</text>',
    ]

    def length(value: float) -> float:
        if not math.isfinite(value):
            return 0.0 if value > 0 else _BAR
        return max(1.0, _BAR * (quiet - value) / (quiet - loud))

    for index, row in enumerate(rows):
        y = _TOP + _ROW * index
        parts.append(
            f"<g><title>{escape(row.node)} {escape(row.source or '')}: alone {row.sqnr_db:.1f} dB, cosine "
            f"{row.cosine:.6f}; with all before it {row.cumulative_sqnr_db:.1f} dB</title>"
            f'<text x="{_LEFT - 8:g}" y="{y + 10:g}" text-anchor="end">{escape(row.node[-40:])}</text>'
            f'<rect x="{_LEFT:g}" y="{y:g}" width="{length(row.cumulative_sqnr_db):.1f}" height="12" '
            f'fill="{_SO_FAR}" opacity="0.45"/>'
            f'<rect x="{_LEFT:g}" y="{y + 2:g}" width="{length(row.sqnr_db):.1f}" height="8" fill="{_ALONE}"/>'
            f'<text x="{_LEFT + _BAR + 8:g}" y="{y + 10:g}">{row.sqnr_db:.1f} dB</text></g>'
        )
    return "\n".join([*parts, "</svg>"])
