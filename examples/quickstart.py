"""ResNet-50 and EfficientNet-Lite0 from PyTorch to int8, on a machine without a GPU; everything is left in build/.

    build/<model>/engine/        TensorRT-RTX engine, its network, manifest, summary
    build/<model>/trtexec/       Q/DQ ONNX file placed for TensorRT proper, with its trtexec line
    build/<model>/cpu/           ONNX file that ONNX Runtime runs in int8
    build/summary.txt            what runs in int8 and what does not, latencies, top-5 classes
    build/report.html            the same as a page

Run it with `scripts/quickstart`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

from benchmarks import models
from benchmarks.photographs import PHOTOGRAPHS, calibration_batches, held_out_crops
from lowering import LoweredModule, lower_to_onnx, lower_to_trt
from lowering.command.report import Latency, Lowering, ReportTable, placement_drawing, write_report
from lowering.timing import measure_interleaved

MODELS = {"resnet50": models.resnet50, "efficientnet_lite0": models.efficientnet_lite0}
STEPS = 7  # for each model
Step = Callable[[str], AbstractContextManager[None]]
console = Console()


@dataclass
class Result:
    """One model, lowered three ways."""

    name: str
    model: nn.Module
    engine: LoweredModule
    trtexec: LoweredModule
    cpu: LoweredModule
    latency: ReportTable
    classes: ReportTable | None
    graph: str

    @property
    def lowerings(self) -> dict[str, LoweredModule]:
        """The three, by what they are."""
        return {
            "TensorRT-RTX engine": self.engine,
            "Q/DQ file for trtexec": self.trtexec,
            "ONNX Runtime on the CPU": self.cpu,
        }

    @property
    def tables(self) -> list[ReportTable]:
        """What was measured."""
        return [table for table in (self.latency, self.classes) if table is not None]


def run(name: str, factory: Callable[[], nn.Module], folder: Path, step: Step) -> Result:
    """Lower one model, write its files, time it and look at photographs with it."""
    with step("load the model and the photographs"):
        model = factory()
        spec = models.input_of(model)
        example = spec.example()
        calibration = calibration_batches(spec, per_photograph=4)
    with step("int8 for the CPU: ONNX Runtime"):
        cpu = lower_to_onnx(model, example, calibration=calibration)
        cpu.save(folder / name / "cpu")
    with step("int8 for TensorRT-RTX: engine"):
        engine = lower_to_trt(model, example, calibration=calibration)
        engine.save(folder / name / "engine")
    with step("int8 for TensorRT: Q/DQ file for trtexec"):
        trtexec = lower_to_onnx(model, example, calibration=calibration, runtime="tensorrt")
        trtexec.save(folder / name / "trtexec")
    with step("time it against PyTorch"):
        latency = latency_table(model, cpu, example)
    with step("look at the photographs with all three"):
        classes = None
        if name == "efficientnet_lite0":  # the one with trained weights
            runs = {"float": model, "ONNX Runtime int8": cpu, "TensorRT network": engine.simulate}
            classes = top5_table(runs, spec)
    with step("draw it"):
        graph = placement_drawing(model, example, engine.report()["target"])
    return Result(name, model, engine, trtexec, cpu, latency, classes, graph)


def latency_table(model: nn.Module, cpu: LoweredModule, example: Tensor) -> ReportTable:
    """Float PyTorch and int8 ONNX Runtime, interleaved in this process."""
    runs = {"PyTorch, float, eager": lambda: model(example), "ONNX Runtime, int8": lambda: cpu(example)}
    timings = measure_interleaved(runs, rounds=10)
    base = timings["PyTorch, float, eager"]
    rows = []
    for name, timing in timings.items():
        low, high = timing.quartiles
        rows.append((name, round(timing.median, 2), f"{low:.2f} to {high:.2f}", round(1 / timing.ratio(base), 2)))
    note = f"Batch 1, {torch.get_num_threads()} thread(s) on both sides, one process, interleaved."
    return ReportTable("Latency on this CPU", ("run", "median ms", "quartiles ms", "speed-up"), rows, 1, note)


def latencies(table: ReportTable) -> list[Latency]:
    """The rows of `latency_table` for the chart of the page."""
    rows = []
    for name, median, quartiles, _ in table.rows:
        low, _, high = quartiles.partition(" to ")
        rows.append(Latency(name, median, float(low), float(high)))
    return rows


def top5_table(runs: dict[str, Callable[[Tensor], Tensor]], spec: Any) -> ReportTable:
    """The five likeliest classes of the centre of every photograph, by every run."""
    names = models.categories()
    rows = []
    for crop in held_out_crops(spec, per_photograph=1):
        for run_name, run_model in runs.items():
            with torch.no_grad():
                probabilities, classes = run_model(crop.pixels).float().softmax(1)[0].topk(5)
            text = ", ".join(f"{names[c]} {p:.0%}" for p, c in zip(probabilities, classes.tolist(), strict=True))
            rows.append((crop.name.split("/")[0], run_name, text))
    shown = ", ".join(f"{Path(file).stem}: {what}" for file, what in PHOTOGRAPHS.items() if what)
    note = (
        f"What is to be seen, where ImageNet has a class for it: {shown}. "
        "The TensorRT network is executed on the CPU by the reference executor; no GPU took part."
    )
    return ReportTable("Top-5 classes", ("photograph", "run", "classes"), rows, None, note)


def as_rich(data: ReportTable) -> Table:
    """A report table for the terminal."""
    table = Table(*data.columns, title=data.title, caption=data.note or None)
    for row in data.rows:
        table.add_row(*(str(value) for value in row))
    return table


def as_text(data: ReportTable) -> str:
    """A report table for a text file."""
    text = StringIO()
    Console(file=text, width=160).print(as_rich(data))
    return text.getvalue()


def summary_text(results: list[Result]) -> str:
    """Everything that was found, as plain text."""
    parts = []
    for result in results:
        parts.append(f"{'=' * 8} {result.name}\n")
        for title, lowered in result.lowerings.items():
            parts.append(f"--- {title}\n{lowered.summary()}")
        parts += [as_text(data) for data in result.tables]
    return "\n".join(parts)


def write_all(results: list[Result], folder: Path) -> None:
    """The summary and the page."""
    (folder / "summary.txt").write_text(summary_text(results), encoding="utf-8")
    parts = []
    for result in results:
        tables, graph = [table for table in (result.classes,) if table is not None], result.graph
        for title, lowered in result.lowerings.items():
            on_cpu = lowered is result.cpu
            latency, note = (latencies(result.latency), result.latency.note) if on_cpu else ([], "")
            name = f"{result.name}: {title}"
            parts.append(Lowering.of(name, lowered, tables=tables, graph=graph, latency=latency, latency_note=note))
            tables, graph = [], None  # they stand with the first of the three
    write_report(folder / "report.html", parts, title="From PyTorch to int8")


def main() -> None:
    """Lower, measure and write everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for the results (default: build)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments = parser.parse_args()
    start = time.perf_counter()
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        for name in arguments.models:
            task = progress.add_task(name, total=STEPS)

            @contextmanager
            def step(what: str, task: TaskID = task, name: str = name) -> Iterator[None]:
                progress.update(task, description=f"{name}: {what}")
                begun = time.perf_counter()
                yield
                progress.console.print(f"{name}: {what}, {time.perf_counter() - begun:.1f} s", highlight=False)
                progress.advance(task)

            results.append(run(name, MODELS[name], arguments.out, step))
            progress.update(task, description=f"{name}: done")
    for result in results:
        console.print(result.engine.summary(), markup=False, highlight=False)
        for data in result.tables:
            console.print(as_rich(data))
    write_all(results, arguments.out)
    console.print(f"everything is in {arguments.out}/ ({time.perf_counter() - start:.0f} s):")
    for path in sorted(arguments.out.rglob("*")):
        if path.suffix in (".engine", ".onnx", ".txt", ".html"):
            console.print(f"  {path.relative_to(arguments.out)}  {path.stat().st_size / 1e6:.1f} MB", highlight=False)


if __name__ == "__main__":
    main()
