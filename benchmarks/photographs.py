"""Colour photographs that ship inside scikit-image, as crops to calibrate with and other crops to test on.

Only files of the installed package are read; `skimage.data`'s functions would fetch what is missing, these never do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lowering.request.images import InputSpec

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["PHOTOGRAPHS", "Batches", "Crop", "calibration_batches", "calibration_crops", "held_out_crops", "photograph"]

# What the photograph shows; None where ImageNet has no such class.
PHOTOGRAPHS: dict[str, str | None] = {
    "astronaut.png": None,
    "chelsea.png": "cat",
    "coffee.png": "espresso",
    "hubble_deep_field.jpg": None,
    "ihc.png": None,
    "motorcycle_left.png": "moped",
    "motorcycle_right.png": "moped",
    "retina.jpg": None,
    "rocket.jpg": "missile",
}


@dataclass(frozen=True)
class Crop:
    """A part of a photograph, ready for a model: `pixels` is (1, channels, height, width), float32."""

    name: str
    pixels: torch.Tensor


def photograph(name: str) -> Image:
    """One of `PHOTOGRAPHS` as an RGB image, from the installed package.

    Raises:
        FileNotFoundError: this scikit-image does not ship it.
    """
    import skimage
    from PIL import Image

    path = Path(skimage.__file__).parent / "data" / name
    with Image.open(path) as image:
        return image.convert("RGB")


def held_out_crops(spec: InputSpec, per_photograph: int = 5) -> list[Crop]:
    """Upright crops: the centre square, then four squares of 3/4 of its side towards the corners, then random ones."""
    crops = []
    for name in PHOTOGRAPHS:
        image = photograph(name)
        boxes = [*_fixed_boxes(*image.size), *_random_boxes(*image.size, count=per_photograph, seed=f"test {name}")]
        for index, box in enumerate(boxes[:per_photograph]):
            pixels = spec.tensor(image.crop(box), whole=True)
            crops.append(Crop(f"{Path(name).stem}/{index}", pixels))
    return crops


def calibration_crops(spec: InputSpec, per_photograph: int = 8) -> list[Crop]:
    """Mirrored crops at random places and sizes, seeded; being mirrored, none equals a held-out crop."""
    from PIL import ImageOps

    crops = []
    for name in PHOTOGRAPHS:
        image = photograph(name)
        for index, box in enumerate(_random_boxes(*image.size, count=per_photograph, seed=f"calibration {name}")):
            pixels = spec.tensor(ImageOps.mirror(image.crop(box)), whole=True)
            crops.append(Crop(f"{Path(name).stem}/calibration {index}", pixels))
    random.Random(0).shuffle(crops)  # every batch then sees every photograph
    return crops


class Batches:
    """Crops stacked into batches (n, channels, height, width); may be iterated several times."""

    def __init__(self, crops: list[Crop], batch_size: int):
        self.crops, self.batch_size = crops, batch_size

    def __len__(self) -> int:
        return -(-len(self.crops) // self.batch_size)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for start in range(0, len(self.crops), self.batch_size):
            yield torch.cat([crop.pixels for crop in self.crops[start : start + self.batch_size]])


def calibration_batches(spec: InputSpec, *, per_photograph: int = 8, batch_size: int = 8) -> Batches:
    """`calibration_crops` as batches."""
    return Batches(calibration_crops(spec, per_photograph), batch_size)


def _fixed_boxes(width: int, height: int) -> list[tuple[int, int, int, int]]:
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    boxes = [(left, top, left + side, top + side)]
    small = side * 3 // 4
    for x in (0, width - small):
        for y in (0, height - small):
            boxes.append((x, y, x + small, y + small))
    return boxes


def _random_boxes(width: int, height: int, *, count: int, seed: str) -> Iterator[tuple[int, int, int, int]]:
    """Squares of 45% to 100% of the shorter side; a string seeds `random.Random` the same way on every machine."""
    source = random.Random(seed)
    for _ in range(count):
        side = round(min(width, height) * source.uniform(0.45, 1.0))
        x, y = source.randint(0, width - side), source.randint(0, height - side)
        yield x, y, x + side, y + side
