"""The HTML report: one page without scripts or outside resources, from what `LoweredModule.report()` tells."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fx_passes.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from torch import nn

    from lowering.module import LoweredModule

__all__ = ["Lowering", "ReportTable", "placement_drawing", "render_report", "write_report"]


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
        tables: latency, accuracy, predictions: whatever was measured beside it.
        graph: the model's graph as an SVG element (`fx_passes.analysis.draw`), or None.
    """

    title: str
    summary: str
    report: dict[str, Any]
    tables: Sequence[ReportTable] = ()
    graph: str | None = None

    @classmethod
    def of(
        cls, title: str, lowered: LoweredModule, tables: Sequence[ReportTable] = (), graph: str | None = None
    ) -> Lowering:
        """From a lowered module."""
        return cls(title, lowered.summary(), lowered.report(), tables, graph)


@dataclass(frozen=True)
class _Coverage:
    """How many convolutions and matmuls of a segment take int8, and the rest by reason."""

    int8: int
    total: int
    reasons: list[tuple[str, str, int]] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.int8 / self.total if self.total else 0.0


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
        title=title, lowerings=lowerings, tables=tables, coverage=_coverage
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


def _coverage(segment: dict[str, Any]) -> _Coverage | None:
    """Of a segment in `LoweredModule.report()`; None where placement decided nothing (float precisions)."""
    rows = [row for row in segment["ops"] if row["op"].startswith(("conv", "linear", "matmul", "bmm", "addmm"))]
    if not rows:
        return None
    reasons: dict[tuple[str, str], int] = {}
    for row in segment["ops"]:
        if not row["int8"]:
            key = (row["op"], row["reason"])
            reasons[key] = reasons.get(key, 0) + 1
    ordered = sorted(((op, reason, count) for (op, reason), count in reasons.items()), key=lambda item: -item[2])
    return _Coverage(sum(row["int8"] for row in rows), len(rows), ordered)


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
