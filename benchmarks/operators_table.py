"""The rows of the operator database as a page of the documentation."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import Any

from benchmarks.operators_case import BACKENDS, DTYPES, SIZES, VERDICTS

__all__ = ["counted", "document"]

Row = Mapping[str, Any]
_CASES = [verdict for verdict in VERDICTS if verdict != "none"]
_LONGEST = 160  # characters of a reason in the table


def counted(rows: Iterable[Row]) -> str:
    """How many rows have each verdict."""
    found = Counter(row["verdict"] for row in rows)
    return ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS)


def document(rows: Iterable[Row], machine: Mapping[str, Any], known: Mapping[tuple[str, str], int]) -> str:
    """The page in Markdown.

    Args:
        rows: of `benchmarks.operators_case`.
        machine: what they were made with.
        known: (operator, dtype) -> samples that the database has of it.
    """
    rows = sorted(rows, key=lambda row: (row["op"].lower(), row["op"], row["backend"]))
    versions = ", ".join(f"{name} {version}" for name, version in machine.items() if re.match(r"\d+\.", str(version)))
    made = len({(row["op"], row["dtype"], row["sample"]) for row in rows})
    lines = [
        "# Operators",
        "",
        f"Written by `scripts/outside_suites --table docs/operators.md` on {date.today().isoformat()} with {versions},",
        "from the rows that `scripts/outside_suites` left.",
        "",
        "Every operator of torch's own test database (`torch.testing._internal.common_methods_invocations.op_db`),",
        f"with its samples of {', '.join(DTYPES)}, evenly chosen: {made} of the {sum(known.values())} there are,",
        "each with the sizes it has and, where eager takes other ones, with one size free. Its tensors are inputs.",
        "A lowering in fp32 is compared with eager: values to 1e-4, shapes, dtypes, structure, NaN and infinities, and",
        "the inputs afterwards. TensorRT's networks are executed by the reference executor, as there is no GPU.",
        "",
        *(f"- **{name}**: {meaning}." for name, meaning in VERDICTS.items()),
        "",
        *_summary(rows),
        *_partly(rows),
        *_whole(rows),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _summary(rows: Sequence[Row]) -> list[str]:
    lines = ["| dtype | backend | sizes | cases | " + " | ".join(_CASES) + " |", "|---" * (4 + len(_CASES)) + "|"]
    for dtype in DTYPES:
        for backend in BACKENDS:
            for sizes in SIZES:
                wanted = (dtype, backend, sizes)
                of = Counter(r["verdict"] for r in rows if (r["dtype"], r["backend"], r["sizes"]) == wanted)
                total = sum(of[verdict] for verdict in _CASES)
                if total:
                    cells = [f"{of['equal']} ({of['equal'] / total:.1%})", *(str(of[v]) for v in _CASES[1:])]
                    lines.append(f"| {dtype} | {backend} | {sizes} | {total} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _partly(rows: Sequence[Row]) -> list[str]:
    """Operators with a case that is not lowered in full: how many are, and the reasons of the rest."""
    grouped: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["verdict"] != "none":
            grouped[row["op"], row["backend"]].append(row)
    lines = ["## Not lowered in full", "", "| operator | backend | equal | otherwise |", "|---|---|---|---|"]
    for (op, backend), group in grouped.items():
        rest = [row for row in group if row["verdict"] != "equal"]
        if not rest:
            continue
        reasons = Counter((row["verdict"], _reason(row["detail"])) for row in rest)
        told = "; ".join(f"{verdict} x {count}: {why}" for (verdict, why), count in reasons.most_common(3))
        lines.append(f"| {op} | {backend} | {len(group) - len(rest)} of {len(group)} | {_cell(told)} |")
    return [*lines, ""]


def _reason(detail: str) -> str:
    """A reason without what changes from sample to sample."""
    return re.sub(r"\s+", " ", re.sub(r"[\[(][\d, ]+[\])]|\b\d{3,}\b", "…", detail))[:_LONGEST]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _whole(rows: Sequence[Row]) -> list[str]:
    cases = [row for row in rows if row["verdict"] != "none"]
    partly = {row["op"] for row in cases if row["verdict"] != "equal"}
    whole = sorted({row["op"] for row in cases} - partly)
    without = sorted({row["op"] for row in rows} - {row["op"] for row in cases})
    lines = [f"## Lowered in full, on both backends: {len(whole)}", "", ", ".join(whole) + "."]
    if without:
        lines += ["", f"No case: {', '.join(without)}."]
    return lines
