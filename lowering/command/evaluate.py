"""Right answers on a folder of labelled images: top-1 and top-5 of a float model and of what it was lowered to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fx_passes.errors import InputError
from lowering.request.images import ImageBatches, InputSpec

__all__ = ["LabelledImages", "Score", "evaluate"]


class LabelledImages:
    """A folder with one subfolder of images for each class, as ImageNet's validation set is usually unpacked.

    Args:
        folder: the subfolders' names are the classes' names.
        spec: how an image becomes a tensor.
        classes: names of the model's classes in the order of its outputs; None: the sorted subfolders are the classes,
            all of them.
        batch_size: of all batches but the last.
        limit: take at most this many images, spread evenly over the sorted paths.

    Raises:
        InputError: no such folder, no image in it, an image outside the subfolders, or a subfolder that is no class.

    Iterating gives (images (n, channels, height, width) float32, labels (n,) int64).
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        spec: InputSpec,
        *,
        classes: list[str] | None = None,
        batch_size: int = 1,
        limit: int | None = None,
    ):
        root = Path(folder)
        self.images = ImageBatches(root, spec, batch_size=batch_size, limit=limit)
        self.classes = classes if classes is not None else sorted(p.name for p in root.iterdir() if p.is_dir())
        places = {name: index for index, name in enumerate(self.classes)}
        self.labels = [places[_class_of(path, root, places)] for path in self.images.paths]

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for batch in self.images:
            yield batch, torch.tensor(self.labels[start : start + len(batch)])
            start += len(batch)


def _class_of(path: Path, root: Path, known: Mapping[str, int]) -> str:
    parts = path.relative_to(root).parts
    if len(parts) < 2:
        raise InputError(f"'{path.name}' lies in no class folder", hint="sort the images into one folder per class")
    if parts[0] not in known:
        raise InputError(f"folder '{parts[0]}' is none of the {len(known)} classes", hint="check the file of classes")
    return parts[0]


@dataclass(frozen=True)
class Score:
    """How often a run was right.

    Args:
        images: how many were shown.
        top1: share whose first answer was right, 0 to 1.
        top5: share whose five likeliest answers held the right one; None with fewer than six classes.
        same: share with the first answer of the first run.
    """

    images: int
    top1: float
    top5: float | None
    same: float


def evaluate(
    runs: Mapping[str, Callable[[Tensor], Any]], batches: Iterable[tuple[Tensor, Tensor]], *, classes: int
) -> dict[str, Score]:
    """Count right answers.

    Args:
        runs: name to a call from images to logits (n, classes); the first one is what `Score.same` refers to.
        batches: images and labels; read once.
        classes: how many there are. With a part of them the numbering of labels and logits would differ.

    Raises:
        InputError: there is no batch, or a run gives something else than logits of so many classes.
    """
    hits: dict[str, Tensor] = {name: torch.zeros(3, dtype=torch.int64) for name in runs}
    images = 0
    with torch.no_grad():
        for pixels, labels in batches:
            images += len(labels)
            first: Tensor | None = None
            for name, run in runs.items():
                ranked = _ranked(name, run(pixels), labels, classes)
                first = ranked[:, 0] if first is None else first
                right = ranked == labels[:, None]
                hits[name] += torch.stack([right[:, 0].sum(), right[:, :5].sum(), (ranked[:, 0] == first).sum()])
    if images == 0:
        raise InputError("there is nothing to evaluate on", hint="pass at least one batch")
    return {
        name: Score(images, float(top1) / images, float(top5) / images if classes > 5 else None, float(same) / images)
        for name, (top1, top5, same) in hits.items()
    }


def _ranked(name: str, logits: Any, labels: Tensor, classes: int) -> Tensor:
    """Classes from the likeliest on, (n, at most 6)."""
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(labels):
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise InputError(
            f"{name} gives {found} for {len(labels)} images, not logits of shape (n, classes)",
            hint="evaluate a classifier, or return its logits alone",
        )
    if logits.shape[1] != classes:
        raise InputError(
            f"{name} has {logits.shape[1]} outputs, and the images are of {classes} classes",
            hint="give the model's classes in their order, one folder name per line, with --classes",
        )
    return logits.float().topk(min(6, logits.shape[1]), dim=1).indices
