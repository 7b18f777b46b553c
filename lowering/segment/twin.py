"""Twins of a quantized program: the same operators with less quantization, to compare engines and speed with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fx_passes.ops import Role, op_of
from fx_passes.quantize.annotation import Granularity
from fx_passes.quantize.decomposed import decomposed
from lowering.segment.normal_form.state import rebuild
from lowering.segment.program import AtenProgram

__all__ = ["float_twin", "is_quantized", "layer_name", "partial_twin", "role_of"]


def float_twin(program: AtenProgram) -> AtenProgram:
    """`program` with every Q/DQ pair replaced by what it reads, and int8 weights by the floats they stand for.

    The weights are those of the int8 program, dequantized: what is compared is which kernels run and what they move,
    not accuracy.

    Args:
        program: a program with Q/DQ, before its float part is cast.

    Returns:
        A new program with the same inputs and outputs; `program` is not changed.
    """
    return partial_twin(program, {})


def partial_twin(program: AtenProgram, kept: Mapping[str, Granularity | None]) -> AtenProgram:
    """`program` with some of its layers left in int8 and the others as in `float_twin`.

    Args:
        program: a program with Q/DQ, before its float part is cast.
        kept: the layers that stay in int8, by the name of their node in the segment that was exported, with the
            granularity of their weight scales; None leaves it as it is. Other granularities change which kernels run:
            per-channel scales are copies of the one per tensor, and the one per tensor is the largest per channel.

    Returns:
        A new program with the same inputs and outputs; `program` is not changed.
    """
    return _Twin(program, kept).make()


def is_quantized(program: AtenProgram) -> bool:
    """Whether anything in a program is dequantized."""
    return any(role_of(node) is Role.DEQUANTIZE for node in program.call_nodes())


def layer_name(node: Node) -> str:
    """The name, in the segment, of the layer that an aten node was exported from."""
    return str(node.meta.get("fx_node", node.name)).removesuffix("_pad")


def role_of(node: Node) -> Role | None:
    """Role of an aten node in the op table."""
    op = op_of(node)
    return op.role if op is not None else None


class _Twin:
    """One copy of a program while it is edited."""

    def __init__(self, program: AtenProgram, kept: Mapping[str, Granularity | None]):
        self.program, self.kept = program, kept
        self.graph = Graph()
        copies: dict[Node, Node] = {}
        result = self.graph.graph_copy(program.graph, copies)
        self.graph.output(result).meta.update(program.graph.output_node().meta)
        self.state = {copies[n]: program.constants[n.name] for n in copies if n.name in program.constants}

    def make(self) -> AtenProgram:
        for node in list(self.graph.nodes):
            if role_of(node) is not Role.DEQUANTIZE:
                continue
            source: Any = node.args[0]
            if role_of(source) is Role.QUANTIZE:
                node.replace_all_uses_with(source.args[0], delete_user_cb=lambda u: layer_name(u) not in self.kept)
            elif source in self.state:
                self._weight(node, source)
        return self._finished()

    def _weight(self, node: Node, source: Node) -> None:
        """Give every reader of a dequantized weight what it is to read: int8 of some granularity, or floats."""
        readers: dict[str, list[Node]] = {"float": []}
        here = "per_channel" if node.target is decomposed().dequantize_per_channel.default else "per_tensor"
        for user in node.users:
            form = self.kept.get(layer_name(user), "float") or here
            readers.setdefault(form, []).append(user)
        for form, users in readers.items():
            if form == here or not users:
                continue
            new = self._float(node, source) if form == "float" else self._regrouped(node, source, form)
            node.replace_all_uses_with(new, delete_user_cb=users.__contains__)

    def _float(self, node: Node, source: Node) -> Node:
        """A constant that holds what `node` gives: its scales and zero points are constants."""
        return self._constant(source, "float", self._value(node), node.meta["val"])

    def _regrouped(self, node: Node, source: Node, form: str) -> Node:
        """`node` with scales per channel along axis 0 instead of one, or the other way round."""
        integers = self.state[source][1].detach()
        fake, limits = node.meta["val"], node.args[-3:]
        if form == "per_channel":
            scale = torch.full(integers.shape[:1], float(node.args[1]), dtype=torch.float32)  # type: ignore[arg-type]
            scales = self._constant(source, "scales", scale, fake.new_empty(scale.shape))
            target: Any = decomposed().dequantize_per_channel.default
            args: tuple[Any, ...] = (source, scales, None, 0, *limits)
        else:
            value = self._value(node)
            highest: Any = limits[1]
            step: float = float(value.abs().max()) / highest or 1.0
            rounded = (value / step).round().to(integers.dtype)
            whole = self._constant(source, "whole", rounded, source.meta["val"])
            target, args = decomposed().dequantize_per_tensor.default, (whole, step, 0, *limits)
        with self.graph.inserting_before(node):
            new = self.graph.call_function(target, args)
        new.meta = dict(node.meta)
        return new

    def _value(self, node: Node) -> Tensor:
        """What a dequantization of a constant gives."""
        args = [self.state[a][1].detach() if isinstance(a, Node) else a for a in node.args]
        assert callable(node.target)
        value: Tensor = node.target(*args, **node.kwargs)
        return value

    def _constant(self, source: Node, suffix: str, value: Tensor, fake: Tensor) -> Node:
        """A new constant beside `source`, under a name of its own."""
        with self.graph.inserting_after(source):
            new = self.graph.placeholder(f"{source.name}_{suffix}")
        new.target = new.name  # the name of the argument: another reader may have one of the same weight already
        new.meta = {**source.meta, "val": fake}
        fqn = self.state[source][0]
        taken = {name for name, _ in self.state.values()}
        names = (f"{fqn}_{suffix}", *(f"{fqn}_{suffix}_{i}" for i in range(len(taken))))
        self.state[new] = (next(name for name in names if name not in taken), value)
        return new

    def _finished(self) -> AtenProgram:
        graph, state, program = self.graph, self.state, self.program
        graph.eliminate_dead_code()
        for node in [n for n in state if not n.users]:
            del state[node]
            graph.erase_node(node)
        gm = GraphModule(program.exported.graph_module, graph)
        entries = {node.name: entry for node, entry in state.items()}
        named = {node: entries[node.name] for node in gm.graph.find_nodes(op="placeholder") if node.name in entries}
        return AtenProgram(
            rebuild(gm, named, program.exported),
            list(program.inputs),
            list(program.outputs),
            list(program.writebacks),
            list(program.buffer_inputs),
            {node.name: entry for node, entry in named.items()},
        )
