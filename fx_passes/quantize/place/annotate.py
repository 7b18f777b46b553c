"""Where quantize-dequantize pairs go, per target: `annotate` writes decisions with reasons, nothing is inserted yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.fx import GraphModule, Node

from fx_passes.graph.module import copy_graph_module
from fx_passes.quantize.annotation import Annotation
from fx_passes.quantize.place.onnxruntime import place_outputs
from fx_passes.quantize.place.sites import RULES, PlacementRules, Site, sites_of
from fx_passes.quantize.place.tensorrt import place_inputs
from fx_passes.quantize.qconfig import QConfig
from fx_passes.quantize.scheme import target_scheme

__all__ = ["annotate"]


def annotate(gm: GraphModule, target: str, qconfig: QConfig | Mapping | None = None) -> GraphModule:
    """Decide for every node of a fused graph whether and how it is quantized.

    Args:
        gm: a graph in eval mode, without in-place ops, BatchNorm folded.
        target: "tensorrt", "tensorrt-rtx" or "onnxruntime".
        qconfig: what the user wants otherwise (see `QConfig`).

    Returns:
        A copy whose nodes have `meta["quantization"]`, an `Annotation`; it shares all modules and tensors with `gm`.

    Raises:
        InputError: unknown target, or a key of `qconfig` that matches nothing.
    """
    scheme = target_scheme(target)
    gm = copy_graph_module(gm)
    sites = sites_of(gm, target, scheme, QConfig.of(qconfig))
    for node, annotation in _placement(target)(sites, RULES[target]).items():
        node.meta["quantization"] = annotation
    if not any(node.meta["quantization"].quantized for node in sites):
        _store_weights_only(sites)
    gm.meta["target"] = target
    return gm


def _placement(target: str) -> Callable[[dict[Node, Site], PlacementRules], dict[Node, Annotation]]:
    return place_outputs if target == "onnxruntime" else place_inputs


def _store_weights_only(sites: dict[Node, Site]) -> None:
    """Nothing runs in int8 here: what int8 can still give is weights of a quarter of the size."""
    for node, site in sites.items():
        if site.layer is not None and site.config.dtype != "float" and site.layer.transposed:
            reason = f"int8 weights alone, to store them smaller; computes in float. {site.float_reason}"
            node.meta["quantization"] = site.annotation(reason, weight="per_channel")
