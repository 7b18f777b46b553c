"""The command `fxtrt`: lower a model, look at the result, run it, time it, compare it, evaluate it, report on it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fx_passes.errors import LoweringError
from lowering.command.options import Backend, Data, Subject, Target, err, grouped

# torch, the builders and the runtimes are imported inside the commands: `fxtrt --help` answers at once.

__all__ = ["app", "main"]

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
out = Console()

BackendOption = Annotated[
    Backend,
    typer.Option(help="trt: engine; onnxruntime, openvino: file for the CPU; tensorrt-onnx: Q/DQ file for trtexec"),
]


@app.command()
@grouped
def lower(
    subject: Subject,
    folder: Annotated[Path, typer.Option("--out", help="folder to write the artifact into")],
    data: Data,
    target: Target,
    backend: BackendOption = Backend.trt,
    threads: Annotated[int | None, typer.Option(min=1, help="threads of the session; default: torch's")] = None,
    network: Annotated[bool, typer.Option(help="also write the network, so that the artifact simulates")] = True,
) -> None:
    """Lower MODEL and write the artifact: engine or ONNX files, manifest, network."""
    lowered = target.lower(subject.load(), data, backend, threads=threads)
    lowered.save(folder, include_network=network)
    out.print(lowered.summary(), end="", markup=False, highlight=False, soft_wrap=True)
    out.print(f"\nwritten to {folder}:", markup=False, highlight=False)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        out.print(f"  {path.relative_to(folder)}  {_bytes(path.stat().st_size)}", markup=False, highlight=False)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="an artifact that `fxtrt lower` or LoweredModule.save wrote")],
    layers: Annotated[bool, typer.Option("--layers", help="list every operator with its precision and why")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="list every kernel of the engines with its types")] = False,
    gpu: Annotated[
        str | None, typer.Option(help='also the roofline floor (no measurement) on this GPU, such as "RTX 4090"')
    ] = None,
) -> None:
    """Show what an artifact holds, after checking its files: segments, kernels, bytes, fallbacks. Loads none of it."""
    from lowering.artifact.load import described

    summary, facts = described(folder)
    out.print(summary, end="", markup=False, highlight=False, soft_wrap=True)
    for segment in facts["segments"]:
        if layers and segment["ops"]:
            out.print(_operator_table(segment))
        for engine in segment["engines"]:
            if engine.get("rows"):
                out.print(_engine_table(segment, engine, gpu))
            if kernels and engine.get("rows"):
                out.print(_kernel_table(segment["name"], engine))


@app.command()
def run(
    folder: Annotated[
        Path, typer.Argument(help="an artifact of ONNX files, such as `fxtrt lower --backend onnxruntime`")
    ],
    inputs: Annotated[list[str], typer.Option("--input", metavar="FILE", help="x.npy, in order, or name=x.npy")],
    file: Annotated[Path | None, typer.Option("--out", help=".npz file to write the results into")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="threads of the call; default: all cores")] = None,
) -> None:
    """Run an artifact once on arrays from files. Needs NumPy and ONNX Runtime, not torch."""
    from lowering.command.run import run_files

    for name, value in run_files(folder, inputs, file, threads).items():
        out.print(f"{name}: {value.dtype} {_size(value.shape)}", markup=False, highlight=False)
    if file is not None:
        out.print(f"written to {file}", markup=False, highlight=False)


@app.command()
@grouped
def bench(
    subject: Subject,
    data: Data,
    target: Target,
    threads: Annotated[list[int] | None, typer.Option(min=1, help="thread counts to measure with")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="turns of each candidate")] = 15,
) -> None:
    """Time MODEL in PyTorch and lowered for ONNX Runtime, interleaved, in one process."""
    import torch

    from lowering.timing import measure_interleaved, torch_threads

    loaded = subject.load()
    example = loaded.example(data)
    table = Table("threads", "run", "median ms", "quartiles ms", "speed-up", title=f"{loaded.name}: {_shapes(example)}")
    for count in threads or [torch.get_num_threads()]:
        with torch_threads(count):
            lowered = target.lower(loaded, data, Backend.onnxruntime, threads=count)
            runs = {
                "PyTorch float, eager": partial(loaded.module, *example),
                f"ONNX Runtime {target.precision}": partial(lowered, *example),
            }
            timings = measure_interleaved(runs, rounds=rounds)
        float_time = timings["PyTorch float, eager"]
        for name, timing in timings.items():
            low, high = timing.quartiles
            speed_up = f"{1 / timing.ratio(float_time):.2f}x"
            table.add_row(str(count), name, f"{timing.median:.2f}", f"{low:.2f} to {high:.2f}", speed_up)
    out.print(table)


@app.command()
@grouped
def compare(
    subject: Subject,
    data: Data,
    target: Target,
    backend: Annotated[list[Backend] | None, typer.Option(help="only these; default: all but openvino")] = None,
) -> None:
    """Lower MODEL for every backend and compare the outputs with PyTorch's float ones.

    TensorRT networks are executed on the CPU by the reference executor.
    """
    from lowering.compare import compare as compared

    loaded = subject.load()
    with_images = loaded.declared is not None and data.calibration is not None
    batches: Any = data.batches(loaded.spec, size=1) if with_images else [loaded.example()]
    candidates = _runs(loaded, data, target, backend or [b for b in Backend if b is not Backend.openvino])
    table = Table("run", "output", "rows", "SQNR dB", "cosine", "worst", "top-1 kept", title=f"{loaded.name} and float")
    for name, results in compared(loaded.module, candidates, batches).items():
        for index, result in enumerate(results):
            top1 = "" if result.top1 is None else f"{result.top1:.1%}"
            row = (f"{result.sqnr_db:.1f}", f"{result.cosine:.5f}", f"{result.worst:.3g}", top1)
            table.add_row(name, str(index), str(result.samples), *row)
    out.print(table)


@app.command()
@grouped
def evaluate(
    subject: Subject,
    labelled: Annotated[Path, typer.Option("--data", help="folder of labelled images, one subfolder per class")],
    data: Data,
    target: Target,
    backend: Annotated[list[Backend] | None, typer.Option(help="only these; default: onnxruntime")] = None,
    classes: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="text file: subfolder names in the order of the model's outputs, one per line",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="at most this many labelled images")] = None,
) -> None:
    """Count right answers of MODEL in float and lowered, on a folder like ImageNet's validation set."""
    from rich.progress import track

    from lowering.command.evaluate import LabelledImages
    from lowering.command.evaluate import evaluate as evaluated

    loaded = subject.load()
    names = None if classes is None else classes.read_text(encoding="utf-8").split("\n")
    names = None if names is None else [name.strip() for name in names if name.strip()]
    images = LabelledImages(labelled, loaded.spec, classes=names, limit=limit)
    runs = {"PyTorch float": loaded.module, **_runs(loaded, data, target, backend or [Backend.onnxruntime])}
    batches = track(images, description="images", console=err, transient=True)
    table = Table("run", "images", "top-1", "top-5", "as float", title=f"{loaded.name} on {labelled.name}")
    for name, score in evaluated(runs, batches, classes=len(images.classes)).items():
        top5 = "" if score.top5 is None else f"{score.top5:.2%}"
        table.add_row(name, str(score.images), f"{score.top1:.2%}", top5, f"{score.same:.2%}")
    out.print(table)


