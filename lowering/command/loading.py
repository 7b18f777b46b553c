"""Models named on a command line: `torchvision:resnet50`, `timm:NAME`, `package.module:factory`, `file.py:factory`."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fx_passes.capture.sources import failure_reason
from fx_passes.errors import BackendUnavailableError, InputError
from lowering.request.images import InputSpec, declared_input

__all__ = ["load_model", "load_weights", "parse_shape"]


def load_model(
    spec: str, *, weights: str | os.PathLike[str] | None = None, pretrained: bool = False
) -> tuple[nn.Module, InputSpec | None]:
    """The model that `spec` names, in eval mode, and the input it declares.

    Args:
        spec: `torchvision:NAME`, `timm:NAME`, `package.module:factory` or `path/to/file.py:factory`; a factory is a
            function or class that is called without arguments and returns an `nn.Module`, or such a module itself.
        weights: a safetensors file, or a checkpoint that `torch.load(weights_only=True)` accepts.
        pretrained: the weights that torchvision or timm publish, downloaded unless they are in its cache.

    Raises:
        InputError: the name, the factory or the weights cannot be used; the text says which and why.
        BackendUnavailableError: torchvision or timm is not installed.
    """
    origin, _, name = spec.rpartition(":")
    if not origin or not name:
        raise InputError(
            f"'{spec}' names no model",
            hint="write torchvision:resnet50, timm:efficientnet_lite0, package.module:factory or file.py:factory",
        )
    if pretrained and origin not in ("torchvision", "timm"):
        raise InputError(f"'{spec}' has no published weights", hint="pass --weights FILE, or load them in the factory")
    if origin == "torchvision":
        model, declared = _from_torchvision(name, pretrained)
    elif origin == "timm":
        model, declared = _from_timm(name, pretrained)
    else:
        model, declared = _from_factory(origin, name), None
    if weights is not None:
        load_weights(model, weights)
    return model.eval(), declared or declared_input(model)


def _from_torchvision(name: str, pretrained: bool) -> tuple[nn.Module, InputSpec | None]:
    models = _import_zoo("torchvision").models
    if name not in models.list_models():
        raise InputError(f"torchvision has no model '{name}'", hint=_nearest(name, models.list_models()))
    model = _published(lambda: models.get_model(name, weights="DEFAULT" if pretrained else None, **_no_backbone(name)))
    return model, _at_own_size(model, _torchvision_preset(models.get_model_weights(name)))


def _at_own_size(model: nn.Module, preset: InputSpec | None) -> InputSpec | None:
    """A vision transformer insists on the size that it was built for, whatever its weights on offer were trained on."""
    side = getattr(model, "image_size", None)
    return dataclasses.replace(preset, size=(3, side, side)) if preset and isinstance(side, int) else preset


def _no_backbone(name: str) -> dict[str, Any]:
    """torchvision's detectors and segmenters download a backbone unless told not to."""
    from torchvision.models import get_model_builder

    return (
        {"weights_backbone": None}
        if "weights_backbone" in inspect.signature(get_model_builder(name)).parameters
        else {}
    )


def _torchvision_preset(weights: Any) -> InputSpec | None:
    """The evaluation transform of a torchvision model's default weights, where it is one of images to one class."""
    preset = next(iter(weights)).transforms()  # the first weights: those of the paper, whose size the name stands for
    if not hasattr(preset, "crop_size") or len(preset.crop_size) != 1:
        return None
    crop, resize = preset.crop_size[0], preset.resize_size[0]
    return InputSpec(
        size=(3, crop, crop),
        mean=tuple(preset.mean),
        std=tuple(preset.std),
        crop=crop / resize,
        interpolation=preset.interpolation.value,
    )


def _from_timm(name: str, pretrained: bool) -> tuple[nn.Module, InputSpec | None]:
    timm = _import_zoo("timm")
    known = timm.list_models(pretrained=False)
    if name.split(".")[0] not in known:
        raise InputError(f"timm has no model '{name}'", hint=_nearest(name, known))
    model = _published(lambda: timm.create_model(name, pretrained=pretrained))
    return model, declared_input(model)


