"""Mixed precision by explicit casts: one policy, from the op table, for FX graphs and for aten graphs.

`autocast_fx` is to a graph what `torch.autocast` is to eager code, with three differences: casts are nodes of the
graph, so that strongly typed backends take them; weights are cast now, not at every call; and a value that exists in
either precision at no cost (a weight, a constant, a dequantized tensor) is made in the precision that its reader wants.
The policy of an op is its `amp` in `fx_passes.ops`; it follows the lists of torch.autocast.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from fx_passes.entry.ambient import plain_state
from fx_passes.errors import InputError, StageError
from fx_passes.graph.copies import deep_copy
from fx_passes.graph.node_meta import inherit_meta
from fx_passes.ops import Op, Role, is_inplace, module_of, op_of

__all__ = ["Host", "autocast_fx", "autocast_graph"]

_FULL = torch.float32


@plain_state()
def autocast_fx(gm: GraphModule, dtype: torch.dtype = torch.float16, keep: Iterable[str] = ()) -> GraphModule:
    """Run the parts of a float32 graph that bear it in a lower precision.

    Args:
        gm: a graph whose nodes have `meta["val"]` (after `propagate_shapes`), or that records `example_inputs`.
        dtype: torch.float16 or torch.bfloat16.
        keep: nodes that stay in float32: node names or module paths, `*` matches anything ("head.*").

    Returns:
        A new graph module with the same inputs and outputs, their dtypes unchanged. Weights that are read in the lower
        precision are new tensors; the others are shared. `meta["amp"]` of a node says why it is in float32.

    Raises:
        InputError: another dtype, or a name in `keep` that matches no node.
        StageError: the graph's dtypes are not known.
    """
    from fx_passes.graph.module import copy_graph_module, delete_unused

    for node in gm.graph.nodes:
        if is_inplace(node, gm):
            raise StageError("an in-place operator is left in the graph", node=node, hint="call functionalize first")
    gm = _with_values(gm)
    new = copy_graph_module(gm)
    new.graph = autocast_graph(gm.graph, dtype, keep, _FxHost(gm, new, dtype))
    delete_unused(new)
    new.graph.lint()
    new.recompile()
    return new


def _with_values(gm: GraphModule) -> GraphModule:
    def known(node: Node) -> bool:
        return "val" in node.meta or node.op in ("output", "get_attr")

    if all(known(n) for n in gm.graph.nodes):
        return gm
    example = gm.meta.get("example_inputs")
    if example is None:
        raise StageError(
            "the dtypes of this graph are not known",
            hint="call propagate_shapes(gm, *example_inputs) before autocast_fx",
        )
    from fx_passes.analysis.shapes import propagate_shapes

    return propagate_shapes(gm, *example)


class Host(Protocol):
    """What differs between kinds of graphs: where constants live and how a cast is written."""

    def constant(self, node: Node) -> Tensor | None:
        """The value of a node that is a weight or another constant."""

    def put_constant(self, graph: Graph, node: Node, value: Tensor | None) -> Node:
        """A node of `graph` for the constant `node`: as it is (None), or with the value cast to the lower precision."""

    def cast(self, graph: Graph, node: Node, dtype: torch.dtype) -> Node:
        """`node` in another precision."""

    def lower_module(self, node: Node) -> str:
        """Where a module whose parameters are in the lower precision is found; for `call_module` nodes."""


@dataclass
class _Value:
    """One value of the old graph in the new one: in either precision, or both, as soon as somebody asks."""

    full: Node | None = None
    low: Node | None = None
    make: Callable[[bool], Node] | None = None  # makes it in the lower precision (True) or in full, at no cost
    wide: bool = False  # computed in float32: what reads it together with others is, too


def autocast_graph(old: Graph, dtype: torch.dtype, keep: Iterable[str], host: Host) -> Graph:
    """The rewrite behind `autocast_fx` and `lowering`'s `cast_float_part`: a new graph from one with known dtypes."""
    if dtype not in (torch.float16, torch.bfloat16):
        raise InputError(f"autocast to {dtype}", hint="torch.float16 or torch.bfloat16")
    return _Rewriter(old, dtype, _kept(old, list(keep)), host).run()


