"""A quantized ONNX file without the quantization of its activations: what its float layers would take, in no time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowering.onnx.files import OnnxFile

if TYPE_CHECKING:
    import onnx

__all__ = ["float_form"]


def float_form(file: OnnxFile) -> OnnxFile | None:
    """`file` with every Quantize-Dequantize pair replaced by what it reads.

    Weights keep their integers: the runtime dequantizes them when it opens the file. So it is a file to measure, not
    to keep, which would want the float weights.

    Returns:
        A new file; None for one above 2 GB, which is not worth a second copy.
    """
    import onnx

    if file.path is not None:
        return None
    model = onnx.load_model_from_string(file.content)
    graph = model.graph
    source = {output: node for node in graph.node for output in node.output}
    renamed: dict[str, str] = {}
    for node in graph.node:
        quantize = source.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if quantize is not None and quantize.op_type == "QuantizeLinear":
            renamed[node.output[0]] = quantize.input[0]
    results = {value.name for value in graph.output}
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = _origin(name, renamed)
        if results.intersection(node.output) and node.output[0] in renamed:  # a result keeps its name
            node.op_type = "Identity"
            del node.attribute[:], node.input[1:]
            node.input[0] = _origin(node.output[0], renamed)
    _drop_unread(graph)
    return OnnxFile.of(model)


def _origin(name: str, renamed: dict[str, str]) -> str:
    while name in renamed:
        name = renamed[name]
    return name


def _drop_unread(graph: onnx.GraphProto) -> None:
    """Remove the nodes that nothing reads, those that only they read included."""
    needed = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            needed.update(_read_inside(node))
            kept.append(node)
    del graph.node[:]
    graph.node.extend(reversed(kept))


def _read_inside(node: onnx.NodeProto) -> set[str]:
    """Names that the subgraphs of a node read."""
    found: set[str] = set()
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                found.update(inner.input)
                found.update(_read_inside(inner))
    return found
