"""A floor under the time of an engine, from its builder's layer listing and a GPU's published figures.

Roofline model (Williams, Waterman, Patterson, CACM 2009), kernel by kernel: a kernel takes at least the time to move
its bytes, and at least the time to do its operations; starting it takes a while of its own. Under the assumptions
stated here no implementation of these kernels is faster. It is not a measurement, and says nothing of how well the
kernels are written.

The memory model, tensor by tensor, for a call in a stream of calls of other work:

- weights, constants and the network's inputs come from DRAM, once per kernel that reads them;
- every byte passes the L2 cache, at its bandwidth;
- an activation that is read again after fewer bytes have been touched than the L2 holds, itself included, is still
  there (least recently used goes first); otherwise it comes from DRAM, and writing it went to DRAM.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

from fx_passes.errors import InputError

__all__ = [
    "LAUNCH_RANGE_US",
    "LAUNCH_US",
    "Floor",
    "Gpu",
    "engine_floor",
    "gpu_named",
    "gpus",
    "kernel_floors",
    "representative_gpu",
]

LAUNCH_US = 2.0
"""What starting a kernel takes, in microseconds, where one figure is needed: an assumption within `LAUNCH_RANGE_US`."""
LAUNCH_RANGE_US = (0.5, 2.5)
"""Between what it may lie. Below: kernels of one CUDA graph, each 0.5 us longer apart than they run (NVIDIA, "Getting
Started with CUDA Graphs", 2019: 3.4 us a kernel that runs for 2.9). Above: launches one by one from the host, which
submits a kernel in 2 to 2.5 us; no figure of NVIDIA's, to be replaced by what a card measures."""
_TYPES = (("Half", "fp16"), ("BFloat16", "bf16"))


@dataclass(frozen=True)
class Gpu:
    """A GPU's figures.

    Attributes:
        name: as in `gpus.json`.
        compute_capability: "8.9", ...
        memory: DRAM bandwidth, bytes/s.
        l2_bytes: size of the L2 cache.
        l2: its bandwidth, bytes/s; assumed (see `gpus.json`).
        rates: operations/s of "int8", "fp16", "bf16" and "fp32" products, dense.
        source: where they are from.
    """

    name: str
    compute_capability: str
    memory: float
    l2_bytes: int
    l2: float
    rates: dict[str, float]
    source: str


@dataclass(frozen=True)
class Floor:
    """Microseconds that one call takes at least.

    Attributes:
        gpu: name of the GPU.
        memory_us: to move the bytes of all kernels.
        compute_us: to do the operations of all kernels.
        launch_us: to start them.
        total_us: the sum over kernels of the larger of the first two, and the third.
        kernels: how many there are.
    """

    gpu: str
    memory_us: float
    compute_us: float
    launch_us: float
    total_us: float
    kernels: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@cache
def _data() -> dict[str, Any]:
    return json.loads(resources.files("lowering").joinpath("gpus.json").read_text(encoding="utf-8"))


@cache
def gpus() -> dict[str, Gpu]:
    """The GPUs that figures are known of, by name."""
    per_clock = _data()["assumptions"]["l2_bytes_per_clock_per_sm"]
    return {
        name: Gpu(
            name,
            g["compute_capability"],
            memory=g["memory_gb_s"] * 1e9,
            l2_bytes=g["l2_mb"] * 2**20,
            l2=per_clock * g["sms"] * g["sm_mhz"] * 1e6,
            rates={kind: rate * 1e12 for kind, rate in g["rates"].items()},
            source=g["source"],
        )
        for name, g in _data()["gpus"].items()
    }


def gpu_named(name: str | Gpu) -> Gpu:
    """A GPU by its name, in any spelling: "RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090".

    Raises:
        InputError: no figures are known of it; the message lists those that are.

    Example:
        >>> gpu_named("nvidia geforce rtx4090").l2_bytes >> 20
        72
    """
    if isinstance(name, Gpu):
        return name
    wanted = _plain(name)
    for known, gpu in gpus().items():
        if wanted == _plain(known):
            return gpu
    raise InputError(f"no figures are known of GPU {name!r}", hint=f"use one of {', '.join(gpus())}")


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


def representative_gpu(compute_capabilities: Sequence[str] | None) -> Gpu:
    """The GPU that stands for these capabilities: for several, the first of them; for None (portable), that of 8.9."""
    table = _data()["representative"]
    wanted = [c for c in compute_capabilities or ("8.9",) if c in table]
    return gpus()[table[wanted[0] if wanted else "8.9"]]


def engine_floor(rows: Sequence[dict[str, Any]], gpu: str | Gpu, launch_us: float = LAUNCH_US) -> Floor:
    """The least time that one call of an engine takes on a GPU.

    Args:
        rows: `LayerReport.rows`: one dict per kernel, in order.
        gpu: a `Gpu` or its name.
        launch_us: microseconds to start a kernel.

    Raises:
        InputError: an unknown GPU, or rows without byte counts (from an artifact of an older version).

    Example:
        >>> row = {"inputs": ["Half[1,8]"], "int8": False, "operations": 0, "reads": [["x", 1008]],
        ...        "constants": [], "writes": [["y", 0]]}
        >>> round(engine_floor([row], "RTX 4090").total_us, 3)
        2.001
    """
    gpu = gpu_named(gpu)
    costs = kernel_floors(rows, gpu)
    launches = launch_us * len(costs)
    return Floor(
        gpu.name,
        memory_us=sum(memory for memory, _ in costs),
        compute_us=sum(compute for _, compute in costs),
        launch_us=launches,
        total_us=sum(max(cost) for cost in costs) + launches,
        kernels=len(costs),
    )


def kernel_floors(rows: Sequence[dict[str, Any]], gpu: Gpu) -> list[tuple[float, float]]:
    """For every kernel the microseconds for its bytes and for its operations."""
    if any("reads" not in row for row in rows):
        raise InputError(
            "these kernels are listed without the bytes of their tensors", hint="lower the model again: older "
            "versions did not write them"
        )  # fmt: skip
    costs = []
    for row, dram in zip(rows, _dram_bytes(rows, gpu.l2_bytes), strict=True):
        moved = sum(size for part in ("reads", "constants", "writes") for _, size in row[part])
        memory = max(dram / gpu.memory, moved / gpu.l2)
        costs.append((memory * 1e6, row["operations"] / gpu.rates[_rate(row)] * 1e6))
    return costs


def _rate(row: dict[str, Any]) -> str:
    """Which of a GPU's rates a kernel's products go at: by the type that it reads."""
    if row["int8"]:
        return "int8"
    return next((kind for name, kind in _TYPES if any(t.startswith(name) for t in row["inputs"])), "fp32")


def _dram_bytes(rows: Sequence[dict[str, Any]], l2_bytes: int) -> list[int]:
    """For every kernel the bytes that it moves from and to DRAM."""
    cached = _Cache(l2_bytes)
    found = [0] * len(rows)
    written: dict[str, tuple[int, int]] = {}  # name -> the kernel that wrote it, and how much
    for index, row in enumerate(rows):
        for name, size in _merged(row["reads"]):
            if cached.holds(name, size):
                continue
            found[index] += size
            if name in written:  # it was evicted, so writing it went to DRAM, too
                writer, wrote = written.pop(name)
                found[writer] += wrote
        for name, size in _merged(row["constants"]):
            found[index] += size
            cached.touch(name, size)
        for name, size in _merged(row["writes"]):
            cached.touch(name, size)
            if size > l2_bytes:
                found[index] += size
            else:
                written[name] = (index, size)
    return found


def _merged(tensors: Iterable[Sequence[Any]]) -> Iterable[tuple[str, int]]:
    """One entry per name: a kernel that reads two slices of a tensor reads the larger at least."""
    sizes: dict[str, int] = {}
    for name, size in tensors:
        sizes[name] = max(size, sizes.get(name, 0))
    return sizes.items()


class _Cache:
    """A cache of tensors, the least recently used of which go first."""

    def __init__(self, size: int):
        self.size = size
        self._entries: OrderedDict[str, int] = OrderedDict()
        self._held = 0

    def holds(self, name: str, size: int) -> bool:
        """Whether a read of `name` finds it; it is there afterwards."""
        hit = name in self._entries
        self.touch(name, max(size, self._entries.get(name, 0)))
        return hit

    def touch(self, name: str, size: int) -> None:
        self._held += size - self._entries.pop(name, 0)
        self._entries[name] = size
        while self._held > self.size:
            _, dropped = self._entries.popitem(last=False)
            self._held -= dropped
