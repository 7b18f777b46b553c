"""`draw`: a graph as SVG, with what is quantized, what is float and what stays Python in colour.

Pure text: no graphviz, no browser. Quantize-dequantize pairs and observers are drawn as green edges, not as boxes;
parameters and sizes are not drawn. Hovering over a box shows its details.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from torch.fx import GraphModule, Node

from fx_passes.analysis.drawing_layout import Layout, lay_out
from fx_passes.analysis.shapes import shape_text
from fx_passes.errors import ArtifactError
from fx_passes.graph.node_meta import source_line
from fx_passes.ops import Role, is_size, module_of, op_of

__all__ = ["draw"]

# kind -> (legend, fill, stroke)
_KINDS = {
    "quantized": ("computes on int8", "#d3f2dd", "#2b8a3e"),
    "float": ("float", "#dce9f9", "#2f6cb3"),
    "segment": ("segment (engine or session)", "#e6defa", "#6741d9"),
    "fallback": ("stays Python", "#ffe3c7", "#d9680b"),
    "end": ("input, output", "#eceef1", "#5c6773"),
}
_INT8, _FLOAT, _SHARED = "#2b8a3e", "#8a94a0", "#c92a2a"
_ROW, _BOX, _MARGIN, _TOP = 58.0, 32.0, 28.0, 76.0


def draw(gm: GraphModule, path: str | os.PathLike[str] | None = None, *, rows: int = 34) -> str:
    """Draw a graph, from top to bottom, in columns.

    Args:
        gm: a graph at any stage. Edges carry shapes if `propagate_shapes` has run on it.
        path: file to write to, too.
        rows: about how many rows a column has.

    Returns:
        The SVG text.

    Raises:
        ArtifactError: the file cannot be written.

    Example:
        >>> import torch
        >>> from fx_passes import trace
        >>> draw(trace(torch.nn.ReLU())).startswith("<svg")
        True
    """
    boxes, edges = _boxes_and_edges(gm)
    layout = lay_out([b.width for b in boxes], [(a, b) for a, b, _ in edges], rows=rows)
    text = _render(gm, boxes, edges, layout)
    if path is not None:
        _write(os.fspath(path), text)
    return text


@dataclass(frozen=True)
class _Box:
    node: Node
    kind: str
    title: str
    subtitle: str
    shape: str
    width: float


# --- what is drawn


def _boxes_and_edges(gm: GraphModule) -> tuple[list[_Box], list[tuple[int, int, bool]]]:
    """The boxes, and (from, to, int8) edges between them; nodes that are not drawn are looked through."""
    boxes: list[_Box] = []
    index: dict[Node, int] = {}
    through: dict[Node, list[tuple[int, bool]]] = {}
    edges: dict[tuple[int, int], bool] = {}
    for node in gm.graph.nodes:
        incoming: dict[int, bool] = {}
        for source in node.all_input_nodes:
            for start, int8 in through.get(source, []):
                incoming[start] = incoming.get(start, False) or int8
        if node.op != "output" and not _is_drawn(node, gm):
            marks = _is_quantizing(node, gm)
            sources = {} if is_size(node) else incoming  # no line for who asks for a shape
            through[node] = [(start, int8 or marks) for start, int8 in sources.items()]
            continue
        int8_input = any(incoming.values())
        index[node] = len(boxes)
        boxes.append(_box(node, gm, int8_input))
        through[node] = [(index[node], False)]
        edges.update({(start, index[node]): int8 for start, int8 in incoming.items()})
    return boxes, [(a, b, int8) for (a, b), int8 in edges.items()]


def _is_drawn(node: Node, gm: GraphModule) -> bool:
    if node.op == "get_attr":
        return False
    return not is_size(node) and not _is_quantizing(node, gm)


def _is_quantizing(node: Node, gm: GraphModule) -> bool:
    """Quantize, dequantize, or an observer or fake-quantization of ours."""
    op = op_of(node, gm)
    if op is not None and op.role in (Role.QUANTIZE, Role.DEQUANTIZE):
        return True
    module = module_of(node, gm) if node.op == "call_module" else None
    return module is not None and type(module).__module__.startswith("fx_passes.quantize")


def _box(node: Node, gm: GraphModule, int8_input: bool) -> _Box:
    op = op_of(node, gm)
    name = str(node.target) if node.op == "call_module" else node.name
    callee = op.name if op else _callee(node, gm)
    subtitle = callee if callee != name else ""
    shape = shape_text(node).replace(", ", "\u00d7").replace("[", "").replace("]", "")
    title = _short(name, 30)
    width = max(7.0 * len(title), 6.0 * len(subtitle), 44.0) + 18.0
    return _Box(node, _kind(node, gm, int8_input), title, _short(subtitle, 34), _short(shape, 34), width)


def _callee(node: Node, gm: GraphModule) -> str:
    if node.op in ("placeholder", "output"):
        return {"placeholder": "input", "output": "output"}[node.op]
    if node.op == "call_module":
        return type(module_of(node, gm)).__name__
    return str(getattr(node.target, "__name__", node.target))


def _kind(node: Node, gm: GraphModule, int8_input: bool) -> str:
    if node.op in ("placeholder", "output"):
        return "end"
    if node.meta.get("python") or node.meta.get("untraceable"):
        return "fallback"
    if node.op == "call_module" and isinstance(module_of(node, gm), GraphModule):
        return "segment"
    annotation: Any = node.meta.get("quantization")
    quantized = annotation.quantized if annotation is not None else int8_input
    return "quantized" if quantized else "float"


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else "\u2026" + text[1 - length :]


def _details(box: _Box) -> str:
    """The tooltip."""
    node, annotation = box.node, box.node.meta.get("quantization")
    lines = [f"{box.title} ({box.subtitle})" if box.subtitle else box.title]
    facts = {
        "module": node.meta.get("module_path"),
        "source": source_line(node),
        "shape": shape_text(node),
        "quantization": annotation.reason if annotation is not None else None,
        "stays Python": node.meta.get("python") or node.meta.get("untraceable"),
        "shares memory": node.meta.get("aliased"),
    }
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in facts.items() if value)])


# --- as SVG


def _render(gm: GraphModule, boxes: list[_Box], edges: list[tuple[int, int, bool]], layout: Layout) -> str:
    legend = _legend(boxes, edges)
    width = max([layout.columns[-1][1] if layout.columns else 0.0, _legend_width(boxes, edges)]) + 2 * _MARGIN
    height = _TOP + layout.rows * _ROW + _MARGIN
    name = type(getattr(gm, "_self", gm)).__name__
    facts = [str(gm.meta[k]) for k in ("stage", "target") if gm.meta.get(k)]
    heading = f"{name} ({', '.join(facts)})" if facts else name
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_MARGIN}" y="28" font-size="16" font-weight="bold" fill="#222">{escape(heading)}</text>',
        legend,
        *(_edge(path, int8, boxes, layout) for path, (_, _, int8) in zip(layout.edges, edges, strict=True)),
        *(_draw_box(box, layout.placed[i].x + _MARGIN, _y(layout, i)) for i, box in enumerate(boxes)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _y(layout: Layout, i: int) -> float:
    """Middle of a box or bend."""
    return _TOP + layout.placed[i].row * _ROW + _BOX / 2


def _entries(boxes: list[_Box], edges: list[tuple[int, int, bool]]) -> list[tuple[str, str, str, str]]:
    """(shape, legend, fill, stroke) of what occurs."""
    kinds = {b.kind for b in boxes}
    entries = [("box", *_KINDS[kind]) for kind in _KINDS if kind in kinds]
    if any(int8 for _, _, int8 in edges):
        entries.append(("line", "int8 value", _INT8, _INT8))
    if any("aliased" in b.node.meta for b in boxes):
        entries.append(("dashed", "may share memory: left as it is", "white", _SHARED))
    return entries


def _legend_width(boxes: list[_Box], edges: list[tuple[int, int, bool]]) -> float:
    return sum(34 + 6.2 * len(text) for _, text, _, _ in _entries(boxes, edges))


def _legend(boxes: list[_Box], edges: list[tuple[int, int, bool]]) -> str:
    x, parts = _MARGIN, []
    for shape, text, fill, stroke in _entries(boxes, edges):
        if shape == "line":
            parts.append(f'<path d="M{x:.1f} 48h14" stroke="{stroke}" stroke-width="2.6"/>')
        else:
            dash = ' stroke-dasharray="4 2"' if shape == "dashed" else ""
            parts.append(
                f'<rect x="{x:.1f}" y="41" width="14" height="14" rx="3" fill="{fill}" stroke="{stroke}"{dash}/>'
            )
        parts.append(f'<text x="{x + 19:.1f}" y="52" font-size="11" fill="#444">{escape(text)}</text>')
        x += 34 + 6.2 * len(text)
    return "\n".join(parts)


def _draw_box(box: _Box, x: float, y: float) -> str:
    _, fill, stroke = _KINDS[box.kind]
    dash = ""
    if "aliased" in box.node.meta:
        stroke, dash = _SHARED, ' stroke-dasharray="4 2"'
    left, top = x - box.width / 2, y - _BOX / 2
    titled = y - 2 if box.subtitle else y + 4
    parts = [
        f'<g id="{escape(box.node.name)}"><title>{escape(_details(box))}</title>',
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{_BOX}" rx="5" fill="{fill}" '
        f'stroke="{stroke}"{dash}/>',
        f'<text x="{x:.1f}" y="{titled:.1f}" font-size="12" text-anchor="middle" fill="#1b1f24">'
        f"{escape(box.title)}</text>",
    ]
    if box.subtitle:
        parts.append(
            f'<text x="{x:.1f}" y="{y + 11:.1f}" font-size="10" text-anchor="middle" fill="#555">'
            f"{escape(box.subtitle)}</text>"
        )
    if box.shape and box.node.op != "output":
        parts.append(
            f'<text x="{x + 6:.1f}" y="{y + _BOX / 2 + 12:.1f}" font-size="9.5" fill="#666" stroke="white" '
            f'stroke-width="3" paint-order="stroke">{escape(box.shape)}</text>'
        )
    return "".join([*parts, "</g>"])


def _edge(path: list[int], int8: bool, boxes: list[_Box], layout: Layout) -> str:
    points = []
    for i in path:
        p, y = layout.placed[i], _y(layout, i)
        half = _BOX / 2 if i < len(boxes) else 0.0
        points.append((p.x + _MARGIN, y, half, p.column))
    commands = [f"M{points[0][0]:.1f} {points[0][1] + points[0][2]:.1f}"]
    for (x0, y0, h0, c0), (x1, y1, h1, c1) in pairwise(points):
        start, end = y0 + h0, y1 - h1
        if c0 == c1:
            middle = (start + end) / 2
            commands.append(f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {end:.1f}")
        else:
            commands.append(_to_next_column(x0, start, x1, end, layout, c0))
    colour, width = (_INT8, 2.4) if int8 else (_FLOAT, 1.3)
    return f'<path d="{" ".join(commands)}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _to_next_column(x0: float, start: float, x1: float, end: float, layout: Layout, column: int) -> str:
    """Down, through the gutter between the columns, to the top of the next one."""
    gutter = (layout.columns[column][1] + layout.columns[column + 1][0]) / 2 + _MARGIN
    low, high = start + 14, end - 14
    return (
        f"L{x0:.1f} {low:.1f} L{gutter:.1f} {low:.1f} L{gutter:.1f} {high:.1f} L{x1:.1f} {high:.1f} L{x1:.1f} {end:.1f}"
    )


def _write(path: str, text: str) -> None:
    partial = f"{path}.{os.getpid()}.part"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except OSError as error:
        raise ArtifactError(f"cannot write the drawing to {path}: {error.strerror}") from error
