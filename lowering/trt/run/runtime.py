"""Running a serialized engine on torch tensors: addresses, shapes, profiles, streams.

No host copies: TensorRT reads torch's device memory and writes into tensors that torch allocated, on the caller's
current stream. Each thread has its own execution contexts, one per optimization profile, because a context may hold
one call at a time and switching its profile would wait for the work in flight. If the caller goes on to another stream,
that one first waits for the last run of the context, whose scratch memory it is going to use.

Torch's allocator gives freed memory to later work of the same stream only, so what a call needs may be dropped as soon
as it is enqueued. A tensor made on another stream needs `record_stream`, as for any kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fx_passes.errors import BackendUnavailableError, InputError, LoweringError
from lowering.trt.bindings import BuilderLog, collect_log, logger, torch_dtype, trt

__all__ = ["Binding", "EngineRunner", "Streams", "TorchStreams", "enqueue"]


@dataclass(frozen=True)
class Binding:
    """One input or output of an engine.

    Attributes:
        name: its name in the engine.
        dtype: torch dtype.
        shape: sizes, -1 where dynamic.
        ranges: for an input, per optimization profile (smallest, largest) sizes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    ranges: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()


class Streams(Protocol):
    """What is needed of CUDA's streams."""

    def current(self, device: torch.device) -> int:
        """The raw handle of this thread's current stream."""

    def wait_for(self, device: torch.device, stream: int) -> None:
        """Let later work of the current stream wait for what has been enqueued on another one."""

    def finish(self, device: torch.device) -> None:
        """Wait for the current stream on the host."""


class TorchStreams:
    """The streams of `torch.cuda`."""

    def current(self, device: torch.device) -> int:
        """The raw handle of this thread's current stream."""
        return torch.cuda.current_stream(device).cuda_stream

    def wait_for(self, device: torch.device, stream: int) -> None:
        """Let later work of the current stream wait for what has been enqueued on another one."""
        torch.cuda.current_stream(device).wait_stream(torch.cuda.ExternalStream(stream, device=device))

    def finish(self, device: torch.device) -> None:
        """Wait for the current stream on the host."""
        torch.cuda.current_stream(device).synchronize()


@dataclass
class _InUse:
    """An execution context and the stream that it was last used on."""

    context: Any
    stream: int


