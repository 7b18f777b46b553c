"""Where the boxes of a layered drawing go: Sugiyama's method, cut into columns so that a deep graph fits a screen.

K. Sugiyama, S. Tagawa, M. Toda, "Methods for visual understanding of hierarchical system structures", 1981: layers by
longest path, dummy vertices on long edges, order within layers by barycentres. A deep network is then one long strip;
it is cut between layers where few edges cross, and the pieces stand side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

__all__ = ["Layout", "Placed", "lay_out"]


@dataclass
class Placed:
    """One box, or a bend of an edge (`width` 0): centre, row within its column."""

    width: float
    layer: int = 0
    column: int = 0
    row: int = 0
    x: float = 0.0
    above: list[int] = field(default_factory=list)
    below: list[int] = field(default_factory=list)


@dataclass
class Layout:
    """Boxes by index, then bends; each edge as the indices of its end points and bends in order."""

    placed: list[Placed]
    edges: list[list[int]]
    columns: list[tuple[float, float]]  # left and right
    rows: int


def lay_out(widths: list[float], edges: list[tuple[int, int]], *, rows: int = 34, gap: float = 26.0) -> Layout:
    """Place boxes so that every edge goes down, or on to the next column.

    Args:
        widths: of the boxes, in topological order.
        edges: (from, to) indices, from < to.
        rows: about how many layers a column has.
        gap: least distance between neighbours in a layer, and half of that between columns.
    """
    placed = [Placed(w) for w in widths]
    for a, b in edges:
        placed[b].layer = max(placed[b].layer, placed[a].layer + 1)
    _pull_down_sources(placed, edges)
    paths = [_with_bends(placed, a, b) for a, b in edges]
    for path in paths:
        for a, b in pairwise(path):
            placed[a].below.append(b)
            placed[b].above.append(a)
    layers: list[list[int]] = [[] for _ in range(max((p.layer for p in placed), default=-1) + 1)]
    for i, p in enumerate(placed):
        layers[p.layer].append(i)
    _order(placed, layers)
    columns, deepest = _cut(placed, layers, rows)
    right = -gap * 2
    spans = []
    for column in columns:
        _coordinates(placed, column, gap)
        inside = [i for layer in column for i in layer]
        left = min(placed[i].x - placed[i].width / 2 for i in inside)
        shift = right + gap * 2 - left
        for i in inside:
            placed[i].x += shift
        spans.append((right + gap * 2, max(placed[i].x + placed[i].width / 2 for i in inside)))
        right = spans[-1][1]
    return Layout(placed, paths, spans, deepest)


def _pull_down_sources(placed: list[Placed], edges: list[tuple[int, int]]) -> None:
    """A box with nothing above it stands just above its first reader, not at the top."""
    has_input = {b for _, b in edges}
    for i, p in enumerate(placed):
        readers = [placed[b].layer for a, b in edges if a == i]
        if i not in has_input and readers:
            p.layer = min(readers) - 1


def _with_bends(placed: list[Placed], a: int, b: int) -> list[int]:
    path = [a]
    for layer in range(placed[a].layer + 1, placed[b].layer):
        placed.append(Placed(0.0, layer))
        path.append(len(placed) - 1)
    return [*path, b]


def _order(placed: list[Placed], layers: list[list[int]], sweeps: int = 8) -> None:
    position = {i: float(k) for layer in layers for k, i in enumerate(layer)}
    for sweep in range(sweeps):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            keys = {}
            for i in layer:
                near = placed[i].above if down else placed[i].below
                keys[i] = sum(position[n] for n in near) / len(near) if near else position[i]
            layer.sort(key=lambda i: keys[i])
            position.update({i: float(k) for k, i in enumerate(layer)})


def _cut(placed: list[Placed], layers: list[list[int]], rows: int) -> tuple[list[list[list[int]]], int]:
    """Split the layers into columns of about `rows`, each cut where the fewest edges cross it."""
    crossing = [sum(len(placed[i].below) for i in layer) for layer in layers]
    columns: list[list[list[int]]] = []
    start = 0
    while start < len(layers):
        end = len(layers)
        if end - start > rows * 1.25:
            window = range(start + int(rows * 0.75), start + int(rows * 1.25))
            end = min(window, key=lambda k: (crossing[k - 1], abs(k - start - rows)))
        for row, layer in enumerate(layers[start:end]):
            for i in layer:
                placed[i].column, placed[i].row = len(columns), row
        columns.append(layers[start:end])
        start = end
    return columns, max((len(c) for c in columns), default=0)


def _coordinates(placed: list[Placed], layers: list[list[int]], gap: float, sweeps: int = 12) -> None:
    """Put each box near the mean of its neighbours in the same column, in order and without overlap."""
    for layer in layers:
        x = 0.0
        for i in layer:
            placed[i].x = x + placed[i].width / 2
            x += placed[i].width + gap
    for sweep in range(sweeps):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            wanted = []
            for i in layer:
                sides = placed[i].above if down else placed[i].below
                near = [placed[n].x for n in sides if placed[n].column == placed[i].column]
                wanted.append(sum(near) / len(near) if near else placed[i].x)
            _separate(placed, layer, wanted, gap)


def _separate(placed: list[Placed], layer: list[int], wanted: list[float], gap: float) -> None:
    """Nearest positions to `wanted` that keep the order and the gaps: the mean of packing from the left and right."""

    def distance(a: int, b: int) -> float:
        return (placed[a].width + placed[b].width) / 2 + gap

    left = list(wanted)
    for k in range(1, len(layer)):
        left[k] = max(left[k], left[k - 1] + distance(layer[k - 1], layer[k]))
    right = list(wanted)
    for k in range(len(layer) - 2, -1, -1):
        right[k] = min(right[k], right[k + 1] - distance(layer[k], layer[k + 1]))
    for k, i in enumerate(layer):
        placed[i].x = (left[k] + right[k]) / 2
