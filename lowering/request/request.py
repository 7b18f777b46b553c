"""What one lowering is asked for, beside the model and its inputs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lowering.request.inputs import CalibrationData, Example

if TYPE_CHECKING:
    from lowering.request.search import PlacementSearch
    from lowering.request.settings import Settings

__all__ = ["Request"]


@dataclass(frozen=True)
class Request:
    """The arguments of a lowering that most of its steps look at.

    Args:
        backend: a `lowering.backend.Backend`.
        precision: as in `lower_to_trt`.
        data: calibration batches, perhaps none.
        qconfig: what to quantize otherwise, and where (see `lower_to_trt`).
        settings: with `float_type` filled in.
        build: whether segments are built; else a report of what would be is all (a dry run).
        search: what `placement="auto"` looks for; None: placement by the target's rules.
    """

    backend: Any
    precision: str
    data: CalibrationData
    qconfig: Any
    settings: Settings
    build: bool = True
    search: PlacementSearch | None = None

    def batches(self, example: Example) -> CalibrationData:
        """The calibration batches; the example alone if there are none."""
        return self.data if self.data else CalibrationData([example.inputs()], 1)

    @property
    def quantizes(self) -> bool:
        """Whether int8 is asked for."""
        return self.precision in ("int8", "auto")

    @property
    def shows_progress(self) -> bool:
        """Whether progress bars are shown: on a terminal, unless the settings say otherwise."""
        return sys.stderr.isatty() if self.settings.progress is None else self.settings.progress

    @property
    def partial_settings(self) -> Settings:
        """The settings for a part of a model, of which alone full lowering is not asked."""
        return replace(self.settings, require_full_lowering=False)
