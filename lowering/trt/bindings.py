"""The TensorRT Python package behind one name, whichever flavour is installed, and the one logger of the process.

`trt` is resolved on first use, so that importing this package needs no TensorRT:

    from lowering.trt.bindings import trt
    trt.LayerType.CONVOLUTION        # imports tensorrt_rtx or tensorrt now

`tensorrt` is taken only where it is importable *and* a CUDA device is present (its builder needs one);
`tensorrt_rtx` builds on any machine.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch

from fx_passes.errors import BackendUnavailableError

__all__ = [
    "BuilderLog",
    "collect_log",
    "flavour",
    "has",
    "loaded",
    "logger",
    "torch_dtype",
    "trt",
    "trt_dtype",
    "use_flavour",
    "version",
]

_log = logging.getLogger("lowering.tensorrt")
FLAVOURS = {"rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
_chosen: str | None = None


def _importable(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    # A stubs-only distribution leaves a namespace package without an __init__: there is nothing to import in it.
    return spec is not None and spec.origin is not None


def _load(name: str) -> ModuleType:
    module = FLAVOURS[name]
    if not _importable(module):
        raise BackendUnavailableError(
            f"the Python package '{module}' is not installed",
            hint="pip install tensorrt-rtx-cu13" if name == "rtx" else "pip install tensorrt",
        )
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise BackendUnavailableError(
            f"the Python package '{module}' is installed but cannot be loaded: {error}",
            hint="reinstall it together with its libraries package",
        ) from error


def flavour() -> str:
    """The flavour in use: "rtx" or "tensorrt".

    Raises:
        BackendUnavailableError: neither package can be used here.
    """
    if _chosen is not None:
        return _chosen
    if torch.cuda.is_available() and _importable("tensorrt"):
        return "tensorrt"
    if _importable("tensorrt_rtx"):
        return "rtx"
    raise BackendUnavailableError(
        "TensorRT is not installed: neither 'tensorrt_rtx' nor ('tensorrt' and a CUDA device) was found",
        hint="pip install tensorrt-rtx-cu13 (builds engines without a GPU), or lower_to_onnx for the CPU",
    )


def use_flavour(name: str | None) -> None:
    """Fix the flavour for this process ("rtx" or "tensorrt"); None goes back to the automatic choice.

    Raises:
        BackendUnavailableError: that flavour cannot be loaded, or another one has been loaded already.
    """
    global _chosen
    if name is not None:
        if name not in FLAVOURS:
            raise BackendUnavailableError(f"unknown TensorRT flavour '{name}'", hint=f"one of {', '.join(FLAVOURS)}")
        if loaded() and name != flavour():
            raise BackendUnavailableError(
                f"TensorRT flavour '{flavour()}' is already loaded in this process", hint="start a new process"
            )
        _load(name)
    _chosen = name


@cache
def _module() -> ModuleType:
    return _load(flavour())


def loaded() -> bool:
    """Whether a TensorRT package has been imported through `trt`, which fixes the flavour of the process."""
    return _module.cache_info().currsize > 0


class _LazyModule:
    """Stands for the TensorRT module and imports it when the first attribute is read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_module(), name)

    def __repr__(self) -> str:
        return "<TensorRT, loaded on first use>"


trt: Any = _LazyModule()


def has(path: str) -> bool:
    """Whether this TensorRT has the dotted name, e.g. ``has("INetworkDefinition.add_attention")``."""
    found: Any = _module()
    for part in path.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def version() -> str:
    """Version of the package in use, such as "1.7.1.116"."""
    return str(getattr(_module(), "__version__", "unknown"))


_DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}


def trt_dtype(dtype: torch.dtype) -> Any:
    """The `tensorrt.DataType` of a torch dtype; KeyError for one that TensorRT lacks (float64, int16, complex)."""
    return getattr(trt, _DTYPES[dtype])


@cache
def _from_trt() -> dict[Any, torch.dtype]:
    return {trt_dtype(dtype): dtype for dtype in _DTYPES}


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of a `tensorrt.DataType`; KeyError for fp8 and 4-bit types."""
    return _from_trt()[dtype]


def has_dtype(dtype: torch.dtype) -> bool:
    """Whether TensorRT networks can hold tensors of this torch dtype."""
    return dtype in _DTYPES


@dataclass(eq=False)
class BuilderLog:
    """What TensorRT said while a network was defined or built.

    Attributes:
        messages: (severity name, text) in order.
        errors: texts of severity ERROR and INTERNAL_ERROR, in order.
    """

    messages: list[tuple[str, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, severity: str, text: str) -> None:
        """Append one message."""
        self.messages.append((severity, text))
        if severity in ("ERROR", "INTERNAL_ERROR"):
            self.errors.append(text)

    @property
    def warnings(self) -> list[str]:
        """Texts of severity WARNING, in order."""
        return [text for severity, text in self.messages if severity == "WARNING"]

    @property
    def text(self) -> str:
        """All messages, one after the other: what the layer report is parsed from."""
        return "\n".join(text for _, text in self.messages)


# TensorRT keeps the first logger of the process for good and ignores later ones, so there is one, and who listens
# changes. Messages of the builder's own worker threads go to every listener.
_listeners: dict[int, list[BuilderLog]] = {}
_lock = threading.Lock()
_LEVELS = {"INTERNAL_ERROR": logging.ERROR, "ERROR": logging.ERROR, "WARNING": logging.WARNING, "INFO": logging.INFO}


def _receive(severity: str, text: str) -> None:
    with _lock:
        own = _listeners.get(threading.get_ident())
        heard = own[-1:] if own else [stack[-1] for stack in _listeners.values()]
        for log in heard:
            log.add(severity, text)
    level = _LEVELS.get(severity, logging.DEBUG)
    # What a listener has collected becomes an exception or part of a result: `logging` gets it for the record only.
    _log.log(min(level, logging.INFO) if heard else level, "%s", text)


@cache
def logger() -> Any:
    """The process's TensorRT logger: hands every message to `collect_log` and to `logging` ("lowering.tensorrt")."""

    class CollectingLogger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            # TensorRT swallows what is raised in here, a KeyboardInterrupt included: do as little as possible.
            _receive(severity.name, msg)

    return CollectingLogger()


@contextmanager
def collect_log(into: BuilderLog | None = None) -> Iterator[BuilderLog]:
    """Collect TensorRT's messages of this thread, and of the builder's worker threads, while the block runs."""
    log = into if into is not None else BuilderLog()
    key = threading.get_ident()
    with _lock:
        _listeners.setdefault(key, []).append(log)
    try:
        yield log
    finally:
        with _lock:
            _listeners[key].remove(log)
            if not _listeners[key]:
                del _listeners[key]
