"""`estimate_cost`: what a graph computes and moves, without running it: FLOPs, bytes, sizes, peak memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fx_passes.analysis.shapes import concrete_shape, propagate_shapes, shape_text
from fx_passes.entry.ambient import plain_state
from fx_passes.errors import InputError
from fx_passes.graph.copies import deep_copy
from fx_passes.graph.node_meta import source_line
from fx_passes.ops import Op, Role, bind, is_inplace, module_of, op_of
from fx_passes.ops.flops import conv_transpose_flops

__all__ = ["Cost", "NodeCost", "estimate_cost"]


@dataclass(frozen=True)
class NodeCost:
    """What one call costs.

    Attributes:
        name, op, source, module_path: which call; `op` is the canonical name, or the target where the op is not known.
        flops: of convolutions and matrix products, 1 multiply-add = 2 FLOPs; None where they are not known.
        read_bytes: its tensor inputs, each counted once, parameters included; 0 for a view.
        written_bytes: its results; 0 for a view.
        parameter_bytes: parameters and buffers that it reads.
        value_bytes: size of its results, views too.
        shape: for people, "[1, 64, 56, 56]".
    """

    name: str
    op: str
    source: str | None
    module_path: str
    flops: int | None
    read_bytes: int
    written_bytes: int
    parameter_bytes: int
    value_bytes: int
    shape: str


@dataclass(frozen=True)
class Cost:
    """What a graph costs, call by call and in total.

    Attributes:
        nodes: in the order of execution.
        parameter_bytes: distinct parameters and buffers that the graph reads.
        input_bytes: its inputs.
        peak_activation_bytes: most memory that inputs and values hold at a time, if each is freed after its last use.
            Buffers inside an op (im2col) are not counted.
    """

    nodes: tuple[NodeCost, ...]
    parameter_bytes: int
    input_bytes: int
    peak_activation_bytes: int

    @property
    def flops(self) -> int:
        """FLOPs of all calls whose FLOPs are known."""
        return sum(n.flops or 0 for n in self.nodes)

    @property
    def unknown(self) -> list[str]:
        """Names of the calls whose FLOPs are not known."""
        return [n.name for n in self.nodes if n.flops is None]

    @property
    def read_bytes(self) -> int:
        return sum(n.read_bytes for n in self.nodes)

    @property
    def written_bytes(self) -> int:
        return sum(n.written_bytes for n in self.nodes)

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs per byte moved, each call on its own (no fusion)."""
        moved = self.read_bytes + self.written_bytes
        return self.flops / moved if moved else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        totals = ("flops", "read_bytes", "written_bytes", "arithmetic_intensity", "unknown")
        return {**asdict(self), **{name: getattr(self, name) for name in totals}}

    def table(self, top: int | None = None) -> str:
        """Text: one line per call, or the `top` most expensive ones by FLOPs, then bytes; then the totals."""
        nodes = list(self.nodes)
        if top is not None:
            nodes = sorted(nodes, key=lambda n: (-(n.flops or 0), -(n.read_bytes + n.written_bytes)))[:top]
        rows = [("node", "op", "shape", "MFLOPs", "read KB", "written KB", "parameters KB", "source")]
        rows += [
            (
                n.name,
                n.op,
                n.shape,
                "?" if n.flops is None else f"{n.flops / 1e6:.2f}",
                f"{n.read_bytes / 1e3:.1f}",
                f"{n.written_bytes / 1e3:.1f}",
                f"{n.parameter_bytes / 1e3:.1f}",
                n.source or "",
            )
            for n in nodes
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        left = (0, 1, 2, 7)
        lines = [
            "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]
        lines.insert(1, "-" * max(len(line) for line in lines))
        return "\n".join([line.rstrip() for line in lines] + ["", str(self)])

    def __str__(self) -> str:
        unknown = f"; FLOPs unknown for {', '.join(self.unknown)}" if self.unknown else ""
        parts = [
            f"{self.flops / 1e9:.3f} GFLOPs",
            f"{self.read_bytes / 1e6:.1f} MB read, {self.written_bytes / 1e6:.1f} MB written",
            f"{self.arithmetic_intensity:.1f} FLOPs per byte",
            f"parameters {self.parameter_bytes / 1e6:.2f} MB",
            f"peak activations {self.peak_activation_bytes / 1e6:.2f} MB",
        ]
        return ", ".join(parts) + unknown


@plain_state()
def estimate_cost(gm: GraphModule, example_inputs: Any = None) -> Cost:
    """Count FLOPs and bytes of every call of a graph, at the shapes of the example inputs. Nothing is computed.

    Args:
        gm: a graph, at any stage, or an exported one; it is not changed.
        example_inputs: a tensor or a tuple of inputs. Default: shapes that `propagate_shapes` put on the graph, else
            the inputs that the graph recorded when it was prepared.

    Returns:
        A `Cost`. FLOPs agree with `torch.utils.flop_counter`; bytes are those of the tensors as they stand in the
        graph. Dynamic dimensions count at the size of the example.

    Raises:
        InputError: there are no shapes and no example inputs, or they do not fit the graph.

    Example:
        >>> from fx_passes import trace
        >>> estimate_cost(trace(torch.nn.Linear(3, 4)), torch.rand(2, 3)).flops
        48
    """
    if example_inputs is None and not any("val" in n.meta for n in gm.graph.nodes):
        example_inputs = gm.meta.get("example_inputs")
        if example_inputs is None:
            raise InputError("the graph has no shapes", hint="pass example_inputs, or run propagate_shapes first")
    if example_inputs is not None:
        inputs = example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
        gm = propagate_shapes(gm, *inputs)
    calls = [n for n in gm.graph.nodes if n.op.startswith("call_")]
    inputs_and_state = [n for n in gm.graph.nodes if n.op == "placeholder"]
    state = {id(t): t for n in gm.graph.nodes for t in _parameters(n, gm)}
    return Cost(
        nodes=tuple(_node_cost(n, gm) for n in calls),
        parameter_bytes=sum(_bytes(t) for t in state.values()),
        input_bytes=sum(_bytes(t) for n in inputs_and_state for t in _tensors(n)),
        peak_activation_bytes=_peak_bytes(gm),
    )


def _node_cost(node: Node, gm: GraphModule) -> NodeCost:
    op = op_of(node, gm)
    parameters = _parameters(node, gm)
    results = _tensors(node)
    operands = _distinct([t for i in node.all_input_nodes for t in _tensors(i)] + parameters)
    moves = _moves_data(node, op, operands, results, gm)
    read = [i for i in node.all_input_nodes if i.op == "get_attr"]
    return NodeCost(
        name=node.name,
        op=op.name if op else str(getattr(node.target, "__name__", node.target)),
        source=source_line(node),
        module_path=node.meta.get("module_path", ""),
        flops=_flops(node, op, gm),
        read_bytes=sum(map(_bytes, operands)) if moves else 0,
        written_bytes=sum(map(_bytes, results)) if moves else 0,
        parameter_bytes=sum(map(_bytes, parameters)) + sum(_bytes(t) for i in read for t in _tensors(i)),
        value_bytes=sum(map(_bytes, results)),
        shape=shape_text(node),
    )


def _moves_data(node: Node, op: Op | None, operands: list[Tensor], results: list[Tensor], gm: GraphModule) -> bool:
    """Whether a call reads and writes memory: a view or a size does not, an op in place does."""
    if op is not None and (op.role is Role.SHAPE or is_inplace(node, gm)):
        return op.role is not Role.SHAPE
    held = {_storage(t) for t in operands}
    return any(_storage(t) not in held for t in results)


def _flops(node: Node, op: Op | None, gm: GraphModule) -> int | None:
    if op is None:
        return _counted_flops(node, gm)
    formula = op.flops
    if formula is None:
        return _counted_flops(node, gm) if op.role in (Role.MATMUL, Role.WEIGHTED) or op.name == "bilinear" else 0
    if op.name == "convolution" and bind(node).get("transposed"):
        formula = conv_transpose_flops
    results = _tensors(node)
    shapes = _operand_shapes(node, op, gm)
    if not results or len(shapes) < 2:
        return None
    return _with_vectors(formula, shapes, concrete_shape(results[0]))


def _with_vectors(formula: Callable[..., int], shapes: list[tuple[int, ...]], output: tuple[int, ...]) -> int:
    """Apply a formula of matrix products; a vector counts as a matrix of one row."""
    return formula(tuple(s if s else (1,) for s in shapes), output)


def _operand_shapes(node: Node, op: Op, gm: GraphModule) -> list[tuple[int, ...]]:
    """Shapes of the operands in the order of the functional spelling; a module's weight comes second."""
    bound = list(bind(node).values()) if node.op != "call_module" else []
    arguments = bound or [*node.args, *node.kwargs.values()]
    tensors = [t for a in arguments if isinstance(a, Node) for t in _tensors(a)[:1]]
    weight = getattr(module_of(node, gm), "weight", None) if node.op == "call_module" else None
    if isinstance(weight, Tensor):
        tensors.insert(1, weight)
    return [concrete_shape(t) for t in tensors]


def _counted_flops(node: Node, gm: GraphModule) -> int | None:
    """FLOPs of a call that the table has no formula for, counted while it runs on fake tensors."""
    if (
        node.meta.get("python")
        or node.meta.get("untraceable")
        or any("val" not in i.meta for i in node.all_input_nodes)
    ):
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    module = module_of(node, gm) if node.op == "call_module" else None
    fakes = [t for i in node.all_input_nodes for t in _tensors(i)]
    mode = getattr(fakes[0], "fake_mode", None) if fakes else None
    if mode is None or (node.op == "call_module" and module is None):
        return 0 if node.op != "call_module" else None
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda i: i.meta["val"])
    # The counter does not know the fused attention of the CPU.
    with mode, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        if module is not None:
            _fake_module(module, mode)(*args, **kwargs)
        elif node.op == "call_method":
            getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            node.target(*args, **kwargs)  # type: ignore[operator]
    total = counter.get_total_flops()
    return int(total if isinstance(total, int) else total.node.hint)


def _fake_module(module: nn.Module, mode: Any) -> nn.Module:
    tensors = (*module.parameters(), *module.buffers())
    memo: dict[int, Any] = {id(t): mode.from_tensor(t, static_shapes=True) for t in tensors}
    return deep_copy(module, memo)


# --- sizes


def _tensors(node: Node) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]


