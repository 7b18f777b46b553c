"""Where each node of a partitioned graph runs: in a segment, at a stage of the glue, or wherever it is needed."""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fx_passes.capture.arguments import check_fixed
from fx_passes.capture.example_values import check_branch
from fx_passes.capture.structures import make_instance
from fx_passes.ops.effects import has_effects, makes_fresh_elements
from fx_passes.partition.recording import Recording

__all__ = ["Place", "Plan"]

# What is known of a tensor without its data.
_SIZE_METHODS = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device", "is_floating_point",
     "is_complex", "is_contiguous", "__len__"}
)  # fmt: skip
_SIZE_ATTRIBUTES = frozenset(
    {"shape", "ndim", "dtype", "device", "layout", "is_cuda", "itemsize", "nbytes", "requires_grad", "is_sparse"}
)
_SIZE_FUNCTIONS: tuple[Any, ...] = (
    *(len, torch.numel, torch.is_floating_point, torch.is_complex, torch.is_tensor, operator.is_, operator.is_not),
)
_CHECKS = frozenset({torch._assert, check_fixed, check_branch})


class Place(enum.Enum):
    """Where a node runs."""

    INPUT = "a placeholder"
    ATTRIBUTE = "a parameter, buffer or object of the model: read wherever it is needed"
    COPIED = "a size or dtype, or arithmetic on them: computed wherever it is needed"
    SEGMENT = "a segment"
    GLUE = "Python between the segments"


