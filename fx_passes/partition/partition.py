"""`partition`: the maximal tensor programs between Python calls, as segments that a glue graph calls.

The glue runs in stages: the Python of stage 0, segment 0, the Python of stage 1, segment 1, ... A tensor op belongs to
the first segment whose inputs are all there; a Python call to the first stage after what it reads. So there are as few
segments as there are Python calls in the longest chain, and no value runs in a circle. Python calls keep their order,
and so do reads and writes of memory that the recorded run saw written.

Sizes, dtypes and the integer arithmetic on them are computed wherever they are needed, from the tensors there: inside
a segment they follow its inputs, they are never constants.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fx_passes.capture.example_values import check_branch
from fx_passes.capture.state import restored_state
from fx_passes.errors import LoweringError
from fx_passes.graph.copies import copied_inputs
from fx_passes.graph.module import copy_graph_module, delete_unused, set_submodule
from fx_passes.graph.node_meta import inherit_meta
from fx_passes.partition.recording import Recording, bind_inputs, positional, record
from fx_passes.partition.stages import Place, Plan

__all__ = ["check_output", "partition"]


def partition(
    gm: GraphModule,
    example_args: tuple[Any, ...],
    example_kwargs: dict[str, Any] | None = None,
    *,
    min_segment_nodes: int = 1,
    check: bool = True,
    recording: Recording | None = None,
) -> GraphModule:
    """Split `gm` into segments of tensor operations and the Python between them.

    Nodes with `meta["python"]` stay Python; so does, with the reason in the same place, what reads a number or a list
    that only Python knows, what hands out a tuple whose length may follow its input's size, and views of memory that
    is written in place elsewhere.

    Args:
        gm: a graph at any stage; it is not changed.
        example_args: positional arguments of one call. It is run (twice, without gradients; buffers, attributes and
            the random state are put back), to know which values are tensors and what shares memory.
        example_kwargs: its keyword arguments.
        min_segment_nodes: a segment with fewer operations stays Python.
        check: run the glue too and compare the structure of its output. False leaves that to the caller, who finds
            the output of the graph's own run in `glue.meta["expected_output"]`, for `check_output`.
        recording: of this very graph on these inputs, from an earlier partition; more of its nodes may be marked to
            stay Python since. None: the graph is run once to record it.

    Returns:
        The glue: a graph module of the same type whose `call_module` nodes `segment_0`, `segment_1`, ... are plain
        `torch.fx.GraphModule`s. A segment takes tensors, positionally, and returns a flat tuple of distinct tensors,
        none of them one of its inputs. Its parameters keep their dotted paths and are shared with `gm`.

    Raises:
        InputError: the example inputs do not fit, or the model fails on them.
        LoweringError: the glue's output has another structure than the graph's.
    """
    kwargs = dict(example_kwargs or {})
    recording = recording or record(gm, tuple(example_args), kwargs)
    plan = Plan(gm, recording, min_segment_nodes)
    glue = _Builder(gm, plan).build()
    if check:
        _verify(glue, recording.output, tuple(example_args), kwargs)
    else:
        glue.meta["expected_output"] = recording.output
    return glue


class _Builder:
    """Builds the segments and the glue from a plan."""

    def __init__(self, gm: GraphModule, plan: Plan):
        self.gm, self.plan = gm, plan
        self.glue = copy_graph_module(gm)
        self.graph = Graph(tracer_cls=gm.graph._tracer_cls)
        self.env: dict[Node, Node] = {}
        self.output_node = next(iter(gm.graph.find_nodes(op="output")))
        self.needed_outside = plan.needed_outside()

    def build(self) -> GraphModule:
        if any(str(n.target).split(".")[0].startswith("segment_") for n in self.plan.glue_nodes()):
            raise LoweringError(
                "the model has a submodule named segment_..., which stays in Python",
                hint="rename it: the segments of a lowered model take these names",
            )
        for node in self.gm.graph.find_nodes(op="placeholder"):
            self.env[node] = self._copy(node)
        segments: dict[str, GraphModule] = {}
        for stage in range(self.plan.stages + 1):
            for node in self.plan.glue_at(stage):
                self._emit(node)
            nodes = self.plan.segment_at(stage)
            outputs = self._outputs(nodes)
            if outputs or any(self.plan.recording.writes[node] for node in nodes):
                name = f"segment_{len(segments)}"
                segments[name] = self._call_segment(name, nodes, outputs)
            self._name_again(nodes)
        result = self.graph.node_copy(self.output_node, self._in_glue)
        result.meta = dict(self.output_node.meta)
        self.glue.graph = self.graph
        for name, segment in segments.items():
            set_submodule(self.glue, name, segment)
        delete_unused(self.glue)
        self.graph.lint()
        self.glue.recompile()
        return self.glue

    def _copy(self, node: Node) -> Node:
        new = self.graph.node_copy(node, self._in_glue)
        if node in self.plan.reasons:
            new.meta["python"] = self.plan.reasons[node]
        return new

    def _emit(self, node: Node) -> None:
        new = self._copy(node)
        for argument in self.plan.clones.get(node, ()):
            before = self._in_glue(argument)
            with self.graph.inserting_before(new):
                clone = inherit_meta(self.graph.call_method("clone", (before,)), argument)
            new.replace_input_with(before, clone)
        self.env[node] = new

    def _in_glue(self, node: Node) -> Node:
        """The glue's node for a value; what is cheap and has no place of its own is copied where it is asked for."""
        if node not in self.env:
            if self.plan.place(node) is Place.SEGMENT:
                raise LoweringError("a value is used before the segment that computes it", node=node)
            self.env[node] = self._copy(node)
        return self.env[node]

    # -- segments ----------------------------------------------------------------------------------------------

    def _outputs(self, nodes: list[Node]) -> list[Node]:
        """What a segment of these nodes gives; nothing where they only hand their inputs on."""
        members = set(nodes)
        outputs: list[Node] = []
        for node in nodes:
            if node in self.needed_outside:
                twin = self._twin(node, members)
                if twin in members and twin not in outputs:
                    outputs.append(twin)
        return outputs

    def _name_again(self, nodes: list[Node]) -> None:
        """The tensors that a segment's nodes give a second time, or hand on from its inputs."""
        members = set(nodes)
        for node in nodes:
            if node in self.needed_outside and node not in self.env:
                self.env[node] = self._in_glue(self._twin(node, members))

    def _call_segment(self, name: str, nodes: list[Node], outputs: list[Node]) -> GraphModule:
        graph = Graph(tracer_cls=self.gm.graph._tracer_cls)
        inside: dict[Node, Node] = {}
        inputs: list[Node] = []
        start = graph.create_node("call_function", torch.tensor, (0,), {}, "start")  # placeholders go before it

        def value(node: Node) -> Node:
            if node in inside:
                return inside[node]
            if self.plan.place(node) in (Place.COPIED, Place.ATTRIBUTE):
                inside[node] = graph.node_copy(node, value)
            else:
                glue = self._in_glue(node)
                twin = next((i for i in inputs if self._in_glue(i) is glue), None)
                if twin is not None:  # one tensor under two names is one input
                    inside[node] = inside[twin]
                    return inside[node]
                inputs.append(node)
                with graph.inserting_before(start):
                    inside[node] = inherit_meta(graph.placeholder(node.name), node)
            return inside[node]

        for node in nodes:
            inside[node] = graph.node_copy(node, value)
        graph.erase_node(start)
        pieces = [piece for node in outputs for piece in self._pieces(graph, inside[node], node)]
        graph.output(tuple(pieces))
        self._emit_segment(name, inputs, outputs)
        segment = GraphModule(self.gm, graph, class_name=name.capitalize())
        segment.meta = dict(self.gm.meta)
        segment.graph.lint()
        return segment

    def _twin(self, node: Node, members: set[Node]) -> Node:
        """The first node, perhaps an input of the segment, that gives this very tensor."""
        while node in self.plan.recording.same and (node in members):
            node = self.plan.recording.same[node]
        return node

    def _pieces(self, graph: Graph, new: Node, node: Node) -> list[Node]:
        """The tensors of one output: itself, or the leaves of a tuple of fixed structure."""
        container = self.plan.recording.containers.get(node)
        if container is None:
            return [new]
        if self.plan.may_have_more_parts(node):
            length = graph.call_function(len, (new,))
            what = f"'{node.name}' gives {len(container)} parts"
            graph.call_function(check_branch, (length, len(container), what))
        found: list[Node] = []
        _open(
            container,
            new,
            lambda parent, i: inherit_meta(graph.call_function(operator.getitem, (parent, i)), node),
            found,
        )
        return found

    def _emit_segment(self, name: str, inputs: list[Node], outputs: list[Node]) -> None:
        call = self.graph.call_module(name, tuple(self._in_glue(n) for n in inputs))
        call.meta["segment"] = name
        index = 0

        def take(node: Node, label: str) -> Node:
            nonlocal index
            new = self.graph.create_node("call_function", operator.getitem, (call, index), {}, label)
            index += 1
            return inherit_meta(new, node)

        for node in outputs:
            container = self.plan.recording.containers.get(node)
            if container is None:
                self.env[node] = take(node, node.name)
            else:
                self.env[node] = _rebuild(self.graph, container, lambda n=node: take(n, n.name))


