"""An ONNX model as a module: torch tensors in, torch tensors out, run by ONNX Runtime on the CPU."""

from __future__ import annotations

import logging
import re
import tempfile
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fx_passes.errors import ArtifactError, BackendUnavailableError, InputError, LoweringError
from lowering.aten import TensorSpec
from lowering.spec_format import checked, spec_from_plain, spec_to_plain

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


class OnnxSession(nn.Module):
    """Runs an ONNX model in ONNX Runtime. Calls from several threads may overlap.

    Args:
        model: the model, as a proto or its bytes.
        inputs: what it takes, in order.
        outputs: names of its outputs, in order.
        threads: of one call; by default `torch.get_num_threads()` now.
        target: whose placement the model has; for "tensorrt" an artifact also gets the `trtexec` line.
        exact: whether integer products must never saturate. On x86 without VNNI, ONNX Runtime adds uint8 x int8
            products in pairs in 16 bits, which large weights and activations overflow; exact kernels take about a
            third longer there, and are the same ones elsewhere. None: only if the results on `probe` differ.
        probe: inputs to decide that with; without them None means False.

    Raises:
        BackendUnavailableError: ONNX Runtime is not installed.
        LoweringError: ONNX Runtime refuses the model.
    """

    def __init__(
        self,
        model: onnx.ModelProto | bytes,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[str],
        *,
        threads: int | None = None,
        target: str = "onnxruntime",
        exact: bool | None = None,
        probe: Sequence[Tensor] | None = None,
    ):
        super().__init__()
        self.bytes = model if isinstance(model, bytes) else model.SerializeToString(deterministic=True)
        self.inputs, self.outputs = list(inputs), list(outputs)
        self.threads = threads or torch.get_num_threads()
        self.target = target
        self.exact = bool(exact)
        self._session = _open(self.bytes, self.threads, fuse_quantized=self.target == "onnxruntime", exact=self.exact)
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
        if exact is None and probe is not None and target == "onnxruntime" and self._saturates(probe):
            self.exact, self._session = True, _open(self.bytes, self.threads, exact=True)

    def _saturates(self, probe: Sequence[Tensor]) -> bool:
        """Whether 16-bit sums overflow on these inputs: the kernels then differ, and are equal bit for bit if not."""
        if _has_vnni() or b"QuantizeLinear" not in self.bytes:
            return False
        fast = self(*probe)
        try:
            exact_session = _open(self.bytes, self.threads, exact=True)
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

    def extra_repr(self) -> str:
        return f"{self.description}, threads={self.threads}, {len(self.bytes) / 1e6:.1f} MB"

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
                f"ONNX Runtime fails on inputs of shapes {', '.join(map(str, shapes))}: {_first_line(error)}",
                hint="check that these sizes work in the original model",
            ) from error

    def optimized_ops(self) -> Counter[str]:
        """How often each op type stands in the graph that ONNX Runtime runs, after its fusions."""
        import onnx

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "optimized.onnx"
            _open(self.bytes, 1, fuse_quantized=self.target == "onnxruntime", exact=self.exact, optimized_to=path)
            model = onnx.load(path, load_external_data=False)
        return Counter(node.op_type for node in model.graph.node)

    # -- shapes -----------------------------------------------------------------------------------------------------

    def _checked(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        if len(inputs) != len(self.inputs):
            raise InputError(f"this segment takes {len(self.inputs)} inputs, {len(inputs)} were given")
        sizes: dict[str, tuple[int, str]] = {}
        values = []
        for value, spec, dims in zip(inputs, self.inputs, self._dims, strict=True):
            _check_input(value, spec)
            for d, (size, dim) in enumerate(zip(value.shape, dims, strict=True)):
                if isinstance(dim, str) and (before := sizes.setdefault(dim, (size, spec.name)))[0] != size:
                    raise InputError(
                        f"input '{spec.name}' has size {size} in dimension {d}, which must equal {before[0]}, "
                        f"the '{dim}' of input '{before[1]}'"
                    )
            values.append(value.detach().contiguous())
        return values

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

    def artifact_record(self, *, include_network: bool = True) -> dict[str, Any]:
        """What the manifest says of this session. An ONNX file is its own network, whatever is asked for."""
        return {
            "kind": "onnx",
            "inputs": [spec_to_plain(spec) for spec in self.inputs],
            "outputs": self.outputs,
            "target": self.target,
            "exact": self.exact,
        }

    def artifact_files(self, name: str, *, include_network: bool = True) -> dict[str, Callable[[Path], Any]]:
        """File name -> function that writes it. An ONNX file is its own network, so `include_network` adds nothing."""
        from lowering.onnx.tensorrt_file import trtexec_command

        files: dict[str, Callable[[Path], Any]] = {f"{name}.onnx": lambda path: path.write_bytes(self.bytes)}
        if self.target == "tensorrt":
            line = trtexec_command(f"{name}.onnx", self.inputs)
            files[f"{name}.trtexec.txt"] = lambda path: path.write_text(line + "\n", encoding="utf-8")
        return files

    @staticmethod
    def artifact_needs(name: str, record: dict[str, Any]) -> list[str]:
        """Names of the files that `from_artifact` reads."""
        return [f"{name}.onnx"]

    @classmethod
    def from_artifact(cls, folder: Path, name: str, record: dict[str, Any]) -> OnnxSession:
        """The session that `artifact_files` and `artifact_record` described, with as many threads as torch has now.

        Raises:
            ArtifactError: the file is missing, or the record is damaged.
        """
        path = folder / f"{name}.onnx"
        if not path.is_file():
            raise ArtifactError(f"{path.name} is missing from {folder.name}", hint="save the lowered module again")
        inputs = [spec_from_plain(plain) for plain in checked(record.get("inputs"), list, f"the inputs of {name}")]
        outputs = [
            checked(o, str, f"an output of {name}")
            for o in checked(record.get("outputs"), list, f"the outputs of {name}")
        ]
        target = checked(record.get("target"), str, f"the target of {name}")
        exact = checked(record.get("exact"), bool, f"'exact' of {name}")
        return cls(path.read_bytes(), inputs, outputs, target=target, exact=exact)

    def __deepcopy__(self, memo: dict[int, Any]) -> OnnxSession:
        copy = type(self)(
            self.bytes, self.inputs, self.outputs, threads=self.threads, target=self.target, exact=self.exact
        )
        memo[id(self)] = copy
        return copy


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
    data: bytes, threads: int, *, exact: bool, fuse_quantized: bool = True, optimized_to: Path | None = None
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
    try:
        return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise LoweringError(
            f"ONNX Runtime refuses the model: {_first_line(error)}",
            hint="an older ONNX Runtime may not know this opset: upgrade onnxruntime",
        ) from error


def _check_input(value: Any, spec: TensorSpec) -> None:
    if not isinstance(value, Tensor):
        raise InputError(f"input '{spec.name}' is a {type(value).__name__}, not a tensor")
    if value.dtype != spec.dtype:
        raise InputError(f"input '{spec.name}' is {value.dtype}, this segment takes {spec.dtype}", hint="cast it")
    if value.device.type != "cpu":
        raise InputError(
            f"input '{spec.name}' is on {value.device}; ONNX Runtime runs here on the CPU", hint="call with .cpu()"
        )
    if value.dim() != len(spec.min):
        raise InputError(
            f"input '{spec.name}' has rank {value.dim()}, shape {tuple(value.shape)}; this segment takes rank "
            f"{len(spec.min)}"
        )
    if any(not lo <= size <= hi for lo, size, hi in zip(spec.min, value.shape, spec.max, strict=True)):
        raise InputError(
            f"input '{spec.name}' has shape {tuple(value.shape)}, this segment takes from {spec.min} to {spec.max}",
            hint="lower with a dynamic_batch or dynamic_shapes that covers these sizes",
        )


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


def _first_line(error: Exception) -> str:
    return re.sub(r"(?:/[\w.\-+]+)+/([\w.\-]+)", r"\1", str(error).strip().splitlines()[0])
