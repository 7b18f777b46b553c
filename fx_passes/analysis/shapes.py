"""`propagate_shapes`: shapes and dtypes of every value of a graph, with fake tensors; dynamic dimensions by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from fx_passes.entry.ambient import plain_state
from fx_passes.errors import InputError, LoweringError
from fx_passes.graph.copies import deep_copy
from fx_passes.graph.module import copy_graph_module

__all__ = ["concrete_shape", "propagate_shapes", "shape_text"]

_UNKNOWN = object()


@plain_state()
def propagate_shapes(
    gm: GraphModule, *inputs: Any, dynamic_shapes: Mapping[str, Mapping[int, Any]] | None = None
) -> GraphModule:
    """Give every node `meta["val"]`: a fake tensor, or a structure of them, or a number. Nothing is computed.

    Args:
        gm: a graph; it is not changed.
        inputs: example inputs, real or fake tensors (or structures of them, or plain values), in order.
        dynamic_shapes: placeholder name -> {dimension: name}, where a name is a string or a `torch.export.Dim`.
            Dimensions of one name are one symbol; all others are fixed at the example's size.

    Returns:
        A copy. Calls that stay Python (`meta["python"]`, leaves that tracing could not enter) are not run: they and
        what follows from them get no "val". With dynamic dimensions, `meta["dimensions"]` maps symbols to names.

    Raises:
        InputError: an input is missing, a node refuses the shapes that reach it, or a node fixes a dynamic dimension;
            the node and its source line are named.

    Example:
        >>> from fx_passes import trace
        >>> gm = trace(torch.nn.Sequential(torch.nn.Linear(3, 4)))
        >>> gm = propagate_shapes(gm, torch.rand(2, 3), dynamic_shapes={"input_1": {0: "n"}})
        >>> [shape_text(node) for node in gm.graph.nodes]
        ['[n, 3]', '[n, 4]', '[n, 4]']
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    new = copy_graph_module(gm)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    placeholders = [n for n in new.graph.nodes if n.op == "placeholder"]
    required = [n for n in placeholders if not n.args]
    if not len(required) <= len(inputs) <= len(placeholders):
        names = ", ".join(n.name for n in placeholders)
        raise InputError(f"the graph takes {len(required)} to {len(placeholders)} inputs ({names}), got {len(inputs)}")
    symbols = _Symbols(mode, dynamic_shapes or {}, placeholders)
    fake_inputs = [symbols.fake(node, value) for node, value in zip(placeholders, inputs, strict=False)]
    with mode, torch.random.fork_rng(devices=[]):
        _ShapeInterpreter(new, symbols).run(*fake_inputs)
    new.meta["dimensions"] = {str(symbol): name for name, symbol in symbols.symbols.items()}
    return new


