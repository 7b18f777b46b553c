"""What an engine was built with and for, and which of several engines fits a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fx_passes.errors import BackendUnavailableError

__all__ = ["EngineTarget", "fitting"]

_NAMES = {"rtx": "TensorRT-RTX", "tensorrt": "TensorRT"}
_AMPERE = (8, 0)


@dataclass(frozen=True)
class EngineTarget:
    """What an engine was built with and for.

    Attributes:
        flavour: "rtx" or "tensorrt".
        version: of that package, such as "1.7.1.116".
        compute_capabilities: of the GPUs it was built for, such as ("8.9",); None: portable (RTX).
        gpu: name of the GPU it was built on (TensorRT only).
        version_compatible: later versions of the same major number run it too.
        hardware_compatible: Ampere and newer GPUs run it too (TensorRT only).
    """

    flavour: str
    version: str
    compute_capabilities: tuple[str, ...] | None = None
    gpu: str | None = None
    version_compatible: bool = False
    hardware_compatible: bool = False

    def __str__(self) -> str:
        what = "portable" if self.compute_capabilities is None else f"for {', '.join(self.compute_capabilities)}"
        built_on = f", built on {self.gpu}" if self.gpu else ""
        freedoms = [
            text
            for text, given in (
                ("version compatible", self.version_compatible),
                ("hardware compatible", self.hardware_compatible),
            )
            if given
        ]
        return ", ".join([f"{_NAMES.get(self.flavour, self.flavour)} {self.version} ({what}{built_on})", *freedoms])

    def runs_on(self, capability: str) -> bool:
        """Whether a GPU of this compute capability is among those it was built for."""
        if self.compute_capabilities is None or self.hardware_compatible:
            return _numbers(capability) >= _AMPERE  # Turing has to be asked for by name
        return capability in self.compute_capabilities

    def runs_in(self, flavour: str, version: str) -> bool:
        """Whether this TensorRT can load it."""
        if flavour != self.flavour:
            return False
        if self.version_compatible:
            return _numbers(version)[:1] == _numbers(self.version)[:1] and _numbers(version) >= _numbers(self.version)
        return self.built_by(version)

    def built_by(self, version: str) -> bool:
        """Whether a version of TensorRT is the one that built it."""
        return _numbers(version)[:3] == _numbers(self.version)[:3]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def fitting(targets: Sequence[EngineTarget], flavour: str, version: str, capability: str, gpu: str) -> int:
    """Index of the engine to run: of those that fit, the one with the shortest list of GPUs.

    Args:
        targets: of the engines there are.
        flavour, version: of the TensorRT in use.
        capability: compute capability of the GPU, such as "8.9".
        gpu: its name.

    Raises:
        BackendUnavailableError: none fits; the text says what there is and what the GPU is.
    """
    fit = [i for i, t in enumerate(targets) if t.runs_in(flavour, version) and t.runs_on(capability)]
    if not fit:
        there = "; ".join(map(str, targets))
        raise BackendUnavailableError(
            f"no engine here fits {gpu} (compute capability {capability}) and {_NAMES[flavour]} {version}. "
            f"There is: {there}",
            hint="lower again for this GPU with this TensorRT, or add such an engine with lowering.merge",
        )
    return min(fit, key=lambda i: _preference(targets[i], gpu))


def _preference(target: EngineTarget, gpu: str) -> tuple[bool, bool, int]:
    """Built on this very GPU first; then the most specific; a portable one last."""
    capabilities = target.compute_capabilities
    return target.gpu not in (None, gpu), capabilities is None, len(capabilities or ())
