"""An ONNX model as a module, run by OpenVINO's own runtime on the CPU."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fx_passes.errors import BackendUnavailableError, InputError, LoweringError
from lowering.artifact.plain import checked
from lowering.onnx.files import OnnxFile
from lowering.onnx.model import OnnxModel, RefusedModelError, first_line
from lowering.segment.program import TensorSpec

if TYPE_CHECKING:
    import onnx

__all__ = ["OpenVinoSession", "is_installed", "runtime_module"]

_DEVICE = "CPU"
# torch dtype -> openvino.Type; the CPU device computes float64 in float32 and int64 in int32
_TYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "boolean",
}


class OpenVinoSession(OnnxModel):
    """Runs an ONNX model in OpenVINO on the CPU. Calls from several threads may overlap.

    Where the processor would compute float32 models in bfloat16 by itself, it is told not to: the file says in which
    types it runs. What the kernels really use is in `optimized_ops`.

    Args:
        model, inputs, outputs, threads, target: as for `OnnxModel`.
        chosen: whether it was chosen for its speed, so that ONNX Runtime takes its place where it is missing.

    Raises:
        BackendUnavailableError: OpenVINO is not installed.
        InputError: an input or output has a type that this class does not pass on (bfloat16).
        RefusedModelError: OpenVINO does not take the model.
    """

    runtime: ClassVar[str] = "openvino"

    def __init__(
        self,
        model: onnx.ModelProto | bytes | OnnxFile,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[str],
        *,
        threads: int | None = None,
        target: str = "onnxruntime",
        chosen: bool = False,
    ):
        super().__init__(model, inputs, outputs, threads=threads, target=target)
        self.chosen = chosen
        self._openvino = runtime_module()
        for spec in self.inputs:
            if spec.dtype not in _TYPES:
                raise InputError(f"input '{spec.name}' is {spec.dtype}, which OpenVINO's Python tensors do not hold")
        core = self._openvino.Core()
        self._device = str(core.get_property(_DEVICE, "FULL_DEVICE_NAME")).strip()
        self._compiled = self._compile(core)
        self._threads = threading.local()
        self._name_dimensions()

    def _compile(self, core: Any) -> Any:
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "ENABLE_CPU_PINNING": False,  # the threads of other sessions and of torch run on these cores too
        }
        try:
            model = core.read_model(self.bytes, b"") if self.file.path is None else core.read_model(self.file.path)
            return core.compile_model(model, _DEVICE, options)
        except Exception as error:
            raise RefusedModelError(
                "OpenVINO", error, hint='run it with runtime="onnxruntime", or upgrade openvino'
            ) from error

    def _name_dimensions(self) -> None:
        """The names that the file gives free dimensions: one name stands for one size."""
        import onnx

        graph = onnx.load_model_from_string(self.bytes).graph
        known = {initializer.name for initializer in graph.initializer}
        given = [value for value in graph.input if value.name not in known]
        if [value.name for value in given] != [spec.name for spec in self.inputs]:
            raise LoweringError(f"the ONNX file takes {[value.name for value in given]}, not the given specs")
        self._dims = [[dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in given]

    @property
    def description(self) -> str:
        """Runtime, version and device, for summaries."""
        return f"openvino {self._openvino.__version__.split('-')[0]} on {_DEVICE} ({self._device})"

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the model.

        Args:
            inputs: CPU tensors as the specs say. They are read where they lie if they are contiguous.

        Returns:
            One new tensor per output.

        Raises:
            InputError: an input has the wrong type, rank, dtype, device or size.
            LoweringError: OpenVINO fails on these inputs.
        """
        values = self._checked(inputs)
        request = self._request()
        try:
            for index, value in enumerate(values):
                request.set_input_tensor(index, self._shared(value))
            request.infer()
            return tuple(_copied(request.get_output_tensor(i)) for i in range(len(self.outputs)))
        except Exception as error:
            shapes = ", ".join(str(tuple(v.shape)) for v in values)
            raise LoweringError(
                f"OpenVINO fails on inputs of shapes {shapes}: {first_line(error)}",
                hint="check that these sizes work in the original model",
            ) from error

    def _request(self) -> Any:
        """This thread's own; a request holds one call at a time."""
        if not hasattr(self._threads, "request"):
            self._threads.request = self._compiled.create_infer_request()
        return self._threads.request

    def _shared(self, value: Tensor) -> Any:
        return self._openvino.Tensor(np.ascontiguousarray(value.numpy()), shared_memory=True)

    def options(self) -> dict[str, Any]:
        """Keyword arguments that make another one like this, but for its threads."""
        return {**super().options(), "chosen": self.chosen}

    @classmethod
    def _read_options(cls, name: str, record: dict[str, Any]) -> dict[str, Any]:
        chosen = checked(record.get("chosen", False), bool, f"'chosen' of {name}")
        return {**super()._read_options(name, record), "chosen": chosen}

    def optimized_ops(self) -> Counter[str]:
        """How often each kind of operator runs, with the type that it computes in: "Convolution u8", ..."""
        counted: Counter[str] = Counter()
        for op in self._compiled.get_runtime_model().get_ordered_ops():
            info = op.get_rt_info()
            kind, precision = str(info["layerType"].astype(str)), str(info["runtimePrecision"].astype(str))
            if kind not in ("Input", "Output", "Const", "Parameter", "Result"):
                counted[f"{kind} {precision}"] += 1
        return counted


def is_installed() -> bool:
    """Whether the package `openvino` is there; it is not loaded."""
    return find_spec("openvino") is not None


def runtime_module() -> Any:
    """The package `openvino`.

    Raises:
        BackendUnavailableError: it is not installed, or cannot be imported.
    """
    try:
        import openvino
    except ImportError as error:
        raise BackendUnavailableError(
            f"OpenVINO cannot be imported: {error}", hint="pip install 'fx-trt-lowering[openvino]'"
        ) from error
    return openvino


def _copied(tensor: Any) -> Tensor:
    """An output as a tensor of its own: the request writes into the same memory next time."""
    return torch.from_numpy(np.array(tensor.data, copy=True))
