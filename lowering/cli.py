"""The command `fxtrt`: lower a model, look at the result, time it, compare it, report on it."""

from __future__ import annotations

from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fx_passes.errors import InputError, LoweringError

# torch, the builders and the runtimes are imported inside the commands: `fxtrt --help` answers at once.
if TYPE_CHECKING:
    from torch import nn

    from lowering.images import InputSpec
    from lowering.module import LoweredModule

__all__ = ["app", "main"]

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
out = Console()
err = Console(stderr=True)


class Backend(str, Enum):
    """What to lower to."""

    trt = "trt"
    onnxruntime = "onnxruntime"
    tensorrt_onnx = "tensorrt-onnx"


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="torchvision:resnet50, timm:efficientnet_lite0, package.module:factory or file.py:factory"
    ),
]
Weights = Annotated[Path | None, typer.Option(help="safetensors file or weights_only checkpoint for MODEL")]
Pretrained = Annotated[bool, typer.Option("--pretrained", help="the weights torchvision or timm publish (downloads)")]
Precision = Annotated[str, typer.Option(help="int8, fp16, bf16, fp32 or auto")]
Calibration = Annotated[Path | None, typer.Option(help="folder of images to calibrate int8 on")]
Images = Annotated[int, typer.Option(min=1, help="at most this many images of the folder")]
Batch = Annotated[int, typer.Option(min=1, help="images in a calibration batch")]
Inputs = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="SHAPE", help="1x3x224x224 or 1x128:int64; once for each input of the model"),
]
BackendOption = Annotated[
    Backend,
    typer.Option(help="trt: an engine; onnxruntime: an ONNX file for the CPU; tensorrt-onnx: a Q/DQ file for trtexec"),
]
Capabilities = Annotated[
    list[str] | None, typer.Option("--compute-capability", help='"8.9"; several make one engine that holds them all')
]
DynamicBatch = Annotated[str | None, typer.Option(metavar="MIN,OPT,MAX", help="make the batch size dynamic")]
FloatType = Annotated[str | None, typer.Option(help="type of what is not int8: fp16, bf16 or fp32")]
Threads = Annotated[int | None, typer.Option(min=1, help="threads of the session; default: torch's")]


@app.command()
def lower(
    model: Model,
    folder: Annotated[Path, typer.Option("--out", help="folder to write the artifact into")],
    backend: BackendOption = Backend.trt,
    precision: Precision = "int8",
    calibration: Calibration = None,
    images: Images = 64,
    batch: Batch = 8,
    weights: Weights = None,
    pretrained: Pretrained = False,
    inputs: Inputs = None,
    compute_capability: Capabilities = None,
    dynamic_batch: DynamicBatch = None,
    float_type: FloatType = None,
    threads: Threads = None,
    network: Annotated[bool, typer.Option(help="also write the network, so that the artifact simulates")] = True,
) -> None:
    """Lower MODEL and write the artifact: engine or ONNX files, manifest, network."""
    module, spec = _load(model, weights, pretrained)
    lowered = _lower(
        module, spec, backend, precision=precision, calibration=calibration, images=images, batch=batch,
        inputs=inputs, capabilities=compute_capability, dynamic_batch=dynamic_batch, float_type=float_type,
        threads=threads,
    )  # fmt: skip
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
) -> None:
    """Show what an artifact holds, after checking its files: segments, kernels, bytes, fallbacks. Loads none of it."""
    from lowering.artifact import described

    summary, facts = described(folder)
    out.print(summary, end="", markup=False, highlight=False, soft_wrap=True)
    for segment in facts["segments"]:
        if layers and segment["ops"]:
            out.print(_operator_table(segment))
        for engine in segment["engines"]:
            if kernels and engine.get("rows"):
                out.print(_kernel_table(segment["name"], engine))