def _parameters(node: Node, gm: GraphModule) -> list[Tensor]:
    """Parameters and buffers that a call of a module, or a `get_attr` node, reads."""
    if node.op == "call_module":
        module = module_of(node, gm)
        return [] if module is None else _distinct([*module.parameters(), *module.buffers()])
    if node.op == "get_attr":
        value: Any = gm
        for name in str(node.target).split("."):
            value = getattr(value, name, None)
        return [value] if isinstance(value, Tensor) else []
    return []


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())


def _bytes(tensor: Tensor) -> int:
    return prod(concrete_shape(tensor)) * tensor.element_size()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _peak_bytes(gm: GraphModule) -> int:
    """Most bytes alive at a time: inputs to the end, other memory until the last use of any value in it."""
    nodes = list(gm.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    last_use: dict[int, int] = {}
    size: dict[int, int] = {}
    state = {_storage(t) for n in nodes if n.op == "get_attr" for t in _tensors(n)}
    for i, node in enumerate(nodes):
        end = len(nodes) if node.op == "placeholder" else max([i, *(order[u] for u in node.users)])
        for tensor in _tensors(node):
            key = _storage(tensor)
            if key not in state and node.op != "output":
                last_use[key] = max(last_use.get(key, 0), end)
                size[key] = max(size.get(key, 0), _bytes(tensor))
    alive: set[int] = set()
    peak = 0
    for i, node in enumerate(nodes):
        alive.update(k for t in _tensors(node) if (k := _storage(t)) in size)
        peak = max(peak, sum(size[k] for k in alive))
        alive -= {k for k in alive if last_use[k] <= i}
    return peak
