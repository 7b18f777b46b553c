"""The lifted state of an exported program while it is rewritten, and the program rebuilt around it."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from lowering.segment.program import AtenProgram, TensorSpec, WriteBack, output_values

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.export.graph_signature import InputSpec, OutputSpec

__all__ = ["LiftedState", "output_specs", "rebuild"]

aten = torch.ops.aten


class LiftedState:
    """Placeholders that stand for tensors of the module: read, add, merge, drop; then `finish` the program."""

    def __init__(self, exported: ExportedProgram):
        from torch.export.graph_signature import InputKind

        self.exported = exported
        self.gm: GraphModule = exported.graph_module
        self.mutated = set(exported.graph_signature.buffers_to_mutate.values())
        self._fqn: dict[Node, str] = {}
        self._value: dict[Node, Tensor] = {}
        placeholders = {n.name: n for n in self.gm.graph.find_nodes(op="placeholder")}
        self._first_input: Node | None = None
        for spec in exported.graph_signature.input_specs:
            node = placeholders[spec.arg.name]
            if spec.kind is InputKind.USER_INPUT:
                self._first_input = self._first_input or node
                continue
            fqn = str(spec.target)
            found = exported.state_dict.get(fqn, exported.constants.get(fqn))
            if not isinstance(found, Tensor):
                raise TypeError(f"{fqn} is a {type(found).__name__}, not a tensor")
            self._fqn[node], self._value[node] = fqn, found

    def value(self, node: Node) -> Tensor | None:
        """The tensor behind a placeholder; None for inputs, calls, and buffers that the program mutates."""
        if node not in self._value or self._fqn[node] in self.mutated:
            return None
        return self._value[node].detach()

    def name(self, node: Node) -> str:
        """The FQN of a lifted tensor."""
        return self._fqn[node]

    def add(self, fqn: str, value: Tensor) -> Node:
        """A new constant under `fqn`, with a number behind it if that is taken."""
        taken = set(self._fqn.values())
        fqn = next(name for name in _numbered(fqn) if name not in taken)
        graph = self.gm.graph
        last = self._first_input or next(n for n in graph.nodes if n.op != "placeholder")
        with graph.inserting_before(last):
            node = graph.placeholder("b_" + re.sub(r"\W", "_", fqn))
        any_val = next((n.meta["val"] for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)), None)
        mode = getattr(any_val, "fake_mode", None)
        node.meta["val"] = value if mode is None else mode.from_tensor(value, static_shapes=True)
        self._fqn[node], self._value[node] = fqn, value
        return node

    def merge_equal_constants(self) -> None:
        """One placeholder for parameters that are one tensor (tied weights), so that it is stored once."""
        seen: dict[tuple, Node] = {}
        for node, value in list(self._value.items()):
            if self._fqn[node] in self.mutated or value.numel() == 0:
                continue
            key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            first = seen.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)

    def finish(self, inputs: list[TensorSpec], segment: GraphModule) -> AtenProgram:
        """Drop unused state, turn mutated buffers into inputs, name inputs and outputs, rebuild the signature."""
        graph = self.gm.graph
        input_specs, output_specs = self._interface()
        buffers = self._buffers_as_inputs(inputs)
        writebacks = self._order_outputs(input_specs, output_specs, buffers)
        graph.eliminate_dead_code()
        for node in [n for n in self._fqn if not n.users]:
            del self._fqn[node], self._value[node]
            graph.erase_node(node)
        specs = list(inputs)
        taken: set[str] = set()
        user_nodes = [n for n in graph.find_nodes(op="placeholder") if n not in self._fqn]
        for i, node in enumerate(user_nodes):
            if i >= len(inputs):
                val = node.meta["val"]
                shape = tuple(int(s) for s in val.shape)
                specs.append(TensorSpec(_identifier(buffers[i - len(inputs)]), val.dtype, shape, shape, shape))
            taken.add(specs[i].name)
        _rename(graph, {node: spec.name for node, spec in zip(user_nodes, specs, strict=True)})
        _copy_unowned_outputs(graph)
        names = _name_outputs(graph, segment, taken, len(writebacks))
        state = {n: (self._fqn[n], self._value[n]) for n in graph.find_nodes(op="placeholder") if n in self._fqn}
        exported = rebuild(self.gm, state, self.exported)
        constants = {node.name: entry for node, entry in state.items()}
        return AtenProgram(exported, specs, names, writebacks, buffers, constants)

    def _interface(self) -> tuple[list[InputSpec], list[OutputSpec]]:
        signature = self.exported.graph_signature
        return signature.input_specs, signature.output_specs

    def _buffers_as_inputs(self, inputs: list[TensorSpec]) -> list[str]:
        """A buffer that the program mutates has a new value at each call: if read, it is an input after the others."""
        graph = self.gm.graph
        last = graph.find_nodes(op="placeholder")[-1]
        found = [n for n in self._fqn if self._fqn[n] in self.mutated and n.users]
        fqns = []
        for node in found:
            fqns.append(self._fqn[node])
            last.append(node)
            last = node
            del self._fqn[node], self._value[node]
        return fqns

    def _order_outputs(
        self, input_specs: list[InputSpec], output_specs: list[OutputSpec], buffers: list[str]
    ) -> list[WriteBack]:
        """Mutations come first in torch's signature and last in ours.

        One of a buffer that is not among `buffers`, those that the program reads, is dropped: every call overwrites the
        buffer before it looks at it, and the program is all that sees its copy.
        """
        from torch.export.graph_signature import InputKind, OutputKind

        output = self.gm.graph.output_node()
        user_names = [s.arg.name for s in input_specs if s.kind is InputKind.USER_INPUT]
        results: list[Node] = []
        mutations: list[tuple[Node, Literal["input", "buffer"], int | str]] = []
        for node, spec in zip(output_values(self.gm.graph), output_specs, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                results.append(node)
            elif spec.kind is OutputKind.BUFFER_MUTATION:
                if str(spec.target) in buffers:
                    mutations.append((node, "buffer", str(spec.target)))
            elif spec.kind is OutputKind.USER_INPUT_MUTATION:
                mutations.append((node, "input", user_names.index(str(spec.target))))
            else:
                raise TypeError(f"an output of kind {spec.kind} cannot be carried")
        output.args = ((*results, *(node for node, _, _ in mutations)),)
        return [WriteBack(len(results) + i, kind, target) for i, (_, kind, target) in enumerate(mutations)]


def rebuild(gm: GraphModule, state: dict[Node, tuple[str, Tensor]], like: ExportedProgram) -> ExportedProgram:
    """An exported program around an edited graph.

    Args:
        gm: its placeholders are the keys of `state`, then the inputs.
        state: placeholder -> (FQN, value) of everything lifted.
        like: the program that it was made from.
    """
    from torch.export import ExportedProgram
    from torch.export import graph_signature as sig

    graph = gm.graph
    values: dict[str, Tensor] = {}
    input_specs = []
    placeholders = graph.find_nodes(op="placeholder")
    for node in placeholders:
        argument = sig.TensorArgument(node.name)
        if node not in state:
            input_specs.append(sig.InputSpec(sig.InputKind.USER_INPUT, argument, None))
            continue
        fqn, value = state[node]
        values[fqn] = value
        if isinstance(value, nn.Parameter):
            input_specs.append(sig.InputSpec(sig.InputKind.PARAMETER, argument, fqn))
        else:
            input_specs.append(sig.InputSpec(sig.InputKind.BUFFER, argument, fqn, persistent=True))
    graph.lint()
    return ExportedProgram(
        root=gm,
        graph=graph,
        graph_signature=sig.ExportGraphSignature(input_specs, output_specs(graph)),
        state_dict=values,
        range_constraints=like.range_constraints,
        module_call_graph=_module_calls(len(placeholders) - len(state), len(output_values(graph))),
        example_inputs=None,
        constants={},
        verifiers=like.verifiers,
    )


def output_specs(graph: Graph) -> list[OutputSpec]:
    """What an exported program's signature says of the results of `graph`."""
    from torch.export import graph_signature as sig

    kind = sig.OutputKind.USER_OUTPUT
    return [sig.OutputSpec(kind, sig.TensorArgument(node.name), None) for node in output_values(graph)]


