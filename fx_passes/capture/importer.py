"""An exported program as nodes of a graph over the module that was exported.

What a layer of `torch.nn` does in one op is a call of that layer again, so that folding and quantizing give what they
give for a traced model, under the same names.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.utils import _pytree as pytree

from fx_passes.capture.conditions import condition_node, worded
from fx_passes.capture.example_values import check_branch
from fx_passes.capture.export import Guard
from fx_passes.capture.sources import line_text, traced_source
from fx_passes.errors import CaptureError
from fx_passes.ops import OPS, Role

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["ProgramImporter"]

# Assertions about sizes that the placeholders' own checks make already, or that hold for any input.
_DROPPED = ("_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size")
_ONE_OP_LAYERS = tuple(
    module for op in OPS.values() if op.role is Role.WEIGHTED or op.name == "batch_norm" for module in op.modules
)
_OP_OF_MODULE = {module: op for op in OPS.values() for module in op.modules}


class ProgramImporter:
    """Adds the nodes of one exported program to a graph.

    Args:
        graph: where the nodes go.
        model: the module that the graph is of.
        exported: the program of `model`, or of a part of it.
        given: what stands for each of the program's inputs, in order: proxies of `graph`, and constants.
        guards: what the program takes for granted about the sizes of its tensors, checked at each call.
        varying: for each tensor of them, the dimensions that may differ from call to call; None: all that are open.
        path_of: from a name below the exported module to the one below `model`.
        constant: makes the node of a tensor that is no parameter or buffer.
    """

    def __init__(
        self,
        graph: Graph,
        model: nn.Module,
        exported: ExportedProgram,
        given: Sequence[Any],
        guards: Sequence[Guard],
        varying: Sequence[frozenset[int]] | None,
        path_of: Callable[[str], str] = str,
        constant: Callable[[Tensor], Node] | None = None,
    ):
        self.graph, self.model, self.exported = graph, model, exported
        self.path_of = path_of
        self.constants: dict[int, Node] = {}
        self.constant = constant or self._own_constant
        self.env: dict[Node, Any] = {}
        self.inputs: list[Node] = []  # placeholders of the exported program that are tensors
        before = set(graph.nodes)
        self._take_inputs(given)
        self._check_sizes(guards, varying)
        self._take_all(exported.graph_module)
        self.new = [node for node in graph.nodes if node not in before]

    def results(self) -> list[Any]:
        """What the program returns, flat: nodes and constants. The buffers that it changes are left out."""
        outputs = self.exported.graph.output_node().args[0]
        leaves = [self.env.get(a, a) if isinstance(a, Node) else a for a in outputs]  # type: ignore[union-attr]
        written = len(leaves) - self.exported.call_spec.out_spec.num_leaves  # type: ignore[union-attr]
        return leaves[written:]

    def erase_unread(self, kept: Sequence[Any]) -> None:
        """Erase the reads of state and sizes that nothing came to need."""
        for node in reversed(self.new):
            if not node.users and node not in kept and (node.op == "get_attr" or node.target == "size"):
                self.graph.erase_node(node)

    # -- arguments -----------------------------------------------------------------------------------------------

    def _take_inputs(self, given: Sequence[Any]) -> None:
        from torch.export.graph_signature import InputKind

        values = iter(given)
        placeholders = {n.name: n for n in self.exported.graph.find_nodes(op="placeholder")}
        for spec in self.exported.graph_signature.input_specs:
            node = placeholders[spec.arg.name]
            if spec.kind is InputKind.USER_INPUT:
                value = next(values)
                self.env[node] = value.node if isinstance(value, Proxy) else value
                if isinstance(value, (Proxy, Node)):
                    self.inputs.append(node)
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                self.env[node] = self.graph.create_node("get_attr", self.path_of(str(spec.target)), (), {})
            elif isinstance(constant := self.exported.constants.get(str(spec.target)), Tensor):
                self.env[node] = self.constant(constant)
            else:
                raise CaptureError(f"the program holds '{spec.target}', which is no tensor")

    def _own_constant(self, value: Tensor) -> Node:
        index = len(self.constants)
        while hasattr(self.model, f"_tensor_constant{index}"):
            index += 1
        node = self.graph.create_node("get_attr", f"_tensor_constant{index}", (), {})
        self.constants[index] = node
        node.meta["constant"] = value.detach()
        return node

    def _check_sizes(self, guards: Sequence[Guard], varying: Sequence[frozenset[int]] | None) -> None:
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
        names, values = [node.name for node in self.inputs], [self.env[node] for node in self.inputs]
        for guard in guards:
            line = "" if guard.source is None else f" ({line_text(*guard.source)})"
            condition = condition_node(self.graph, guard.condition, values)
            self._check(condition, True, worded(guard.condition, names) + line)

    def _check(self, value: Any, expected: Any, text: str) -> None:
        self._call(check_branch, value, expected, text)

    def _call(self, function: Callable[..., Any], *args: Any) -> Node:
        return self.graph.call_function(function, args)

    # -- operations ----------------------------------------------------------------------------------------------

    def _take_all(self, gm: GraphModule) -> None:
        for node in gm.graph.nodes:
            if node.op == "call_function":
                self._take(node, gm)

    def _take(self, node: Node, gm: GraphModule) -> None:
        target: Any = node.target
        name = getattr(target, "__name__", str(target)).split(".")[0]
        if name in _DROPPED or self._counts_batches(node):
            return
        if isinstance(target, torch._ops.HigherOrderOperator):
            self.env[node] = self._inlined(node, gm)
            return
        source = node.args[0] if target is operator.getitem else None
        if isinstance(source, Node) and isinstance(self.env.get(source), list):
            self.env[node] = self.env[source][node.args[1]]
            return
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
        line = traced_source(node.meta.get("stack_trace"))
        if line is not None:
            new.meta["source"] = line
        path = self._module_path(node)
        new.meta["module_path"] = path.rpartition(".")[0] if new.op == "call_module" else path

    def _inlined(self, node: Node, gm: GraphModule) -> list[Any]:
        """What a block under `torch.no_grad` or a disabled autocast gives, its operations in their place in the graph.

        Raises:
            CaptureError: another structure, such as a loop or a branch on data, which a flat graph cannot express.
        """
        name = str(node.target)
        flags = [a for a in node.args if not isinstance(a, Node)]
        blocks = [a for a in node.args if isinstance(a, Node) and a.op == "get_attr"]
        no_gradients = name == "wrap_with_set_grad_enabled"
        harmless = no_gradients or (name == "wrap_with_autocast" and False in flags[:3])
        if not harmless or len(blocks) != 1:
            raise CaptureError(
                f"the program holds '{node.target}', a control structure that a flat graph cannot express"
            )
        block: Any = getattr(gm, str(blocks[0].target))
        inner = block.graph.find_nodes(op="placeholder")
        given = node.args[node.args.index(blocks[0]) + 1 :]
        for placeholder, value in zip(inner, given, strict=True):
            self.env[placeholder] = self.env[value] if isinstance(value, Node) else value
        self._take_all(block)
        results = block.graph.output_node().args[0]
        found = [self.env[r] if isinstance(r, Node) else r for r in results]
        if no_gradients and not flags[0] and self.model.training:
            return [self.graph.call_method("detach", (r,)) if isinstance(r, Node) else r for r in found]
        return found

    def _counts_batches(self, node: Node) -> bool:
        """Whether the op adds to the counter of a BatchNorm, which the layer's own call does."""
        if node.target is not torch.ops.aten.add_.Tensor:
            return False
        counter = self.env.get(node.args[0])  # type: ignore[arg-type]
        return isinstance(counter, Node) and str(counter.target).endswith(".num_batches_tracked")

    def _as_layer(self, node: Node) -> Node | None:
        """A call of the layer whose forward is nothing but this op, or None."""
        path = self._module_path(node)
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

    def _module_path(self, node: Node) -> str:
        """Qualified name of the module whose forward made the node ("layer@1" is the second call of "layer")."""
        stack = node.meta.get("nn_module_stack") or {}
        path = list(stack.values())[-1][0] if stack else ""
        return self.path_of(re.sub(r"@\d+", "", path))


def _is_symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


def _depends_on_data(value: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return any(
        bool(free_unbacked_symbols(leaf))
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
    )


def _line(node: Node) -> str:
    source = traced_source(node.meta.get("stack_trace"))
    return f"{source[0].rpartition('/')[2]}:{source[1]}" if source else "no source line"
