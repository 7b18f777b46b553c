"""ONNX model → the network that NVIDIA's own parser makes of it, executable."""

from __future__ import annotations

import importlib
import os
from typing import Any

from fx_passes.errors import BackendUnavailableError, BuildError
from lowering.trt.reference.read import read_record
from lowering.trt.reference.run import ReferenceNetwork

__all__ = ["network_from_onnx"]


def network_from_onnx(model: Any, *, path: str | os.PathLike[str] | None = None) -> ReferenceNetwork:
    """Parses an ONNX model with NVIDIA's parser and reads the network back.

    Args:
        model: `onnx.ModelProto`, or its bytes.
        path: where the model lies, if it keeps its weights in files beside it.

    Returns:
        The network, independent of the parser.

    Raises:
        BackendUnavailableError: neither tensorrt_rtx nor tensorrt is installed.
        BuildError: the parser refuses the model; the message is its first error.
    """
    trt = _bindings()

    class Log(trt.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)

    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    data = model if isinstance(model, (bytes, bytearray)) else model.SerializeToString()
    accepted = parser.parse(bytes(data)) if path is None else parser.parse(bytes(data), os.fspath(path))
    if not accepted:
        reasons = [parser.get_error(i).desc() for i in range(parser.num_errors)] or log.errors or ["no reason given"]
        raise BuildError(f"NVIDIA's ONNX parser refuses the model: {reasons[0]}")
    return ReferenceNetwork(read_record(network))


def _bindings() -> Any:
    for name in ("tensorrt_rtx", "tensorrt"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise BackendUnavailableError(
        "neither tensorrt_rtx nor tensorrt is installed", hint="pip install tensorrt-rtx-cu13"
    )
