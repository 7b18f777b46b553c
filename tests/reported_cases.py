"""Small models distilled from public bug reports of this field, each with what the right answer is.

Each model is plain PyTorch and stands alone. `Case.expect` says what must hold of the lowered model:
  "match"   its output equals `model(*inputs)`: same structure, shapes and dtypes, floats within tolerance
  "int8"    as "match" in fp32; in int8 finite, with a cosine similarity to float of at least `min_cosine`
  "python"  as "match", and the part named in the note stays a Python call
`Case.dynamic` gives further inputs that one lowering (with those batch sizes in its range) must serve.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Case:
    name: str
    report: str
    note: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple]
    expect: str = "match"
    min_cosine: float = 0.99
    dynamic: Callable[[], list[tuple]] | None = None
    calibration: Callable[[], list[tuple]] | None = None
    tags: tuple[str, ...] = field(default=())


CASES: list[Case] = []


def case(report: str, note: str, inputs: Callable[[], tuple], **more: Any):
    """Register an nn.Module class as a case; its weights are seeded, its BatchNorm statistics non-trivial."""

    def register(cls: type[nn.Module]) -> type[nn.Module]:
        def build() -> nn.Module:
            torch.manual_seed(0)
            model = cls()
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                    nn.init.normal_(module.running_mean, std=0.5)
                    nn.init.uniform_(module.running_var, 0.3, 2.0)
                    if module.affine:
                        nn.init.uniform_(module.weight, 0.5, 1.5)
                        nn.init.normal_(module.bias, std=0.3)
            return model.eval()

        CASES.append(Case(cls.__name__, report, note, build, inputs, **more))
        return cls

    return register


def image(n: int = 2, c: int = 3, h: int = 8, w: int = 8, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, c, h, w, generator=torch.Generator().manual_seed(seed))


@case(
    "pytorch/pytorch #197539", "a convolution used twice, BatchNorm on one path only", lambda: (image(), image(seed=2))
)
class ReusedConvOneBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x, y):
        return self.bn(self.conv(x)), self.conv(y)


@case(
    "pytorch/ao #2795",
    "the same conv and BatchNorm on two chunks, and two BatchNorms on one conv",
    lambda: (image(c=6),),
)
class SharedConvTwoBatchNorms(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn1, self.bn2 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        return torch.cat([self.bn1(self.conv(a)), self.bn2(self.conv(b)), self.bn1(self.conv(b))], dim=1)


@case(
    "pytorch/pytorch #180995",
    "grouped and depthwise transposed convolution followed by BatchNorm",
    lambda: (image(c=4),),
    expect="int8",
)
class GroupedDeconvBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.bn = nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, bias=False), nn.BatchNorm2d(6)
        self.dw, self.bn_dw = nn.ConvTranspose2d(6, 6, 2, groups=6), nn.BatchNorm2d(6, affine=False)

    def forward(self, x):
        return self.bn_dw(self.dw(self.bn(self.up(x))))


@case(
    "pytorch/pytorch #71259",
    "BatchNorm without running statistics uses the batch's own, in eval mode too: never folded",
    lambda: (image(n=4),),
)
class BatchNormWithoutStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x):
        return self.bn(self.conv(x))


@case(
    "pytorch/pytorch #122070", "functional batch_norm after a convolution, with running statistics", lambda: (image(),)
)
class FunctionalBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("var", torch.rand(4) + 0.5)
        self.weight = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x):
        return F.batch_norm(self.conv(x), self.mean, self.var, self.weight, None, False, 0.1, 1e-3)


@case(
    "NVIDIA-AI-IOT/torch2trt #910",
    "functional batch_norm with training=True inside an eval model: batch statistics",
    lambda: (image(n=4),),
)
class FunctionalBatchNormTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return F.batch_norm(self.conv(x), None, None, training=True)


@case(
    "pytorch/pytorch #68892",
    "a folded module's parameters are read elsewhere in forward: the reader sees the original values",
    lambda: (image(),),
)
class ParameterReadElsewhere(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x))) + self.conv.weight.sum() + self.conv.bias.view(1, -1, 1, 1)


@case("pytorch/pytorch #68301", "an in-place method whose result is not used: its effect counts", lambda: (image(),))
class UnusedInPlaceMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        y = self.conv(x)
        y.mul_(0.5)
        y.add_(1.0)
        return y


@case("pytorch/pytorch #162267", "augmented assignment and item assignment", lambda: (image(),))
class AugmentedAndItemAssignment(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        y = self.conv(x)
        y += 2.0
        z = y * 2
        z[:, 0] = 0
        z[:, 1:3] = torch.sigmoid(z[:, 1:3])
        return z


@case(
    "NVIDIA/TensorRT #652",
    "in-place ReLU and in-place residual add on a skip path",
    lambda: (image(c=4),),
    expect="int8",
)
class InPlaceResidual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.conv1(x)
        r = self.relu(y)
        out = self.conv2(r)
        out += y  # y was changed in place: this is relu(conv1(x))
        return self.relu(out)


def decode_boxes(scores: torch.Tensor, keep: int) -> list[torch.Tensor]:
    """Post-processing in plain Python: a loop over the batch and a data-dependent number of results."""
    found = []
    for i in range(len(scores)):
        s = scores[i].flatten()
        found.append(s[s > 0].sort(descending=True).values[:keep])
    return found


@case(
    "pytorch/pytorch #53534",
    "decode_boxes is wrapped as a function: one node, run as Python, also after fusing and re-tracing",
    lambda: (image(),),
    expect="python",
    tags=("wrap:decode_boxes",),
)
class WrappedLoopPostProcess(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return decode_boxes(self.bn(self.conv(x)), 5)


@case(
    "pytorch/pytorch #51803",
    "tensors whose size follows the input's: never frozen at the example's size",
    lambda: (image(),),
    dynamic=lambda: [(image(1),), (image(3),)],
)
class ShapeDependentFactories(nn.Module):
    def forward(self, x):
        n, c, h, w = x.shape
        ramp = torch.arange(w, dtype=x.dtype).view(1, 1, 1, -1)
        bias = torch.zeros(x.shape[0], c, 1, 1) + 0.5
        return (x + ramp + bias).reshape(n, -1) / h


@case(
    "pytorch/TensorRT #728, microsoft/onnxruntime #26339", "an input is also an output, as it came", lambda: (image(),)
)
class InputIsOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return x, self.conv(x), x.flatten(1).t()


@case("pytorch/pytorch #64190", "one tensor returned three times", lambda: (image(),))
class SameOutputThrice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        y = self.conv(x)
        return y, y, [y]


@case(
    "pytorch/TensorRT #2053, NVIDIA-AI-IOT/torch2trt #452",
    "outputs in a nested dict: keys, order and types kept",
    lambda: (image(),),
    expect="int8",
)
class NestedDictOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.cls, self.reg = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        f = F.relu(self.stem(x))
        return {"reg": self.reg(f), "aux": {"cls": self.cls(f), "pooled": (f.mean((2, 3)), f.amax((2, 3)))}}


@case(
    "pytorch/pytorch #183528",
    "average pooling with ceil_mode and count_include_pad; max pooling with ceil_mode",
    lambda: (torch.arange(1.0, 17.0).view(1, 1, 4, 4),),
)
class CeilModePooling(nn.Module):
    def forward(self, x):
        return F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=True), F.max_pool2d(
            x, 3, 2, 1, ceil_mode=True
        )


@case(
    "roboflow/rf-detr #949, pytorch/pytorch #122321",
    "the batch size of the example is not baked in",
    lambda: (image(2),),
    dynamic=lambda: [(image(1),), (image(3),), (image(8),)],
)
class BatchSizeNotBakedIn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 5)
        self.query = nn.Parameter(torch.randn(1, 1, 5))

    def forward(self, x):
        b = x.shape[0]
        f = self.head(self.conv(x).view(b, -1))
        return f.unsqueeze(1) + self.query.repeat(b, 1, 1)


@case(
    "microsoft/onnxruntime #11660",
    "a ReLU must survive symmetric int8: no negative output",
    lambda: (image(),),
    expect="int8",
    min_cosine=0.995,
)
class ReluSurvivesInt8(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x):
        return F.relu(self.conv2(F.relu(self.conv1(x))))


@case(
    "microsoft/onnxruntime #22020",
    "weights so small that an int32 bias would overflow: the output is the bias",
    lambda: (image(),),
    expect="int8",
)
class TinyWeightsLargeBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)
        with torch.no_grad():
            self.conv.weight.mul_(1e-8)
            self.conv.bias.copy_(torch.tensor([5.0, -4.5]))

    def forward(self, x):
        return self.conv(x)


@case(
    "NVIDIA/TensorRT #2498, NVIDIA/Model-Optimizer #454",
    "an all-zero and a vanishing weight channel, a dead ReLU, a constant activation: finite positive scales",
    lambda: (image(),),
    expect="int8",
)
class DeadChannels(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
        with torch.no_grad():
            self.conv1.weight[0].zero_()
            self.conv1.weight[1].fill_(1e-38)
            self.conv1.bias[0] = -1.0

    def forward(self, x):
        y = F.relu(self.conv1(x))
        return self.conv2(y) + self.conv2(torch.zeros_like(y))


@case(
    "NVIDIA/TensorRT #2628",
    "NaN and infinity in one calibration batch: a clear error naming the tensor, or finite scales with a warning; "
    "never a NaN scale",
    lambda: (image(),),
    expect="int8",
    tags=("calibration",),
    calibration=lambda: [
        (image(seed=3),),
        (
            image(seed=4).index_put(
                (torch.tensor(0), torch.tensor(0), torch.tensor(0), torch.tensor(0)), torch.tensor(float("nan"))
            ),
        ),
        (image(n=1, seed=5),),
    ],
)
class NanInCalibration(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x)


@case(
    "pytorch/pytorch #29657",
    "one ReLU module called after two layers of very different range: one scale per call",
    lambda: (image(),),
    expect="int8",
    min_cosine=0.995,
)
class SharedReluTwoRanges(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(3, 4, 1) for _ in range(4))
        self.mix1, self.mix2 = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.relu = nn.ReLU()

    def forward(self, x):
        small, large = self.relu(self.a(x)), self.relu(self.b(x) * 100)
        return self.mix1(small), self.mix2(large)


@case(
    "NVIDIA/Model-Optimizer #425, NVIDIA/TensorRT #1992",
    "residual block with identity and with convolutional shortcut: only the shortcut branch of the add is quantized "
    "for TensorRT",
    lambda: (image(c=4),),
    expect="int8",
    tags=("placement",),
)
class ResidualPlacement(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.b1, self.c2, self.b2 = (
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4),
        )
        self.c3, self.b3, self.c4, self.b4, self.cs = (
            nn.Conv2d(4, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.Conv2d(4, 8, 1),
        )

    def forward(self, x):
        x = F.relu(self.b2(self.c2(F.relu(self.b1(self.c1(x))))) + x)
        return F.relu(self.b4(self.c4(F.relu(self.b3(self.c3(x))))) + self.cs(x))
