"""RESIZE and GRID_SAMPLE."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lowering.trt.reference.kernel import Kernel, Layer

__all__ = ["grid_sample", "resize"]


def resize(layer: Layer) -> Kernel:
    """Inputs: data, and the new shape (1-D) where it is computed. Each dimension that changes is resampled in turn."""
    mode, static, scales = layer["resize_mode"], layer["shape"], layer["scales"]
    rule = _Rule(layer)

    def run(x: torch.Tensor, shape: torch.Tensor | None = None) -> torch.Tensor:
        if shape is not None:
            target = shape.tolist()
        elif static is not None:
            target = list(static)
        else:
            target = [int(n * s) for n, s in zip(x.shape, scales, strict=True)]
        factors = scales if shape is None and static is None else None
        for axis, (n, m) in enumerate(zip(x.shape, target, strict=True)):
            factor = m / n if factors is None else factors[axis]
            if n == m and factor == 1:
                continue
            position = rule.positions(n, m, factor)
            if mode == "NEAREST":
                x = x.index_select(axis, rule.nearest(position, n))
            else:
                weights = rule.weights(position, n)
                x = torch.tensordot(x, weights.to(x.dtype), dims=([axis], [1])).movedim(-1, axis)
        return x

    return layer.same(run, exact=mode == "NEAREST")


class _Rule:
    """How output indices map to input coordinates, and what is read there."""

    def __init__(self, layer: Layer):
        self.mode: str = layer["resize_mode"]
        self.transformation: str = layer["coordinate_transformation"]
        self.upper = layer["selector_for_single_pixel"] == "UPPER"
        self.rounding: str = layer["nearest_rounding"]
        self.exclude_outside = bool(layer["exclude_outside"])
        self.cubic = float(layer["cubic_coeff"])

    def positions(self, n: int, m: int, factor: float) -> torch.Tensor:
        """The input coordinate of each of m outputs, float64."""
        out = torch.arange(m, dtype=torch.float64)
        if m == 1 and self.upper:
            return torch.zeros(1, dtype=torch.float64)
        if self.transformation == "ALIGN_CORNERS":
            return out * ((n - 1) / (m - 1)) if m > 1 else torch.zeros(1, dtype=torch.float64)
        if self.transformation == "ASYMMETRIC":
            return out / factor
        return (out + 0.5) / factor - 0.5

    def nearest(self, position: torch.Tensor, n: int) -> torch.Tensor:
        """The input index that each position rounds to."""
        rounded = {
            "HALF_UP": lambda p: torch.floor(p + 0.5),
            "HALF_DOWN": lambda p: torch.ceil(p - 0.5),
            "FLOOR": torch.floor,
            "CEIL": torch.ceil,
        }[self.rounding](position)
        return rounded.to(torch.int64).clamp(0, n - 1)

    def weights(self, position: torch.Tensor, n: int) -> torch.Tensor:
        """(m, n) interpolation weights, float64."""
        base = torch.floor(position)
        fraction = (position - base).unsqueeze(1)
        if self.mode == "LINEAR":
            offsets = torch.arange(0, 2)
            taps = torch.cat((1 - fraction, fraction), 1)
        else:
            offsets = torch.arange(-1, 3)
            taps = _cubic(fraction, self.cubic)
        index = base.to(torch.int64).unsqueeze(1) + offsets
        if self.exclude_outside:
            taps = torch.where((index < 0) | (index >= n), 0.0, taps)
            taps = taps / taps.sum(1, keepdim=True)
        matrix = torch.zeros(position.numel(), n, dtype=torch.float64)
        return matrix.scatter_add_(1, index.clamp(0, n - 1), taps)


def _cubic(t: torch.Tensor, a: float) -> torch.Tensor:
    """Keys' cubic convolution kernel at distances 1 + t, t, 1 - t, 2 - t."""

    def near(d: torch.Tensor) -> torch.Tensor:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: torch.Tensor) -> torch.Tensor:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return torch.cat((far(1 + t), near(t), near(1 - t), far(2 - t)), 1)


def grid_sample(layer: Layer) -> Kernel:
    """Inputs: data (N, C, *spatial), grid (N, *spatial out, 2 or 3) in [-1, 1], x first."""
    interpolation = {"NEAREST": "nearest", "LINEAR": "bilinear", "CUBIC": "bicubic"}[layer["interpolation_mode"]]
    padding = {"CLAMP": "border", "FILL": "zeros", "REFLECT": "reflection"}.get(layer["sample_mode"])
    if padding is None:
        raise layer.unsupported(f"samples outside with {layer['sample_mode']}")
    if interpolation == "bicubic" and layer.rank == 5:
        raise layer.unsupported("interpolates a volume cubically, which torch lacks")
    corners = bool(layer["align_corners"])
    layer.require_same_dtypes()
    return layer.same(lambda x, grid: F.grid_sample(x, grid, interpolation, padding, corners))