def _open(structure: Any, node: Node, take: Any, found: list[Node]) -> None:
    """Append, in order, a node for each None of `structure`, taken out of `node`."""
    if structure is None:
        found.append(node)
        return
    items = structure.items() if isinstance(structure, dict) else enumerate(structure)
    for key, item in items:
        _open(item, take(node, key), take, found)


def _rebuild(graph: Graph, structure: Any, take: Any) -> Node:
    """A node that gives `structure` with each None replaced by what `take` gives."""

    def build(part: Any) -> Any:
        if part is None:
            return take()
        if isinstance(part, dict):
            return {key: build(item) for key, item in part.items()}
        items = [build(item) for item in part]
        if type(part) in (tuple, list):
            return type(part)(items)
        if hasattr(part, "_fields"):
            return graph.call_function(type(part), tuple(items))
        return graph.call_function(type(part), (tuple(items),))  # torch.return_types: made from one tuple

    return build(structure)


def _verify(glue: GraphModule, expected: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with restored_state(glue), torch.random.fork_rng(devices=[]), torch.no_grad():
        values = bind_inputs(glue, *copied_inputs((args, kwargs)))
        output = Interpreter(glue).run(*positional(values))
    check_output(expected, output)


def check_output(expected: Any, actual: Any) -> None:
    """Compare what the glue gives with what the graph gave: structure, types, shapes and dtypes.

    Raises:
        LoweringError: they differ; says where.
    """
    difference = _difference(expected, actual, "the output")
    if difference:
        raise LoweringError(
            f"the partitioned graph does not give what the graph gives: {difference}",
            hint="this is a fault of the partitioner; wrap() the code around the value named",
        )


def _difference(expected: Any, actual: Any, where: str) -> str | None:
    """Where two results differ in structure, types, shapes or dtypes, in words; None where they do not."""
    if _plain_type(expected) is not _plain_type(actual):
        return f"{where} is a {type(actual).__name__}, not a {type(expected).__name__}"
    if isinstance(expected, torch.Tensor):
        same = expected.shape == actual.shape and expected.dtype == actual.dtype
        return None if same else f"{where} is {tuple(actual.shape)} {actual.dtype}"
    if isinstance(expected, dict):
        if list(expected) != list(actual):
            return f"{where} has the keys {list(actual)}"
        pairs = [(key, expected[key], actual[key]) for key in expected]
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(actual):
            return f"{where} has {len(actual)} elements"
        pairs = [(i, e, a) for i, (e, a) in enumerate(zip(expected, actual, strict=True))]
    else:
        return None
    return next((d for key, e, a in pairs if (d := _difference(e, a, f"{where}[{key!r}]"))), None)


def _plain_type(value: Any) -> type:
    """The type of a result; a list or dict among the arguments of a node is an immutable one when interpreted."""
    plain: dict[type, type] = {immutable_list: list, immutable_dict: dict}
    return plain.get(type(value), type(value))
