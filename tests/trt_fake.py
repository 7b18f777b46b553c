"""A recorded stand-in for TensorRT's runtime: it keeps every call and computes `y = 2 x` on the addresses it got.

So a wrong address, size, order or stream shows in the result or in the record. It is as strict as the bindings' own
documentation: a context belongs to one thread, addresses must be set and must not be null, sizes must lie within the
profile that was chosen, an allocator is asked for memory and told the size before the enqueuing call returns.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

from lowering.trt import bindings

Range = tuple[tuple[int, ...], tuple[int, ...]]


class FakeContext:
    """An `IExecutionContext` of a `FakeEngine`."""

    def __init__(self, engine: FakeEngine, configuration: Any = None):
        self.engine, self.calls, self.configuration = engine, [], configuration
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, Any] = {}
        self.current_profile = 0
        self.thread = threading.get_ident()

    def _note(self, *call: Any) -> bool:
        assert threading.get_ident() == self.thread, "a context was used by two threads"
        self.calls.append(call)
        return call[0] not in self.engine.refuses

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert 0 <= profile < self.engine.num_optimization_profiles
        self.shapes.clear()
        self.current_profile = profile
        return self._note("profile", profile, stream)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, high = self.engine.ranges[self.current_profile]
        assert all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True)), f"{shape} outside of the profile"
        self.shapes[name] = shape
        return self._note("shape", name, shape)

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address, "a null address"
        assert name in self.engine.inputs or self.shapes.keys() == set(self.engine.inputs), "outputs before shapes"
        self.addresses[name] = address
        self.allocators.pop(name, None)
        return self._note("address", name)

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        assert name in self.engine.outputs
        self.allocators[name] = allocator
        self.addresses.pop(name, None)
        return self._note("allocator", name)

    def infer_shapes(self) -> list[str]:
        self._note("infer")
        if "infer" in self.engine.refuses:
            raise RuntimeError("shape inference fails")
        return [name for name in self.engine.inputs if name not in self.shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        shape = self.shapes[self.engine.source(name)]
        return (-1, *shape[1:]) if name in self.engine.data_dependent else shape

    def execute_async_v3(self, stream: int) -> bool:
        if not self._note("run", stream):
            return False
        work = [self._prepared(name, stream) for name in self.engine.outputs]
        if self.engine.recorder is not None:
            self.engine.recorder.extend(work)
        else:
            for step in work:
                step()
        return True

    def _prepared(self, name: str, stream: int) -> Callable[[], None]:
        """Doubling the values from one fixed address into another, `rows` of them if the size depends on the data."""
        source = self.engine.source(name)
        shape = self.shapes[source]
        if name in self.allocators:
            shape = (max(shape[0] - 1, 0), *shape[1:])  # "depends on the data": one row fewer than the upper bound
            size = torch.Size(shape).numel() * 4
            address = self.allocators[name].reallocate_output_async(name, 0, size, 256, stream)
            assert address, "no memory from the allocator"
            self.allocators[name].notify_shape(name, shape)
            self.addresses[name] = address
        count = torch.Size(shape).numel()
        read, write = self.addresses[source], self.addresses[name]

        def step() -> None:
            values = (ctypes.c_float * count).from_address(read)
            results = (ctypes.c_float * count).from_address(write)
            for i in range(count):
                results[i] = values[i] * 2

        return step


class FakeEngine:
    """Two inputs a and b, two outputs p = 2a and q = 2b, float32, any number of profiles."""

    inputs, outputs = ("a", "b"), ("p", "q")

    def __init__(self, ranges: list[Range]):
        self.ranges = ranges
        self.contexts: list[FakeContext] = []
        self.refuses: set[str] = set()
        self.data_dependent: set[str] = set()
        self.host: set[str] = set()
        self.num_optimization_profiles = len(ranges)
        self.recorder: list[Callable[[], None]] | None = None

    def source(self, name: str) -> str:
        return name if name in self.inputs else self.inputs[self.outputs.index(name)]

    def create_runtime_config(self) -> Any:
        return type("RuntimeConfig", (), {"cuda_graph_strategy": "DISABLED"})()

    def create_execution_context(self, configuration: Any = None) -> FakeContext | None:
        if "context" in self.refuses:
            return None
        self.contexts.append(FakeContext(self, configuration))
        return self.contexts[-1]

    def get_tensor_profile_shape(self, name: str, profile: int) -> tuple:
        assert name in self.inputs
        smallest, largest = self.ranges[profile]
        return smallest, smallest, largest

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        sizes = list(zip(*(size for pair in self.ranges for size in pair), strict=True))
        return tuple(s[0] if len(set(s)) == 1 else -1 for s in sizes)

    def get_tensor_dtype(self, name: str) -> Any:
        return bindings.trt.float32

    def get_tensor_location(self, name: str) -> Any:
        return "HOST" if name in self.host else "DEVICE"


def fake_module(engine: FakeEngine, data: bytes) -> type:
    """What `lowering.trt.run.runtime` uses of the package; only `data` can be deserialized."""

    class Runtime:
        def __init__(self, logger: Any):
            assert logger is bindings.logger()

        def load_runtime(self, path: str) -> Any:
            return Runtime(bindings.logger()) if path == "libnvinfer_lean.so" else None

        def deserialize_cuda_engine(self, plan: bytes) -> FakeEngine | None:
            if plan == data:
                return engine
            bindings._receive("ERROR", "the engine was made by another version")
            return None

    class IOutputAllocator:
        def __init__(self) -> None:
            self.made = True

    class TensorLocation:
        DEVICE, HOST = "DEVICE", "HOST"

    class CudaGraphStrategy:
        WHOLE_GRAPH_CAPTURE = "WHOLE_GRAPH_CAPTURE"

    names = {
        "Runtime": Runtime,
        "IOutputAllocator": IOutputAllocator,
        "CudaGraphStrategy": CudaGraphStrategy,
        "TensorLocation": TensorLocation,
        "float32": bindings.trt.float32,
    }
    return type("FakeTensorRT", (), names)


class FakeStreams:
    """A current stream that a test can change, and a record of what waited for what."""

    def __init__(self, stream: int):
        self.stream, self.waits, self.finished = stream, [], []

    def current(self, device: torch.device) -> int:
        return self.stream

    def wait_for(self, device: torch.device, stream: int) -> None:
        self.waits.append((self.stream, stream))

    def finish(self, device: torch.device) -> None:
        self.finished.append(self.stream)


class FakeCapturer:
    """CUDA graphs on the CPU: what is enqueued while capturing runs when it is replayed."""

    SIDE = 99  # the stream that it captures on

    def __init__(self, engine: FakeEngine):
        self.engine, self.captures, self.synchronized, self.inside = engine, 0, [], False
        self.replays: list[int] = []

    def capturing(self) -> bool:
        return self.inside

    def capture(self, device: torch.device, record: Callable[[int], Any]) -> tuple[Any, Callable[[], None]]:
        index, self.captures = self.captures, self.captures + 1
        record(self.SIDE)  # the warm-up
        self.engine.recorder = steps = []
        try:
            outputs = record(self.SIDE)
        finally:
            self.engine.recorder = None

        def replay() -> None:
            self.replays.append(index)
            for step in steps:
                step()

        return outputs, replay

    def synchronize(self, device: torch.device, stream: int) -> None:
        self.synchronized.append(stream)
