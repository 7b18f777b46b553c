"""A TensorRT engine as an `nn.Module`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fx_passes.errors import ArtifactError, BackendUnavailableError, InputError
from lowering.artifact.plain import checked, lists
from lowering.artifact.schema import spec_from_plain, spec_to_plain
from lowering.segment.program import TensorSpec
from lowering.trt import bindings
from lowering.trt.builder.build import Engine
from lowering.trt.builder.targets import EngineTarget, fitting
from lowering.trt.reference import ReferenceNetwork, store
from lowering.trt.run.graphs import GraphedRunner, TorchCapturer
from lowering.trt.run.runtime import EngineRunner, TorchStreams

__all__ = ["EngineFile", "TrtEngine"]


@dataclass(frozen=True)
class EngineFile:
    """A serialized engine and what it was built with and for."""

    data: bytes
    target: EngineTarget


class TrtEngine(nn.Module):
    """Runs an engine on a GPU, and its network on the CPU.

    Args:
        engines: the built engine, or engines of one network for different GPUs, of which the fitting one is run.
        reference: the very network the engines were built from, for `simulate`; None if it was not kept.
        inputs: specs of the inputs, in order.
        outputs: names of the outputs, in order.
        cuda_graphs: replay the run as a CUDA graph for each shape.

    Attributes:
        lean_runtime: path of the lean runtime library of the TensorRT that built a version compatible engine. A later
            TensorRT needs it, as the engine file has no host code in it; None if the versions are the same.
    """

    def __init__(
        self,
        engines: Engine | Sequence[EngineFile],
        reference: ReferenceNetwork | None,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[str],
        *,
        cuda_graphs: bool = False,
    ):
        super().__init__()
        self.engines = [EngineFile(engines.data, engines.target)] if isinstance(engines, Engine) else list(engines)
        self.reference = reference
        self.inputs, self.outputs = list(inputs), list(outputs)
        self.cuda_graphs = cuda_graphs
        self.lean_runtime: str | None = None
        self._runners: dict[torch.device, EngineRunner | GraphedRunner] = {}
        self._lock = threading.Lock()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the engine on CUDA tensors, on the current stream; the outputs are new tensors on the same device.

        Raises:
            BackendUnavailableError: this machine has no CUDA device (`simulate` runs the network without one), or no
                engine here fits it.
            InputError: an input has the wrong device, dtype, rank or size.
            LoweringError: TensorRT does not start the run.
        """
        if not torch.cuda.is_available():
            raise BackendUnavailableError(
                "a TensorRT engine runs on an NVIDIA GPU, and torch finds none on this machine",
                hint="call .simulate(...) to execute the same network on the CPU",
            )
        if not inputs:
            raise InputError("a TensorRT engine needs at least one input tensor")
        device = inputs[0].device
        if device.type != "cuda":
            raise InputError(
                f"input '{self.inputs[0].name}' is on {device}, a TensorRT engine takes CUDA tensors",
                hint="move the inputs to the GPU, or call .simulate(...) on the CPU",
            )
        with torch.cuda.device(device):
            return self._runner(device)(*inputs)

    def prepare(self, device: torch.device) -> None:
        """Choose the engine for a GPU and load it now, not at the first call.

        Raises:
            BackendUnavailableError: none fits; the text says what there is and what the GPU is.
        """
        with torch.cuda.device(device):
            self._runner(torch.device("cuda", torch.cuda.current_device()))

    def _runner(self, device: torch.device) -> EngineRunner | GraphedRunner:
        with self._lock:  # deserializing is not for two threads at once
            if device not in self._runners:
                self._runners[device] = self._load(device)
            return self._runners[device]

    def _load(self, device: torch.device) -> EngineRunner | GraphedRunner:
        name = torch.cuda.get_device_name(device)
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
        self._choose_flavour()
        targets = [file.target for file in self.engines]
        chosen = self.engines[fitting(targets, bindings.flavour(), bindings.version(), capability, name)]
        built_here = chosen.target.flavour == "rtx" or chosen.target.built_by(bindings.version())
        if not built_here and self.lean_runtime is None:
            raise BackendUnavailableError(
                f"the engine is {chosen.target}; TensorRT {bindings.version()} runs it through the lean runtime of "
                f"{chosen.target.version}, which is a library of its own",
                hint="set the attribute lean_runtime of the TrtEngine to its path (libnvinfer_lean.so)",
            )
        native = self.cuda_graphs and bindings.has("CudaGraphStrategy.WHOLE_GRAPH_CAPTURE")
        runner = EngineRunner(
            chosen.data,
            [spec.name for spec in self.inputs],
            self.outputs,
            device,
            TorchStreams(),
            lean_runtime=None if built_here else self.lean_runtime,
            native_graphs=native,
            described=f"the engine is {chosen.target}; the GPU is {name}, compute capability {capability}",
        )
        return GraphedRunner(runner, TorchCapturer()) if self.cuda_graphs and not native else runner

    def _choose_flavour(self) -> None:
        """Take the TensorRT that the engines are for, if this process has not loaded another one yet."""
        flavours = {file.target.flavour for file in self.engines}
        if len(flavours) == 1 and bindings.flavour() not in flavours and not bindings.loaded():
            bindings.use_flavour(flavours.pop())

    def simulate(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Execute the network that the engine was built from, on the CPU.

        Raises:
            BackendUnavailableError: the network was not kept (`save(..., include_network=False)`).
            InputError: an input has the wrong dtype, rank or size.
        """
        if self.reference is None:
            raise BackendUnavailableError(
                "this artifact was saved without its network, so it cannot be simulated",
                hint="save it with include_network=True",
            )
        self._check_sizes(inputs)
        return self.reference.run(*inputs)

    def _check_sizes(self, inputs: Sequence[Tensor]) -> None:
        """What the engine would refuse is refused here too."""
        if len(inputs) != len(self.inputs):
            raise InputError(f"the segment takes {len(self.inputs)} inputs, {len(inputs)} were given")
        profiles = max((len(spec.profiles) for spec in self.inputs), default=0)
        for spec, x in zip(self.inputs, inputs, strict=True):
            ranges = [(low, high) for low, _, high in spec.profiles] or [(spec.min, spec.max)]
            if not any(_fits(x, *sizes) for sizes in ranges):
                taken = " or ".join(str(low) if low == high else f"from {low} to {high}" for low, high in ranges)
                raise InputError(
                    f"input '{spec.name}' has shape {tuple(x.shape)}, this segment takes {taken}",
                    hint="lower with a dynamic_batch or dynamic_shapes that covers these sizes",
                )
        if profiles > 1 and not any(self._in_profile(inputs, index) for index in range(profiles)):
            given = ", ".join(f"{s.name}={tuple(x.shape)}" for s, x in zip(self.inputs, inputs, strict=True))
            raise InputError(f"no one optimization profile covers {given}")

    def _in_profile(self, inputs: Sequence[Tensor], index: int) -> bool:
        return all(
            not spec.profiles or _fits(x, spec.profiles[index][0], spec.profiles[index][2])
            for spec, x in zip(self.inputs, inputs, strict=True)
        )

    # -- artifacts --------------------------------------------------------------------------------------------------

    def artifact_record(self, *, include_network: bool = True) -> dict[str, Any]:
        """What the manifest says of this engine."""
        return {
            "kind": "tensorrt",
            "inputs": [spec_to_plain(spec) for spec in self.inputs],
            "outputs": self.outputs,
            "network": include_network and self.reference is not None,
            "engines": [lists(asdict(file.target)) for file in self.engines],
            "cuda_graphs": self.cuda_graphs,
        }

    def artifact_files(self, name: str, *, include_network: bool = True) -> dict[str, Callable[[Path], Any]]:
        """File name -> function that writes it: the engines as trtexec takes them, and the network if asked for."""
        files: dict[str, Callable[[Path], Any]] = {
            engine_file(name, index): partial(_write_bytes, file.data) for index, file in enumerate(self.engines)
        }
        if include_network and self.reference is not None:
            files |= {f"{name}.{part}": write for part, write in store.parts(self.reference.record).items()}
        return files

    @staticmethod
    def artifact_needs(name: str, record: dict[str, Any]) -> list[str]:
        """Names of the files that `from_artifact` reads."""
        count = len(checked(record.get("engines"), list, f"the list of engines of {name}"))
        engines = [engine_file(name, index) for index in range(count)]
        return engines + [f"{name}.{part}" for part in (store.STRUCTURE, store.WEIGHTS) if record.get("network")]

    @classmethod
    def from_artifact(cls, folder: Path, name: str, record: dict[str, Any]) -> TrtEngine:
        """The engine that `artifact_files` and `artifact_record` described.

        Raises:
            ArtifactError: a file is missing, or the record is damaged.
        """
        for needed in cls.artifact_needs(name, record):
            if not (folder / needed).is_file():
                raise ArtifactError(f"{needed} is missing from {folder.name}", hint="save the lowered module again")
        targets = [_target(plain, name) for plain in record["engines"]]
        if not targets:
            raise ArtifactError(f"the manifest lists no engine for {name}", hint="save the lowered module again")
        inputs = [spec_from_plain(plain) for plain in checked(record.get("inputs"), list, f"the inputs of {name}")]
        outputs = [
            checked(o, str, f"an output of {name}")
            for o in checked(record.get("outputs"), list, f"the outputs of {name}")
        ]
        reference = None
        if checked(record.get("network"), bool, f"'network' of {name}"):
            reference = ReferenceNetwork(
                store.read(*(folder / f"{name}.{p}" for p in (store.STRUCTURE, store.WEIGHTS)))
            )
        files = [EngineFile((folder / engine_file(name, i)).read_bytes(), t) for i, t in enumerate(targets)]
        graphs = checked(record.get("cuda_graphs", False), bool, f"'cuda_graphs' of {name}")
        return cls(files, reference, inputs, outputs, cuda_graphs=graphs)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrtEngine:
        copy = type(self)(self.engines, self.reference, self.inputs, self.outputs, cuda_graphs=self.cuda_graphs)
        memo[id(self)] = copy
        return copy


def engine_file(name: str, index: int) -> str:
    """File name of a segment's engine: "segment_0.engine", then "segment_0.1.engine" ..."""
    return f"{name}.engine" if index == 0 else f"{name}.{index}.engine"


def _target(plain: Any, name: str) -> EngineTarget:
    checked(plain, dict, f"an engine of {name}")
    capabilities = plain.get("compute_capabilities")
    if capabilities is not None:
        listed = checked(capabilities, list, f"the compute capabilities of {name}")
        capabilities = tuple(checked(c, str, f"a compute capability of {name}") for c in listed)
    return EngineTarget(
        checked(plain.get("flavour"), str, f"the flavour of an engine of {name}"),
        checked(plain.get("version"), str, f"the TensorRT version of an engine of {name}"),
        capabilities,
        checked(plain.get("gpu"), str | None, f"the GPU of an engine of {name}"),
        checked(plain.get("version_compatible", False), bool, "version_compatible"),
        checked(plain.get("hardware_compatible", False), bool, "hardware_compatible"),
    )


def _write_bytes(data: bytes, path: Path) -> None:
    path.write_bytes(data)


def _fits(x: Tensor, smallest: Sequence[int], largest: Sequence[int]) -> bool:
    return x.dim() == len(smallest) and all(
        lo <= size <= hi for lo, size, hi in zip(smallest, x.shape, largest, strict=True)
    )
