"""Quantization-aware training: train with rounding in the loop, convert, and run the very numbers that were validated.

python examples/training.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_passes import convert_fx, prepare_qat_fx
from fx_passes.quantize.qat.prepare import freeze_batch_norm, freeze_ranges, set_qat_state
from lowering import lower_to_onnx


def spots(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images (count, 1, 16, 16) with a bright spot, and the quarter it lies in (count,)."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, 16, 16, generator=generator)
    places = torch.randint(0, 16, (count, 2), generator=generator)
    for image, (row, column) in zip(images, places, strict=True):
        image[0, row, column] += 6.0
    return images, 2 * (places[:, 0] >= 8) + (places[:, 1] >= 8)


def network() -> nn.Module:
    """Convolutions with BatchNorm, then a linear layer. Shape: (n, 1, 16, 16) to (n, 4)."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 8), (8, 16)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 16, 4))


def train(model: nn.Module, images: Tensor, labels: Tensor, *, epochs: int, rate: float) -> None:
    """The same loop for the float model and for the one with fake quantization."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()


def right(model: nn.Module, images: Tensor, labels: Tensor) -> str:
    """Share of right answers."""
    with torch.no_grad():
        return f"{float((model(images).argmax(1) == labels).double().mean()):.1%}"


def main() -> None:
    """Train in float, then with quantization, then lower."""
    torch.manual_seed(0)
    images, labels = spots(2048, seed=1)
    held_out = spots(512, seed=2)
    model = network()
    train(model, images, labels, epochs=6, rate=3e-3)
    print("float:                      ", right(model.eval(), *held_out))

    qat = prepare_qat_fx(model.train(), images[:64], target="onnxruntime")
    set_qat_state(qat, "calibrate")  # ranges are taken, nothing is rounded yet
    with torch.no_grad():
        qat(images[:256])
    set_qat_state(qat, "train")
    train(qat, images, labels, epochs=1, rate=3e-4)
    freeze_batch_norm(qat)  # the last epochs see the statistics and ranges of deployment
    freeze_ranges(qat)
    train(qat, images, labels, epochs=1, rate=1e-4)
    set_qat_state(qat, "validate")
    print("trained with quantization:  ", right(qat, *held_out))

    converted = convert_fx(qat)
    with torch.no_grad():
        print("converted, largest difference:", float((converted(held_out[0]) - qat(held_out[0])).abs().max()))
    lowered = lower_to_onnx(converted, held_out[0])
    print("in ONNX Runtime:            ", right(lowered, *held_out))


if __name__ == "__main__":
    main()
