"""The errors of this project. Every one names what failed, where in the user's program, and what to try next."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.fx import Node

__all__ = [
    "ArtifactError",
    "BackendUnavailableError",
    "BuildError",
    "CalibrationError",
    "CaptureError",
    "ExportError",
    "InputError",
    "LoweringError",
    "QuantizationError",
    "StageError",
    "UnsupportedOpError",
]


class LoweringError(Exception):
    """Base of all errors raised by `fx_passes` and `lowering`.

    Args:
        what: what went wrong, in one sentence.
        node: the graph node concerned, if there is one; its name and the user's source line join the message.
        hint: the next thing to try.
    """

    def __init__(self, what: str, *, node: Node | None = None, hint: str | None = None):
        self.what, self.node, self.hint = what, node, hint
        message = what
        if node is not None:
            from fx_passes.graph.node_meta import describe

            message += f"\n  at: {describe(node)}"
        if hint:
            message += f"\n  next: {hint}"
        super().__init__(message)


class CaptureError(LoweringError):
    """The model cannot be captured as a graph.

    Args:
        source: "file.py:12" of the user's line that is at fault, where there is no node.
    """

    def __init__(self, what: str, *, node: Node | None = None, hint: str | None = None, source: str | None = None):
        super().__init__(what, node=node, hint=hint)
        self.source = source


class StageError(LoweringError):
    """A graph reached a step in the wrong state: traced in train mode, converted for another target, not calibrated."""


class QuantizationError(LoweringError):
    """A tensor or an operator cannot be quantized as asked."""


class CalibrationError(QuantizationError):
    """The calibration data is empty, or holds values that give no finite range."""


class ExportError(LoweringError):
    """`torch.export` or the ONNX exporter refuses a segment."""


class UnsupportedOpError(LoweringError):
    """No converter can express an operator, or this use of it."""


class BuildError(LoweringError):
    """The TensorRT builder refuses a network."""


class BackendUnavailableError(LoweringError):
    """A package or a device that the request needs is not there."""


class InputError(LoweringError):
    """An argument has the wrong type, rank, dtype, size or value.

    Args:
        other_sizes: the inputs would be right for the model, but their sizes take it through code that was not
            captured: another branch, another number.
    """

    def __init__(self, what: str, *, node: Node | None = None, hint: str | None = None, other_sizes: bool = False):
        super().__init__(what, node=node, hint=hint)
        self.other_sizes = other_sizes


class ArtifactError(LoweringError):
    """A saved artifact cannot be written or read, or is not what its manifest says."""