class Plan:
    """The place of every live node of `gm`, and the reasons of those that stay Python.

    Args:
        gm: the graph.
        recording: what one run of it showed.
        min_segment_nodes: a segment with fewer operations stays Python.

    Attributes:
        reasons: for each call that stays Python, why.
        clones: for each Python call, the arguments of which it gets a copy: it may write to them, and what read them
            before it in the program runs after it now.
        stages: number of stages.
    """

    def __init__(self, gm: GraphModule, recording: Recording, min_segment_nodes: int):
        self.gm, self.recording = gm, recording
        self.min_segment_nodes = min_segment_nodes
        self.nodes = list(gm.graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.reasons: dict[Node, str] = {n: n.meta["python"] for n in self.nodes if n.meta.get("python")}
        self.wrapped = set(self.reasons)
        self.live = self._live()
        self._as_input: set[Node] = set()
        while True:
            self._places: dict[Node, Place] = {}
            self._index: dict[Node, int] = {}
            self._assign()
            violations = dict(self._violations())
            if not violations:
                break
            self.reasons.update({n: reason for n, reason in violations.items() if n.op != "get_attr"})
            self._as_input.update(n for n in violations if n.op == "get_attr")
        self.stages = max(self._index.values(), default=0) + 1
        self.clones = dict(self._clones())

    # -- what the builder asks ---------------------------------------------------------------------------------

    def place(self, node: Node) -> Place:
        return self._places[node]

    def glue_nodes(self) -> list[Node]:
        return [n for n, place in self._places.items() if place is Place.GLUE]

    def glue_at(self, stage: int) -> list[Node]:
        """The Python of a stage, in the order of the program."""
        return [n for n in self.glue_nodes() if self._index[n] == stage]

    def segment_at(self, stage: int) -> list[Node]:
        """The operations of the segment that follows that Python, in the order of the program."""
        return [n for n, place in self._places.items() if place is Place.SEGMENT and self._index[n] == stage]

    def needed_outside(self) -> set[Node]:
        """The nodes in segments that the glue, its output or another segment reads."""
        found: set[Node] = set()
        for user in [*self._places, *self.gm.graph.find_nodes(op="output")]:
            if self._places.get(user) in (Place.COPIED, Place.ATTRIBUTE, Place.INPUT):
                continue
            own = self._index[user] if self._places.get(user) is Place.SEGMENT else None
            for source in self._sources(user.all_input_nodes):
                if self._places[source] is Place.SEGMENT and self._index[source] != own:
                    found.add(source)
        return found

    def _sources(self, nodes: Iterable[Node]) -> Iterator[Node]:
        """The nodes with a place of their own behind `nodes`: for a size, the tensors that it is read from."""
        for node in nodes:
            if self._places[node] is Place.COPIED:
                yield from self._sources(node.all_input_nodes)
            else:
                yield node

    # -- places ------------------------------------------------------------------------------------------------

    def _live(self) -> set[Node]:
        live: set[Node] = set()
        for node in reversed(self.nodes):
            root = node.op in ("placeholder", "output") or node in self.reasons or node.target in _CHECKS
            unused = not node.users and node.op != "get_attr" and has_effects(node, self.gm)
            if root or unused or self.recording.writes[node]:
                live.add(node)
            if node in live:
                live.update(node.all_input_nodes)
        return live

    def _assign(self) -> None:
        memory = _MemoryOrder(self.recording, self.nodes, self.wrapped)
        last_python = 0
        for node in self.nodes:
            if node not in self.live or node.op == "output":
                continue
            place = self._places[node] = self._choose(node)
            if place in (Place.INPUT, Place.ATTRIBUTE, Place.COPIED):
                continue
            needed = [*self._sources(node.all_input_nodes), *memory.before(node)]
            if place is Place.SEGMENT:
                self._index[node] = max((self._index.get(d, 0) for d in needed), default=0)
                continue
            stage = max((self._index.get(d, 0) + (self._places[d] is Place.SEGMENT) for d in needed), default=0)
            if node in self.reasons:
                stage = last_python = max(stage, last_python)
            self._index[node] = stage

    def _choose(self, node: Node) -> Place:
        if node.op == "placeholder":
            return Place.INPUT
        if node.op == "get_attr":
            return Place.GLUE if node in self._as_input else Place.ATTRIBUTE
        if node in self.reasons:
            return Place.GLUE
        if node.target in _CHECKS:
            # A check of sizes inside a segment stays there: outside, it would make outputs of what it reads.
            counted = all(a.target is len and self._places[a] is Place.SEGMENT for a in node.all_input_nodes)
            if counted and node.all_input_nodes:
                return Place.SEGMENT
            sized = all(self._places[a] is Place.COPIED for a in node.all_input_nodes)
            inside = sized and any(self._places[s] is Place.SEGMENT for s in self._sources(node.all_input_nodes))
            return Place.SEGMENT if inside else Place.GLUE
        kind = self.recording.kinds[node]
        if self._counts_parts(node):
            return Place.SEGMENT
        if kind == "host" and not self.recording.writes[node]:
            if self._is_copied(node):
                return Place.COPIED
            if any(self.recording.kinds[a] == "tensor" for a in node.all_input_nodes):
                self.reasons[node] = "gives Python a value that is computed from a tensor's data"
            return Place.GLUE
        if self._is_plumbing(node):
            return Place.GLUE
        if kind == "object":
            self.reasons[node] = "returns an object that is no tensor"
            return Place.GLUE
        reason = next((r for a in node.all_input_nodes if (r := self._refusal(a)) is not None), None)
        if reason is None:
            return Place.SEGMENT
        self.reasons[node] = reason
        return Place.GLUE

    def _counts_parts(self, node: Node) -> bool:
        """Whether it is the length of a tuple that a segment makes, and nothing but checks ask for it.

        A tuple has as many parts as the program that was exported made, so the check is one of that program.
        """
        source = node.args[0] if node.target is len else None
        if not isinstance(source, Node) or self._places[source] is not Place.SEGMENT:
            return False
        return self.recording.kinds[source] == "container" and all(user.target in _CHECKS for user in node.users)

    def _is_copied(self, node: Node) -> bool:
        arguments = node.all_input_nodes
        tensors = [a for a in arguments if self.recording.kinds[a] == "tensor"]
        if any(a not in tensors and self._places[a] is not Place.COPIED for a in arguments):
            return False
        return not tensors or (tensors == [node.args[0]] and _reads_size(node))

    def _is_plumbing(self, node: Node) -> bool:
        """Whether the node only takes apart or builds a structure that is in the glue anyway."""
        if node.op == "call_function" and (isinstance(node.target, type) or node.target is make_instance):
            return True  # a NamedTuple, a dataclass, an OrderedDict
        first = node.args[0] if node.args else None
        if not isinstance(first, Node) or self.recording.kinds[first] not in ("container", "object"):
            return False
        takes_apart = node.op == "call_method" or node.target in (operator.getitem, getattr)
        return takes_apart and self._places[first] in (Place.INPUT, Place.GLUE, Place.ATTRIBUTE)

    def _refusal(self, argument: Node) -> str | None:
        """Why a segment cannot take this argument, or None."""
        kind, place = self.recording.kinds[argument], self._places[argument]
        if kind == "tensor" or place in (Place.COPIED, Place.SEGMENT):
            return None
        if kind == "container":
            return f"takes a list of tensors from '{argument.name}', whose length may change"
        if place is Place.INPUT:
            return f"takes the argument '{argument.target}', which is no tensor"
        if kind == "host":
            return f"takes a number from '{argument.name}', which is computed in Python"
        return f"takes an object from '{argument.name}'"

    # -- what a first assignment gets wrong --------------------------------------------------------------------

    def _violations(self) -> Iterator[tuple[Node, str]]:
        found = list(self._crossing_containers()) or list(self._torn_memory()) or list(self._small_segments())
        yield from found
        for node, _ in found:
            for producer in node.all_input_nodes:
                # A cut does not come between a DequantizeLinear and the op that reads it.
                name = getattr(producer.target, "__name__", "")
                if "dequantize_per" in name and set(producer.users) == {node}:
                    yield producer, f"belongs to {node.name}, which stays in Python"

    def _crossing_containers(self) -> Iterator[tuple[Node, str]]:
        outside = self.needed_outside()
        for node in self._places:
            for source in self._sources(node.all_input_nodes) if self._places[node] is Place.SEGMENT else ():
                crosses = self._places[source] is Place.SEGMENT and self._index[source] != self._index[node]
                if crosses and self.recording.kinds[source] == "container":
                    yield node, f"takes a tuple of tensors from '{source.name}', which runs before a Python call"
            if node in outside and self.recording.kinds[node] == "container" and not self._holds_tensors_alone(node):
                yield node, "hands out a tuple that holds more than tensors"

    def _holds_tensors_alone(self, node: Node) -> bool:
        leaves = torch.utils._pytree.tree_leaves(self.recording.containers[node])
        return all(leaf is None for leaf in leaves)

    def may_have_more_parts(self, node: Node) -> bool:
        """Whether the length of the tuple that a node gives may follow the size of its input (`chunk`, `split`)."""
        value = self.recording.containers[node]
        if node.op == "call_module" or node.target is operator.getitem:
            return False
        fixed = type(value).__module__ == "torch.return_types" or makes_fresh_elements(node)  # (values, indices) etc.
        return isinstance(value, (tuple, list)) and not fixed

    def _torn_memory(self) -> Iterator[tuple[Node, str]]:
        """Memory that is written to must be one tensor wherever it is seen: in one segment, or in the glue."""
        rec = self.recording
        for group in set().union(*(rec.writes[n] for n in self._places)):
            writers = [n for n in self._places if group in rec.writes[n]]
            holders = [n for n in self._places if group in rec.groups[n] and self._places[n] is Place.SEGMENT]
            attributes = [n for n in self._places if n.op == "get_attr" and group in rec.groups[n]]
            if attributes or group in rec.state_groups:
                yield from self._torn_state(group, writers, holders, attributes)
                continue
            base = next(n for n in self.nodes if group in rec.groups[n])
            where = {(self._places[n], self._index[n]) for n in [*writers, *holders] if n is not base}
            if len(where) != 1:
                for node in holders:
                    if self._first_name(node) is not base and node not in writers:
                        yield node, f"shares memory with '{base.name}', which is written to in place elsewhere"
            for node in writers:
                if self._places[node] is Place.SEGMENT and len(self._names_taken(group, self._index[node])) > 1:
                    yield node, f"writes to the memory of '{base.name}', of which the segment takes two views"

    def _names_taken(self, group: int, stage: int) -> set[Node]:
        """The values in this memory that a segment takes as inputs; a backend gets each as a tensor of its own."""
        sources = {s for n in self.segment_at(stage) for s in self._outer_sources(n, stage)}
        return {self._first_name(s) for s in sources if group in self.recording.groups[s]}

    def _torn_state(
        self, group: int, writers: list[Node], holders: list[Node], attributes: list[Node]
    ) -> Iterator[tuple[Node, str]]:
        """A parameter or buffer that is written to lives in the one segment that touches it, or in the glue."""
        rec = self.recording
        touching = {n for n in self._places if group in rec.reads[n] and n.op != "get_attr"} | set(writers)
        where = {(self._places[n], self._index.get(n)) for n in touching}
        returned = any(user.op == "output" for node in attributes for user in node.users)
        if len(where) == 1 and not returned:  # what is returned is read in the glue
            return
        for node in attributes:
            if self._places[node] is Place.ATTRIBUTE:
                yield node, ""
        for node in touching:
            inner = node.op == "call_module"  # it holds the tensor itself
            view = node in holders and self._first_name(node).op != "get_attr"
            if self._places[node] is Place.SEGMENT and (inner or view):
                yield node, "shares a buffer that is written to in place elsewhere"

    def _first_name(self, node: Node) -> Node:
        """The node whose tensor this is in the glue. What Python returned is a name of its own: a wrapped function
        that returned its argument this time may return another tensor the next."""
        while node in self.recording.same and self._places[node] is Place.SEGMENT:
            node = self.recording.same[node]
        return node

    def _small_segments(self) -> Iterator[tuple[Node, str]]:
        for stage in set(self._index.values()):
            members = self.segment_at(stage)
            nodes = [n for n in members if n.target not in (*_CHECKS, len) and not self._takes_out(n)]
            if not nodes:
                continue
            if len(nodes) < self.min_segment_nodes:
                reason = f"a segment of {len(nodes)} operations, and min_segment_nodes is {self.min_segment_nodes}"
                yield from ((node, reason) for node in nodes)
            elif not any(
                self._places[s] is not Place.ATTRIBUTE for n in members for s in self._outer_sources(n, stage)
            ):
                yield from ((node, "computed from no input") for node in nodes)

    def _takes_out(self, node: Node) -> bool:
        """Whether the node only takes a tensor out of a tuple of them."""
        source = node.args[0] if node.target is operator.getitem else None
        return isinstance(source, Node) and self.recording.kinds[source] == "container"

    def _outer_sources(self, node: Node, stage: int) -> Iterator[Node]:
        for source in self._sources(node.all_input_nodes):
            if self._places[source] is not Place.SEGMENT or self._index[source] != stage:
                yield source

    def _clones(self) -> Iterator[tuple[Node, list[Node]]]:
        rec = self.recording
        memory = _MemoryOrder(rec, self.nodes, self.wrapped)
        for node in self.wrapped & set(self._places):
            cloned = []
            for argument in node.all_input_nodes:
                groups = rec.groups[argument] - memory.writes(node)  # reads before those come before in the plan too
                if rec.kinds[argument] == "tensor" and groups and self._read_too_late(node, groups):
                    cloned.append(argument)
            if cloned:
                yield node, cloned

    def _read_too_late(self, call: Node, groups: set[int]) -> bool:
        """Whether something that reads this memory before `call` in the program runs after it in the plan."""
        for reader in self._places:
            if self.order[reader] < self.order[call] and groups & self.recording.reads[reader]:
                place, index = self._places[reader], self._index.get(reader, -1)
                later = index >= self._index[call] if place is Place.SEGMENT else index > self._index[call]
                if later:
                    return True
        return False


def _reads_size(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in _SIZE_METHODS
    if node.target is getattr:
        return node.args[1] in _SIZE_ATTRIBUTES
    return node.op == "call_function" and node.target in _SIZE_FUNCTIONS


class _MemoryOrder:
    """The reads and writes that must come before a node, of memory that is written to anywhere."""

    def __init__(self, recording: Recording, nodes: list[Node], wrapped: set[Node]):
        self.recording, self.wrapped = recording, wrapped
        self.written: set[int] = set().union(*(recording.writes[n] for n in nodes if n in recording.writes))
        self.writer: dict[int, Node] = {}
        self.readers: dict[int, list[Node]] = {}

    def writes(self, node: Node) -> set[int]:
        """The groups that a node writes to, or hands on from Python to something that does."""
        recording = self.recording
        handed_on = recording.reads[node] & recording.groups[node] & self.written if node in self.wrapped else set()
        return recording.writes[node] | handed_on

    def before(self, node: Node) -> list[Any]:
        found: list[Node] = []
        writes = self.writes(node)
        for group in self.recording.reads[node] & self.written:
            if group in self.writer:
                found.append(self.writer[group])
            if group in writes:
                found += self.readers.pop(group, [])
                self.writer[group] = node
            else:
                self.readers.setdefault(group, []).append(node)
        return found
