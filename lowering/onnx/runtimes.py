"""The runtimes of an ONNX file by name."""

from __future__ import annotations

from fx_passes.errors import ArtifactError
from lowering.onnx.model import OnnxModel

__all__ = ["runtime_class"]


def runtime_class(name: str) -> type[OnnxModel]:
    """The class that runs ONNX files in "onnxruntime" or "openvino"; neither is loaded before it is asked for.

    Raises:
        ArtifactError: there is no such runtime here.
    """
    if name == "onnxruntime":
        from lowering.onnx.session import OnnxSession

        return OnnxSession
    if name == "openvino":
        from lowering.onnx.openvino import OpenVinoSession

        return OpenVinoSession
    raise ArtifactError(f"the runtime {name!r} is not known", hint="update fx-trt-lowering")
