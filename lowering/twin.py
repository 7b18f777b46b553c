"""The float twin of a quantized program: the same operators without quantization, to compare engines and speed with."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fx_passes.ops import Role, op_of
from lowering.aten import AtenProgram
from lowering.aten_state import rebuild

__all__ = ["float_twin"]


def float_twin(program: AtenProgram) -> AtenProgram:
    """`program` with every Q/DQ pair replaced by what it reads, and int8 weights by the floats they stand for.

    The weights are those of the int8 program, dequantized: what is compared is which kernels run and what they move,
    not accuracy.

    Args:
        program: a program with Q/DQ, before its float part is cast.

    Returns:
        A new program with the same inputs and outputs; `program` is not changed.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    result = graph.graph_copy(program.graph, copies)
    graph.output(result).meta.update(program.graph.output_node().meta)
    state = {copies[node]: program.constants[node.name] for node in copies if node.name in program.constants}
    for node in list(graph.nodes):
        if _role(node) is Role.DEQUANTIZE:
            source = node.args[0]
            assert isinstance(source, Node)
            if _role(source) is Role.QUANTIZE:
                node.replace_all_uses_with(source.args[0])
            elif source in state:
                node.replace_all_uses_with(_dequantized(graph, node, source, state))
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


def _role(node: Node) -> Role | None:
    op = op_of(node)
    return op.role if op is not None else None


def _dequantized(graph: Graph, node: Node, source: Node, state: dict[Node, tuple[str, Tensor]]) -> Node:
    """A constant that holds what dequantizing `source` gives: by `node`, with constant scales and zero points."""
    with graph.inserting_after(source):
        new = graph.placeholder(f"{source.name}_float")
    new.target = new.name  # the name of the argument: another reader may have one of the same weight already
    new.meta = {**source.meta, "val": node.meta["val"]}
    args = [state[a][1].detach() if isinstance(a, Node) else a for a in node.args]
    fqn = state[source][0]
    taken = {name for name, _ in state.values()}
    name = next(n for n in (f"{fqn}_float", *(f"{fqn}_float_{i}" for i in range(len(taken)))) if n not in taken)
    assert callable(node.target)
    state[new] = (name, node.target(*args, **node.kwargs))
    return new
