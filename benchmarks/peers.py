"""The other ways to int8 that the benchmarks compare with: quantizers that take an ONNX file and give another."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "QUANTIZERS",
    "available",
    "export_float",
    "installed",
    "nncf",
    "open_session",
    "quantize_static",
    "session_call",
]


def export_float(model: nn.Module, example: Tensor, file: Path) -> Path:
    """The float model through `torch.onnx`, static at the example's size."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.onnx warns about its own future
        torch.onnx.export(model, (example,), file, dynamo=True, verbose=False, external_data=False)
    return file


def quantize_static(
    file: Path, data: Iterable[Tensor], *, per_channel: bool = True, symmetric: bool = False, float_bias: bool = False
) -> Path:
    """ONNX Runtime's own quantizer, Q/DQ format, int8 weights.

    Args:
        file: of the float model.
        data: calibration batches of the file's own batch size.
        per_channel: one weight scale for each output channel.
        symmetric: int8 activations around 0, as TensorRT wants them, instead of uint8 with a zero point.
        float_bias: leave biases in float: TensorRT refuses the int32 ones.

    Returns:
        The file it wrote, beside `file`.
    """
    from onnxruntime.quantization import QuantFormat, QuantType
    from onnxruntime.quantization import quantize_static as quantize
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared, quantized = file.with_suffix(".prepared.onnx"), file.with_suffix(".static.onnx")
    quant_pre_process(file, prepared)  # what its documentation asks for first: shapes, and BatchNorm folded
    quantize(
        prepared,
        quantized,
        _Reader(data, _input_name(prepared)),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=per_channel,
        extra_options={"ActivationSymmetric": symmetric, "QuantizeBias": not float_bias},
    )
    return quantized


def nncf(file: Path, data: Iterable[Tensor]) -> Path:
    """NNCF's post-training quantization of the ONNX file, with its defaults.

    Raises:
        ImportError: NNCF is not installed.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # it reports its progress there
        import onnx
        from nncf import Dataset, quantize

        name = _input_name(file)
        batches = [{name: batch.numpy()} for batch in data]
        quantized = quantize(onnx.load(file), Dataset(batches), subset_size=len(batches))
    target = file.with_suffix(".nncf.onnx")
    onnx.save(quantized, target)
    return target


QUANTIZERS: dict[str, Callable[[Path, Iterable[Tensor]], Path]] = {
    "ONNX Runtime quantize_static": quantize_static,
    "NNCF": nncf,
}


def available(name: str) -> bool:
    """Whether the package behind one of `QUANTIZERS` is installed."""
    return installed("nncf" if name == "NNCF" else "onnxruntime")


def installed(package: str) -> bool:
    """Whether `import package` would find something."""
    return importlib.util.find_spec(package) is not None


def open_session(file: Path, threads: int) -> Any:
    """An ONNX Runtime session with default options but for the threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def session_call(file: Path, threads: int) -> Callable[[Tensor], Tensor]:
    """A model file as a call from a float32 tensor to its first output."""
    session = open_session(file, threads)
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def _input_name(file: Path) -> str:
    import onnx

    return onnx.load(file, load_external_data=False).graph.input[0].name


class _Reader:
    """Calibration batches as `quantize_static` reads them."""

    def __init__(self, data: Iterable[Tensor], name: str):
        self._feeds = iter([{name: batch.numpy()} for batch in data])

    def get_next(self) -> dict[str, Any] | None:
        return next(self._feeds, None)
