"""A labelled image set that ships inside scikit-learn, and two small networks that learn it in well under a minute.

`resnet` is an ordinary residual network. `unequal` is hard to quantize on purpose: depthwise convolutions whose
channels differ in range by a factor of up to a hundred, as they may in trained MobileNets; its function is the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["NETWORKS", "QAT_EPOCHS", "Batches", "Digits", "accuracy", "digits", "predictions", "train"]

EPOCHS = 20
QAT_EPOCHS = 4
_BATCH = 64
_SPREAD = 100.0  # largest over smallest factor that a channel of `unequal` is scaled by


class Batches:
    """Images as batches (n, 1, 16, 16), float32; may be iterated several times; the last batch may be smaller."""

    def __init__(self, images: Tensor, size: int = _BATCH):
        self.images, self.size = images, size

    def __len__(self) -> int:
        return -(-len(self.images) // self.size)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.images.split(self.size))


@dataclass(frozen=True)
class Digits:
    """The set, cut in two: images (n, 1, 16, 16) in -1..1, float32, and labels (n,), int64."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def calibration(self, count: int = 256) -> Batches:
        """The first training images."""
        return Batches(self.train_images[:count])


def digits() -> Digits:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, enlarged to 16 x 16; half train, half test, seeded."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 8 - 1
    images = F.interpolate(images, size=(16, 16), mode="bilinear", align_corners=False)
    labels = torch.from_numpy(data.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    first, second = order[: len(order) // 2], order[len(order) // 2 :]
    return Digits(images[first], labels[first], images[second], labels[second])


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class DigitResNet(nn.Module):
    """Three stages of two residual blocks. Shape: (n, 1, 16, 16) to (n, 10)."""

    def __init__(self, widths: tuple[int, int, int] = (16, 32, 64)):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)
        )
        blocks = []
        inputs = widths[0]
        for stage, width in enumerate(widths):
            blocks += [_Residual(inputs, width, 1 if stage == 0 else 2), _Residual(width, width, 1)]
            inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


def _separable(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class DigitSeparable(nn.Module):
    """Depthwise separable convolutions throughout. Shape: (n, 1, 16, 16) to (n, 10)."""

    def __init__(self, width: int = 24):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True))
        self.blocks = nn.Sequential(
            _separable(width, width, 1),
            _separable(width, 2 * width, 2),
            _separable(2 * width, 2 * width, 1),
            _separable(2 * width, 4 * width, 2),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


def spread_channels(model: nn.Module, *, seed: int = 0) -> None:
    """Scale the channels between consecutive layers of a chain by unequal factors, and back in the next layer.

    A ReLU passes positive factors, so the function stays the same; the ranges of weights and activations do not.
    The BatchNorm in front multiplies (its weight and bias), the convolution behind divides (its input channels).
    """
    generator = torch.Generator().manual_seed(seed)
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.BatchNorm2d))]
    with torch.no_grad():
        for norm, conv in pairwise(layers):
            if not (isinstance(norm, nn.BatchNorm2d) and isinstance(conv, nn.Conv2d)):
                continue
            exponent = torch.rand(norm.num_features, generator=generator) - 0.5
            factor = _SPREAD**exponent
            norm.weight *= factor
            norm.bias *= factor
            conv.weight /= factor[:, None, None, None] if conv.groups > 1 else factor[None, :, None, None]


def train(model: nn.Module, data: Digits, *, epochs: int, rate: float) -> None:
    """Cross entropy, Adam with a cosine schedule, seeded shuffling; leaves the model in train mode."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    steps = epochs * -(-len(data.train_labels) // _BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for chosen in torch.randperm(len(data.train_labels), generator=generator).split(_BATCH):
            if len(chosen) < 2:  # BatchNorm needs two
                continue
            loss = F.cross_entropy(model(data.train_images[chosen]), data.train_labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def trained(make: Callable[[], nn.Module], data: Digits) -> nn.Module:
    """A seeded, trained network in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
        train(model, data, epochs=EPOCHS, rate=3e-3)
    return model.eval()


def resnet(data: Digits) -> nn.Module:
    """The ordinary network."""
    return trained(DigitResNet, data)


def unequal(data: Digits) -> nn.Module:
    """The hard network."""
    model = copy.deepcopy(trained(DigitSeparable, data))
    spread_channels(model)
    return model


NETWORKS: dict[str, Callable[[Digits], nn.Module]] = {"resnet": resnet, "unequal": unequal}


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    """Share of right answers in percent."""
    return 100 * float((predictions == labels).double().mean())


def predictions(call: Callable[[Tensor], Any], images: Tensor, batch: int = _BATCH) -> Tensor:
    """The likeliest class of each image, (n,), int64. The last batch is filled up to `batch`, for static engines."""
    found = []
    with torch.no_grad():
        for part in images.split(batch):
            padded = torch.cat([part, part[:1].expand(batch - len(part), *part.shape[1:])])
            found.append(call(padded)[: len(part)].argmax(1))
    return torch.cat(found)
