"""The coverage rows as a page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from benchmarks.coverage_case import COLUMNS
from benchmarks.zoo import TIMM

__all__ = ["document", "good", "is_complete"]

Row = Mapping[str, Any]


def is_complete(row: Row) -> bool:
    """Whether every cell is a "yes", or was left out."""
    return all(good(row.get(name)) for name in COLUMNS)


def good(cell: Any) -> bool:
    """Whether a cell is no gap."""
    return cell in ("yes", "-")


def document(rows: Mapping[str, Row], listed: Sequence[tuple[str, int | None]], machine: Mapping[str, Any]) -> str:
    """The page in Markdown.

    Args:
        rows: model -> row of `benchmarks.coverage_case`.
        listed: the models that the page is about, in order.
        machine: what they were run with.
    """
    found = [rows[spec] for spec, _ in listed if spec in rows]
    versions = ", ".join(f"{name} {version}" for name, version in machine.items() if _is_version(version))
    lines = [
        "# Coverage",
        "",
        f"Written by `scripts/coverage` on {date.today().isoformat()} with {versions}.",
        "",
        "Random weights, with BatchNorm statistics settled on noise and with noise on every parameter that starts as a",
        "constant (a residual branch that ends in a zero hides what is wrong in it). One input of the size given, one",
        "image. No GPU took part: networks are executed by the reference executor.",
        "",
        *(f"- **{name}**: {meaning}." for name, meaning in COLUMNS.items()),
        "",
        "A dash: not run, since a smaller model of the same family was.",
        "",
        *_summary(found),
        *_not_run([spec for spec, _ in listed if spec not in rows]),
        "",
        *_misses(found),
        *_table("torchvision classifiers", [row for row in found if row["model"].startswith("torchvision:")]),
        *_table("timm, one small model of every family", [row for row in found if row["model"].startswith("timm:")]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _is_version(value: Any) -> bool:
    return isinstance(value, str) and value[:1].isdigit()


def _not_run(specs: Sequence[str]) -> list[str]:
    names = ", ".join(f"`{spec}`" for spec in specs)
    return ["", f"{len(specs)} models of the list have not been run: {names}."] if specs else []


def _summary(rows: Sequence[Row]) -> list[str]:
    head = ["| | models | " + " | ".join(COLUMNS) + " | all |", "| --- " * (len(COLUMNS) + 3) + "|"]
    for origin in ("torchvision", "timm"):
        mine = [row for row in rows if row["model"].startswith(f"{origin}:")]
        ran = [[row for row in mine if row.get(name) != "-"] for name in COLUMNS]
        counts = [
            f"{sum(row.get(n) == 'yes' for row in rows)} of {len(rows)}" for n, rows in zip(COLUMNS, ran, strict=True)
        ]
        cells = " | ".join(map(str, (len(mine), *counts, sum(map(is_complete, mine)))))
        head.append(f"| {origin} | {cells} |")
    return head


def _misses(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        causes: dict[str, list[str]] = {}
        for name in COLUMNS:
            if not good(row.get(name)):
                causes.setdefault(str(row.get(name)), []).append(name)
        lines += [f"- `{row['model']}`, {', '.join(names)}: {cause}" for cause, names in causes.items()]
    return ["## Misses", "", *lines, ""] if lines else []


def _table(title: str, rows: Sequence[Row]) -> list[str]:
    family = {f"timm:{name}": key for key, (name, _) in TIMM.items()}
    lines = [f"## {title}", "", "| model | pixels | " + " | ".join(COLUMNS) + " |", "| --- " * (len(COLUMNS) + 2) + "|"]
    for row in rows:
        spec = row["model"]
        name = spec.split(":")[1] + (f" ({family[spec]})" if spec in family and family[spec] not in spec else "")
        cells = [row[column] if good(row.get(column)) else "**no**" for column in COLUMNS]
        lines.append(f"| {name} | {row['size']} | {' | '.join(cells)} |")
    return [*lines, ""]
