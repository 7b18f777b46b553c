"""Capture by `torch.export`: the same kind of graph for a model whose own forward symbolic tracing refuses.

The graph is spelled in aten, over the model's own parameters and buffers. What a layer of `torch.nn` does in one op is
a call of that layer again, so that folding and quantizing give what they give for a traced model, under the same names.
"""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer
from torch.utils import _pytree as pytree

from fx_passes.capture.arguments import ArgumentPlan
from fx_passes.capture.conditions import UntranslatableError, condition_node
from fx_passes.capture.example_values import check_branch
from fx_passes.capture.patching import activate
from fx_passes.capture.quiet import quiet_torch
from fx_passes.capture.sources import failure_reason, traced_source
from fx_passes.capture.state import restored_state
from fx_passes.capture.tensor_indices import TensorIndices
from fx_passes.capture.wrap import records, wrapped_calls
from fx_passes.errors import CaptureError, LoweringError
from fx_passes.graph.copies import copied_inputs
from fx_passes.ops import OPS, Role

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["exported_graph"]

# Assertions about sizes that the placeholders' own checks make already, or that hold for any input.
_DROPPED = ("_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size")
_ONE_OP_LAYERS = tuple(
    module for op in OPS.values() if op.role is Role.WEIGHTED or op.name == "batch_norm" for module in op.modules
)


def exported_graph(model: nn.Module, example_inputs: Any, varying: tuple[Any, Any] | None = None) -> Graph:
    """The graph of one call of `model`, over its parameters and buffers; the model stays as it is.

    Args:
        model: any module.
        example_inputs: a tensor, a tuple of positional or a dict of keyword arguments. Sizes of 0 and 1 are constants
            to `torch.export`.
        varying: two more examples; what differs in size between them may differ from call to call. None: all that the
            model's code leaves open. The graph checks at each call what was decided by a size.

    Returns:
        A graph for `GraphModuleWithAttr(model, graph)`, with the signature of the model's forward.

    Raises:
        CaptureError: `torch.export` refuses, something wrapped runs in the model (its Python would be lost), a varying
            dimension is a constant to the model's code, or the graph would hold sizes that depend on data.
    """
    plan = ArgumentPlan(model, None, example_inputs)
    _refuse_wrapped_calls(model, plan)
    free = None if varying is None else _differing(*(_tensors(ArgumentPlan(model, None, inputs)) for inputs in varying))
    try:
        return _Importer(model, plan, _export(model, plan, free), free).graph
    except UntranslatableError as relation:
        if free is not None:
            raise CaptureError(
                f"torch.export relates dynamic sizes by '{relation}', which a graph cannot check"
            ) from None
        fixed = [frozenset[int]()] * len(_tensors(plan))
        return _Importer(model, plan, _export(model, plan, fixed), fixed).graph


class _WrappedCallError(BaseException):
    """Unwinds out of user code, past its own handlers."""