def _module_calls(n_inputs: int, n_outputs: int) -> list:
    """The call signature of a program of `n_inputs` tensors to a tuple of `n_outputs`."""
    from torch.export import ModuleCallEntry, ModuleCallSignature
    from torch.utils import _pytree as pytree

    in_spec = pytree.tree_flatten((tuple(range(n_inputs)), {}))[1]
    out_spec = pytree.tree_flatten(tuple(range(n_outputs)))[1]
    return [ModuleCallEntry("", ModuleCallSignature([], [], in_spec, out_spec))]


def _copy_unowned_outputs(graph: torch.fx.Graph) -> None:
    """An output that is an input, a constant or another output gets a copy of its own: backends ask for it."""
    output = graph.output_node()
    seen: set[Node] = set()
    results = []
    for node in output_values(graph):
        if node.op == "placeholder" or node in seen:
            with graph.inserting_before(output):
                copy = graph.call_function(aten.clone.default, (node,))
            copy.meta = {k: v for k, v in node.meta.items() if k in ("val", "source", "module_path", "fx_node")}
            node = copy
        seen.add(node)
        results.append(node)
    output.args = (tuple(results),)


def _name_outputs(graph: torch.fx.Graph, segment: GraphModule, taken: set[str], n_writebacks: int) -> list[str]:
    """The names of the segment's output nodes, made distinct; write-backs are named after what made them."""
    results = output_values(graph)
    given = [n.name for n in _flat(segment.graph.output_node().args[0])]
    labels = given + [f"{n.meta.get('fx_node', n.name)}_new" for n in results[len(given) :]]
    names = []
    for label in labels:
        name = next(n for n in _numbered(_identifier(label)) if n not in taken)
        taken.add(name)
        names.append(name)
    assert len(names) == len(results), (names, results, n_writebacks)
    return names


def _flat(value: Any) -> list[Node]:
    return [value] if isinstance(value, Node) else [n for item in value for n in _flat(item)]


def _numbered(name: str) -> Iterable[str]:
    yield name
    i = 1
    while True:
        yield f"{name}_{i}"
        i += 1


def _identifier(name: str) -> str:
    name = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"_{name}" if not name or name[0].isdigit() or keyword.iskeyword(name) else name


def _rename(graph: torch.fx.Graph, names: dict[Node, str]) -> None:
    """Give nodes exactly these names; whatever else holds one of them moves aside."""
    wanted = set(names.values())
    for node in graph.nodes:
        if node.name in wanted and names.get(node) != node.name:
            node._rename(f"{node.name}__node")
    for node, name in names.items():
        if node.name != name:
            node.name = name
            node.target = name
