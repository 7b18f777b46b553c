"""Which values of a graph share memory, and the nodes that hold them while `functionalize` rewrites the graph.

A **storage** is one block of memory; a **value** is one tensor object in it, reached from the storage's base by view
steps. Storages that may or may not be one (`reshape`, `contiguous`, results of calls that are not understood) are
*neighbours*.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

__all__ = ["Memory", "Storage", "Value"]


@dataclass(eq=False)
class Storage:
    """One block of memory.

    Attributes:
        base: node that holds all of it now.
        foreign: why it does not belong to the graph alone (an input, a parameter, the result of a call that is not
            understood), or None.
        version: how many writes to it have been made out-of-place.
        escaped: the call that may have kept a reference to it, or None.
        marked: why its values carry `meta["aliased"]`, or None.
        neighbours: storages that may be this one.
        values: the tensor objects in it.
    """

    base: Node
    foreign: str | None = None
    version: int = 0
    escaped: str | None = None
    marked: str | None = None
    neighbours: set[Storage] = field(default_factory=set)
    values: list[Value] = field(default_factory=list)

    def link(self, other: Storage) -> None:
        """Record that both may be one, and that this one may be whatever the other may be."""
        for storage in {other, *other.neighbours} - {self}:
            self.neighbours.add(storage)
            storage.neighbours.add(self)


@dataclass(eq=False)
class Value:
    """One tensor object.

    Attributes:
        storage: its memory.
        node: the node that holds it as of `version` of the storage.
        steps: the (view node, input of that node) pairs that lead to it from the storage's base.
        names: the nodes of the original graph that yield this very object.
    """

    storage: Storage
    node: Node
    steps: tuple[tuple[Node, Node], ...] = ()
    version: int = 0
    names: list[Node] = field(default_factory=list)

    def is_view_of(self, other: Value) -> bool:
        return self is other or self.steps[: len(other.steps)] == other.steps


class Memory:
    """The values of a graph at one point of a forward walk over it.

    Args:
        graph: the graph, which this class adds regenerated view nodes to.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.last_use = {n: max((self.order[u] for u in n.users), default=-1) for n in graph.nodes}
        self.now = 0
        self._values: dict[Node, Value] = {}
        self._regenerated: dict[tuple[Storage, int, Node], Node] = {}

    def get(self, node: Any) -> Value | None:
        return self._values.get(node) if isinstance(node, Node) else None

    def new(self, node: Node, foreign: str | None = None) -> Value:
        """Record that `node` yields memory of its own."""
        return self._enter(Value(Storage(node, foreign), node), node)

    def view(self, node: Node, source: Value, taken_of: Node) -> Value:
        """Record that `node` yields a view of `source`, which it reads as `taken_of`."""
        storage = source.storage
        return self._enter(Value(storage, node, (*source.steps, (node, taken_of)), storage.version), node)

    def maybe(self, node: Node, sources: list[Storage], foreign: str | None) -> Value:
        """Record that `node` yields new memory or memory of `sources`."""
        value = self.new(node, foreign)
        for storage in sources:
            value.storage.link(storage)
            if storage.marked:
                self.mark(value.storage, storage.marked)
        return value

    def _enter(self, value: Value, node: Node) -> Value:
        value.storage.values.append(value)
        self.name(value, node)
        return value

    def name(self, value: Value, node: Node) -> None:
        """Record that `node` yields the very object `value`."""
        self._values[node] = value
        value.names.append(node)
        if value.storage.marked:
            node.meta.setdefault("aliased", value.storage.marked)

    def current(self, value: Value, before: Node) -> Node:
        """The node that holds `value` after all writes so far; views are taken again from the storage's base."""
        storage = value.storage
        if value.version != storage.version:
            node = storage.base
            with self.graph.inserting_before(before):
                for view, source in value.steps:
                    node = self._take(storage, view, source, node)
            self._hold(value, node)
        return value.node

    def _take(self, storage: Storage, view: Node, source: Node, base: Node) -> Node:
        key = (storage, storage.version, view)
        if key not in self._regenerated:
            self._regenerated[key] = self.graph.node_copy(view, lambda n: base if n is source else n)
        return self._regenerated[key]

    def _hold(self, value: Value, node: Node) -> None:
        value.node, value.version = node, value.storage.version
        self._values[node] = value
        if value.storage.marked:
            node.meta.setdefault("aliased", value.storage.marked)

    def read_later(self, value: Value) -> bool:
        return any(self.last_use.get(n, -1) > self.now for n in value.names)

    def others_read_later(self, value: Value) -> bool:
        """Whether anything of the same memory is read later that is no view taken of `value`."""
        return any(not v.is_view_of(value) and self.read_later(v) for v in value.storage.values)

    def write_whole(self, value: Value, result: Node) -> None:
        """`result` is the new content of `value`, which is its storage's base."""
        value.storage.base, value.storage.version = result, value.storage.version + 1
        self._hold(value, result)

    def write_base(self, storage: Storage, written: Node) -> None:
        """`written` is the new content of all of `storage`."""
        storage.base, storage.version = written, storage.version + 1

    def split_off(self, value: Value, result: Node) -> None:
        """Nothing else of its memory is read again: `value`, now in `result`, and its views go on in a new storage."""
        old, depth = value.storage, len(value.steps)
        moved = [v for v in old.values if v.is_view_of(value)]
        new = Storage(result, version=1, values=moved)
        old.values = [v for v in old.values if v not in moved]
        for v in moved:
            v.storage, v.steps, v.version = new, v.steps[depth:], 0
        self._hold(value, result)

    def retype(self, value: Value, node: Node, taken_of: Node) -> None:
        """From here on the object `value` is the view `node` of what it was."""
        value.steps = (*value.steps, (node, taken_of))
        self._hold(value, node)
        self.name(value, node)

    def mark(self, storage: Storage, reason: str) -> None:
        """Mark every value of `storage`, those to come too, as shared in a way that is not understood."""
        storage.marked = storage.marked or reason
        for value in storage.values:
            self.mark_value(value, reason)

    def mark_value(self, value: Value, reason: str) -> None:
        for node in (*value.names, value.node):
            node.meta.setdefault("aliased", reason)
