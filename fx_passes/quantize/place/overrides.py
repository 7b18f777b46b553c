"""Placement from outside: decisions about single layers, as data, over those that the target's own rules made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from fx_passes.errors import InputError, StageError
from fx_passes.graph.module import copy_graph_module
from fx_passes.quantize.annotation import Granularity, annotation_of, as_float

__all__ = ["Decision", "decide"]


@dataclass(frozen=True)
class Decision:
    """What becomes of one layer that placement has quantized.

    Attributes:
        int8: it stays quantized.
        reason: why; it is what `summary()` says.
        weight: granularity of its weight scales; None leaves it as it was placed.
    """

    int8: bool
    reason: str
    weight: Granularity | None = None


def decide(prepared: GraphModule, decisions: Mapping[str, Decision]) -> GraphModule:
    """`prepared` with some of its layers decided anew; what calibration found stays valid.

    A search can calibrate once, with everything quantized that can be, and convert many placements.

    Args:
        prepared: from `prepare_calibration_fx`; it stays as it is.
        decisions: by node name.

    Returns:
        A copy that shares all modules and tensors with `prepared`.

    Raises:
        StageError: `prepared` is not prepared.
        InputError: a name of no node, or int8 for a node that was not placed in int8.
    """
    if prepared.meta.get("stage") != "prepared":
        raise StageError(f"the graph is at stage {prepared.meta.get('stage')!r}, not prepared")
    gm = copy_graph_module(prepared)
    nodes = {node.name: node for node in gm.graph.nodes}
    for name, decision in decisions.items():
        annotation = annotation_of(nodes[name]) if name in nodes else None
        if annotation is None:
            raise InputError(f"a placement decides about '{name}', which is no node of the graph")
        if not decision.int8:
            nodes[name].meta["quantization"] = as_float(annotation, decision.reason)
            continue
        if not annotation.quantized:
            raise InputError(f"a placement wants '{name}' in int8, which stays float: {annotation.reason}")
        weight = annotation.weight and (decision.weight or annotation.weight)
        nodes[name].meta["quantization"] = replace(annotation, reason=decision.reason, weight=weight)
    return gm
