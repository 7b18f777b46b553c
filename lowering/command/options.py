"""The options that commands of `fxtrt` share, in groups, and what each group makes of its values."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console

from fx_passes.errors import InputError

# torch, the builders and the runtimes are imported inside the methods: `fxtrt --help` answers at once.
if TYPE_CHECKING:
    from torch import nn

    from lowering.module import LoweredModule
    from lowering.request.images import ImageBatches, InputSpec
    from lowering.request.settings import Settings

__all__ = ["Backend", "Data", "Subject", "Target", "grouped"]

err = Console(stderr=True)


class Backend(str, Enum):
    """What to lower to."""

    trt = "trt"
    onnxruntime = "onnxruntime"
    openvino = "openvino"
    tensorrt_onnx = "tensorrt-onnx"


@dataclass(frozen=True)
class Subject:
    """The model, and what it takes."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="torchvision:resnet50, timm:efficientnet_lite0, package.module:factory or file.py:factory",
        ),
    ]
    weights: Annotated[Path | None, typer.Option(help="safetensors file or weights_only checkpoint for MODEL")] = None
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="the weights torchvision or timm publish (downloads)")
    ] = False
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="SHAPE", help="1x3x224x224 or 1x128:int64; once for each input of the model"),
    ] = None

    def load(self) -> Loaded:
        """The model and the input it declares.

        Raises:
            InputError: the name, the factory, the weights or a shape cannot be used.
        """
        from lowering.command.loading import load_model

        if self.weights is None and not self.pretrained and self.model.split(":")[0] in ("torchvision", "timm"):
            err.print(
                "note: random weights; pass --weights FILE or --pretrained for numbers that mean something",
                markup=False,
                highlight=False,
            )
        module, spec = load_model(self.model, weights=self.weights, pretrained=self.pretrained)
        return Loaded(self.model, module, spec, self.inputs)


@dataclass(frozen=True)
class Loaded:
    """A model that a `Subject` named."""

    name: str
    module: nn.Module
    declared: InputSpec | None
    inputs: list[str] | None

    @property
    def spec(self) -> InputSpec:
        """The image input that the model declares.

        Raises:
            InputError: it declares none.
        """
        if self.declared is None:
            raise InputError(
                f"{type(self.module).__name__} declares no image input, which a folder of images needs",
                hint="give it pretrained_cfg = {'input_size': ..., 'mean': ..., 'std': ...}, or calibrate from Python",
            )
        return self.declared

    def example(self, data: Data | None = None) -> tuple[Any, ...]:
        """Inputs of one call: as `--input` says, the first calibration image, or noise of the declared size."""
        from lowering.command.loading import parse_shape

        if self.inputs:
            return tuple(parse_shape(text) for text in self.inputs)
        if self.declared is None:
            raise InputError(
                f"{type(self.module).__name__} declares no input size",
                hint="give --input 1x3x224x224, once for each input",
            )
        if data is not None and data.calibration is not None:
            return (next(iter(data.batches(self.spec, size=1))),)
        return (self.declared.example(),)


@dataclass(frozen=True)
class Data:
    """Images to calibrate on."""

    calibration: Annotated[Path | None, typer.Option(help="folder of images to calibrate int8 on")] = None
    images: Annotated[int, typer.Option(min=1, help="at most this many images of the folder")] = 64
    batch: Annotated[int, typer.Option(min=1, help="images in a calibration batch")] = 8

    def batches(self, spec: InputSpec, size: int | None = None) -> ImageBatches:
        """The images of the folder, `size` or `batch` at a time."""
        from lowering.request.images import ImageBatches

        assert self.calibration is not None
        return ImageBatches(self.calibration, spec, batch_size=size or self.batch, limit=self.images)