def _kept(graph: Graph, patterns: Sequence[str]) -> set[Node]:
    found: set[Node] = set()
    for pattern in patterns:
        matches = {
            n
            for n in graph.nodes
            for name in (n.name, n.meta.get("fx_node"), n.meta.get("module_path"))
            if n.op.startswith("call_")
            and name
            and (fnmatch.fnmatch(str(name), pattern) or str(name).startswith(f"{pattern}."))
        }
        if not matches:
            raise InputError(f"keep={pattern!r} matches no node of the graph", hint="names are as in print_tabular()")
        found |= matches
    return found


class _Rewriter:
    """Builds the new graph in one pass over the old one."""

    def __init__(self, old: Graph, dtype: torch.dtype, kept: set[Node], host: Host):
        self.old, self.dtype, self.kept, self.host = old, dtype, kept, host
        self.graph = Graph()
        self.values: dict[Node, _Value] = {}
        self.limits = torch.finfo(dtype)

    def run(self) -> Graph:
        for node in self.old.nodes:
            if node.op == "output":
                self._output(node)
            else:
                self.values[node] = self._value(node)
        return self.graph

    # -- one node ---------------------------------------------------------------------------------------------------

    def _value(self, node: Node) -> _Value:
        if (constant := self.host.constant(node)) is not None:
            return self._constant(node, constant)
        if node.op in ("placeholder", "get_attr"):
            return _Value(full=self._copy(node, low=False), wide=True)
        op = op_of(node)
        inputs = [n for n in node.all_input_nodes if _is_full(n)]
        if self._costs_nothing(node, op, inputs):
            return _Value(make=lambda low: self._copy(node, low=low, op=op))
        low, reason = self._precision(node, op, inputs)
        new = self._copy(node, low=low, op=op)
        if reason and inputs:
            new.meta["amp"] = reason
        return _Value(low=new) if low and _is_full(node) else _Value(full=new, wide=True)

    def _constant(self, node: Node, value: Tensor) -> _Value:
        if not _is_full(node) or not self._fits(value):
            return _Value(full=self.host.put_constant(self.graph, node, None), wide=True)

        def make(low: bool) -> Node:
            return self.host.put_constant(self.graph, node, value.to(self.dtype) if low else None)

        return _Value(make=make)

    def _fits(self, value: Tensor) -> bool:
        """Whether a constant survives the cast: nothing overflows. Infinities are what they are in any precision."""
        finite = value[torch.isfinite(value)] if value.numel() else value
        return finite.numel() == 0 or float(finite.abs().max()) <= self.limits.max

    def _costs_nothing(self, node: Node, op: Op | None, inputs: list[Node]) -> bool:
        """Whether the value can be made in either precision, with the same result as a cast of the other one."""
        if not _is_full(node) or op is None or node in self.kept:
            return False
        if op.role is Role.DEQUANTIZE:
            return self._fits_dequantized(node)
        if op.role is Role.FACTORY:
            return op.name in ("zeros", "ones", "full", "empty", "eye") and self._scalars_fit(node)
        if op.role is Role.CAST:  # small integers and booleans are exact in every float type
            source = node.args[0]
            small = (torch.bool, torch.uint8, torch.int8)
            return isinstance(source, Node) and isinstance(_value(source), Tensor) and _value(source).dtype in small
        if op.role is Role.RESHAPE and node.op != "call_module" and inputs:
            return all(self.values[n].make is not None for n in inputs)
        return False

    def _fits_dequantized(self, node: Node) -> bool:
        scale = node.args[1]
        largest = 255.0
        if isinstance(node.args[0], Node) and (stored := self.host.constant(node.args[0])) is not None:
            largest = float(stored.abs().max()) if stored.numel() else 0.0
        if isinstance(scale, Node):
            value = self.host.constant(scale)
            scale = float(value.max()) if value is not None and value.numel() else math.inf
        return isinstance(scale, (int, float)) and scale * largest <= self.limits.max

    def _precision(self, node: Node, op: Op | None, inputs: list[Node]) -> tuple[bool, str]:
        """Whether to compute in the lower precision, and if not, why."""
        if node in self.kept:
            return False, "kept by the caller"
        if op is None:
            return False, "unknown operator"
        if op.role is Role.QUANTIZE:
            return True, ""
        if op.amp == "fp32":
            return False, f"{op.name} is computed in float32"
        if not self._scalars_fit(node) and op.role is not Role.RESHAPE:
            return False, f"a number in it does not fit into {str(self.dtype).removeprefix('torch.')}"
        if node.kwargs.get("dtype") is _FULL or (op.role is Role.CAST and _names_float32(node)):
            return False, "the model asks for float32"
        if op.role is Role.CAST and not inputs:
            return False, ""
        if op.amp == "lower":
            blocked = [n.name for n in inputs if self.host.constant(n) is not None and self.values[n].make is None]
            return not blocked, f"weight {blocked[0]} does not fit" if blocked else ""
        if node.op == "call_module" and any(True for _ in _module(node).parameters()):
            return False, f"{op.name} is computed in float32"
        wide = [n for n in inputs if self.values[n].wide]
        return bool(inputs) and not wide, f"{wide[0].name} is in float32" if wide else ""

    def _scalars_fit(self, node: Node) -> bool:
        """Whether the numbers among the arguments keep their meaning: neither infinite nor zero after rounding."""
        numbers: list[float] = []
        map_aggregate(  # type: ignore[arg-type]
            (node.args, node.kwargs),
            lambda a: numbers.append(float(a)) if isinstance(a, (int, float)) and not isinstance(a, bool) else None,
        )
        whole = 2.0**31  # end of a slice, not an operand
        return all(
            not math.isfinite(n)
            or n == 0
            or abs(n) >= whole
            or self.limits.smallest_normal <= abs(n) <= self.limits.max
            for n in numbers
        )

    # -- building ---------------------------------------------------------------------------------------------------

    def _copy(self, node: Node, *, low: bool, op: Op | None = None) -> Node:
        """`node` computed in one precision: its float32 inputs read in that precision, dtypes it names changed."""
        lower = low and op is not None

        def read(n: Node) -> Node:
            # Q takes either precision, and a conversion to another type does too: no cast for their sake
            indifferent = op is not None and (op.role is Role.QUANTIZE or (op.role is Role.CAST and not _is_full(node)))
            scale = op is not None and op.role in (Role.QUANTIZE, Role.DEQUANTIZE) and n is not node.args[0]
            if scale:  # stays float32: half scales gain nothing and underflow
                return self._read(n, False)
            return self._read(n, None if indifferent else lower)

        new = self.graph.node_copy(node, read)
        if lower and op is not None:
            self._lower(new, node, op)
        inherit_meta(new, node)
        if "val" in new.meta and lower:
            new.meta["val"] = _lowered(new.meta["val"], self.dtype)
        return new

    def _lower(self, new: Node, old: Node, op: Op) -> None:
        """Dtypes that the call names: `out_dtype` of a DQ, `dtype` of a factory or cast; parameters of a module."""
        if op.role is Role.DEQUANTIZE:
            new.kwargs = {**new.kwargs, "out_dtype": self.dtype}
        elif op.role is Role.FACTORY:
            new.kwargs = {**new.kwargs, "dtype": self.dtype}
        elif op.role is Role.CAST and _is_full(old):
            change = lambda a: self.dtype if a is _FULL else a  # noqa: E731
            new.args, new.kwargs = map_aggregate(new.args, change), map_aggregate(new.kwargs, change)  # type: ignore
        elif new.op == "call_module" and any(True for _ in _module(old).parameters()):
            new.target = self.host.lower_module(old)

    def _read(self, node: Node, low: bool | None) -> Node:
        """The new node for an old one, in the precision asked for (None: in whichever it exists, else low)."""
        value = self.values[node]
        if not _is_full(node):
            low = False
        elif low is None:
            low = value.full is None
        found = value.low if low else value.full
        if found is not None:
            return found
        if value.make is not None:
            made = value.make(low)
        else:
            other = value.full if low else value.low
            assert other is not None
            made = self.host.cast(self.graph, other, self.dtype if low else _FULL)
            inherit_meta(made, node)
            if "fx_node" in node.meta:
                made.meta["fx_node"] = node.meta["fx_node"]
            made.meta["val"] = node.meta["val"] if not low else _lowered(node.meta["val"], self.dtype)
        if low:
            value.low = made
        else:
            value.full = made
        return made

    def _output(self, node: Node) -> None:
        result = map_arg(node.args[0], lambda n: self._read(n, False))
        new = self.graph.output(result)
        new.meta = dict(node.meta)