@app.command()
def bench(
    model: Model,
    precision: Precision = "int8",
    calibration: Calibration = None,
    images: Images = 64,
    batch: Batch = 8,
    weights: Weights = None,
    pretrained: Pretrained = False,
    inputs: Inputs = None,
    threads: Annotated[list[int] | None, typer.Option(min=1, help="thread counts to measure with")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="turns of each candidate")] = 15,
) -> None:
    """Time MODEL in PyTorch and lowered for ONNX Runtime, interleaved, in one process."""
    import torch

    from lowering.timing import measure_interleaved, torch_threads

    module, spec = _load(model, weights, pretrained)
    example = _example(module, spec, inputs, calibration)
    table = Table("threads", "run", "median ms", "quartiles ms", "speed-up", title=f"{model}: {_shapes(example)}")
    for count in threads or [torch.get_num_threads()]:
        with torch_threads(count):
            lowered = _lower(
                module, spec, Backend.onnxruntime, precision=precision, calibration=calibration, images=images,
                batch=batch, inputs=inputs, threads=count,
            )  # fmt: skip
            runs = {
                "PyTorch float, eager": partial(module, *example),
                f"ONNX Runtime {precision}": partial(lowered, *example),
            }
            timings = measure_interleaved(runs, rounds=rounds)
        float_time = timings["PyTorch float, eager"]
        for name, timing in timings.items():
            low, high = timing.quartiles
            speed_up = f"{1 / timing.ratio(float_time):.2f}x"
            table.add_row(str(count), name, f"{timing.median:.2f}", f"{low:.2f} to {high:.2f}", speed_up)
    out.print(table)


@app.command()
def compare(
    model: Model,
    precision: Precision = "int8",
    calibration: Calibration = None,
    images: Images = 64,
    batch: Batch = 8,
    weights: Weights = None,
    pretrained: Pretrained = False,
    inputs: Inputs = None,
    backend: Annotated[list[Backend] | None, typer.Option(help="only these; default: all")] = None,
) -> None:
    """Lower MODEL for every backend and compare the outputs with PyTorch's float ones.

    TensorRT networks are executed on the CPU by the reference executor.
    """
    from lowering.compare import compare as compared

    module, spec = _load(model, weights, pretrained)
    candidates = {}
    for kind in backend or list(Backend):
        lowered = _lower(
            module, spec, kind, precision=precision, calibration=calibration, images=images, batch=batch, inputs=inputs
        )
        candidates[f"{kind.value} {precision}"] = lowered.simulate if kind is Backend.trt else lowered
    if spec is not None and calibration is not None:
        batches: Any = _batches(spec, calibration, images, 1)
    else:
        batches = [_example(module, spec, inputs, calibration)]
    table = Table("run", "output", "rows", "SQNR dB", "cosine", "worst", "top-1 kept", title=f"{model} against float")
    for name, results in compared(module, candidates, batches).items():
        for index, result in enumerate(results):
            top1 = "" if result.top1 is None else f"{result.top1:.1%}"
            row = (f"{result.sqnr_db:.1f}", f"{result.cosine:.5f}", f"{result.worst:.3g}", top1)
            table.add_row(name, str(index), str(result.samples), *row)
    out.print(table)


@app.command()
def report(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a model, as for lower, or the folder of an artifact")],
    file: Annotated[Path, typer.Option("--out", help="HTML file to write")],
    backend: BackendOption = Backend.trt,
    precision: Precision = "int8",
    calibration: Calibration = None,
    images: Images = 64,
    batch: Batch = 8,
    weights: Weights = None,
    pretrained: Pretrained = False,
    inputs: Inputs = None,
) -> None:
    """Write an HTML page: summary, layers, int8 coverage with reasons, kernels and bytes."""
    from lowering.artifact import described
    from lowering.report import Lowering, placement_drawing, write_report

    if Path(model).is_dir():
        title = Path(model).name
        part = Lowering(title, *described(model))
    else:
        title = f"{model} for {backend.value}"
        module, spec = _load(model, weights, pretrained)
        lowered = _lower(
            module, spec, backend, precision=precision, calibration=calibration, images=images, batch=batch,
            inputs=inputs,
        )  # fmt: skip
        graph = None
        if precision in ("int8", "auto"):
            graph = placement_drawing(module, _example(module, spec, inputs, calibration), lowered.report()["target"])
        part = Lowering.of(title, lowered, graph=graph)
    written = write_report(file, [part], title=title)
    out.print(f"written to {written}", markup=False, highlight=False)


