"""The charts of the report page as SVG: bars with intervals, bytes by module, a roofline. The page colours them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from lowering.roofline import gpu_named, kernel_floors, representative_gpu

__all__ = ["Latency", "bytes_chart", "latency_chart", "roofline_chart"]

_WIDTH, _LABEL, _ROW = 640.0, 210.0, 30.0


@dataclass(frozen=True)
class Latency:
    """A measured latency: the median and an interval, ms."""

    name: str
    median: float
    low: float
    high: float


def latency_chart(rows: Sequence[Latency]) -> str:
    """Horizontal bars from 0, each with its interval."""
    longest = max(row.high for row in rows) or 1.0
    room = _WIDTH - _LABEL - 90
    parts = []
    for index, row in enumerate(rows):
        y = index * _ROW + 6
        x = [_LABEL + room * value / longest for value in (row.low, row.median, row.high)]
        parts += [
            _text(0, y + 14, row.name),
            f'<rect class="bar" x="{_LABEL:.1f}" y="{y:.1f}" width="{x[1] - _LABEL:.1f}" height="18" rx="2"/>',
            f'<path class="whisker" d="M{x[0]:.1f} {y + 9:.1f}H{x[2]:.1f}M{x[0]:.1f} {y + 4:.1f}v10M{x[2]:.1f} '
            f'{y + 4:.1f}v10"/>',
            _text(x[2] + 6, y + 14, f"{row.median:.3g} ms"),
        ]
    return _svg(parts, len(rows) * _ROW + 8, "latency, with intervals")


def bytes_chart(rows: Sequence[tuple[str, float, float]]) -> str:
    """Bytes by module: int8 kernels and others, stacked.

    Args:
        rows: name, bytes of int8 kernels, bytes of the others.
    """
    longest = max((a + b for _, a, b in rows), default=1.0) or 1.0
    room = _WIDTH - _LABEL - 90
    parts = []
    for index, (name, int8, others) in enumerate(rows):
        y, width = index * _ROW * 0.8 + 4, [room * value / longest for value in (int8, others)]
        parts += [
            _text(0, y + 13, name),
            f'<rect class="int8" x="{_LABEL:.1f}" y="{y:.1f}" width="{width[0]:.1f}" height="16">'
            f"<title>int8 kernels: {int8 / 1e6:.2f} MB</title></rect>",
            f'<rect class="float" x="{_LABEL + width[0]:.1f}" y="{y:.1f}" width="{width[1]:.1f}" height="16">'
            f"<title>other kernels: {others / 1e6:.2f} MB</title></rect>",
            _text(_LABEL + sum(width) + 6, y + 13, f"{(int8 + others) / 1e6:.1f} MB"),
        ]
    return _svg(parts, len(rows) * _ROW * 0.8 + 8, "bytes that kernels move, by module")


def roofline_chart(engine: Mapping[str, Any], gpu_name: str | None = None) -> str | None:
    """Every kernel of an engine by operations a byte and operations a second at its floor, both logarithmic.

    Args:
        engine: a layer report as plain data.
        gpu_name: None: one that stands for what the engine was built for.

    Returns:
        None for artifacts of earlier versions, which do not list bytes.
    """
    rows = [row for row in engine.get("rows") or () if row.get("operations") and "reads" in row]
    if not rows or any("reads" not in row for row in engine["rows"]):
        return None
    gpu = gpu_named(gpu_name) if gpu_name else representative_gpu(engine["compute_capabilities"])
    floors = dict(zip((id(row) for row in engine["rows"]), kernel_floors(engine["rows"], gpu), strict=True))
    points = []
    for row in rows:
        microseconds = max(floors[id(row)])
        if microseconds > 0 and row["bytes"]:
            points.append((row, row["operations"] / row["bytes"], row["operations"] / microseconds * 1e6))
    if not points:
        return None
    return _scatter(points, gpu.rates["int8"], gpu.rates["fp16"], gpu.memory, gpu.name)


def _scatter(points: Sequence[tuple[Any, float, float]], int8: float, fp16: float, memory: float, name: str) -> str:
    width, height, left, bottom = _WIDTH, 300.0, 64.0, 40.0
    low_x, high_x = _decades([x for _, x, _ in points] + [int8 / memory])
    low_y, high_y = _decades([y for *_, y in points] + [int8])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - low_x) / (high_x - low_x)
        up = (math.log10(y) - low_y) / (high_y - low_y)
        return left + across * (width - left - 10), (height - bottom) * (1 - up) + 6

    parts = []
    for decade in range(low_x, high_x + 1):
        x, y = place(10.0**decade, 10.0**low_y)
        parts += [f'<path class="grid" d="M{x:.1f} 6V{y:.1f}"/>', _text(x - 8, y + 16, _power(decade))]
    for decade in range(low_y, high_y + 1):
        x, y = place(10.0**low_x, 10.0**decade)
        parts += [f'<path class="grid" d="M{x:.1f} {y:.1f}H{width - 10:.1f}"/>', _text(4, y + 4, _power(decade))]
    for kind, rate in (("int8", int8), ("float", fp16)):
        knee, end = place(rate / memory, rate), place(10.0**high_x, rate)
        start = place(10.0**low_x, min(10.0**low_x * memory, rate))
        parts.append(
            f'<path class="roof {kind}" d="M{start[0]:.1f} {start[1]:.1f}L{knee[0]:.1f} {knee[1]:.1f}H{end[0]:.1f}"/>'
        )
    for row, x, y in points:
        cx, cy = place(x, y)
        label = f"{', '.join(row['modules']) or row['name']}: {row['bytes'] / 1e6:.2f} MB, {row['kind']}"
        parts.append(
            f'<circle class="{"int8" if row["int8"] else "float"}" cx="{cx:.1f}" cy="{cy:.1f}" r="4">'
            f"<title>{escape(label)}</title></circle>"
        )
    parts.append(_text(left + 8, height + 4, f"operations a byte; upwards operations a second, {name}"))
    return _svg(parts, height + 12, f"roofline on {name}")


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _power(decade: int) -> str:
    return f"1e{decade}"


def _text(x: float, y: float, text: str) -> str:
    shown = text if len(text) <= 34 else text[:15] + "…" + text[-18:]
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(shown)}</text>'


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" role="img" '
        f'aria-label="{escape(label)}">' + "".join(parts) + "</svg>"
    )
