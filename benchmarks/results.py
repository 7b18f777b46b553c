"""Results as a table on the terminal and as JSON and CSV under `build/benchmarks/`."""

from __future__ import annotations

import csv
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["FOLDER", "machine", "publish"]

FOLDER = Path("build/benchmarks")


def machine() -> dict[str, Any]:
    """What the numbers were measured on and with."""
    import os

    from lowering.summary import versions

    return {"processor": _processor(), "cores": os.cpu_count(), "system": platform.system(), **versions()}


def publish(name: str, rows: Sequence[dict[str, Any]], *, title: str, note: str = "") -> None:
    """Print `rows` as a table and write `<FOLDER>/<name>.json` and `.csv`.

    Args:
        name: of the files.
        rows: all with the same keys; numbers are rounded for the terminal only.
        title: of the table.
        note: how it was measured; below the table and in the JSON file.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    columns = list(rows[0])
    with (FOLDER / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    data = {"title": title, "note": note, "machine": machine(), "rows": list(rows)}
    (FOLDER / f"{name}.json").write_text(json.dumps(data, indent=1, default=str) + "\n", encoding="utf-8")
    table = Table(title=title, caption=note or None)
    for column in columns:
        numbers = all(isinstance(row[column], (int, float)) or row[column] is None for row in rows)
        table.add_column(column, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(_shown(row[column]) for column in columns))
    Console(width=None if Console().is_terminal else 150).print(table)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _processor() -> str:
    """The processor's model name; `platform.processor()` is empty on most Linux systems."""
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
