"""Padding of windows (convolution, pooling): the four `PaddingMode`s as explicit amounts per side.

Formulas: NVIDIA's documentation of `PaddingMode`; B = beginning, E = end, DK = dilated kernel extent.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Window", "output_and_padding"]


class Window:
    """Kernel geometry in the spatial dimensions, all tuples of the same length."""

    def __init__(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        mode: str,
        before: Sequence[int],
        after: Sequence[int],
    ):
        self.size, self.stride, self.dilation, self.mode = tuple(size), tuple(stride), tuple(dilation), mode
        self.before, self.after = tuple(before), tuple(after)

    def resolve(self, spatial: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Output size, padding before and padding after, per spatial dimension of an input.

        With EXPLICIT_ROUND_UP the padding after grows as far as the last window reaches.
        """
        per_dimension = [
            output_and_padding(self.mode, n, (k - 1) * d + 1, s, b, e)
            for n, k, s, d, b, e in zip(
                spatial, self.size, self.stride, self.dilation, self.before, self.after, strict=True
            )
        ]
        outputs, before, after = zip(*per_dimension, strict=True)
        return outputs, before, after


def output_and_padding(mode: str, size: int, extent: int, stride: int, before: int, after: int) -> tuple[int, int, int]:
    """Output size, padding before and padding after, of one dimension.

    Args:
        mode: member name of `PaddingMode`.
        size: of the input.
        extent: of the dilated window.
        stride: of the window.
        before: explicit padding, for the EXPLICIT modes.
        after: likewise.

    Returns:
        Three integers; the padding may be negative where the input is cropped.
    """
    if mode == "EXPLICIT_ROUND_DOWN":
        return (size + before + after - extent) // stride + 1, before, after
    if mode == "EXPLICIT_ROUND_UP":
        output = -(-(size + before + after - extent) // stride) + 1
        return output, before, max(after, (output - 1) * stride + extent - size - before)
    output = -(-size // stride)
    total = max((output - 1) * stride + extent - size, 0)
    small, large = total // 2, total - total // 2
    return (output, small, large) if mode == "SAME_UPPER" else (output, large, small)
