"""The passes one after the other, for those who want to look at the graph between them.

python examples/step_by_step.py
"""

from __future__ import annotations

import torch
from torch import nn

from fx_passes import convert_fx, functionalize, fuse_fx, prepare_calibration_fx, trace
from lowering import lower_to_onnx


class Block(nn.Module):
    """A residual block, written with in-place operations as most are."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 8, h, w) to the same."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


def main() -> None:
    """Print the operators after every pass."""
    torch.manual_seed(0)
    model = Block().eval()
    images = [torch.randn(4, 8, 16, 16) for _ in range(4)]

    traced = trace(model)
    functional = functionalize(traced)
    fused = fuse_fx(functional)
    prepared = prepare_calibration_fx(fused, target="onnxruntime")
    for batch in images:
        prepared(batch)
    converted = convert_fx(prepared)
    stages = {"traced": traced, "functional": functional, "fused": fused, "converted": converted}
    for name, graph in stages.items():
        print(f"{name}: {', '.join(node.name for node in graph.graph.nodes)}")

    for node in converted.graph.nodes:
        if (annotation := node.meta.get("quantization")) is not None:
            print(f"  {node.name}: {annotation.reason}")

    lowered = lower_to_onnx(converted, images[0])
    print("largest difference to the converted graph:", float((lowered(images[0]) - converted(images[0])).abs().max()))


if __name__ == "__main__":
    main()