class EngineRunner:
    """A deserialized engine.

    Args:
        data: the engine file's bytes.
        inputs: names of the inputs in the caller's order.
        outputs: names of the outputs in the caller's order.
        device: where it runs.
        streams: the raw CUDA stream to enqueue on, and waiting for another one.
        lean_runtime: shared library of the lean runtime of the version that built the engine, for a version compatible
            engine in a later TensorRT. It is code of the machine's own, not of the engine file.
        native_graphs: let the runtime capture and replay CUDA graphs by itself (TensorRT-RTX).
        described: what the engine was built for and where it is loaded, for error messages.

    Raises:
        BackendUnavailableError: the runtime refuses the engine (another TensorRT version, another GPU).
    """

    def __init__(
        self,
        data: bytes,
        inputs: Sequence[str],
        outputs: Sequence[str],
        device: torch.device,
        streams: Streams,
        *,
        lean_runtime: str | None = None,
        native_graphs: bool = False,
        described: str = "",
    ):
        self.device, self.streams, self._native_graphs = device, streams, native_graphs
        with collect_log() as log:
            self._runtime = trt.Runtime(logger())
            if lean_runtime is not None:
                self._host, self._runtime = self._runtime, self._runtime.load_runtime(lean_runtime)
            self._engine: Any = None if self._runtime is None else self._runtime.deserialize_cuda_engine(data)
        if self._engine is None:
            raise BackendUnavailableError(
                f"TensorRT cannot load this engine: {_reason(log)}" + (f"\n  {described}" if described else ""),
                hint="lower again with this TensorRT version and for this GPU's compute capability",
            )
        self.inputs = [self._binding(name, is_input=True) for name in inputs]
        self.outputs = [self._binding(name, is_input=False) for name in outputs]
        self._threads = threading.local()

    def _binding(self, name: str, is_input: bool) -> Binding:
        ranges: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        if is_input:
            for profile in range(self._engine.num_optimization_profiles):
                smallest, _, largest = self._engine.get_tensor_profile_shape(name, profile)
                ranges.append((tuple(smallest), tuple(largest)))
        if self._engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            raise LoweringError(
                f"'{name}' of this engine lies in host memory: its values are sizes",
                hint="keep what computes sizes from values in Python with wrap()",
            )
        shape = tuple(self._engine.get_tensor_shape(name))
        return Binding(name, torch_dtype(self._engine.get_tensor_dtype(name)), shape, tuple(ranges))

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Enqueue one run on the current stream.

        Args:
            inputs: one tensor per input, on this device, of its dtype, with sizes that one profile covers.

        Returns:
            New tensors, one per output. They are complete once the stream has come to this point.

        Raises:
            InputError: a wrong number, device, dtype or size; the text says what the engine takes.
            LoweringError: TensorRT does not enqueue the run.
        """
        profile = self.profile(inputs)
        stream = self.streams.current(self.device)
        try:
            return enqueue(self.context(profile, stream), self.inputs, self.outputs, inputs, stream)
        except LoweringError:
            self._contexts().pop(profile, None)  # its state is not known any more
            raise

    def profile(self, inputs: Sequence[Tensor]) -> int:
        """The optimization profile for these inputs.

        Raises:
            InputError: as `__call__`.
        """
        self._check(inputs)
        count = self._engine.num_optimization_profiles
        for profile in range(count):
            if all(_within(x.shape, *b.ranges[profile]) for b, x in zip(self.inputs, inputs, strict=True)):
                return profile
        given = ", ".join(f"{b.name}={tuple(x.shape)}" for b, x in zip(self.inputs, inputs, strict=True))
        ranges = "; or ".join(
            ", ".join(f"{b.name} from {b.ranges[p][0]} to {b.ranges[p][1]}" for b in self.inputs) for p in range(count)
        )
        raise InputError(
            f"no optimization profile covers {given}; the engine takes {ranges}",
            hint="lower with a dynamic_batch or dynamic_shapes that covers these sizes",
        )

    def new_context(self, profile: int, stream: int) -> Any:
        """An execution context of its own, with its optimization profile set."""
        with collect_log() as log:
            context = self._engine.create_execution_context(*self._configuration())
            if context is None:
                raise BackendUnavailableError(
                    f"TensorRT gives no execution context: {_reason(log)}",
                    hint="the GPU's memory may be full: free some of it, or use fewer threads",
                )
            if self._engine.num_optimization_profiles > 1:
                _demand(context.set_optimization_profile_async(profile, stream), log, f"profile {profile}")
                self.streams.finish(self.device)  # TensorRT leaves it to the caller to order what it copies for that
        return context

    def _configuration(self) -> tuple[Any, ...]:
        if not self._native_graphs:
            return ()
        configuration = self._engine.create_runtime_config()
        configuration.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        return (configuration,)

    def context(self, profile: int, stream: int) -> Any:
        """This thread's execution context for a profile, ready to be used on a stream."""
        contexts = self._contexts()
        if profile not in contexts:
            contexts[profile] = _InUse(self.new_context(profile, stream), stream)
        held = contexts[profile]
        if held.stream != stream:
            self.streams.wait_for(self.device, held.stream)
            held.stream = stream
        return held.context

    def _contexts(self) -> dict[int, _InUse]:
        return self._threads.__dict__.setdefault("contexts", {})

    def _check(self, inputs: Sequence[Tensor]) -> None:
        if len(inputs) != len(self.inputs):
            raise InputError(f"the engine takes {len(self.inputs)} inputs, {len(inputs)} were given")
        for binding, x in zip(self.inputs, inputs, strict=True):
            if not isinstance(x, Tensor):
                raise InputError(f"input '{binding.name}' is a {type(x).__name__}, not a tensor")
            if x.device != self.device:
                raise InputError(
                    f"input '{binding.name}' is on {x.device}, the engine runs on {self.device}",
                    hint=f"move it there: x.to('{self.device}')",
                )
            if x.dtype != binding.dtype:
                raise InputError(
                    f"input '{binding.name}' is {x.dtype}, the engine takes {binding.dtype}",
                    hint=f"cast it: x.to({binding.dtype})",
                )
            if x.dim() != len(binding.shape):
                raise InputError(
                    f"input '{binding.name}' has {x.dim()} dimensions, the engine takes {len(binding.shape)}"
                )


