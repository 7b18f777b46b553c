"""The runtimes of an ONNX file by name."""

from __future__ import annotations

import warnings

from fx_passes.errors import ArtifactError
from lowering.onnx.model import OnnxModel

__all__ = ["runtime_class"]


def runtime_class(name: str, *, chosen: bool = False) -> type[OnnxModel]:
    """The class that runs ONNX files in "onnxruntime" or "openvino"; neither is loaded before it is asked for.

    Args:
        name: of the runtime.
        chosen: whether it was chosen for its speed: where it is not installed, ONNX Runtime runs the same file, with a
            warning.

    Raises:
        ArtifactError: there is no such runtime here.
    """
    if name == "onnxruntime":
        from lowering.onnx.session import OnnxSession

        return OnnxSession
    if name == "openvino":
        from lowering.onnx.openvino import OpenVinoSession, is_installed

        if chosen and not is_installed():
            warnings.warn(
                "OpenVINO was the fastest runtime where this was lowered and is not installed here: ONNX Runtime runs "
                "the same file (pip install 'fx-trt-lowering[openvino]')",
                stacklevel=4,
            )
            return runtime_class("onnxruntime")
        return OpenVinoSession
    raise ArtifactError(f"the runtime {name!r} is not known", hint="update fx-trt-lowering")
