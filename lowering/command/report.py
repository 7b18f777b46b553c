"""The HTML report: one page without outside resources, from `LoweredModule.report()` and what was measured."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fx_passes.errors import ArtifactError, InputError
from lowering.command.report_charts import Latency, bytes_chart, latency_chart, roofline_chart
from lowering.command.report_facts import Card, Coverage, cards, coverage, kept_float, layers, module_bytes
from lowering.compare import Agreement

if TYPE_CHECKING:
    from torch import nn

    from lowering.module import LoweredModule

__all__ = ["Latency", "Lowering", "ReportTable", "placement_drawing", "render_report", "write_report"]


@dataclass(frozen=True)
class ReportTable:
    """A table of the report.

    Args:
        title: above it.
        columns: the header; a column whose cells are all numbers is aligned right.
        rows: cells are shown with `str`; None as an empty cell.
        bars: index of a column of numbers to draw as bars, or None.
        note: a sentence below it: how it was measured.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    bars: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Lowering:
    """One lowered model in the report.

    Args:
        title: its heading.
        summary: what `LoweredModule.summary()` says.
        report: what `LoweredModule.report()` says.
        tables: accuracy, predictions: whatever was measured beside it.
        graph: the model's graph as an SVG element (`fx_passes.analysis.draw`), or None.
        latency: what was measured, for a chart; without any, what choosing the runtime measured.
        latency_note: how.
        accuracy: of the lowered model against float (`lowering.compare`), or None.
    """

    title: str
    summary: str
    report: dict[str, Any]
    tables: Sequence[ReportTable] = ()
    graph: str | None = None
    latency: Sequence[Latency] = ()
    latency_note: str = ""
    accuracy: Agreement | None = None

    @classmethod
    def of(cls, title: str, lowered: LoweredModule, **measured: Any) -> Lowering:
        """From a lowered module; `measured` are the other fields."""
        return cls(title, lowered.summary(), lowered.report(), **measured)


@dataclass(frozen=True)
class _EngineView:
    """An engine as the page shows it."""

    data: dict[str, Any]
    bytes: str | None
    roofline: str | None


@dataclass(frozen=True)
class _SegmentView:
    """A segment as the page shows it."""

    data: dict[str, Any]
    coverage: Coverage | None
    float: list[tuple[int, str, str]]
    layers: list[dict[str, Any]]
    engines: list[_EngineView]


@dataclass(frozen=True)
class _Part:
    """A lowering as the page shows it."""

    lowering: Lowering
    cards: list[Card]
    latency: str | None
    latency_note: str
    segments: list[_SegmentView]


def render_report(lowerings: Sequence[Lowering], *, title: str, tables: Sequence[ReportTable] = ()) -> str:
    """The page as text.

    Args:
        lowerings: one part of the page each.
        title: of the page.
        tables: shown before the first part.

    Raises:
        InputError: a graph is not an SVG element.
    """
    import jinja2

    for lowering in lowerings:
        if lowering.graph is not None and not lowering.graph.lstrip().startswith("<svg"):
            raise InputError(
                f"the graph of '{lowering.title}' is no SVG element",
                hint="pass what fx_passes.draw(graph) returns",
            )
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lowering.command"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(megabytes=_megabytes, cell=_cell, scaled=_scaled, numeric=_numeric)
    return environment.get_template("report.html").render(
        title=title, parts=[_part(lowering) for lowering in lowerings], tables=tables
    )


def write_report(
    path: str | Path, lowerings: Sequence[Lowering], *, title: str, tables: Sequence[ReportTable] = ()
) -> Path:
    """`render_report` into a file, written under a temporary name and renamed; its folder is made if missing.

    Raises:
        ArtifactError: the file cannot be written.
    """
    path = Path(path)
    page = render_report(lowerings, title=title, tables=tables)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(prefix=".report-", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(page)
            os.chmod(scratch, 0o644)  # mkstemp makes it private
            os.replace(scratch, path)
        except OSError:
            os.unlink(scratch)
            raise
    except OSError as error:
        raise ArtifactError(
            f"cannot write the report {path}: {error.strerror or error}", hint="choose another path"
        ) from error
    return path


def placement_drawing(model: nn.Module, example_inputs: Any, target: str) -> str:
    """The model's graph as SVG, coloured by what is int8 and what is float where it is lowered for `target`.

    Args:
        model: a float module, or a graph before conversion.
        example_inputs: one batch; what is drawn does not depend on its values.
        target: "tensorrt", "tensorrt-rtx" or "onnxruntime".

    Raises:
        QuantizationError: nothing of it can be quantized for `target`.
    """
    from fx_passes import convert_fx, draw, prepare_calibration_fx
    from fx_passes.quantize.calibrate import calibrate

    prepared = prepare_calibration_fx(model, example_inputs, target=target)
    calibrate(prepared, [example_inputs])
    return draw(convert_fx(prepared))


def _part(lowering: Lowering) -> _Part:
    report = lowering.report
    gpu = (report.get("placement") or {}).get("gpu")
    rows, note = (lowering.latency, lowering.latency_note) if lowering.latency else _chosen(report)
    return _Part(
        lowering,
        cards(report, lowering.accuracy),
        latency_chart(rows) if rows else None,
        note,
        [_segment(segment, gpu) for segment in report["segments"]],
    )


def _segment(segment: dict[str, Any], gpu: str | None) -> _SegmentView:
    engines = [_engine(engine, gpu) for engine in segment["engines"] if "kernels" in engine]
    return _SegmentView(segment, coverage(segment), kept_float(segment), layers(segment), engines)


def _engine(engine: dict[str, Any], gpu: str | None) -> _EngineView:
    bars = bytes_chart(module_bytes(engine)) if engine.get("rows") else None
    return _EngineView(engine, bars, roofline_chart(engine, gpu))


def _chosen(report: dict[str, Any]) -> tuple[list[Latency], str]:
    """What choosing the runtime of the only segment measured."""
    choices = [segment.get("choice") for segment in report["segments"]]
    choice = choices[0] if len(choices) == 1 else None
    if not choice or not choice["milliseconds"]:
        return [], ""
    clock = "cpu" if choice["clock"] == "CPU time" else "wall"
    base = choice["milliseconds"]["ONNX Runtime"][clock]
    rows = []
    for name, times in choice["milliseconds"].items():
        ratio = choice["ratios"].get(name)
        low, high = (base * ratio["low"], base * ratio["high"]) if ratio else (times[clock], times[clock])
        label = name if name.startswith("float") else f"int8 in {name}" + (" (kept)" if name == choice["kept"] else "")
        rows.append(Latency(label, times[clock], min(low, times[clock]), max(high, times[clock])))
    threads = report["threads"] or 1
    note = (
        f"{choice['clock']} of one call on the example, {threads} thread{'s' if threads > 1 else ''}, "
        f"{choice['rounds']} rounds interleaved; the intervals are those of the ratio to ONNX Runtime."
    )
    return rows, note


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.1f}"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _numeric(rows: Sequence[Sequence[Any]], column: int) -> bool:
    return all(isinstance(row[column], (int, float)) or row[column] is None for row in rows)


def _scaled(value: float | None, rows: Sequence[Sequence[Any]], column: int) -> float:
    """The length of a bar in percent of the longest; none where there is no number."""
    longest = max((row[column] for row in rows if row[column] is not None), default=0)
    return 100 * value / longest if value is not None and longest else 0.0
