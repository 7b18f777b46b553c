"""From a calibrated module back to its annotated float graph, and what its observers found out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.fx import Graph, GraphModule

from fx_passes.errors import StageError
from fx_passes.graph.module import copy_graph_module
from fx_passes.quantize.annotation import annotation_of, as_float, quantized_values
from fx_passes.quantize.channels.smooth import smooth
from fx_passes.quantize.insertion import place_of
from fx_passes.quantize.prepare import OBSERVERS, observers_of
from fx_passes.quantize.scheme import affine_qparams, target_scheme

__all__ = ["Found", "float_reference", "leave_float", "rounded_to_nearest", "without_observers"]


@dataclass(frozen=True)
class Found:
    """What calibration or training found out about an annotated graph, by node name.

    Attributes:
        qparams: scale and zero point of a value.
        learned: scales of a layer's weight.
        highest: largest number of every channel of a value.
        means: mean of every channel of a value.
    """

    qparams: dict[str, tuple[float, int]]
    learned: dict[str, Tensor] = field(default_factory=dict)
    highest: dict[str, Tensor] = field(default_factory=dict)
    means: dict[str, Tensor] = field(default_factory=dict)


def rounded_to_nearest(prepared: GraphModule) -> GraphModule:
    """A copy of a prepared module that learns no rounding: for trials, of which only the best is worth learning for."""
    gm = copy_graph_module(prepared)
    for node in gm.graph.nodes:
        if (annotation := annotation_of(node)) is not None:
            node.meta["quantization"] = replace(annotation, learn_rounding=False)
    return gm


def float_reference(prepared: GraphModule) -> GraphModule:
    """The float graph whose weights and values `convert_fx` rounds: equalized and smoothed as configured.

    Args:
        prepared: from `prepare_calibration_fx`, after calibration.

    Raises:
        StageError: not such a module, or one that saw no data.
    """
    if prepared.meta.get("stage") != "prepared":
        raise StageError("there is no calibrated module", hint="call prepare_calibration_fx and calibrate first")
    gm, _ = without_observers(prepared)
    gm.graph.lint()
    gm.recompile()
    gm.meta["stage"] = "fused"
    return gm


def without_observers(prepared: GraphModule) -> tuple[GraphModule, Found]:
    """The annotated float graph, smoothed where that is asked for, and what its observers found."""
    gm = copy_graph_module(prepared)
    observers = observers_of(gm)
    for name in observers:
        for node in gm.graph.find_nodes(op="call_module", target=place_of(gm, OBSERVERS, name)):
            node.replace_all_uses_with(node.all_input_nodes[0])
            gm.graph.erase_node(node)
    leave_float(gm.graph, {name: o.seen_type for name, o in observers.items() if o.seen_type is not None})
    observers = {name: o for name, o in observers.items() if o.seen_type is None}
    extrema = {n: (o.channel_low.cpu(), o.channel_high.cpu()) for n, o in observers.items() if o.channel_low.dim()}
    highest = {name: o.channel_high for name, o in observers.items() if o.channel_high.dim()}
    means = {name: mean for name, o in observers.items() if (mean := o.channel_mean()) is not None}
    qparams = {name: o.qparams() for name, o in observers.items()}
    smoothed = smooth(gm, extrema)
    gm.meta["smooth_report"] = smoothed.report
    scheme = target_scheme(gm.meta["target"]).activation
    for name, factor in smoothed.factors.items():
        low, high = (bound / factor for bound in extrema[name])
        qparams[name] = affine_qparams(float(low.min()), float(high.max()), scheme)
        highest[name], means[name] = high.float().to(highest[name]), means[name] / factor.to(means[name])
    return gm, Found(qparams, highest=highest, means=means)


def leave_float(graph: Graph, seen: dict[str, str]) -> None:
    """Leave in float what reads or gives a value that turned out to be no floating point tensor.

    Args:
        graph: annotated; its annotations are changed.
        seen: the type that the value of a node had, by node name.
    """
    while bad := {
        value.node: seen[value.scale_of.name] for value in quantized_values(graph) if value.scale_of.name in seen
    }:
        for node, found in bad.items():
            for concerned in (node, *node.users):
                annotation = annotation_of(concerned)
                if annotation is not None and annotation.quantized:
                    reason = f"the value of '{node.name}' is {found}, not a floating point tensor"
                    concerned.meta["quantization"] = as_float(annotation, reason)