def enqueue(
    context: Any, inputs: Sequence[Binding], outputs: Sequence[Binding], values: Sequence[Tensor], stream: int
) -> tuple[Tensor, ...]:
    """Set shapes and addresses on a context and start a run of it.

    Args:
        context: an `IExecutionContext`, used by this thread only, its profile set.
        inputs, outputs: what it takes and gives.
        values: one tensor per input, checked.
        stream: raw CUDA stream.

    Returns:
        New tensors on the device of the first input. Their sizes come from shape inference; where they depend on the
        data, TensorRT asks for the memory while it enqueues and says the size then.

    Raises:
        InputError: TensorRT cannot infer the sizes of these inputs.
        LoweringError: TensorRT refuses a shape, an address or the run.
    """
    # TensorRT wants densely packed tensors and an address even for an empty one
    held = [x.contiguous() if x.numel() else x.new_empty(1) for x in values]
    device = values[0].device
    with collect_log() as log:
        for binding, given, x in zip(inputs, values, held, strict=True):
            _demand(context.set_input_shape(binding.name, tuple(given.shape)), log, f"the shape of {binding.name}")
            _demand(context.set_tensor_address(binding.name, x.data_ptr()), log, f"the address of {binding.name}")
        try:
            missing = context.infer_shapes()
        except RuntimeError as error:
            raise InputError(f"TensorRT cannot infer the sizes of the outputs: {_reason(log, str(error))}") from error
        if missing:
            raise InputError(f"TensorRT cannot infer the sizes of {', '.join(missing)}")
        slots = [_slot(context, binding, device, log) for binding in outputs]
        if not context.execute_async_v3(stream):
            raise LoweringError(
                f"TensorRT does not start the run: {_reason(log)}",
                hint="a fault of earlier work on the GPU shows only here: run once with CUDA_LAUNCH_BLOCKING=1",
            )
    return tuple(slot.result() for slot in slots)


@dataclass(frozen=True)
class _Allocated:
    """An output whose sizes are known before the run."""

    tensor: Tensor

    def result(self) -> Tensor:
        return self.tensor


def _slot(context: Any, binding: Binding, device: torch.device, log: BuilderLog) -> Any:
    shape = tuple(context.get_tensor_shape(binding.name))
    what = f"the address of {binding.name}"
    if any(size < 0 for size in shape):
        allocator = _output_allocator(binding, device)
        _demand(context.set_output_allocator(binding.name, allocator), log, f"an allocator for {binding.name}")
        return allocator
    result = torch.empty(shape, dtype=binding.dtype, device=device)
    memory = result if result.numel() else result.new_empty(1)
    _demand(context.set_tensor_address(binding.name, memory.data_ptr()), log, what)
    return _Allocated(result)


def _output_allocator(binding: Binding, device: torch.device) -> Any:
    """An `IOutputAllocator` over torch's memory. TensorRT calls both methods before the enqueuing call returns."""

    class OutputAllocator(trt.IOutputAllocator):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.memory: Tensor | None = None
            self.shape: tuple[int, ...] | None = None

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            self.memory = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
            return self.memory.data_ptr()  # torch aligns to 512 bytes on CUDA; TensorRT asks for 256 at most

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Sequence[int]) -> None:
            self.shape = tuple(shape)

        def result(self) -> Tensor:
            if self.memory is None or self.shape is None:
                raise LoweringError(f"TensorRT did not say the size of output '{binding.name}'")
            size = torch.Size(self.shape).numel() * binding.dtype.itemsize
            return self.memory[:size].view(binding.dtype).view(self.shape)

    return OutputAllocator()


def _demand(done: bool, log: BuilderLog, what: str) -> None:
    if not done:
        raise LoweringError(f"TensorRT refuses {what}: {_reason(log)}")


def _reason(log: BuilderLog, otherwise: str = "no reason given") -> str:
    return log.errors[0].strip() if log.errors else otherwise


def _within(shape: Sequence[int], smallest: Sequence[int], largest: Sequence[int]) -> bool:
    return all(lo <= size <= hi for size, lo, hi in zip(shape, smallest, largest, strict=True))
