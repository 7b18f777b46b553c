"""Images as model input: what a model declares about its input, and folders of images as calibration batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from fx_passes.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "ImageBatches", "InputSpec", "declared_input"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

# What ImageNet classifiers are evaluated with unless they say otherwise: 224 of 256 pixels.
_DEFAULT_CROP = 0.875


@dataclass(frozen=True)
class InputSpec:
    """How an image becomes the input of a model.

    Args:
        size: (channels, height, width).
        mean: per channel, of values in 0..1.
        std: per channel, of values in 0..1.
        crop: share of the shorter side of the resized image that the centre crop keeps.
        interpolation: "bilinear", "bicubic", "nearest" or "lanczos".
    """

    size: tuple[int, int, int] = (3, 224, 224)
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    crop: float = _DEFAULT_CROP
    interpolation: str = "bilinear"

    def example(self, batch: int = 1, seed: int = 0) -> torch.Tensor:
        """A seeded normal tensor (batch, channels, height, width), float32: the right shape, not an image."""
        return torch.randn(batch, *self.size, generator=torch.Generator().manual_seed(seed))

    def tensor(self, image: Image, *, whole: bool = False) -> torch.Tensor:
        """An image as a normalised float32 tensor (1, channels, height, width).

        Args:
            image: any mode; converted to RGB (3 channels) or grey (1 channel).
            whole: take the image as it is, resized to the input size, instead of its centre crop.

        Raises:
            InputError: the model takes neither 1 nor 3 channels.
        """
        import numpy as np
        from PIL import Image as pil

        channels, height, width = self.size
        if channels not in (1, 3):
            raise InputError(
                f"an image has 1 or 3 channels, the model takes {channels}",
                hint="pass calibration batches from Python: lower_to_trt(model, calibration=...)",
            )
        image = image.convert("RGB" if channels == 3 else "L")
        resample = getattr(pil.Resampling, self.interpolation.upper())
        if not whole:
            image = _centre_crop(image, height / width, self.crop)
        image = image.resize((width, height), resample)
        pixels = torch.from_numpy(np.asarray(image, dtype=np.float32).copy()).reshape(height, width, channels)
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        return ((pixels / 255 - mean) / std).permute(2, 0, 1)[None].contiguous()


def _centre_crop(image: Image, aspect: float, share: float) -> Image:
    """The centred box of the given height:width aspect that covers `share` of the largest such box, per side."""
    width, height = image.size
    box_width = min(width, height / aspect) * share
    box_height = box_width * aspect
    left, top = (width - box_width) / 2, (height - box_height) / 2
    return image.crop((round(left), round(top), round(left + box_width), round(top + box_height)))


class ImageBatches:
    """The images of a folder as batches (n, channels, height, width), in the order of their paths; re-iterable.

    Args:
        folder: searched with its subfolders; files with a common image suffix are taken.
        spec: how an image becomes a tensor.
        batch_size: of all batches but the last.
        limit: take at most this many images, spread evenly over the sorted paths.

    Raises:
        InputError: no such folder, no image in it, or (while iterating) a file that is no image.
    """

    def __init__(
        self, folder: str | os.PathLike[str], spec: InputSpec, *, batch_size: int = 8, limit: int | None = None
    ):
        root = Path(folder)
        if not root.is_dir():
            raise InputError(f"calibration folder '{folder}' does not exist", hint="give a folder of images")
        paths = sorted(p for p in root.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
        if not paths:
            raise InputError(f"no image in '{folder}'", hint=f"files ending in {', '.join(IMAGE_SUFFIXES)} are read")
        if limit is not None and len(paths) > limit:
            paths = [paths[i * len(paths) // limit] for i in range(limit)]
        self.paths, self.spec, self.batch_size = paths, spec, batch_size

    def __len__(self) -> int:
        return -(-len(self.paths) // self.batch_size)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for start in range(0, len(self.paths), self.batch_size):
            yield torch.cat([self._read(path) for path in self.paths[start : start + self.batch_size]])

    def _read(self, path: Path) -> torch.Tensor:
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(path) as image:
                return self.spec.tensor(image)
        except (UnidentifiedImageError, OSError) as error:
            raise InputError(
                f"'{path.name}' cannot be read as an image: {error}", hint="remove or replace it"
            ) from error


def declared_input(model: nn.Module) -> InputSpec | None:
    """The input that a model declares: timm's `pretrained_cfg`, or what torchvision evaluates its classifiers with.

    A model of your own declares it as timm's do, by an attribute
    `pretrained_cfg = {"input_size": (3, 224, 224), "mean": (...), "std": (...)}`.

    Returns:
        None where nothing is declared.
    """
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if isinstance(config, dict) and config.get("input_size"):
        return InputSpec(
            size=tuple(config["input_size"]),
            mean=tuple(config.get("mean") or IMAGENET_MEAN),
            std=tuple(config.get("std") or IMAGENET_STD),
            crop=config.get("crop_pct") or _DEFAULT_CROP,
            interpolation=config.get("interpolation") or "bilinear",
        )
    package = type(model).__module__.split(".")
    if package[:2] == ["torchvision", "models"] and len(package) == 3:  # classifiers only: detection etc. are deeper
        # Inception-v3 is the one torchvision classifier whose builder is not evaluated at 224 or does not run there.
        return InputSpec(size=(3, 299, 299) if package[2] == "inception" else (3, 224, 224))
    return None