def _published(make: Callable[[], nn.Module]) -> nn.Module:
    """Build a zoo model; the failure of a download says what to do without one."""
    try:
        return make()
    except OSError as error:  # urllib's, requests' and the hub's errors all are
        raise InputError(
            f"the published weights cannot be fetched: {error}",
            hint="fetch them elsewhere and pass --weights FILE",
        ) from error


def _import_zoo(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(
            f"{package} is not installed", hint="install the model zoo: pip install 'fx-trt-lowering[zoo]'"
        ) from error


def _nearest(name: str, known: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(near)}?" if near else "see the library's list_models()"


def _from_factory(origin: str, name: str) -> nn.Module:
    module = _import_file(origin) if origin.endswith(".py") else _import_module(origin)
    try:
        made = getattr(module, name)
    except AttributeError as error:
        raise InputError(f"'{origin}' has no '{name}'", hint="name a function that returns the model") from error
    if not isinstance(made, nn.Module) and callable(made):
        try:
            made = made()
        except Exception as error:  # the user's own code: any error is possible
            raise InputError(
                f"'{origin}:{name}' fails: {failure_reason(error)}", hint=f"{name}() has to return the model"
            ) from error
    if not isinstance(made, nn.Module):
        raise InputError(
            f"'{origin}:{name}' gives {type(made).__name__}, not an nn.Module",
            hint="name a module, or a function without arguments that returns one",
        )
    return made


def _import_module(name: str) -> Any:
    # A console command does not have the working directory on its path, where a user's own module most often is.
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # the module is there; something that it imports is not
        raise InputError(
            f"there is no Python module '{name}'", hint="check the name, or give file.py:factory"
        ) from error
    finally:
        sys.path.remove(folder)


def _import_file(path: str) -> Any:
    file = Path(path)
    if not file.is_file():
        raise InputError(f"'{path}' does not exist", hint="give the path of a Python file")
    name = f"_fxtrt_model_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and inspect look a class's module up there
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)  # as `python file.py` does, for imports of its neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a safetensors file or a `weights_only` checkpoint into `model`, strictly.

    A checkpoint may be a state dict or hold one under "state_dict", "model" or "model_state_dict", with or without
    the "module." prefix of a data-parallel run.

    Raises:
        InputError: the file is missing, is neither format, or its names or shapes are not the model's.
    """
    state = _read_state(Path(path))
    prefix = "module."
    if state and all(key.startswith(prefix) for key in state):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise InputError(f"'{path}' does not fit the model: {error}", hint="check that it belongs to it") from error


def _read_state(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise InputError(f"weights file '{path}' does not exist", hint="check the path")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise InputError(f"'{path}' is not a safetensors file: {error}", hint="check the file") from error
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # malformed bytes lead the unpickler into whatever error comes first
        raise InputError(
            f"'{path}' is not a checkpoint of plain tensors: {str(error).splitlines()[0] if str(error) else error!r}",
            hint="save it with torch.save(model.state_dict(), path) or as safetensors",
        ) from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(checkpoint, dict) and isinstance(checkpoint.get(key), dict):
            checkpoint = checkpoint[key]
            break
    if not isinstance(checkpoint, dict) or not all(isinstance(v, torch.Tensor) for v in checkpoint.values()):
        raise InputError(f"'{path}' holds no state dict", hint="save it with torch.save(model.state_dict(), path)")
    return checkpoint


def parse_shape(text: str) -> torch.Tensor:
    """A seeded example tensor from "1x3x224x224" or "1x128:int64".

    Floating point types get normal values, integer types zeros (a valid index everywhere), bool false.

    >>> parse_shape("2x3:int64").shape
    torch.Size([2, 3])

    Raises:
        InputError: not of that form.
    """
    shape_text, _, dtype_text = text.partition(":")
    dtype = getattr(torch, dtype_text or "float32", None)
    try:
        shape = tuple(int(part) for part in shape_text.replace(",", "x").split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1 or not isinstance(dtype, torch.dtype):
        raise InputError(f"'{text}' is no shape", hint="write 1x3x224x224 or 1x128:int64")
    if dtype.is_floating_point:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.zeros(shape, dtype=dtype)
