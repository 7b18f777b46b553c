"""A detector whose post-processing stays Python while its convolutions run in int8.

python examples/postprocessing.py
"""

from __future__ import annotations

import torch
from torch import nn

from fx_passes import wrap
from lowering import load, lower_to_onnx


class SpotFinder(nn.Module):
    """Finds bright spots: a heat map by convolutions, then a list of places by plain Python."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1), nn.Sigmoid()
        )

    def forward(self, image: torch.Tensor) -> list[list[tuple[int, int]]]:
        """(n, 1, height, width) to a list of (row, column) for each image."""
        return self.places(self.features(image))

    @wrap
    def places(self, heat: torch.Tensor) -> list[list[tuple[int, int]]]:
        """Loops and lists: nothing a tensor program could hold."""
        found = []
        for image in heat[:, 0]:
            rows, columns = torch.nonzero(image >= image.amax() - 1e-3, as_tuple=True)
            found.append(list(zip(rows.tolist(), columns.tolist(), strict=True)))
        return found


def main() -> None:
    """Lower, run, save, load."""
    torch.manual_seed(0)
    model = SpotFinder().eval()
    images = [torch.rand(2, 1, 32, 32) for _ in range(8)]

    lowered = lower_to_onnx(model, calibration=images)
    print(lowered.summary())
    print("float:", model(images[0]))
    print("int8: ", lowered(images[0]))

    lowered.save("build/spots")
    # The file holds no code, so the model supplies what stayed Python.
    again = load("build/spots", model=model)
    assert again(images[0]) == lowered(images[0])


if __name__ == "__main__":
    main()
