"""Replaying an engine's run as a CUDA graph: one graph for each combination of input shapes.

A graph has its addresses and sizes fixed. So each has an execution context, input tensors and output tensors of its
own: a call copies the inputs in, replays, and copies the outputs out, all on the caller's stream. (TensorRT developer
guide, "CUDA graphs": a context whose shapes change has to be captured again.) TensorRT-RTX does all this itself if its
runtime configuration says so; this module is for TensorRT proper.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fx_passes.errors import LoweringError
from lowering.trt.run.runtime import EngineRunner, enqueue

__all__ = ["Capturer", "GraphedRunner", "TorchCapturer"]

_log = logging.getLogger("lowering.tensorrt")
_KEPT = 8  # graphs in a thread; each holds an execution context and its activations
Shapes = tuple[tuple[int, ...], ...]
Record = Callable[[int], tuple[Tensor, ...]]


class Capturer(Protocol):
    """What is needed of CUDA."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured by somebody else."""

    def capture(self, device: torch.device, record: Record) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        """Run `record(stream)` once for real and once for the record; what it gave then, and a call that replays it."""

    def synchronize(self, device: torch.device, stream: int) -> None:
        """Wait for a stream."""


class TorchCapturer:
    """Capturing by `torch.cuda.CUDAGraph`."""

    def capturing(self) -> bool:
        """Whether torch is capturing the current stream."""
        return torch.cuda.is_current_stream_capturing()

    def capture(self, device: torch.device, record: Record) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        """On a stream of its own, after a first run in which TensorRT allocates what it needs."""
        current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            record(side.cuda_stream)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        # other threads may go on allocating while this one captures
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            outputs = record(side.cuda_stream)
        current.wait_stream(side)
        return outputs, graph.replay

    def synchronize(self, device: torch.device, stream: int) -> None:
        """Wait for a stream."""
        torch.cuda.ExternalStream(stream, device=device).synchronize()


@dataclass
class _Graph:
    context: Any
    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]
    replay: Callable[[], None]


@dataclass
class _Captured:
    """One thread's graphs; `uncapturable` are the shapes with an output whose size depends on the data."""

    stream: int | None = None
    graphs: OrderedDict[Shapes, _Graph] = field(default_factory=OrderedDict)
    uncapturable: set[Shapes] = field(default_factory=set)


class GraphedRunner:
    """Runs an engine through CUDA graphs, which it captures as new shapes come.

    Args:
        runner: the engine.
        capturer: CUDA, or a stand-in.

    Graphs belong to one thread and one stream: on another stream they are dropped, after the work in flight, because
    two replays of one graph must not overlap.
    """

    def __init__(self, runner: EngineRunner, capturer: Capturer):
        self.runner, self._capturer = runner, capturer
        self._threads = threading.local()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """As `EngineRunner`; inside a capture of the caller's it enqueues plainly, and so becomes part of that.

        Raises:
            InputError: as `EngineRunner`.
            LoweringError: this engine cannot be captured.
        """
        profile = self.runner.profile(inputs)
        shapes = tuple(tuple(x.shape) for x in inputs)
        captured = self._captured()
        if self._capturer.capturing() or shapes in captured.uncapturable:
            return self.runner(*inputs)
        stream = self.runner.streams.current(self.runner.device)
        if captured.stream != stream:
            self._drop(captured, len(captured.graphs))
            captured.stream = stream
        if shapes not in captured.graphs:
            graph = self._capture(profile, stream, inputs)
            if graph is None:
                captured.uncapturable.add(shapes)
                return self.runner(*inputs)
            self._drop(captured, len(captured.graphs) - _KEPT + 1)
            captured.graphs[shapes] = graph
        captured.graphs.move_to_end(shapes)
        graph = captured.graphs[shapes]
        for static, x in zip(graph.inputs, inputs, strict=True):
            static.copy_(x, non_blocking=True)
        graph.replay()
        return tuple(output.clone() for output in graph.outputs)

    def _captured(self) -> _Captured:
        return self._threads.__dict__.setdefault("captured", _Captured())

    def _drop(self, captured: _Captured, count: int) -> None:
        """Forget the `count` graphs that were not used for longest, once nothing of them is in flight."""
        if count > 0 and captured.graphs and captured.stream is not None:
            self._capturer.synchronize(self.runner.device, captured.stream)
        for _ in range(min(count, len(captured.graphs))):
            captured.graphs.popitem(last=False)

    def _capture(self, profile: int, stream: int, inputs: tuple[Tensor, ...]) -> _Graph | None:
        runner = self.runner
        context = runner.new_context(profile, stream)
        static = [x.detach().clone(memory_format=torch.contiguous_format) for x in inputs]
        for binding, x in zip(runner.inputs, static, strict=True):
            context.set_input_shape(binding.name, tuple(x.shape))
        if any(size < 0 for b in runner.outputs for size in context.get_tensor_shape(b.name)):
            _log.warning("an output's size depends on the data: these shapes run without a CUDA graph")
            return None
        try:
            outputs, replay = self._capturer.capture(
                runner.device, lambda stream: enqueue(context, runner.inputs, runner.outputs, static, stream)
            )
        except RuntimeError as error:
            raise LoweringError(
                f"this engine cannot be captured in a CUDA graph: {str(error).strip().splitlines()[0]}",
                hint="lower with settings.cuda_graphs=False",
            ) from error
        return _Graph(context, static, outputs, replay)
