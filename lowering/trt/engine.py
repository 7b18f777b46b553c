"""A TensorRT engine as an `nn.Module`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fx_passes.errors import ArtifactError, BackendUnavailableError, InputError
from lowering.aten import TensorSpec
from lowering.trt.build import Engine
from lowering.trt.reference import ReferenceNetwork, store
from lowering.trt.runtime import EngineRunner

__all__ = ["TrtEngine"]


class TrtEngine(nn.Module):
    """Runs an engine on a GPU, and its network on the CPU.

    Args:
        engine: the built engine, or its bytes.
        reference: the very network the engine was built from, for `simulate`; None if it was not kept.
        inputs: specs of the inputs, in order.
        outputs: names of the outputs, in order.
    """

    def __init__(
        self,
        engine: Engine | bytes,
        reference: ReferenceNetwork | None,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[str],
    ):
        super().__init__()
        self.data = engine if isinstance(engine, bytes) else engine.data
        self.reference = reference
        self.inputs, self.outputs = list(inputs), list(outputs)
        self._runners: dict[torch.device, EngineRunner] = {}

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the engine on CUDA tensors, on the current stream; the outputs are new tensors on the same device.

        Raises:
            BackendUnavailableError: this machine has no CUDA device; `simulate` runs the network without one.
            InputError: an input has the wrong device, dtype, rank or size.
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

    def _runner(self, device: torch.device) -> EngineRunner:
        if device not in self._runners:
            names = [spec.name for spec in self.inputs]
            self._runners[device] = EngineRunner(self.data, names, self.outputs, device, _current_stream)
        return self._runners[device]

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
        if len(inputs) != len(self.inputs):
            raise InputError(f"the segment takes {len(self.inputs)} inputs, {len(inputs)} were given")
        for spec, x in zip(self.inputs, inputs, strict=True):
            fits = x.dim() == len(spec.min) and all(
                lo <= size <= hi for lo, size, hi in zip(spec.min, x.shape, spec.max, strict=True)
            )
            if not fits:
                taken = f"{spec.min}" if spec.min == spec.max else f"from {spec.min} to {spec.max}"
                raise InputError(
                    f"input '{spec.name}' has shape {tuple(x.shape)}, this segment takes {taken}",
                    hint="lower with a dynamic_batch or dynamic_shapes that covers these sizes",
                )

    # -- artifacts --------------------------------------------------------------------------------------------------

    def artifact_record(self) -> dict[str, Any]:
        """What the manifest says of this engine."""
        return {
            "kind": "tensorrt",
            "inputs": [{**asdict(spec), "dtype": str(spec.dtype).removeprefix("torch.")} for spec in self.inputs],
            "outputs": self.outputs,
            "network": self.reference is not None,
        }

    def artifact_files(self, name: str, *, include_network: bool = True) -> dict[str, Callable[[Path], Any]]:
        """File name -> function that writes it: the engine as trtexec takes it, and the network if asked for."""
        files: dict[str, Callable[[Path], Any]] = {f"{name}.engine": lambda path: path.write_bytes(self.data)}
        if include_network and self.reference is not None:
            for part in (store.STRUCTURE, store.WEIGHTS):
                files[f"{name}.{part}"] = partial(_write_part, self.reference, part)
        return files

    @classmethod
    def from_artifact(cls, folder: Path, name: str, record: dict[str, Any]) -> TrtEngine:
        """The engine that `artifact_files` and `artifact_record` described."""
        path = folder / f"{name}.engine"
        if not path.is_file():
            raise ArtifactError(f"{path.name} is missing from {folder.name}", hint="save the lowered module again")
        inputs = [_spec(plain) for plain in record["inputs"]]
        reference = _read_reference(folder, name) if record["network"] else None
        return cls(path.read_bytes(), reference, inputs, record["outputs"])

    def __deepcopy__(self, memo: dict[int, Any]) -> TrtEngine:
        copy = type(self)(self.data, self.reference, self.inputs, self.outputs)
        memo[id(self)] = copy
        return copy


def _spec(plain: dict[str, Any]) -> TensorSpec:
    lists = {key: tuple(plain[key]) for key in ("min", "opt", "max")}
    symbols = None if plain.get("symbols") is None else tuple(plain["symbols"])
    return TensorSpec(plain["name"], getattr(torch, plain["dtype"]), **lists, symbols=symbols)


def _write_part(reference: ReferenceNetwork, part: str, path: Path) -> None:
    # `save` writes a folder of two files; each is wanted under a name of its own
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        reference.save(scratch)
        os.replace(Path(scratch) / part, path)


def _read_reference(folder: Path, name: str) -> ReferenceNetwork:
    with tempfile.TemporaryDirectory() as scratch:
        for part in (store.STRUCTURE, store.WEIGHTS):
            source, target = (folder / f"{name}.{part}").resolve(), Path(scratch) / part
            if not source.is_file():
                raise ArtifactError(
                    f"{source.name} is missing from {folder.name}", hint="save the lowered module again"
                )
            try:
                target.symlink_to(source)
            except OSError:  # no permission for links (Windows): a copy does
                shutil.copyfile(source, target)
        return ReferenceNetwork.load(scratch)


def _current_stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream
