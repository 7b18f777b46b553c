"""What placement decides about a node, as data; and the list of quantized values that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch.fx import Graph, Node

from fx_passes.errors import QuantizationError

__all__ = ["Annotation", "QuantizedValue", "annotation_of", "as_float", "quantized_values"]


Granularity = Literal["per_channel", "per_tensor"]
NO_TENSOR = "no tensor arithmetic"
"""Ends the reason of a node that computes sizes, dtypes and the like."""
NO_OPS = frozenset({"input", "constant", "python"})


@dataclass(frozen=True)
class Annotation:
    """The decision about one node.

    Attributes:
        op: canonical op name, or what the node is where the op is not known.
        reason: why the node is quantized as it is, or why it stays float; never empty.
        quantized_inputs: which of `node.all_input_nodes` it reads through a quantize-dequantize pair.
        weight: granularity of its int8 weight, None for a float weight or none.
        output: its value is quantized for everything that reads it.
        share_scale_with: name of the node whose scale its value takes (ops that only move or pick values).
        weight_method: how the weight's range is found, "minmax" or "mse".
        correct_bias: let the bias take back what rounding the weight does to the layer's mean output.
        smooth: strength with which differences between the channels of its input move into its weight, None for none.
        learn_rounding: its weight is rounded as calibration batches teach, not to the nearest.
        observer: name of the observer that its value gets, where the configuration asks for one.
    """

    op: str
    reason: str
    quantized_inputs: tuple[int, ...] = ()
    weight: Granularity | None = None
    output: bool = False
    share_scale_with: str | None = None
    weight_method: str = "minmax"
    correct_bias: bool = True
    smooth: float | None = None
    learn_rounding: bool = False
    observer: str | None = None

    @property
    def tensor_op(self) -> bool:
        """Whether the node computes a tensor, so that it might have been quantized."""
        return self.op not in NO_OPS and NO_TENSOR not in self.reason

    @property
    def quantized(self) -> bool:
        """Whether the node computes on int8 (or, with a weight alone, stores int8)."""
        return bool(self.quantized_inputs or self.output or self.weight)


@dataclass(frozen=True)
class QuantizedValue:
    """One value that gets a quantize-dequantize pair.

    Attributes:
        node: what produces it.
        readers: the nodes that read the dequantized value.
        scale_of: the node whose range gives the scale: `node` itself, or what it shares the scale with.
    """

    node: Node
    readers: tuple[Node, ...]
    scale_of: Node


def annotation_of(node: Node) -> Annotation | None:
    return node.meta.get("quantization")


def as_float(annotation: Annotation, reason: str) -> Annotation:
    """The same node left in float."""
    return replace(
        annotation, reason=reason, quantized_inputs=(), weight=None, output=False, share_scale_with=None, observer=None
    )


def quantized_values(graph: Graph) -> list[QuantizedValue]:
    """The values that the annotations ask to quantize, in graph order.

    Raises:
        QuantizationError: an annotation names a node that is not there.
    """
    by_name = {node.name: node for node in graph.nodes}
    readers: dict[Node, dict[Node, None]] = {}
    for node in graph.nodes:
        annotation = annotation_of(node)
        if annotation is None:
            continue
        if annotation.output:
            readers.setdefault(node, {}).update(dict.fromkeys(node.users))
        inputs = node.all_input_nodes
        for index in annotation.quantized_inputs:
            readers.setdefault(inputs[index], {})[node] = None
    values = []
    for node in graph.nodes:
        if node in readers:
            values.append(QuantizedValue(node, tuple(readers[node]), _scale_source(node, by_name)))
    return values


def _scale_source(node: Node, by_name: dict[str, Node]) -> Node:
    seen = set()
    while (annotation := annotation_of(node)) is not None and annotation.share_scale_with is not None:
        if node in seen or annotation.share_scale_with not in by_name:
            raise QuantizationError(
                f"the scale of '{node.name}' is to be that of '{annotation.share_scale_with}', which has none",
                node=node,
            )
        seen.add(node)
        node = by_name[annotation.share_scale_with]
    return node
