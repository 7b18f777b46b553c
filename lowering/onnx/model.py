"""What all runtimes of an ONNX file share: its bytes and specs, the checks of inputs, its part of an artifact."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fx_passes.errors import ArtifactError, InputError, LoweringError
from lowering.artifact.plain import checked
from lowering.artifact.schema import spec_from_plain, spec_to_plain
from lowering.onnx.expected import INPUTS, OUTPUTS, Expected, polygraphy_command
from lowering.onnx.files import OnnxFile
from lowering.segment.program import TensorSpec

if TYPE_CHECKING:
    import onnx

__all__ = ["OnnxModel", "RefusedModelError", "first_line"]

Self = TypeVar("Self", bound="OnnxModel")


class RefusedModelError(LoweringError):
    """A runtime does not take a model.

    Attributes:
        operator: the name of the ONNX node at fault, if the runtime's message has it.
    """

    def __init__(self, runtime: str, error: Exception, *, hint: str):
        super().__init__(f"{runtime} refuses the model: {first_line(error)}", hint=hint)
        found = _NODE.search(str(error))
        self.operator = next(filter(None, found.groups()), None) if found else None


# How ONNX Runtime's messages name a node: "in node (add)", "Node (topk) Op (TopK)", "node with name 'mean'".
_NODE = re.compile(r"[Nn]ode \(([^()]+)\)|node with name '([^']+)'")


class OnnxModel(nn.Module):
    """An ONNX model: torch tensors on the CPU in and out.

    Args:
        model: the model, as a proto, its bytes, or (above 2 GB) a file.
        inputs: what it takes, in order.
        outputs: names of its outputs, in order.
        threads: of one call; by default `torch.get_num_threads()` now.
        target: whose placement the model has; for "tensorrt" an artifact also gets the `trtexec` line.

    Attributes:
        runtime: whose class this is, as `lower_to_onnx(runtime=)` calls it.
        expected: one call of a file for TensorRT, to check its engine with where the GPU is; None: no such call.
    """

    runtime: ClassVar[str]

    def __init__(
        self,
        model: onnx.ModelProto | bytes | OnnxFile,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[str],
        *,
        threads: int | None = None,
        target: str = "onnxruntime",
    ):
        super().__init__()
        self.file = OnnxFile.of(model)
        self.inputs, self.outputs = list(inputs), list(outputs)
        self.threads = threads or torch.get_num_threads()
        self.target = target
        self.expected: Expected | None = None
        self._dims: list[list[Any]] = [list(spec.opt) for spec in self.inputs]  # a free dimension has a name instead

    @property
    def bytes(self) -> bytes:
        """The model, without its weights where they lie in a file of their own."""
        return self.file.content

    @property
    def description(self) -> str:
        """Runtime and version, for summaries."""
        raise NotImplementedError

    def optimized_ops(self) -> Counter[str]:
        """How often each kind of operator stands in the graph that really runs."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.description}, threads={self.threads}, {len(self.bytes) / 1e6:.1f} MB"

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

    # -- artifacts --------------------------------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """Keyword arguments that make another one like this, but for its threads."""
        return {"target": self.target}

    def artifact_record(self, *, include_network: bool = True) -> dict[str, Any]:
        """What the manifest says of this session. An ONNX file is its own network, whatever is asked for."""
        return {
            "kind": "onnx",
            "runtime": self.runtime,
            "inputs": [spec_to_plain(spec) for spec in self.inputs],
            "outputs": self.outputs,
            "external_data": self.file.path is not None,
            "expected": None if self.expected is None else self.expected.tolerances,
            **self.options(),
        }

    def artifact_files(self, name: str, *, include_network: bool = True) -> dict[str, Callable[[Path], Any]]:
        """File name -> function that writes it. An ONNX file is its own network, so `include_network` adds nothing."""
        from lowering.onnx.tensorrt_file import trtexec_command

        files = self.file.writers(f"{name}.onnx")
        if self.target == "tensorrt":
            line = trtexec_command(f"{name}.onnx", self.inputs)
            files[f"{name}.trtexec.txt"] = partial(_write_line, line)
        if self.expected is not None:
            check = polygraphy_command(name, self.inputs, self.expected.tolerances)
            files[f"{name}.polygraphy.txt"] = partial(_write_line, check)
            files[f"{name}.{INPUTS}"] = partial(Path.write_bytes, data=self.expected.inputs)
            files[f"{name}.{OUTPUTS}"] = partial(Path.write_bytes, data=self.expected.outputs)
        return files

    @staticmethod
    def artifact_needs(name: str, record: dict[str, Any]) -> list[str]:
        """Names of the files that `from_artifact` reads."""
        external = [f"{name}.onnx.data"] if record.get("external_data") else []
        expected = [f"{name}.{INPUTS}", f"{name}.{OUTPUTS}"] if record.get("expected") else []
        return [f"{name}.onnx", *external, *expected]

    @classmethod
    def from_artifact(cls: type[Self], folder: Path, name: str, record: dict[str, Any]) -> Self:
        """The session that `artifact_files` and `artifact_record` described, with as many threads as torch has now.

        Raises:
            ArtifactError: the file is missing, or the record is damaged.
            BackendUnavailableError: the runtime is not installed.
        """
        for needed in cls.artifact_needs(name, record):
            if not (folder / needed).is_file():
                raise ArtifactError(f"{needed} is missing from {folder.name}", hint="save the lowered module again")
        external = checked(record.get("external_data"), bool, f"'external_data' of {name}")
        inputs = [spec_from_plain(plain) for plain in checked(record.get("inputs"), list, f"the inputs of {name}")]
        outputs = [
            checked(o, str, f"an output of {name}")
            for o in checked(record.get("outputs"), list, f"the outputs of {name}")
        ]
        file = OnnxFile.read(folder / f"{name}.onnx", external)
        session = cls(file, inputs, outputs, **cls._read_options(name, record))
        if tolerances := checked(record.get("expected"), dict | None, f"'expected' of {name}"):
            limits = {output: checked(limit, float, f"a tolerance of {name}") for output, limit in tolerances.items()}
            read = [(folder / f"{name}.{part}").read_bytes() for part in (INPUTS, OUTPUTS)]
            session.expected = Expected(read[0], read[1], limits)
        return session

    @classmethod
    def _read_options(cls, name: str, record: dict[str, Any]) -> dict[str, Any]:
        return {"target": checked(record.get("target"), str, f"the target of {name}")}

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        copy = type(self)(self.file, self.inputs, self.outputs, threads=self.threads, **self.options())
        copy.expected = self.expected
        memo[id(self)] = copy
        return copy


def _write_line(line: str, path: Path) -> None:
    path.write_text(line + "\n", encoding="utf-8")


def _check_input(value: Any, spec: TensorSpec) -> None:
    if not isinstance(value, Tensor):
        raise InputError(f"input '{spec.name}' is a {type(value).__name__}, not a tensor")
    if value.dtype != spec.dtype:
        raise InputError(f"input '{spec.name}' is {value.dtype}, this segment takes {spec.dtype}", hint="cast it")
    if value.device.type != "cpu":
        raise InputError(
            f"input '{spec.name}' is on {value.device}; an ONNX file runs here on the CPU", hint="call with .cpu()"
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


def first_line(error: Exception) -> str:
    """What a runtime says first, without the folders of the machine that it was built on."""
    return re.sub(r"(?:/[\w.\-+]+)+/([\w.\-]+)", r"\1", str(error).strip().splitlines()[0])