def _load(model: str, weights: Path | None, pretrained: bool) -> tuple[nn.Module, InputSpec | None]:
    from lowering.loading import load_model

    if weights is None and not pretrained and model.split(":")[0] in ("torchvision", "timm"):
        err.print(
            "note: random weights; pass --weights FILE or --pretrained for numbers that mean something",
            markup=False, highlight=False,
        )  # fmt: skip
    return load_model(model, weights=weights, pretrained=pretrained)


def _lower(
    module: nn.Module,
    spec: InputSpec | None,
    backend: Backend,
    *,
    precision: str,
    calibration: Path | None,
    images: int,
    batch: int,
    inputs: list[str] | None,
    capabilities: list[str] | None = None,
    dynamic_batch: str | None = None,
    float_type: str | None = None,
    threads: int | None = None,
) -> LoweredModule:
    from lowering import Settings, lower_to_onnx, lower_to_trt

    data = None
    if calibration is not None:
        if spec is None:
            raise InputError(
                "the model declares no image input, so a folder of images cannot calibrate it",
                hint="give it pretrained_cfg = {'input_size': ..., 'mean': ..., 'std': ...}, or calibrate from Python",
            )
        data = _batches(spec, calibration, images, batch)
    options: dict[str, Any] = {
        "precision": precision,
        "calibration": data,
        "dynamic_batch": _dynamic_batch(dynamic_batch),
        "settings": Settings(float_type=float_type, threads=threads),
    }
    example = _example(module, spec, inputs, None)
    if backend is Backend.trt:
        return lower_to_trt(module, example, compute_capabilities=capabilities, **options)
    if capabilities:
        raise InputError("--compute-capability is for engines", hint="use it with --backend trt")
    runtime = "onnxruntime" if backend is Backend.onnxruntime else "tensorrt"
    return lower_to_onnx(module, example, runtime=runtime, **options)


def _batches(spec: InputSpec, folder: Path, images: int, batch: int) -> Any:
    from lowering.images import ImageBatches

    return ImageBatches(folder, spec, batch_size=batch, limit=images)


def _example(
    module: nn.Module, spec: InputSpec | None, inputs: list[str] | None, calibration: Path | None
) -> tuple[Any, ...]:
    from lowering.loading import parse_shape

    if inputs:
        return tuple(parse_shape(text) for text in inputs)
    if spec is None:
        raise InputError(
            f"{type(module).__name__} declares no input size", hint="give --input 1x3x224x224, once for each input"
        )
    if calibration is not None:
        return (next(iter(_batches(spec, calibration, 1, 1))),)
    return (spec.example(),)


def _dynamic_batch(text: str | None) -> tuple[int, int, int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
        raise InputError(f"--dynamic-batch is '{text}'", hint="write MIN,OPT,MAX, for example 1,8,32")
    least, usual, most = (int(part) for part in parts)
    return least, usual, most


def _shapes(example: tuple[Any, ...]) -> str:
    return ", ".join("x".join(map(str, tensor.shape)) for tensor in example)


def _bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"


def _operator_table(segment: dict[str, Any]) -> Table:
    table = Table("node", "operator", "int8", "reason", "source", title=f"{segment['name']}: operators")
    for row in segment["ops"]:
        table.add_row(row["node"], row["op"], "yes" if row["int8"] else "no", row["reason"], row["source"] or "")
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
