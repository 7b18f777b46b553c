"""`LoweredModule`: engines or sessions and Python fallbacks as one `nn.Module`, and what it tells about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fx_passes.entry.ambient import is_plain, plain_state
from fx_passes.errors import BackendUnavailableError, LoweringError
from lowering.artifact.save import save
from lowering.children.lowered import LoweredChild, WithChildren
from lowering.records import Described, Fallback, SegmentInfo
from lowering.segment.segment import Segment, simulating
from lowering.summary import report_data, summary_text

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LoweredModule"]


class LoweredModule(nn.Module):
    """A lowered model. Call it like the model; the result has the model's own structure and types.

    Made by `lower_to_trt`, `lower_to_onnx` and `load`. Its attributes:

    Attributes:
        glue: calls segments and Python fallbacks: a `torch.fx.GraphModule`, or, where the model itself stays Python, a
            `WithChildren` around a copy of it.
        segments: what is known of each segment.
        fallbacks: every call that stays in Python, with the reason.
        details: target, precision, flops_share, capture, settings, versions, threads.
    """

    def __init__(
        self, glue: nn.Module, segments: list[SegmentInfo], fallbacks: list[Fallback], details: dict[str, Any]
    ):
        super().__init__()
        self.glue = glue
        self.segments = segments
        self.fallbacks = fallbacks
        self.details = details
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            if is_plain():
                return self.glue(*args, **kwargs)
        with plain_state(), torch.no_grad():  # else its Python would compute something else than was lowered
            return self.glue(*args, **kwargs)

    def simulate(self, *args: Any, **kwargs: Any) -> Any:
        """Execute the very TensorRT networks of this module on the CPU, with the reference executor.

        Args:
            args, kwargs: as for the model, on the CPU.

        Returns:
            What calling the module gives on a GPU, up to the rounding of the device's kernels.

        Raises:
            BackendUnavailableError: the segments are not TensorRT networks, or were saved without them.
        """
        for segment in self.backend_segments():
            if not hasattr(segment.backend, "simulate"):
                raise BackendUnavailableError(
                    f"{segment.name} runs in {type(segment.backend).__name__}, which needs no simulation",
                    hint="call the module itself",
                )
        with simulating():
            return self(*args, **kwargs)

    def backend_segments(self) -> list[Segment]:
        """The segments of the glue graph, in order."""
        return [m for m in self.glue.modules() if isinstance(m, Segment)]

    def lowered_children(self) -> list[LoweredChild]:
        """The submodules that were lowered one by one, where the model itself stays Python."""
        return list(self.glue.lowered) if isinstance(self.glue, WithChildren) else []  # type: ignore[arg-type]

    def described(self) -> Described:
        """What is known of it, as the record that summaries and reports are made from."""
        outside = {child.path: dict(child.outside) for child in self.lowered_children()}
        return Described(self.details, self.segments, self.fallbacks, outside)

    def summary(self) -> str:
        """What runs where and in which precision, every fallback with its reason, as text."""
        return summary_text(self.described())

    def report(self) -> dict[str, Any]:
        """The same as plain data, with the layer report of every engine (see the README for its keys)."""
        return report_data(self.described())

    def save(self, folder: str | Path, include_network: bool = True) -> Path:
        """Write engines or ONNX files, a manifest and the state that fallbacks need into `folder`.

        Args:
            folder: made if missing; an artifact that is already there is replaced.
            include_network: also write TensorRT networks as JSON and safetensors, so that the loaded module simulates.

        Raises:
            ArtifactError: the folder cannot be written, or holds something that is no artifact.
        """
        return save(self, folder, include_network=include_network)

    def __getstate__(self) -> dict[str, Any]:
        raise LoweringError(
            "a lowered module is not pickled", hint="use lowered.save(folder) and lowering.load(folder)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> LoweredModule:
        raise LoweringError("a lowered module is not copied", hint="lower again, or save and load it")
