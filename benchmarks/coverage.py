"""How far each of a list of models gets: captured, quantized, lowered, and equal to eager when executed.

    python -m benchmarks.coverage                             every torchvision classifier and timm family
    python -m benchmarks.coverage timm:resnet18 my.py:make    these
    python -m benchmarks.coverage --again                     those that have no "yes" in every column yet
    python -m benchmarks.coverage --table docs/coverage.md    no run; the table of what has been run

Every model runs in a process of its own, with a limit on memory and on time, so that a crash is a row of the table.
Rows are appended to `build/benchmarks/coverage.jsonl` as they come; a model that is there is not run a second time. See
`benchmarks.coverage_case` for what a cell says.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import resource
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.coverage_case import COLUMNS, row_of
from benchmarks.coverage_table import document, good, is_complete
from benchmarks.results import FOLDER, machine
from benchmarks.zoo import is_one_more, timm_models, torchvision_classifiers

ROWS = FOLDER / "coverage.jsonl"


def main() -> None:
    """Run what has not run yet; print one line per model and how many are complete."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="as for fxtrt; default: the whole list of benchmarks.zoo")
    parser.add_argument("--again", action="store_true", help="run the models with a gap again")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only write the table of the rows there are")
    parser.add_argument("--memory", type=float, default=12, metavar="GB", help="limit of each model's process")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="limit of each model's process")
    arguments = parser.parse_args()
    listed = [*torchvision_classifiers(), *timm_models()]
    if arguments.table:
        arguments.table.write_text(document(recorded(), listed, machine()), encoding="utf-8")
        return
    sizes = dict(listed)
    done = recorded()
    wanted = arguments.models or [
        spec for spec, _ in listed if spec not in done or (arguments.again and not is_complete(done[spec]))
    ]
    _import_all()
    for spec in track(wanted, description="models"):
        row = run(spec, sizes.get(spec), arguments.memory, arguments.timeout)
        record(row)
        print(spec, "complete" if is_complete(row) else gaps(row), f"{row['seconds']} s", flush=True)
    rows = recorded()
    print(f"{sum(map(is_complete, rows.values()))} of {len(rows)} models have a yes in every column")


def recorded() -> dict[str, dict[str, Any]]:
    """Model -> its latest row."""
    if not ROWS.is_file():
        return {}
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    return {row["model"]: row for row in rows}


def record(row: dict[str, Any]) -> None:
    """Append a row to the file."""
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    with ROWS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def run(spec: str, size: int | None, memory: float, timeout: float) -> dict[str, Any]:
    """One model in its own process; if that dies, a row that says how.

    The process is a fork of this one, which has imported everything: half of a small model's time else.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_row, args=(sender, spec, size, memory))
    process.start()
    sender.close()
    try:
        row = receiver.recv() if receiver.poll(timeout) else _died(spec, size, f"not finished after {timeout:.0f} s")
    except EOFError:
        process.join()
        row = _died(spec, size, f"the process ended with {process.exitcode}")
    process.kill()
    process.join()
    return row


def _send_row(sender: Any, spec: str, size: int | None, memory: float) -> None:
    limit = int(memory * 1e9)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # native libraries print there too
        os.dup2(nowhere, descriptor)
    try:
        row = row_of(spec, size, short=is_one_more(spec))
    except Exception as error:
        row = _died(spec, size, f"{type(error).__name__}: {error}"[:300])
    sender.send(row)
    sender.close()


def _died(spec: str, size: int | None, why: str) -> dict[str, Any]:
    return {"model": spec, "size": size, "parameters": None, **dict.fromkeys(COLUMNS, why), "seconds": None}


def _import_all() -> None:
    """What a row needs and imports late."""
    for name in ("onnxruntime", "onnxscript", "timm", "torch.onnx", "torchvision", "lowering.trt.define.network"):
        importlib.import_module(name)


def gaps(row: dict[str, Any]) -> str:
    """The cells that are no "yes"."""
    return "; ".join(f"{name}: {row[name]}" for name in COLUMNS if not good(row.get(name)))


if __name__ == "__main__":
    main()
