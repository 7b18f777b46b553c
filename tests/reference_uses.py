"""The uses of layers in the networks that the converters' own test cases give."""

from __future__ import annotations

import importlib
from pathlib import Path

from trt_checks import Case, lower

from lowering.trt.reference import read_network
from lowering.trt.reference.coverage import Use, save_confirmed, uses
from lowering.trt.reference.report import CONFIRMED, collect, page


def emitted_uses() -> tuple[int, set[Use]]:
    """How many cases there are, and every use in their networks."""
    count, found = 0, set()
    for path in sorted((Path(__file__).parent / "trt").glob("test_trt_*.py")):
        for case in getattr(importlib.import_module(path.stem), "CASES", ()):
            if isinstance(case, Case):
                network = lower(case.program, *case.inputs, dynamic=case.dynamic)
                found |= uses(read_network(network.definition).record)
                count += 1
    return count, found


def main() -> None:
    """Writes the documentation page and the confirmed uses."""
    root = Path(__file__).parent.parent
    lines, confirmed = collect()
    print(*lines, sep="\n")
    (root / CONFIRMED).parent.mkdir(exist_ok=True)
    save_confirmed(root / CONFIRMED, confirmed)
    text = page(lines, emitted_uses()[1], confirmed)
    (root / "docs" / "reference_coverage.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
