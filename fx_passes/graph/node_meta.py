"""What the passes keep on a node's `meta`, and how a node is named to the user.

| key | value |
| --- | --- |
| `source` | `(file, line)` of the last frame outside torch and this package, or absent |
| `module_path` | qualified name of the module whose forward made the node, "" for the root |
| `python` | why this call stays a Python call (wrapped by the user, a leaf that tracing cannot enter) |
| `aliased` | why this value may share memory with another one in a way that is not understood |
| `quantization` | the `Annotation` that placement gave the node |
| `val` | fake tensor, or structure of them (`propagate_shapes`) |
"""

from __future__ import annotations

import os

from torch.fx import Node

__all__ = ["describe", "inherit_meta", "source_line"]

_INHERITED = ("source", "module_path", "stack_trace", "nn_module_stack")


def inherit_meta(new: Node, old: Node) -> Node:
    """Give `new`, made in place of or on behalf of `old`, its source line and module path. Returns `new`."""
    for key in _INHERITED:
        if key in old.meta and key not in new.meta:
            new.meta[key] = old.meta[key]
    return new


def source_line(node: Node) -> str | None:
    """The user's line as "file.py:12" (base name: no absolute path goes into a written file), or None."""
    source = node.meta.get("source")
    return f"{os.path.basename(source[0])}:{source[1]}" if source else None


def describe(node: Node) -> str:
    """One line for messages: node name, what it calls, module path, source line."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    parts = [f"node '{node.name}' ({node.op} {target})"]
    if node.meta.get("module_path"):
        parts.append(f"in module '{node.meta['module_path']}'")
    if (line := source_line(node)) is not None:
        parts.append(f"from {line}")
    return " ".join(parts)
