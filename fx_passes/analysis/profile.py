"""`profile_nodes`: measured time and memory of every call of a graph, as PyTorch runs it here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from fx_passes.errors import InputError
from fx_passes.graph.node_meta import source_line
from fx_passes.ops import op_of

__all__ = ["NodeProfile", "Profile", "profile_nodes"]


@dataclass(frozen=True)
class NodeProfile:
    """One call.

    Attributes:
        name, op, source: which call; `op` is the canonical name, or the target where the op is not known.
        milliseconds: median over the iterations.
        memory_bytes: in use once it has run: `torch.cuda.memory_allocated` on a GPU; on a CPU the inputs and the values
            that are still needed, without parameters.
    """

    name: str
    op: str
    source: str | None
    milliseconds: float
    memory_bytes: int


@dataclass(frozen=True)
class Profile:
    """A measured run.

    Attributes:
        nodes: in the order of execution.
        iterations, warmup: how many runs were measured, and how many before them were not.
        threads: `torch.get_num_threads()`.
        device: of the inputs, "cpu" or the name of the GPU.
    """

    nodes: tuple[NodeProfile, ...]
    iterations: int
    warmup: int
    threads: int
    device: str

    @property
    def milliseconds(self) -> float:
        """Sum over the calls of their medians; without the time between calls."""
        return sum(n.milliseconds for n in self.nodes)

    @property
    def peak_bytes(self) -> int:
        return max((n.memory_bytes for n in self.nodes), default=0)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "milliseconds": self.milliseconds, "peak_bytes": self.peak_bytes}

    def table(self, top: int | None = None) -> str:
        """Text: one line per call, or the `top` slowest ones; then the totals."""
        nodes = list(self.nodes)
        if top is not None:
            nodes = sorted(nodes, key=lambda n: -n.milliseconds)[:top]
        width = max([4, *(len(n.name) for n in nodes)])
        op_width = max([2, *(len(n.op) for n in nodes)])
        total = self.milliseconds or 1.0
        lines = [f"{'node':{width}}  {'op':{op_width}}  {'ms':>9}  {'share':>6}  {'memory MB':>9}  source"]
        lines += [
            f"{n.name:{width}}  {n.op:{op_width}}  {n.milliseconds:9.4f}  {n.milliseconds / total:6.1%}  "
            f"{n.memory_bytes / 1e6:9.2f}  {n.source or ''}".rstrip()
            for n in nodes
        ]
        return "\n".join([*lines, "", str(self)])

    def __str__(self) -> str:
        return (
            f"{self.milliseconds:.3f} ms, peak {self.peak_bytes / 1e6:.2f} MB, median of {self.iterations} runs after "
            f"{self.warmup}, {self.threads} threads, {self.device}"
        )


def profile_nodes(gm: GraphModule, *inputs: Any, iterations: int = 10, warmup: int = 3) -> Profile:
    """Run a graph node by node and measure every call.

    Args:
        gm: any graph; its buffers, the random state and the inputs are afterwards as they were. Wrapped Python calls
            do run, as often as there are iterations.
        inputs: the graph's inputs.
        iterations: measured runs; the median counts.
        warmup: runs before them.

    Returns:
        A `Profile`. Gradients are off. On a GPU every call is waited for, so short kernels show launch cost.

    Raises:
        InputError: `iterations` is below 1 or `warmup` below 0.

    Example:
        >>> from fx_passes import trace
        >>> profile_nodes(trace(torch.nn.ReLU()), torch.rand(4), iterations=1).nodes[0].op
        'relu'
    """
    if iterations < 1 or warmup < 0:
        raise InputError(f"iterations={iterations} and warmup={warmup}: there must be at least one measured run")
    devices = {t.device for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)}
    cuda = next((d for d in devices if d.type == "cuda"), None)
    runs: list[_TimingInterpreter] = []
    with torch.no_grad(), _restored(gm, [d for d in devices if d.type == "cuda"]):
        for i in range(warmup + iterations):
            own = pytree.tree_map_only(Tensor, torch.clone, inputs)  # a graph may write to its inputs
            run = _TimingInterpreter(gm, cuda)
            run.run(*own)
            if i >= warmup:
                runs.append(run)
    calls = [n for n in gm.graph.nodes if n.op.startswith("call_")]
    return Profile(
        nodes=tuple(_node_profile(node, gm, runs) for node in calls),
        iterations=iterations,
        warmup=warmup,
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(cuda) if cuda is not None else "cpu",
    )


def _node_profile(node: Node, gm: GraphModule, runs: list[_TimingInterpreter]) -> NodeProfile:
    op = op_of(node, gm)
    return NodeProfile(
        name=node.name,
        op=op.name if op else str(getattr(node.target, "__name__", node.target)),
        source=source_line(node),
        milliseconds=statistics.median(run.seconds[node] for run in runs) * 1e3,
        memory_bytes=max(run.memory[node] for run in runs),
    )


@contextmanager
def _restored(gm: GraphModule, devices: list[torch.device]) -> Iterator[None]:
    """Leave buffers, parameters that the graph writes to, and the random state as they are found."""
    tensors = {id(t): t for t in (*gm.parameters(), *gm.buffers())}.values()
    versions = [(t, t._version, t.detach().clone()) for t in tensors if not isinstance(t, torch.nn.Parameter)]
    versions += [(t, t._version, t.detach().clone()) for t in _read_parameters(gm)]
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for tensor, version, value in versions:
                if tensor._version != version or not torch.equal(tensor, value):  # BatchNorm counts no versions
                    tensor.detach().copy_(value)


def _read_parameters(gm: GraphModule) -> list[Tensor]:
    """Parameters that the graph itself reads by name: only those can be written to by it."""
    named = dict(gm.named_parameters(remove_duplicate=False))
    return [named[str(n.target)] for n in gm.graph.nodes if n.op == "get_attr" and str(n.target) in named]


class _TimingInterpreter(Interpreter):
    """Times each call; frees a value after its last use, as generated code does."""

    def __init__(self, gm: GraphModule, cuda: torch.device | None):
        super().__init__(gm)
        self.cuda = cuda
        self.seconds: dict[Node, float] = {}
        self.memory: dict[Node, int] = {}
        self._state = {t.untyped_storage()._cdata for t in (*gm.parameters(), *gm.buffers())}
        self._inputs: list[Any] = []

    def run_node(self, n: Node) -> Any:
        if not n.op.startswith("call_"):
            result = super().run_node(n)
            if n.op == "placeholder":
                self._inputs.append(result)
            return result
        self._wait()
        start = time.perf_counter()
        result = super().run_node(n)
        self._wait()
        self.seconds[n] = time.perf_counter() - start
        self.memory[n] = self._memory(result)
        return result

    def _wait(self) -> None:
        if self.cuda is not None:
            torch.cuda.synchronize(self.cuda)

    def _memory(self, result: Any) -> int:
        if self.cuda is not None:
            return torch.cuda.memory_allocated(self.cuda)
        leaves = pytree.tree_leaves([self._inputs, list(self.env.values()), result])
        storages = [t.untyped_storage() for t in leaves if isinstance(t, Tensor) and t.layout is torch.strided]
        return sum({s._cdata: s.nbytes() for s in storages if s._cdata not in self._state}.values())