@app.command()
@grouped
def report(
    subject: Subject,
    file: Annotated[Path, typer.Option("--out", help="HTML file to write")],
    data: Data,
    target: Target,
    backend: BackendOption = Backend.trt,
) -> None:
    """Write an HTML page: summary, layers, int8 coverage with reasons, kernels and bytes.

    MODEL may also be the folder of an artifact.
    """
    from lowering.artifact.load import described
    from lowering.command.report import Lowering, placement_drawing, write_report

    if Path(subject.model).is_dir():
        title = Path(subject.model).name
        part = Lowering(title, *described(subject.model))
    else:
        loaded = subject.load()
        title = f"{loaded.name} for {backend.value}"
        lowered = target.lower(loaded, data, backend)
        graph = None
        if target.precision in ("int8", "auto"):
            graph = placement_drawing(loaded.module, loaded.example(data), lowered.report()["target"])
        part = Lowering.of(title, lowered, graph=graph)
    written = write_report(file, [part], title=title)
    out.print(f"written to {written}", markup=False, highlight=False)


def _runs(loaded: Any, data: Data, target: Target, backends: list[Backend]) -> dict[str, Any]:
    """How to run the model lowered for each backend: TensorRT networks on the CPU, by the reference executor."""
    runs = {}
    for backend in backends:
        lowered = target.lower(loaded, data, backend)
        runs[f"{backend.value} {target.precision}"] = lowered.simulate if backend is Backend.trt else lowered
    return runs


def _shapes(example: tuple[Any, ...]) -> str:
    return ", ".join("x".join(map(str, tensor.shape)) for tensor in example)


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"


def _operator_table(segment: dict[str, Any]) -> Table:
    table = Table("node", "operator", "int8", "reason", "source", title=f"{segment['name']}: operators")
    for row in segment["ops"]:
        table.add_row(row["node"], row["op"], "yes" if row["int8"] else "no", row["reason"], row["source"] or "")
    return table


def _engine_table(segment: dict[str, Any], engine: dict[str, Any], gpu: str | None) -> Table:
    """What the engine's kernels add up to, beside the same in the float type where that is known."""
    from lowering.command.engine_facts import engine_facts

    sides = {segment["precision"]: engine_facts(engine, gpu)}
    twin = segment.get("float_twin")
    if twin:
        sides[f"the same in {twin['precision']}"] = engine_facts(twin, gpu)
    table = Table("", *sides, title=f"{segment['name']}: engine")
    for name in next(iter(sides.values())):
        table.add_row(name, *(facts[name] for facts in sides.values()))
    return table


def _kernel_table(segment: str, engine: dict[str, Any]) -> Table:
    table = Table("kind", "of", "reads", "writes", "kB", title=f"{segment}: kernels")
    for row in engine["rows"]:
        table.add_row(
            row["kind"], ", ".join(row["modules"]), " ".join(row["inputs"]), " ".join(row["outputs"]),
            f"{row['bytes'] / 1e3:.1f}",
        )  # fmt: skip
    return table


def main(arguments: list[str] | None = None) -> None:
    """Run the command. A `LoweringError` is printed without a traceback, and the exit status is 1."""
    try:
        app(args=arguments)
    except LoweringError as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