def _value(node: Node) -> Any:
    return node.meta.get("val")


def _is_full(node: Node) -> bool:
    """Whether the node's value, or any part of it, is a float32 tensor."""
    value = _value(node)
    if isinstance(value, Tensor):
        return value.dtype is _FULL
    if value is None or isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        return False
    found = False

    def look(value: Any) -> Any:
        nonlocal found
        found = found or (isinstance(value, Tensor) and value.dtype is _FULL)
        return value

    torch.utils._pytree.tree_map(look, value)
    return found


def _lowered(value: Any, dtype: torch.dtype) -> Any:
    return torch.utils._pytree.tree_map(
        lambda v: v.to(dtype) if isinstance(v, Tensor) and v.dtype is _FULL else v, value
    )


def _names_float32(node: Node) -> bool:
    return node.target == "float" or _FULL in (*node.args, *node.kwargs.values())


def _module(node: Node) -> nn.Module:
    module = module_of(node)
    assert module is not None
    return module


class _FxHost:
    """Constants are `get_attr` nodes, casts are `.to(dtype)`."""

    def __init__(self, old: GraphModule, new: GraphModule, dtype: torch.dtype):
        self.old, self.new, self.dtype = old, new, dtype
        self._lowered_modules: dict[str, str] = {}

    def constant(self, node: Node) -> Tensor | None:
        if node.op != "get_attr":
            return None
        value: Any = self.old
        for name in str(node.target).split("."):
            value = getattr(value, name, None)
        if not isinstance(value, Tensor):
            return None
        node.meta.setdefault("val", value.detach())
        return value.detach()

    def put_constant(self, graph: Graph, node: Node, value: Tensor | None) -> Node:
        from fx_passes.graph.module import set_buffer

        target = str(node.target)
        if value is not None:
            target = self._free(f"{target}_{_suffix(self.dtype)}")
            set_buffer(self.new, target, value)
        new = graph.get_attr(target)
        new.meta = dict(node.meta)
        new.meta["val"] = node.meta["val"] if value is None else value
        return new

    def cast(self, graph: Graph, node: Node, dtype: torch.dtype) -> Node:
        return graph.call_method("to", (node, dtype))

    def lower_module(self, node: Node) -> str:
        from fx_passes.graph.module import set_submodule

        path = str(node.target)
        if path not in self._lowered_modules:
            lowered = deep_copy(_module(node)).to(self.dtype)
            self._lowered_modules[path] = self._free(f"{path}_{_suffix(self.dtype)}")
            set_submodule(self.new, self._lowered_modules[path], lowered)
        return self._lowered_modules[path]

    def _free(self, path: str) -> str:
        taken = {
            name for name, _ in (*self.new.named_modules(), *self.new.named_parameters(), *self.new.named_buffers())
        }
        while path in taken:
            path += "_"
        return path


def _suffix(dtype: torch.dtype) -> str:
    return {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
