"""SmoothQuant: large channels of an activation made smaller, the weights that read them larger by as much.

Source: Xiao, Lin, Seznec, Wu, Demouth, Han, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models", ICML 2023 (arXiv 2211.10438), eq. 4: s_j = max|X_j|^a / max|W_j|^(1 - a) with a migration strength a.
X_j / s_j costs nothing where it can be folded into what writes X: the weight and bias of a LayerNorm, or of a layer
with only a positively homogeneous activation between. Other values are left alone, with the reason.

The factors need the channels' extrema, which calibration watches, so smoothing is a step of `convert_fx`. They also
give the exact range of the smoothed value: for it, a range is that of min and max.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fx_passes.errors import InputError
from fx_passes.quantize.annotation import annotation_of, quantized_values
from fx_passes.quantize.channels.groups import ChannelGroup, channel_groups, outputs_of
from fx_passes.quantize.channels.scaling import ScaledLayer, scale_group, scaled_layers, usable
from fx_passes.quantize.weights.parameters import set_parameters

__all__ = ["Smoothed", "smooth", "smoothed_values"]


@dataclass
class Smoothed:
    """What smoothing did.

    Attributes:
        factors: by the name of the node whose range is observed, what its channels were divided by, float64.
        report: (names of the nodes that write a value, what was done with it and why).
    """

    factors: dict[str, Tensor] = field(default_factory=dict)
    report: list[tuple[str, str]] = field(default_factory=list)


def smoothed_values(gm: GraphModule) -> dict[str, int]:
    """Of the observed values that are to be smoothed, the channel axis, by the name of the node.

    Raises:
        InputError: an observer is asked for that cuts the range of such a value.
    """
    axes = {}
    for group in _asked(gm):
        if group.reason is not None:
            continue
        for node in _observed(gm, group):
            wish = next((a.observer for n in (node, *node.users) if (a := annotation_of(n)) and a.observer), None)
            if wish not in (None, "minmax"):
                raise InputError(
                    f"'{node.name}' is to be smoothed, and its observer is to be {wish!r}",
                    hint='the range of a smoothed value is that of "minmax": leave one of the two out',
                )
            axes[node.name] = _axis(group)
    return axes


def smooth(gm: GraphModule, extrema: Mapping[str, tuple[Tensor, Tensor]]) -> Smoothed:
    """Scale the channels of the values whose readers ask for it; the graph goes on computing what it did.

    Args:
        gm: the annotated float graph, the caller's own: its parameters are replaced.
        extrema: lowest and highest value of every channel, by the name of the observed node.
    """
    done = Smoothed()
    groups = _asked(gm)
    layers = scaled_layers(groups)
    changed: dict[Node, None] = {}
    for group in groups:
        names = ", ".join(node.name for node in (*group.norms, *group.writers))
        observed = [node.name for node in _observed(gm, group)]
        reason = group.reason or _why_not(group, observed, extrema)
        if reason is not None:
            done.report.append((names, reason))
            continue
        largest = torch.stack([torch.maximum(-low, high) for low, high in (extrema[n] for n in observed)]).amax(0)
        factor = _factor(group, layers, largest.double())
        scale_group(group, layers, factor)
        _scale_norms(gm, group, factor)
        changed.update(dict.fromkeys((*group.writers, *group.readers)))
        done.factors.update(dict.fromkeys(observed, factor))
        done.report.append((names, "smoothed for " + ", ".join(f"'{node.name}'" for node in group.readers)))
    for node in changed:
        set_parameters(gm, node, *layers[node].parameters())
    return done


def _asked(gm: GraphModule) -> list[ChannelGroup]:
    groups = channel_groups(gm, lambda node: True, norms=True)
    asked = [group for group in groups if any(_strength(node) is not None for node in group.readers)]
    for group in asked:
        if other := next((node for node in group.readers if _strength(node) is None), None):
            group.reason = group.reason or f"'{other.name}' reads it, too, and does not ask for it"
    return asked


def _strength(node: Node) -> float | None:
    annotation = annotation_of(node)
    return None if annotation is None or annotation.weight is None else annotation.smooth


def _observed(gm: GraphModule, group: ChannelGroup) -> list[Node]:
    """Nodes of the group whose values have a range of their own."""
    observed = {value.scale_of for value in quantized_values(gm.graph)}
    return [node for node in group.values if node in observed]


def _axis(group: ChannelGroup) -> int:
    return -1 if group.norms or next(iter(group.writers.values())).op == "linear" else 1


def _why_not(group: ChannelGroup, observed: list[str], extrema: Mapping[str, tuple[Tensor, Tensor]]) -> str | None:
    if not observed:
        return "none of its values is quantized"
    if any(name not in extrema or extrema[name][0].numel() != outputs_of(group) for name in observed):
        return "the extrema of its channels were not observed"
    return None


def _factor(group: ChannelGroup, layers: dict[Node, ScaledLayer], largest: Tensor) -> Tensor:
    """s of every channel; 1 for a channel that is dead on either side. The strongest migration asked for counts."""
    strength = max(a for node in group.readers if (a := _strength(node)) is not None)
    weights = torch.stack([layers[node].input_ranges() for node in group.readers]).amax(0)
    return usable(largest.pow(strength) / weights.pow(1.0 - strength), largest, weights)


def _scale_norms(gm: GraphModule, group: ChannelGroup, factor: Tensor) -> None:
    for node, norm in group.norms.items():
        by = factor.to(norm.weight.device)
        bias = None if norm.bias is None else (norm.bias / by).to(norm.bias.dtype)
        set_parameters(gm, node, (norm.weight / by).to(norm.weight.dtype), bias)
