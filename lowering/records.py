"""What is known of a lowering once it is done, as plain records: segments, their operators, what stays in Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

__all__ = ["Described", "Fallback", "OpRow", "SegmentInfo"]


@dataclass(frozen=True)
class Fallback:
    """A call that stays in Python.

    Args:
        node: name of the node in the glue graph.
        source: "file.py:12" of the user's line, or None.
        reason: why it stays.
    """

    node: str
    source: str | None
    reason: str


@dataclass(frozen=True)
class OpRow:
    """One operator that could run in int8: whether it does, and why or why not."""

    node: str
    op: str
    int8: bool
    reason: str
    source: str | None


@dataclass
class SegmentInfo:
    """What is known of one segment once it is lowered.

    Args:
        name: as in the glue graph.
        backend: "tensorrt-rtx 1.7.1", "onnxruntime 1.27", ...
        precision: "int8 + fp16", "fp32", ...
        nodes: operators in it.
        flops: of one call at the opt sizes.
        ops: the operators that placement decided on.
        engines: layer report of every engine as plain data; `{"ops": {type: count}}` for a session.
        float_twin: the layer report of the same segment all in its float type, to compare bytes; None if not int8.
        checks: what the sizes of its inputs must be beside their ranges, each as Python code with the user's line.
        weights: bytes of its constants as they are stored ("stored") and as they would be in float32 ("float32").
        choice: how its runtime was chosen (`lowering.onnx.choice.Choice` as plain data); None where nobody measured.
        compare: builds the engine that `float_twin` reports on; it is called when somebody asks (see `completed`).
    """

    name: str
    backend: str
    precision: str
    nodes: int
    flops: int
    ops: list[OpRow] = field(default_factory=list)
    engines: list[dict[str, Any]] = field(default_factory=list)
    float_twin: dict[str, Any] | None = None
    checks: list[str] = field(default_factory=list)
    weights: dict[str, int] | None = None
    choice: dict[str, Any] | None = None
    compare: Callable[[], dict[str, Any]] | None = field(default=None, repr=False, compare=False)

    def completed(self) -> SegmentInfo:
        """This record with its comparison made. Building the float engine would otherwise delay every lowering."""
        if self.compare is not None:
            self.float_twin, self.compare = self.compare(), None
        return self

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as reports and manifests hold it."""
        self.completed()
        return asdict(replace(self, compare=None), dict_factory=_without_compare)


def _without_compare(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in items if key != "compare"}


@dataclass
class Described:
    """What a summary and a report tell of a lowered module.

    Args:
        details: target, precision, flops_share, flops, capture, settings, versions, threads.
        segments: what is known of each segment.
        fallbacks: every call that stays in Python, with the reason.
        outside: by path of a lowered child, how many of its calls PyTorch ran, by reason.
    """

    details: dict[str, Any]
    segments: list[SegmentInfo]
    fallbacks: list[Fallback]
    outside: dict[str, dict[str, int]] = field(default_factory=dict)
