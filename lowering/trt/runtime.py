"""Running a serialized engine on torch tensors: addresses, shapes, profiles, streams.

No host copies: TensorRT reads torch's device memory and writes into tensors that torch allocated, on the caller's
current stream. Each thread has its own execution contexts, one per optimization profile, because a context may hold
one call at a time and switching its profile would wait for the work in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fx_passes.errors import BackendUnavailableError, BuildError, InputError
from lowering.trt.bindings import collect_log, logger, torch_dtype, trt

__all__ = ["Binding", "EngineRunner"]


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


class EngineRunner:
    """A deserialized engine.

    Args:
        data: the engine file's bytes.
        inputs: names of the inputs in the caller's order.
        outputs: names of the outputs in the caller's order.
        device: where it runs.
        current_stream: gives the raw CUDA stream to enqueue on.

    Raises:
        BackendUnavailableError: the runtime refuses the engine (another TensorRT version, another GPU).
    """

    def __init__(
        self,
        data: bytes,
        inputs: Sequence[str],
        outputs: Sequence[str],
        device: torch.device,
        current_stream: Callable[[torch.device], int],
    ):
        self.device, self._current_stream = device, current_stream
        with collect_log() as log:
            self._runtime = trt.Runtime(logger())
            self._engine = self._runtime.deserialize_cuda_engine(data)
        if self._engine is None:
            reason = log.errors[0].strip() if log.errors else "no reason given"
            raise BackendUnavailableError(
                f"TensorRT cannot load this engine: {reason}",
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
        shape = tuple(self._engine.get_tensor_shape(name))
        return Binding(name, torch_dtype(self._engine.get_tensor_dtype(name)), shape, tuple(ranges))

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Enqueue one run on the current stream.

        Args:
            inputs: one tensor per input, on this device, of its dtype, with sizes that one profile covers.

        Raises:
            InputError: a wrong number, device, dtype or size; the text says what the engine takes.
        """
        self._check(inputs)
        profile = self._profile(inputs)
        stream = self._current_stream(self.device)
        context = self._context(profile, stream)
        # TensorRT wants densely packed tensors and an address even for an empty one
        held = [x.contiguous() if x.numel() else x.new_empty(1) for x in inputs]
        with collect_log() as log:
            for binding, given, x in zip(self.inputs, inputs, held, strict=True):
                self._demand(context.set_input_shape(binding.name, tuple(given.shape)), log, binding.name)
                self._demand(context.set_tensor_address(binding.name, x.data_ptr()), log, binding.name)
            missing = context.infer_shapes()
            if missing:
                raise InputError(f"TensorRT cannot infer the sizes of {', '.join(missing)}")
            results = [self._allocate(context, binding, log) for binding in self.outputs]
            self._demand(context.execute_async_v3(stream), log, "the run")
        return tuple(result for result, _ in results)

    def _allocate(self, context: Any, binding: Binding, log: Any) -> tuple[torch.Tensor, torch.Tensor]:
        shape = tuple(context.get_tensor_shape(binding.name))
        if any(size < 0 for size in shape):
            raise BuildError(f"output '{binding.name}' has sizes that depend on the data: {shape}")
        result = torch.empty(shape, dtype=binding.dtype, device=self.device)
        memory = result if result.numel() else result.new_empty(1)
        self._demand(context.set_tensor_address(binding.name, memory.data_ptr()), log, binding.name)
        return result, memory

    def _demand(self, done: bool, log: Any, what: str) -> None:
        if not done:
            reason = log.errors[0].strip() if log.errors else "no reason given"
            raise BuildError(f"TensorRT refuses {what}: {reason}")

    def _context(self, profile: int, stream: int) -> Any:
        contexts = self._threads.__dict__.setdefault("contexts", {})
        if profile not in contexts:
            with collect_log() as log:
                context = self._engine.create_execution_context()
                if context is None:
                    reason = log.errors[0].strip() if log.errors else "no reason given"
                    raise BackendUnavailableError(f"TensorRT gives no execution context: {reason}")
                if self._engine.num_optimization_profiles > 1:
                    self._demand(context.set_optimization_profile_async(profile, stream), log, f"profile {profile}")
            contexts[profile] = context
        return contexts[profile]

    def _check(self, inputs: Sequence[torch.Tensor]) -> None:
        if len(inputs) != len(self.inputs):
            raise InputError(f"the engine takes {len(self.inputs)} inputs, {len(inputs)} were given")
        for binding, x in zip(self.inputs, inputs, strict=True):
            if x.device != self.device:
                raise InputError(
                    f"input '{binding.name}' is on {x.device}, the engine runs on {self.device}",
                    hint=f"move it there: x.to('{self.device}')",
                )
            if x.dtype != binding.dtype:
                raise InputError(f"input '{binding.name}' is {x.dtype}, the engine takes {binding.dtype}")
            if x.dim() != len(binding.shape):
                raise InputError(
                    f"input '{binding.name}' has {x.dim()} dimensions, the engine takes {len(binding.shape)}"
                )

    def _profile(self, inputs: Sequence[torch.Tensor]) -> int:
        def fits(profile: int) -> bool:
            return all(_within(x.shape, *b.ranges[profile]) for b, x in zip(self.inputs, inputs, strict=True))

        count = self._engine.num_optimization_profiles
        found = next((profile for profile in range(count) if fits(profile)), None)
        if found is None:
            given = ", ".join(f"{b.name}={tuple(x.shape)}" for b, x in zip(self.inputs, inputs, strict=True))
            ranges = "; or ".join(
                ", ".join(f"{b.name} from {b.ranges[p][0]} to {b.ranges[p][1]}" for b in self.inputs)
                for p in range(count)
            )
            raise InputError(
                f"no optimization profile covers {given}; the engine takes {ranges}",
                hint="lower with a dynamic_batch or dynamic_shapes that covers these sizes",
            )
        return found


def _within(shape: Sequence[int], smallest: Sequence[int], largest: Sequence[int]) -> bool:
    return all(lo <= size <= hi for size, lo, hi in zip(shape, smallest, largest, strict=True))
