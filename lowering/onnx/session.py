"""An ONNX model as a module: torch tensors in, torch tensors out, run by ONNX Runtime on the CPU."""

from __future__ import annotations

import logging
import re
import tempfile
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fx_passes.errors import BackendUnavailableError, LoweringError
from lowering.artifact.plain import checked
from lowering.onnx.files import OnnxFile
from lowering.onnx.model import OnnxModel, RefusedModelError, first_line
from lowering.segment.program import TensorSpec

if TYPE_CHECKING:
    import onnx
    import onnxruntime

__all__ = ["OnnxSession"]

_log = logging.getLogger("lowering.onnxruntime")
_REMEMBERED_SHAPES = 64
_SYMBOL = re.compile(r"[A-Za-z_]\w*")

# torch dtype -> TensorProto.DataType; what crosses the boundary of a segment
_ELEMENT_TYPES = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}


class OnnxSession(OnnxModel):
    """Runs an ONNX model in ONNX Runtime. Calls from several threads may overlap.

    Args:
        model, inputs, outputs, threads, target: as for `OnnxModel`.
        exact: whether integer products must never saturate (see `settle_exactness`).

    Raises:
        BackendUnavailableError: ONNX Runtime is not installed.
        RefusedModelError: ONNX Runtime does not take the model.
    """

    runtime: ClassVar[str] = "onnxruntime"

    def __init__(
        self,
        model: onnx.ModelProto | bytes | OnnxFile,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[str],
        *,
        threads: int | None = None,
        target: str = "onnxruntime",
        exact: bool = False,
    ):
        super().__init__(model, inputs, outputs, threads=threads, target=target)
        self.exact = exact
        self._session = _open(self.file, self.threads, fuse_quantized=self.target == "onnxruntime", exact=self.exact)
        self._output_plan = [(o.name, *_output_type(o.type), o.shape) for o in self._session.get_outputs()]
        self._dims = [list(i.shape) for i in self._session.get_inputs()]
        if [i.name for i in self._session.get_inputs()] != [s.name for s in self.inputs]:
            raise LoweringError(
                f"the ONNX file takes {[i.name for i in self._session.get_inputs()]}, not the given specs"
            )
        shapes = [spec.min for spec in self.inputs] + [shape for *_, shape in self._output_plan]
        self._fixed = all(spec.min == spec.max for spec in self.inputs) and all(
            isinstance(size, int) and size > 0 for shape in shapes for size in shape
        )
        self._shapes: OrderedDict[tuple, list[tuple[int, ...]]] = OrderedDict()
        self._lock = threading.Lock()

    def settle_exactness(self, probe: Sequence[Tensor]) -> None:
        """Use kernels whose integer products never saturate, if the results on `probe` differ from the usual ones'.

        On x86 without VNNI, ONNX Runtime adds uint8 x int8 products in pairs in 16 bits, which large weights and
        activations overflow; exact kernels take about a third longer there, and are the same ones elsewhere.
        """
        if self.target == "onnxruntime" and not self.exact and self._saturates(probe):
            self.exact, self._session = True, _open(self.file, self.threads, exact=True)

    def _saturates(self, probe: Sequence[Tensor]) -> bool:
        """Whether 16-bit sums overflow on these inputs: the kernels then differ, and are equal bit for bit if not."""
        if _has_vnni() or b"QuantizeLinear" not in self.bytes:
            return False
        fast = self(*probe)
        try:
            exact_session = _open(self.file, self.threads, exact=True)
        except LoweringError as error:
            # ONNX Runtime 1.32 converts a weight that two layers share twice, and then refuses the model.
            _log.info("ONNX Runtime cannot run this model with exact integer products: %s", error.what)
            return False
        session, self._session = self._session, exact_session
        try:
            exact = self(*probe)
        finally:
            self._session = session
        return not all(torch.equal(a, b) for a, b in zip(fast, exact, strict=True))

    @property
    def description(self) -> str:
        """Backend and version, for summaries."""
        return f"onnxruntime {_runtime().__version__}"

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the model.

        Args:
            inputs: CPU tensors as the specs say. They are read where they lie if they are contiguous.

        Returns:
            One new tensor per output, written in place by ONNX Runtime wherever its shape can be foreseen.

        Raises:
            InputError: an input has the wrong type, rank, dtype, device or size.
            LoweringError: ONNX Runtime fails on these inputs.
        """
        if self._fixed and self._as_specified(inputs):
            return self._run_fixed(inputs)
        values = self._checked(inputs)
        shapes = tuple(tuple(v.shape) for v in values)
        known = self._known_shapes(shapes)
        binding = self._session.io_binding()
        for spec, value in zip(self.inputs, values, strict=True):
            binding.bind_input(spec.name, "cpu", 0, _ELEMENT_TYPES[value.dtype], value.shape, _address(value))
        results: list[Tensor | None] = []
        for (name, dtype, element, _), shape in zip(self._output_plan, known, strict=True):
            if shape is None or 0 in shape:  # an empty tensor has no address to bind
                binding.bind_output(name, "cpu")
                results.append(None)
            else:
                buffer = torch.empty(shape, dtype=dtype)
                binding.bind_output(name, "cpu", 0, element, shape, buffer.data_ptr())
                results.append(buffer)
        self._run(binding, shapes)
        if any(result is None for result in results):
            bound = binding.get_outputs()
            results = [_to_torch(bound[i]) if r is None else r for i, r in enumerate(results)]
            self._remember(shapes, results)
        return tuple(r for r in results if r is not None)

    def _as_specified(self, inputs: tuple[Tensor, ...]) -> bool:
        """Whether every input can be read where it lies. `_checked` makes it so, or says what is wrong."""
        if len(inputs) != len(self.inputs):
            return False
        for value, spec in zip(inputs, self.inputs, strict=True):
            if not (
                isinstance(value, Tensor)
                and value.shape == spec.opt
                and value.dtype is spec.dtype
                and value.is_cpu
                and value.is_contiguous()
            ):
                return False
        return True

    def _run_fixed(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The short way, where all sizes are fixed: between two long calls each line of Python costs much more."""
        binding = self._session.io_binding()
        for value, spec in zip(inputs, self.inputs, strict=True):
            binding.bind_input(spec.name, "cpu", 0, _ELEMENT_TYPES[spec.dtype], spec.opt, value.data_ptr())
        results = []
        for name, dtype, element, shape in self._output_plan:
            result = torch.empty(shape, dtype=dtype)
            binding.bind_output(name, "cpu", 0, element, shape, result.data_ptr())
            results.append(result)
        self._run(binding, tuple(spec.opt for spec in self.inputs))
        return tuple(results)

    def _run(self, binding: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise LoweringError(
                f"ONNX Runtime fails on inputs of shapes {', '.join(map(str, shapes))}: {first_line(error)}",
                hint="check that these sizes work in the original model",
            ) from error

    def optimized_ops(self) -> Counter[str]:
        """How often each op type stands in the graph that ONNX Runtime runs, after its fusions."""
        import onnx

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "optimized.onnx"
            _open(self.file, 1, fuse_quantized=self.target == "onnxruntime", exact=self.exact, optimized_to=path)
            model = onnx.load(path, load_external_data=False)
        return Counter(node.op_type for node in model.graph.node)

    # -- shapes -----------------------------------------------------------------------------------------------------

    def _known_shapes(self, shapes: tuple) -> list[tuple[int, ...] | None]:
        """The output shapes where they follow from the input shapes: fixed, or seen with these inputs before."""
        with self._lock:
            seen = self._shapes.get(shapes)
            if seen is not None:
                self._shapes.move_to_end(shapes)
        symbols = {dim for dims in self._dims for dim in dims if isinstance(dim, str)}
        known: list[tuple[int, ...] | None] = []
        for i, (*_, dims) in enumerate(self._output_plan):
            names = {name for dim in dims if isinstance(dim, str) for name in _SYMBOL.findall(dim)}
            if all(isinstance(dim, int) for dim in dims):
                known.append(tuple(dims))
            elif None not in dims and names <= symbols and seen is not None:
                known.append(seen[i])
            else:  # the size depends on the data, or this is the first call with these sizes
                known.append(None)
        return known

    def _remember(self, shapes: tuple, results: Sequence[Tensor | None]) -> None:
        with self._lock:
            self._shapes[shapes] = [tuple(r.shape) for r in results if r is not None]
            while len(self._shapes) > _REMEMBERED_SHAPES:
                self._shapes.popitem(last=False)

    # -- artifacts --------------------------------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """Keyword arguments that make another one like this, but for its threads."""
        return {**super().options(), "exact": self.exact}

    @classmethod
    def _read_options(cls, name: str, record: dict[str, Any]) -> dict[str, Any]:
        exact = checked(record.get("exact", False), bool, f"'exact' of {name}")
        return {**super()._read_options(name, record), "exact": exact}


def _runtime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendUnavailableError(
            f"ONNX Runtime cannot be imported: {error}", hint="pip install onnxruntime"
        ) from error
    return onnxruntime


@cache
def _has_vnni() -> bool:
    """Whether this CPU multiplies uint8 by int8 with 32-bit sums. Not knowing counts as no."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="ignore")
    except OSError:
        return False
    return "vnni" in flags or "asimddp" in flags


def _open(
    file: OnnxFile, threads: int, *, exact: bool, fuse_quantized: bool = True, optimized_to: Path | None = None
) -> onnxruntime.InferenceSession:
    ort = _runtime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 4  # what matters comes back as an exception
    options.add_session_config_entry("session.x64quantprecision", "1" if exact else "0")
    # A file placed for TensorRT may have Half around its Q/DQ, which ONNX Runtime 1.32 moves as if it were Float.
    options.add_session_config_entry("session.disable_quant_qdq", "0" if fuse_quantized else "1")
    if optimized_to is not None:
        options.optimized_model_filepath = str(optimized_to)
        options.add_session_config_entry("session.disable_prepacking", "1")
        if file.path is not None:
            options.add_session_config_entry(
                "session.optimized_model_external_initializers_file_name", "optimized.data"
            )
    try:
        return ort.InferenceSession(file.source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise RefusedModelError(
            "ONNX Runtime", error, hint="an older ONNX Runtime may not know this opset: upgrade onnxruntime"
        ) from error


def _address(value: Tensor) -> int:
    return value.data_ptr() if value.numel() else _EMPTY.data_ptr()


_EMPTY = torch.zeros(1)  # ONNX Runtime wants an address even for a tensor without elements


def _output_type(text: str) -> tuple[torch.dtype, int]:
    """`tensor(float16)` -> torch.float16 and its number in ONNX."""
    names = {"float": torch.float32, "double": torch.float64}
    inner = text.removeprefix("tensor(").removesuffix(")")
    dtype = names.get(inner) or getattr(torch, inner, None)
    if not isinstance(dtype, torch.dtype) or dtype not in _ELEMENT_TYPES:
        raise LoweringError(f"an output of the ONNX file is {text}, which has no torch type")
    return dtype, _ELEMENT_TYPES[dtype]


def _to_torch(value: Any) -> Tensor:
    """An output in ONNX Runtime's memory as a tensor, sharing it."""
    if value.element_type() == _ELEMENT_TYPES[torch.bool]:
        return torch.from_numpy(value.numpy())  # DLPack would give uint8
    return torch.from_dlpack(value._get_c_value())
