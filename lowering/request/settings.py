"""The few choices of a lowering that are not arguments of their own."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from fx_passes.errors import InputError

__all__ = ["FLOAT_TYPES", "PRECISIONS", "VERBOSITIES", "Settings", "resolve_settings"]

FLOAT_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "auto")
VERBOSITIES = ("detailed", "names", "none")

# Whole numbers and the least that each may be.
_COUNTS = {
    "kept_batches": 1,
    "threads": 1,
    "min_segment_nodes": 1,
    "workspace_bytes": 1,
    "engine_cache_bytes": 1,
}
_FLAGS = ("version_compatible", "hardware_compatible", "strip_weights", "refit", "cuda_graphs")
_PATHS = ("engine_cache", "timing_cache")


@dataclass(frozen=True)
class Settings:
    """Choices that a lowering keeps and reports.

    Args:
        float_type: type of what is not int8 when `precision="int8"`: "fp32", "fp16" or "bf16".
            None: "fp16" for TensorRT engines, "fp32" for ONNX files.
        kept_batches: how many batches of a one-shot calibration iterator are kept (they are needed again where
            placement is searched or compared). A re-iterable is iterated instead.
        threads: threads of an ONNX Runtime session. None: `torch.get_num_threads()` when it is created.
        min_segment_nodes: a tensor program with fewer operators than this stays in Python.
        require_full_lowering: any Python fallback is an error instead of a line in the summary.
        optimization_level: TensorRT builder optimization level, 0 to 5. None: the builder's own.
        workspace_bytes: upper limit of the builder's scratch memory in bytes. None: the builder's own.
        version_compatible: the engine may be run by later TensorRT versions of the same major number.
        hardware_compatible: the engine runs on Ampere and newer GPUs (TensorRT only: RTX engines are portable anyway).
        strip_weights: leave out of the engine the weights that a refit can restore.
        refit: allow the weights of the engine to be replaced later.
        profiling_verbosity: what the engine file tells of its layers: "detailed", "names" or "none". The layer report
            is the same: what the file does not tell is read from a second build.
        timing_cache: file in which the builder keeps what it measured (TensorRT only: RTX measures nothing).
        engine_cache: folder in which engines are kept, so that the same network is built only once. None: no cache.
        engine_cache_bytes: what that folder may hold; the engines that were not used for longest go first. None: no
            limit.
        cuda_graphs: replay an engine's kernels as one CUDA graph for each shape it is called with.
        progress: show progress bars. None: on a terminal only.
    """

    float_type: str | None = None
    kept_batches: int = 8
    threads: int | None = None
    min_segment_nodes: int = 1
    require_full_lowering: bool = False
    optimization_level: int | None = None
    workspace_bytes: int | None = None
    version_compatible: bool = False
    hardware_compatible: bool = False
    strip_weights: bool = False
    refit: bool = False
    profiling_verbosity: str = "detailed"
    timing_cache: str | os.PathLike[str] | None = None
    engine_cache: str | os.PathLike[str] | None = None
    engine_cache_bytes: int | None = 4 << 30
    cuda_graphs: bool = False
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.float_type is not None and self.float_type not in FLOAT_TYPES:
            raise InputError(f"settings.float_type is {self.float_type!r}", hint=f"use one of {', '.join(FLOAT_TYPES)}")
        if self.profiling_verbosity not in VERBOSITIES:
            raise InputError(
                f"settings.profiling_verbosity is {self.profiling_verbosity!r}",
                hint=f"use one of {', '.join(VERBOSITIES)}",
            )
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise InputError(f"settings.{name} is {value!r}", hint=f"use an integer of at least {least}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"settings.{name} is {getattr(self, name)!r}", hint="use True or False")
        for name in _PATHS:
            if not isinstance(getattr(self, name), str | os.PathLike | None):
                raise InputError(f"settings.{name} is {getattr(self, name)!r}", hint="use a path")
        if self.optimization_level is not None and self.optimization_level not in range(6):
            raise InputError(f"settings.optimization_level is {self.optimization_level!r}", hint="use 0 to 5")

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain data, for reports and manifests; of a path only whether there is one."""
        return {**asdict(self), **{name: getattr(self, name) is not None for name in _PATHS}}

    def with_float_type(self, default: str) -> Settings:
        """These settings with `float_type` filled in where it was left open."""
        return self if self.float_type is not None else replace(self, float_type=default)


def resolve_settings(settings: Settings | dict[str, Any] | None) -> Settings:
    """Settings from None, a `Settings`, or a dict of its fields.

    Raises:
        InputError: an unknown key; the message lists the known ones.
    """
    if settings is None:
        return Settings()
    if isinstance(settings, Settings):
        return settings
    known = [f.name for f in fields(Settings)]
    if not isinstance(settings, dict):
        raise InputError(
            f"settings is a {type(settings).__name__}", hint="pass a lowering.Settings or a dict of its fields"
        )
    if unknown := [key for key in settings if key not in known]:
        raise InputError(
            f"unknown settings: {', '.join(map(repr, unknown))}", hint=f"the settings are {', '.join(known)}"
        )
    return Settings(**settings)
