"""torch's own operator database through both backends: what is lowered, what stays in Python, what is wrong.

    python -m benchmarks.operators                          four samples of every operator, resumed where it stopped
    python -m benchmarks.operators 'nn.functional.*pad*'    these operators, all shown
    python -m benchmarks.operators --dtypes int64 --backends ONNX --sizes dynamic --samples 2
    python -m benchmarks.operators --again                  once more what is not yet right
    python -m benchmarks.operators --table docs/operators.md

Rows are appended to `build/benchmarks/operators.jsonl` as they come, and a row that is there is not made a second time.
A few operators at a time run in a process of their own, with a limit on memory and one on the time of each row, so that
a crash is a row and the rest goes on. See `benchmarks.operators_case` for what a row says.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import resource
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress

from benchmarks.operators_case import BACKENDS, DTYPES, SIZES, operators, row_of, sample_counts, samples_of
from benchmarks.operators_table import counted, document
from benchmarks.results import FOLDER, machine

ROWS = FOLDER / "operators.jsonl"
Key = tuple[str, str, int, str, str]
_UNITS = 12  # operators and dtypes that share a process: its first lowerings are slow


class Job(NamedTuple):
    """Rows to make in one process."""

    units: tuple[tuple[str, str], ...]  # operator and dtype
    ways: tuple[tuple[str, str], ...]  # backend and sizes
    samples: int | None
    known: frozenset[Key]


class Limits(NamedTuple):
    """Of one process: bytes, and seconds for one row."""

    memory: int
    seconds: float


def main() -> None:
    """Make the rows that are missing; print what is wrong, and the counts."""
    arguments = _parser().parse_args()
    rows = recorded(arguments.rows)
    if arguments.table:
        arguments.table.write_text(document(rows.values(), machine(), sample_counts()), encoding="utf-8")
        return
    if arguments.again:
        rows = {key: row for key, row in rows.items() if row["verdict"] in ("equal", "none")}
    jobs = list(_jobs(arguments, frozenset(rows)))
    _import_all()
    made = []
    with Progress() as progress:
        task = progress.add_task("operators", total=len(jobs))
        for row in run(jobs, Limits(int(arguments.memory * 1e9), arguments.timeout), arguments.workers):
            if row is None:
                progress.advance(task)
                continue
            made.append(row)
            record(row, arguments.rows)
            if row["verdict"] in ("wrong", "raw") or arguments.ops:
                progress.print(_line(row), markup=False, highlight=False, soft_wrap=True)
    print(counted(made))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", help="names of operators, or patterns of them; default: all")
    for name, known in (("dtypes", DTYPES), ("backends", BACKENDS), ("sizes", SIZES)):
        parser.add_argument(f"--{name}", nargs="+", choices=list(known), default=list(known))
    parser.add_argument("--samples", type=int, default=4, help="of each operator and dtype at most; 0: all")
    parser.add_argument("--again", action="store_true", help="make the rows again that are not equal")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only write the table of the rows there are")
    parser.add_argument("--rows", type=Path, default=ROWS, metavar="FILE", help="where the rows are kept")
    parser.add_argument("--workers", type=int, default=1, help="operators that run side by side")
    parser.add_argument("--memory", type=float, default=8, metavar="GB", help="limit of each process")
    parser.add_argument("--timeout", type=float, default=60, metavar="SECONDS", help="limit of each row")
    return parser


def _jobs(arguments: argparse.Namespace, known: frozenset[Key]) -> Iterator[Job]:
    ways = tuple((backend, sizes) for backend in arguments.backends for sizes in arguments.sizes)
    patterns = arguments.ops or ["*"]
    named = [op for op in operators() if any(fnmatchcase(op, pattern) for pattern in patterns)]
    units = [(op, dtype) for op in named for dtype in arguments.dtypes]
    for start in range(0, len(units), _UNITS):
        yield Job(tuple(units[start : start + _UNITS]), ways, arguments.samples or None, known)


def recorded(path: Path) -> dict[Key, dict[str, Any]]:
    """The latest row of each sample, backend and kind of sizes."""
    if not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {_key(row): row for row in rows}


def _key(row: dict[str, Any]) -> Key:
    return row["op"], row["dtype"], row["sample"], row["backend"], row["sizes"]


def record(row: dict[str, Any], path: Path) -> None:
    """Append a row to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _line(row: dict[str, Any]) -> str:
    where = f"{row['op']} {row['dtype']} {row['sample']} {row['backend']} {row['sizes']}"
    return f"{row['verdict']:8} {where}: {row['detail']}"


class _Process:
    """A process that works on one job, and what it is doing."""

    def __init__(self, job: Job, limits: Limits):
        context = multiprocessing.get_context("fork")
        self.job = job
        self.current: dict[str, Any] | None = None
        self.receiver, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(sender, job, limits.memory))
        self.process.start()
        sender.close()

    def end(self) -> int | None:
        """Stop it; the exit code that it had."""
        self.process.join(1)
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        self.receiver.close()
        return code


def run(jobs: Iterable[Job], limits: Limits, workers: int) -> Iterator[dict[str, Any] | None]:
    """The rows of all jobs, and None after each job. What ends its process, or the time, is a row too."""
    waiting = list(jobs)[::-1]
    working: list[_Process] = []
    while waiting or working:
        while waiting and len(working) < workers:
            working.append(_Process(waiting.pop(), limits))
        ready = wait([w.receiver for w in working], timeout=limits.seconds)
        for worker in [w for w in working if w.receiver in ready or not ready]:
            row, done = _next(worker, late=not ready, limits=limits)
            if row is not None:
                yield row
            if done:
                working.remove(worker)
                if worker.current is None:
                    yield None
                else:  # go on behind the row that it died of
                    waiting.append(worker.job._replace(known=worker.job.known | {_key(worker.current)}))


def _next(worker: _Process, late: bool, limits: Limits) -> tuple[dict[str, Any] | None, bool]:
    """A row, and whether the process has come to its end."""
    try:
        message = None if late else worker.receiver.recv()
    except EOFError:
        late, message = False, None
    if message is None:
        code = worker.end()
        if worker.current is None:
            return None, True
        why = f"not finished after {limits.seconds:.0f} s" if late else f"the process ended with {code}"
        return {**worker.current, "verdict": "raw", "detail": why, "seconds": None}, True
    kind, row = message
    if kind == "begins":
        worker.current = row
        return None, False
    worker.current = None
    worker.job = worker.job._replace(known=worker.job.known | {_key(row)})
    return row, False


def _work(sender: Connection, job: Job, memory: int) -> None:
    """Make the rows of a job: each is announced before it is begun."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # native libraries print there too
        os.dup2(nowhere, descriptor)
    for sample in (s for op, dtype in job.units for s in samples_of(op, dtype, job.samples)):
        for backend, sizes in job.ways:
            key = (sample.op, sample.dtype, sample.index, backend, sizes)
            if key not in job.known:
                sender.send(("begins", dict(zip(("op", "dtype", "sample", "backend", "sizes"), key, strict=True))))
                sender.send(("made", row_of(sample, backend, sizes)))
    sender.close()


def _import_all() -> None:
    """What a row needs and imports late: every process is a fork of this one."""
    for name in ("onnxruntime", "onnxscript", "torch.onnx", "lowering.trt.define.network", "lowering.onnx.session"):
        importlib.import_module(name)


if __name__ == "__main__":
    main()
