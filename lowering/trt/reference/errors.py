"""The errors of the reference executor."""

from __future__ import annotations

from fx_passes.errors import LoweringError

__all__ = ["ExecutionError", "InferenceMismatchError"]


class ExecutionError(LoweringError):
    """A layer of a network can't be executed on the values it was given."""


class InferenceMismatchError(LoweringError):
    """A layer gave another shape or type than NVIDIA's own inference says: the executor or the network is wrong."""