class _Symbols:
    """Fake inputs, with one symbol per named dimension."""

    def __init__(self, mode: Any, dynamic: Mapping[str, Mapping[int, Any]], placeholders: list[Node]):
        self.mode, self.dynamic = mode, dynamic
        self.symbols: dict[str, Any] = {}  # name -> sympy symbol
        self.sizes: dict[str, int] = {}
        self._nodes: dict[str, Any] = {}
        unknown = set(dynamic) - {n.name for n in placeholders} - {str(n.target) for n in placeholders}
        if unknown:
            raise InputError(
                f"dynamic_shapes names {sorted(unknown)}, which are no inputs of the graph",
                hint=f"its inputs are {[n.name for n in placeholders]}",
            )

    def fake(self, node: Node, value: Any) -> Any:
        dims = self.dynamic.get(node.name, self.dynamic.get(str(node.target), {}))
        if dims and not isinstance(value, Tensor):
            raise InputError(f"dynamic_shapes names '{node.name}', which is a {type(value).__name__}", node=node)
        if not dims:
            return pytree.tree_map_only(Tensor, lambda t: self.mode.from_tensor(t, static_shapes=True), value)
        sizes: list[Any] = list(value.shape)
        for dim, name in dims.items():
            if not -value.dim() <= dim < value.dim():
                raise InputError(f"'{node.name}' has {value.dim()} dimensions, dynamic_shapes names {dim}", node=node)
            sizes[dim] = self._size(node, dim, getattr(name, "__name__", name), value.shape[dim])
        with self.mode:
            return torch.empty(sizes, dtype=value.dtype, device=value.device)

    def _size(self, node: Node, dim: int, name: str, size: int) -> Any:
        if self.sizes.setdefault(name, size) != size:
            raise InputError(f"dimension '{name}' is {self.sizes[name]} and {size} in the examples", node=node)
        if name not in self._nodes:
            from torch._dynamo.source import ConstantSource
            from torch.fx.experimental.symbolic_shapes import DimDynamic

            env, source, hint = self.mode.shape_env, ConstantSource(f"{node.name}_{dim}"), max(size, 2)
            self.symbols[name] = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            self._nodes[name] = env.create_symintnode(self.symbols[name], hint=hint, source=source)
        return self._nodes[name]

    def fixed(self) -> tuple[str, Any] | None:
        """A named dimension that has been made a constant, and the constant."""
        for name, symbol in self.symbols.items():
            value = self.mode.shape_env.replacements.get(symbol)
            if value is not None and value.is_number:
                return name, value
        return None


class _ShapeInterpreter(Interpreter):
    def __init__(self, gm: GraphModule, symbols: _Symbols):
        super().__init__(gm)
        self.symbols = symbols
        self._modules: dict[int, Any] = {}

    def fetch_attr(self, target: str) -> Any:
        """Tensors of the model as fake ones, modules as copies that hold fake ones: a run writes to nothing real."""
        value = super().fetch_attr(target)
        if isinstance(value, nn.Module):
            if id(value) not in self._modules:
                tensors = (*value.parameters(), *value.buffers())
                memo: dict[int, Any] = {id(t): self.symbols.mode.from_tensor(t, static_shapes=True) for t in tensors}
                self._modules[id(value)] = deep_copy(value, memo)
            return self._modules[id(value)]
        return self.symbols.mode.from_tensor(value, static_shapes=True) if _is_real(value) else value

    def run_node(self, n: Node) -> Any:
        result = _UNKNOWN
        held = any(self.env[i] is _UNKNOWN for i in n.all_input_nodes)
        if not held and not n.meta.get("python") and not n.meta.get("untraceable"):
            result = self._run(n)
        n.meta.pop("val", None)
        if result is not _UNKNOWN:
            n.meta["val"] = result
        return result

    def _run(self, n: Node) -> Any:
        try:
            result = super().run_node(n)
        except LoweringError:
            raise
        except Exception as error:
            shapes = ", ".join(f"{i.name}: {shape_text(i)}" for i in n.all_input_nodes if shape_text(i))
            message = str(error).strip().split("\n")[0]
            raise InputError(f"shapes do not fit: {message} (inputs {shapes})", node=n) from error
        fixed = self.symbols.fixed()
        if fixed is not None:
            raise InputError(
                f"dynamic dimension '{fixed[0]}' is fixed at {fixed[1]} by this node",
                node=n,
                hint="derive sizes from the input's shape instead of writing them as numbers",
            )
        return result


def _is_real(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def concrete_shape(value: Tensor) -> tuple[int, ...]:
    """The shape of a fake tensor in integers, dynamic dimensions at the example's size."""
    return tuple(size if isinstance(size, int) else int(size.node.hint) for size in value.shape)


def shape_text(node: Node) -> str:
    """The shape of a node's value for people: "[n, 3, 224, 224]", one for each tensor of a tuple; "" if unknown."""
    gm = node.graph.owning_module
    names = gm.meta.get("dimensions", {}) if isinstance(gm, GraphModule) else {}
    tensors = [t for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
    return " ".join("[" + ", ".join(names.get(str(s), str(s)) for s in t.shape) + "]" for t in tensors)
