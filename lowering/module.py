"""`LoweredModule`: engines or sessions and Python fallbacks as one `nn.Module`, and what it tells about itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fx_passes.errors import BackendUnavailableError, InputError, LoweringError
from lowering.children.lowered import LoweredChild, WithChildren

if TYPE_CHECKING:
    from pathlib import Path

    from lowering.segment.segments import Fallback
    from lowering.segment.to_aten import WriteBack

__all__ = ["LoweredModule", "OpRow", "Segment", "SegmentInfo"]

_mode = threading.local()


@contextmanager
def _simulating() -> Iterator[None]:
    before = getattr(_mode, "simulate", False)
    _mode.simulate = True
    try:
        yield
    finally:
        _mode.simulate = before


class Segment(nn.Module):
    """One tensor program: a backend, the buffers it updates and the inputs it changes in place.

    Args:
        name: name of the segment in the glue graph.
        backend: takes and returns tensors; `backend(*inputs, *buffers)` gives outputs, then write-backs.
        writebacks: which extra output is copied back into which input or buffer.
        buffers: the current values of the buffers that the program updates, by qualified name.
    """

    backend: Any  # a TrtEngine or an OnnxSession; both write their part of an artifact

    def __init__(self, name: str, backend: nn.Module, writebacks: list[WriteBack], buffers: dict[str, Tensor]):
        super().__init__()
        self.name = name
        self.backend = backend
        self.writebacks = writebacks
        self.buffer_names = list(buffers)
        for index, value in enumerate(buffers.values()):
            self.register_buffer(f"state_{index}", value.detach().clone())

    def state(self) -> list[Tensor]:
        """The buffers that the program updates, in the order the backend takes them."""
        return [getattr(self, f"state_{i}") for i in range(len(self.buffer_names))]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        run = self.backend.simulate if getattr(_mode, "simulate", False) else self.backend
        if any(value.numel() == 0 for value in inputs):
            return self._of_nothing(run, inputs)
        state = self.state()
        outputs = tuple(run(*inputs, *state))
        for write in self.writebacks:
            into_input = write.kind == "input"
            target = inputs[int(write.target)] if into_input else state[self.buffer_names.index(str(write.target))]
            target.copy_(outputs[write.output])
        return outputs[: len(outputs) - len(self.writebacks)]

    def _of_nothing(self, run: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Results for inputs of which one has no elements, which no backend takes: no detections, for example.

        Where they have none either, only their sizes are asked for: those at 1 and 2 in place of 0 tell them.

        Raises:
            InputError: a result has elements, which would have to be computed from nothing.
        """
        some = [
            run(*(v.new_zeros([n or size for n in v.shape]) if v.numel() == 0 else v for v in inputs), *self.state())
            for size in (1, 2)
        ]
        results = [
            a.new_empty([2 * m - n for m, n in zip(a.shape, b.shape, strict=True)]) for a, b in zip(*some, strict=True)
        ]
        if self.writebacks or any(value.numel() for value in results):
            raise InputError(
                f"{self.name} gets an empty tensor, and its results are not empty",
                hint="let the Python before it handle that case, for example by returning early",
            )
        return tuple(results)


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
        with _simulating():
            return self(*args, **kwargs)

    def backend_segments(self) -> list[Segment]:
        """The segments of the glue graph, in order."""
        return [m for m in self.glue.modules() if isinstance(m, Segment)]

    def lowered_children(self) -> list[LoweredChild]:
        """The submodules that were lowered one by one, where the model itself stays Python."""
        return list(self.glue.lowered) if isinstance(self.glue, WithChildren) else []  # type: ignore[arg-type]

    def summary(self) -> str:
        """What runs where and in which precision, every fallback with its reason, as text."""
        from lowering.summary import summary_text

        return summary_text(self)

    def report(self) -> dict[str, Any]:
        """The same as plain data, with the layer report of every engine (see the README for its keys)."""
        from lowering.summary import report_data

        return report_data(self)

    def save(self, folder: str | Path, include_network: bool = True) -> Path:
        """Write engines or ONNX files, a manifest and the state that fallbacks need into `folder`.

        Args:
            folder: made if missing; an artifact that is already there is replaced.
            include_network: also write TensorRT networks as JSON and safetensors, so that the loaded module simulates.

        Raises:
            ArtifactError: the folder cannot be written, or holds something that is no artifact.
        """
        from lowering.artifact.folder import save

        return save(self, folder, include_network=include_network)

    def __getstate__(self) -> dict[str, Any]:
        raise LoweringError(
            "a lowered module is not pickled", hint="use lowered.save(folder) and lowering.load(folder)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> LoweredModule:
        raise LoweringError("a lowered module is not copied", hint="lower again, or save and load it")