class _Guard:
    """Stands in for a tracer in one run of the model: a wrapped call that gets tensors ends it."""

    def sees(self, arguments: Any) -> bool:
        return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(arguments))

    def call_wrapped(self, target: Any, original: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if records(target, args) and self.sees((args, kwargs)):
            raise _WrappedCallError(getattr(target, "__name__", str(target)))
        with activate(None):
            return original(*args, **kwargs)


def _differing(some: list[Tensor], others: list[Tensor]) -> list[frozenset[int]]:
    """The dimensions in which tensors differ, pair by pair."""
    return [
        frozenset(d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n)
        for a, b in zip(some, others, strict=True)
    ]


def _tensors(plan: ArgumentPlan) -> list[Tensor]:
    return [leaf for leaf in plan.leaves(plan.examples) if isinstance(leaf, Tensor)]


def _refuse_wrapped_calls(model: nn.Module, plan: ArgumentPlan) -> None:
    """Run the model once, up to the first wrapped call that gets a tensor.

    Not while `torch.export` runs: what stands in for a wrapped builtin must not be seen by torch itself.

    Raises:
        CaptureError: there is such a call, or the model fails.
    """
    call = plan.call()
    forward = model.forward

    @functools.wraps(forward)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with TensorIndices():
            return forward(*args, **kwargs)

    with restored_state(model), torch.random.fork_rng(devices=[]), torch.no_grad(), wrapped_calls(model):
        try:
            with activate(_Guard()):  # type: ignore[arg-type]
                args, kwargs = copied_inputs((call.args, call.kwargs))
                model(*args, **kwargs)
        except _WrappedCallError as found:
            raise CaptureError(
                f"torch.export would lose the Python of '{found}', which is wrapped and runs in {type(model).__name__}",
                hint="move the code that cannot be traced into the wrapped function too",
            ) from None
        except Exception as error:
            raise CaptureError(f"the model fails on the example inputs: {failure_reason(error)}") from error


def _export(model: nn.Module, plan: ArgumentPlan, varying: Sequence[frozenset[int]] | None) -> ExportedProgram:
    call = plan.call()
    forward = model.forward

    @functools.wraps(forward)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with TensorIndices():
            return forward(*args, **kwargs)

    with restored_state(model), torch.random.fork_rng(devices=[]), quiet_torch(stack_traces=True), torch.no_grad():
        model.forward = traced
        try:
            return torch.export.export(model, call.args, call.kwargs, dynamic_shapes=_dims(plan, varying), strict=False)
        except Exception as error:
            raise CaptureError(f"torch.export refuses {type(model).__name__}: {_summary(error)}") from error


def _dims(plan: ArgumentPlan, varying: Sequence[frozenset[int]] | None) -> dict[str, Any]:
    from torch.export import Dim

    by_tensor = None if varying is None else dict(zip(map(id, _tensors(plan)), varying, strict=True))

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None
        free = frozenset(range(leaf.dim())) if by_tensor is None else by_tensor[id(leaf)]
        return {d: Dim.AUTO if d in free else Dim.STATIC for d in range(leaf.dim())}

    return {name: pytree.tree_map(of, value) for name, value in plan.call().arguments.items()}


def _summary(error: Exception) -> str:
    """The first sentence of what torch.export says, with the user's line."""
    message = failure_reason(error)
    return re.sub(r"\s+", " ", re.sub(r"(?:/[\w.\-+]+)+/([\w.\-]+)", r"\1", message))[:400]


class _Importer:
    """Rebuilds an exported program as a graph over the module that was exported."""

    def __init__(
        self,
        model: nn.Module,
        plan: ArgumentPlan,
        exported: ExportedProgram,
        varying: Sequence[frozenset[int]] | None,
    ):
        self.model, self.exported = model, exported
        self.graph = Graph()
        self.values = plan.opened(GraphAppendingTracer(self.graph), lambda leaf: not isinstance(leaf, Tensor))
        self.env: dict[Node, Any] = {}
        self.inputs: list[Node] = []  # placeholders of the exported program
        self._take_inputs(plan)
        self._check_sizes(plan, varying)
        for node in exported.graph.nodes:
            if node.op == "call_function":
                self._take(node)
        self._give_output()
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (node.op == "get_attr" or node.target == "size"):
                self.graph.erase_node(node)
        self.graph.lint()

    # -- arguments -----------------------------------------------------------------------------------------------

    def _take_inputs(self, plan: ArgumentPlan) -> None:
        from torch.export.graph_signature import InputKind

        given = iter(plan.leaves(self.values))
        taken: dict[str, int] = {}
        for spec in self.exported.graph_signature.input_specs:
            node = next(n for n in self.exported.graph.find_nodes(op="placeholder") if n.name == spec.arg.name)
            if spec.kind is InputKind.USER_INPUT:
                value = next(given)
                self.env[node] = value.node if isinstance(value, Proxy) else value
                if isinstance(value, Proxy):
                    self.inputs.append(node)
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                self.env[node] = self.graph.create_node("get_attr", str(spec.target), (), {})
            elif isinstance(constant := self.exported.constants.get(str(spec.target)), Tensor):
                self.env[node] = self._constant(constant, taken)
            else:
                raise CaptureError(f"the program holds '{spec.target}', which is no tensor")

    def _constant(self, value: Tensor, taken: dict[str, int]) -> Node:
        index = len(taken)
        while hasattr(self.model, f"_tensor_constant{index}"):
            index += 1
        taken[f"_tensor_constant{index}"] = index
        node = self.graph.create_node("get_attr", f"_tensor_constant{index}", (), {})
        node.meta["constant"] = value.detach()
        return node

    def _check_sizes(self, plan: ArgumentPlan, varying: Sequence[frozenset[int]] | None) -> None:
        """What the program takes for granted about the sizes of its inputs, checked at each call."""
        for index, node in enumerate(self.inputs):
            value: Node = self.env[node]
            shape = node.meta["val"].shape
            known = {d: int(size) for d, size in enumerate(shape) if not _is_symbolic(size)}
            if varying is not None and (frozen := sorted(varying[index] & set(known))):
                raise CaptureError(
                    f"dimension {frozen[0]} of '{node.name}' is given as dynamic, but to torch.export the model works "
                    f"only with size {known[frozen[0]]}",
                    hint="compute sizes from the tensor's shape, or give a static size",
                )
            if len(known) == len(shape):
                whole = self._call(getattr, value, "shape")
                self._check(whole, tuple(shape), f"{node.name}.shape")
                continue
            for d, size in known.items():
                self._check(self.graph.call_method("size", (value, d)), size, f"{node.name}.shape[{d}]")
        for text in getattr(self.exported, "_guards_code", ()):
            if not re.fullmatch(r"L(\[[^\]]+\])+\.size\(\)\[\d+\] == \d+", text):
                words = re.sub(r"L\['(\w+)'\]", r"\1", text).replace(".size()", ".shape")
                self._check(condition_node(self.graph, text, self.values), True, words)

    def _check(self, value: Any, expected: Any, text: str) -> None:
        self._call(check_branch, value, expected, text)

    def _call(self, function: Callable[..., Any], *args: Any) -> Node:
        return self.graph.call_function(function, args)

    # -- operations ----------------------------------------------------------------------------------------------

    def _take(self, node: Node) -> None:
        target: Any = node.target
        name = getattr(target, "__name__", str(target)).split(".")[0]
        if name in _DROPPED:
            return
        if isinstance(target, torch._ops.HigherOrderOperator):
            raise CaptureError(f"the program holds '{target}', a control structure that a flat graph cannot express")
        if _depends_on_data(node.meta.get("val")):
            raise CaptureError(
                f"the size of what '{target}' gives depends on data ({_line(node)})",
                hint="wrap() the function that computes it",
            )
        new = self._as_layer(node)
        if new is None and target is torch.ops.aten.sym_size.int:
            value, dim = node.args
            new = self.graph.call_method("size", (self.env[value], dim))  # type: ignore[index, arg-type]
        if new is None:
            new = self.graph.node_copy(node, self.env.__getitem__)
            new.meta = {}
        self.env[node] = new
        source = traced_source(node.meta.get("stack_trace"))
        if source is not None:
            new.meta["source"] = source
        path = _module_path(node)
        new.meta["module_path"] = path.rpartition(".")[0] if new.op == "call_module" else path

    def _as_layer(self, node: Node) -> Node | None:
        """A call of the layer whose forward is nothing but this op, or None."""
        path = _module_path(node)
        module = self._module(path)
        if type(module) not in _ONE_OP_LAYERS or module._forward_hooks or module._forward_pre_hooks:  # type: ignore[union-attr]
            return None
        first, *rest = (self.env.get(a, a) if isinstance(a, Node) else a for a in node.args)
        weight = next((a for a in rest if isinstance(a, Node) and a.op == "get_attr"), None)
        same_op = _OP_OF_MODULE[type(module)].aten
        if weight is None or str(weight.target) != f"{path}.weight" or node.target.name().split(".")[0] not in same_op:  # type: ignore[union-attr]
            return None
        if getattr(module, "padding_mode", "zeros") != "zeros" or not isinstance(first, Node):
            return None
        return self.graph.call_module(path, (first,))

    def _module(self, path: str) -> nn.Module | None:
        try:
            return self.model.get_submodule(path) if path else None
        except AttributeError:
            return None

    # -- the result ----------------------------------------------------------------------------------------------

    def _give_output(self) -> None:
        leaves = [self.env.get(a, a) if isinstance(a, Node) else a for a in self.exported.graph.output_node().args[0]]
        written = len(leaves) - self.exported.call_spec.out_spec.num_leaves  # type: ignore[union-attr]
        remaining = iter(leaves[written:])
        self.graph.output(self._structure(self.exported.call_spec.out_spec, remaining))

    def _structure(self, spec: Any, leaves: Iterator[Any]) -> Any:
        """The model's own structure around the results."""
        if spec.is_leaf():
            return next(leaves)
        items = [self._structure(child, leaves) for child in spec.children()]
        kind = spec.type
        if kind in (list, tuple):
            return kind(items)
        if kind is dict:
            return dict(zip(spec.context, items, strict=True))
        if kind is OrderedDict:
            return self._call(OrderedDict, dict(zip(spec.context, items, strict=True)))
        if kind is torch.Size:
            return self._call(torch.Size, tuple(items))
        built = pytree.tree_unflatten([None] * spec.num_leaves, spec)
        if isinstance(built, tuple) and hasattr(built, "_fields"):
            return self._call(type(built), *items)
        if type(built).__module__ == "torch.return_types":
            return self._call(type(built), tuple(items))
        if is_dataclass(built) and isinstance(built, dict):
            return self.graph.call_function(type(built), (), dict(zip(built, items, strict=True)))
        raise LoweringError(f"the model returns a {kind.__name__}, which a graph cannot build")


_OP_OF_MODULE = {module: op for op in OPS.values() for module in op.modules}


def _is_symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


def _depends_on_data(value: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return any(
        bool(free_unbacked_symbols(leaf))
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
    )


def _module_path(node: Node) -> str:
    """Qualified name of the module whose forward made the node ("layer@1" is the second call of "layer")."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return re.sub(r"@\d+", "", path)


def _line(node: Node) -> str:
    source = traced_source(node.meta.get("stack_trace"))
    return f"{source[0].rpartition('/')[2]}:{source[1]}" if source else "no source line"
