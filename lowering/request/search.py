"""What a search for placement is to find, and how much it may try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fx_passes.errors import InputError
from lowering.roofline import Gpu, gpu_named, representative_gpu

__all__ = ["PlacementSearch"]


@dataclass(frozen=True)
class PlacementSearch:
    """What `placement="auto"` looks for.

    Args:
        gpu: name of the GPU whose floor is to be low, such as "RTX 4090". None: one that represents the compute
            capabilities asked for.
        sqnr_db: signal to quantization noise that the outputs must keep against the float model, in dB.
        builds: engines that may be built on the way.
        samples: batches of calibration data are taken for the accuracy until there are this many rows.
    """

    gpu: str | None = None
    sqnr_db: float = 20.0
    builds: int = 12
    samples: int = 8

    def __post_init__(self) -> None:
        if self.gpu is not None:
            gpu_named(self.gpu)
        if self.builds < 3:
            raise InputError(f"a placement search with {self.builds} builds", hint="it takes 3 at least")
        if self.samples < 1:
            raise InputError(f"a placement search on {self.samples} samples", hint="it takes 1 at least")

    def on(self, compute_capabilities: Sequence[str] | None) -> Gpu:
        """The GPU to search for."""
        return gpu_named(self.gpu) if self.gpu is not None else representative_gpu(compute_capabilities)