@dataclass(frozen=True)
class Target:
    """What to lower to, and how."""

    precision: Annotated[str, typer.Option(help="int8, fp16, bf16, fp32 or auto")] = "int8"
    compute_capability: Annotated[
        list[str] | None,
        typer.Option("--compute-capability", help='"8.9"; several make one engine that holds them all'),
    ] = None
    dynamic_batch: Annotated[str | None, typer.Option(metavar="MIN,OPT,MAX", help="make the batch size dynamic")] = None
    float_type: Annotated[str | None, typer.Option(help="type of what is not int8: fp16, bf16 or fp32")] = None
    qconfig: Annotated[
        Path | None, typer.Option(help="TOML or JSON file: what to quantize otherwise, by place in the model")
    ] = None
    placement: Annotated[
        str, typer.Option(help='"default": what the target gains by; "auto": searched with builds, for one GPU')
    ] = "default"
    gpu: Annotated[
        str | None, typer.Option(help='whose roofline floor --placement auto lowers, such as "RTX 4090"')
    ] = None
    chosen: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="another field of lowering.Settings; may be repeated"),
    ] = None

    def lower(self, loaded: Loaded, data: Data, backend: Backend, *, threads: int | None = None) -> LoweredModule:
        """The model lowered for `backend`.

        Args:
            loaded, data, backend: what to lower, on what to calibrate it, for what.
            threads: of a session; None: torch's.

        Raises:
            LoweringError: as `lower_to_trt` and `lower_to_onnx` do.
        """
        from lowering import lower_to_onnx, lower_to_trt

        options: dict[str, Any] = {
            "precision": self.precision,
            "calibration": None if data.calibration is None else data.batches(loaded.spec),
            "dynamic_batch": _three_sizes(self.dynamic_batch),
            "settings": self.settings(threads),
        }
        if self.qconfig is not None:
            options["qconfig"] = self.qconfig
        if backend is Backend.trt:
            engine = {"compute_capabilities": self.compute_capability, "placement": self.search()}
            return lower_to_trt(loaded.module, loaded.example(), **engine, **options)
        if self.compute_capability or self.placement != "default":
            raise InputError("--compute-capability and --placement are for engines", hint="use --backend trt")
        runtime = "tensorrt" if backend is Backend.tensorrt_onnx else backend.value
        return lower_to_onnx(loaded.module, loaded.example(), runtime=runtime, **options)

    def search(self) -> Any:
        """`placement` of `lower_to_trt`, with the GPU where one is named."""
        if self.gpu is None:
            return self.placement
        if self.placement != "auto":
            raise InputError("--gpu names a GPU to search a placement for", hint="add --placement auto")
        from lowering.request.search import PlacementSearch

        return PlacementSearch(gpu=self.gpu)

    def settings(self, threads: int | None = None) -> Settings:
        """`--float-type`, `threads` and every `--set`, whose values are JSON or plain text."""
        from lowering.request.settings import resolve_settings

        values: dict[str, Any] = {"float_type": self.float_type, "threads": threads}
        for text in self.chosen or []:
            name, equals, value = text.partition("=")
            if not equals:
                raise InputError(f"--set '{text}' has no value", hint="write --set min_segment_nodes=4")
            values[name.strip()] = _value(value.strip())
        return resolve_settings(values)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Spell out the groups among a command's parameters, for typer, and put the values back into groups.

    A parameter annotated with one of the dataclasses above becomes the fields of that class.
    """
    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    groups = {name: hints[name] for name in signature.parameters if is_dataclass(hints[name])}
    parameters = []
    for name, parameter in signature.parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        types = get_type_hints(groups[name], include_extras=True)
        for f in fields(groups[name]):
            default = inspect.Parameter.empty if f.default is MISSING else f.default
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(f.name, kind, default=default, annotation=types[f.name]))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        made = {
            name: group(**{f.name: values.pop(f.name) for f in fields(group)})  # type: ignore[operator]
            for name, group in groups.items()
        }
        command(**values, **made)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__wrapped__  # type: ignore[attr-defined]  # typer would look through it
    return run


def _three_sizes(text: str | None) -> tuple[int, int, int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
        raise InputError(f"--dynamic-batch is '{text}'", hint="write MIN,OPT,MAX, for example 1,8,32")
    least, usual, most = (int(part) for part in parts)
    return least, usual, most


def _value(text: str) -> Any:
    """`4`, `true` and `"a"` as JSON reads them; anything else is the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
