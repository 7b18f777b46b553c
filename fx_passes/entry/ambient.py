"""The state of torch that holds for a thread or a process: what is on around a call, and what is plain."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch.nn.modules import module as torch_module

from fx_passes.errors import InputError

__all__ = ["TorchState", "as_caller", "is_plain", "plain_state", "refuse_global_hooks"]

T = TypeVar("T")

_thread = threading.local()
_CPU = torch.device("cpu")
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "privateuseone")


@dataclass(frozen=True)
class TorchState:
    """What is on in torch around a call.

    Attributes:
        grad, inference: grad mode and inference mode.
        dtype, device: of new tensors where code names none.
        autocast: device types for which autocast is on.
        deterministic: whether deterministic algorithms are asked for, and whether only a warning comes of it.
    """

    grad: bool = True
    inference: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device = _CPU
    autocast: frozenset[str] = frozenset()
    deterministic: tuple[bool, bool] = (False, False)

    @classmethod
    def now(cls) -> TorchState:
        """The state of this thread."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            frozenset(device for device in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device)),
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let this state hold until the context ends. What is so already is not touched."""
        before = TorchState.now()
        if self == before:
            yield
            return
        with ExitStack() as stack:
            if self.inference != before.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.dtype != before.dtype:
                stack.callback(torch.set_default_dtype, before.dtype)
                torch.set_default_dtype(self.dtype)
            if self.device != before.device:
                stack.enter_context(self.device)
            for device in self.autocast ^ before.autocast:
                stack.callback(torch.set_autocast_enabled, device, device in before.autocast)
                torch.set_autocast_enabled(device, device in self.autocast)
            if self.deterministic != before.deterministic:
                stack.callback(_set_deterministic, *before.deterministic)
                _set_deterministic(*self.deterministic)
            yield


def _set_deterministic(mode: bool, warn_only: bool) -> None:
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)


@contextmanager
def plain_state() -> Iterator[None]:
    """Torch as a fresh process has it, until the context ends; also a decorator.

    What is captured, quantized and built does not depend on where it is asked for: in inference mode, under autocast,
    with another default dtype or device, with deterministic algorithms. A default device other than the CPU stays if
    it is an accelerator, on which the model may be. Functions that were given to `torch.compile` run as they are.
    """
    with _process.plain() as (dtype, deterministic):
        now = TorchState.now()
        outermost = getattr(_thread, "caller", None) is None
        if outermost:
            _thread.caller = replace(now, dtype=dtype, deterministic=deterministic)
        try:
            with TorchState(device=_CPU if now.device.type in ("cpu", "meta") else now.device).entered():
                yield
        finally:
            if outermost:
                _thread.caller = None


class _Process:
    """The part of the state that all threads share: plain from the first thread that wants it so to the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._undo = ExitStack()
        self._before: tuple[torch.dtype, tuple[bool, bool]] = (torch.float32, (False, False))

    @contextmanager
    def plain(self) -> Iterator[tuple[torch.dtype, tuple[bool, bool]]]:
        """Gives default dtype and determinism as they were."""
        with self._lock:
            if self._users == 0:
                self._begin()
            self._users += 1
            before = self._before
        try:
            yield before
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._undo.close()

    def _begin(self) -> None:
        now, plain = TorchState.now(), TorchState()
        self._before = now.dtype, now.deterministic
        if now.dtype != plain.dtype:
            self._undo.callback(torch.set_default_dtype, now.dtype)
            torch.set_default_dtype(plain.dtype)
        if now.deterministic != plain.deterministic:
            self._undo.callback(_set_deterministic, *now.deterministic)
            _set_deterministic(*plain.deterministic)
        if "torch._dynamo" in sys.modules:  # else nothing can be compiled
            self._undo.enter_context(torch.compiler.set_stance("force_eager"))


_process = _Process()


def as_caller(values: Iterable[T]) -> Iterator[T]:
    """The values, each made in the state around `plain_state`: a generator of batches is the caller's code."""
    state: TorchState = getattr(_thread, "caller", None) or TorchState.now()
    with state.entered():
        iterator = iter(values)
    while True:
        with state.entered():
            try:
                value = next(iterator)
            except StopIteration:
                return
        yield value


def is_plain() -> bool:
    """Whether no part of the state that changes results is on, as far as can be told in a microsecond."""
    return (
        torch.get_default_dtype() is torch.float32
        and not torch._C._len_torch_function_stack()  # a default device, among others
        and not torch.is_autocast_enabled("cpu")
        and not torch.is_autocast_enabled("cuda")
    )


def refuse_global_hooks() -> None:
    """Refuse hooks on all modules of the process: no graph says which of them changes what.

    Raises:
        InputError: there is one, which is named.
    """
    tables = {
        "forward pre-hook": torch_module._global_forward_pre_hooks,
        "forward hook": torch_module._global_forward_hooks,
    }
    for kind, table in tables.items():
        for hook in table.values():
            raise InputError(
                f"the global {kind} '{getattr(hook, '__qualname__', type(hook).__name__)}' runs around every module, "
                "and a graph would have it for some",
                hint="take it off while the model is captured (handle.remove()), or register it on the model alone",
            )
