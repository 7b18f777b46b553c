"""Cross-layer equalization: channels scaled between layers so that none needs a range far larger than the others.

Source: Nagel, van Baalen, Blankevoort, Welling, "Data-Free Quantization Through Weight Equalization and Bias
Correction", ICCV 2019, section 4.1. For a positively homogeneous f between two layers,
W2 f(W1 x + b1) = W2 S f(S^-1 (W1 x + b1)) with any positive diagonal S; s = sqrt(r1 / r2) gives channel i of both
weights the same range sqrt(r1 r2). Here all layers that write to a value and all that read it count, so that residual
branches share their factors.

With one weight scale per tensor this recovers channels that would round to zero. With one per output channel the first
weight needs no help; what is gained is the range of the activation between, which has one scale for all its channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_passes.capture.exclusive import in_turn
from fx_passes.entry.ambient import plain_state
from fx_passes.graph.module import copy_graph_module, delete_unused, set_buffer
from fx_passes.graph.node_meta import inherit_meta
from fx_passes.quantize.channels.groups import ChannelGroup, channel_groups, outputs_of
from fx_passes.quantize.channels.scaling import ScaledLayer, scale_group, scaled_layers, usable
from fx_passes.quantize.float_graph import fused_float
from fx_passes.quantize.weights.parameters import set_parameters

__all__ = ["equalize_fx"]

_SWEEPS, _CONVERGED = 30, 1e-2


@in_turn
@plain_state()
def equalize_fx(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    takes_part: Callable[[Node], bool] = lambda node: True,
    clips: bool = True,
) -> GraphModule:
    """Scale channels between layers so that their ranges are alike; the result computes what the model does.

    Goes through ReLU, LeakyReLU, PReLU, pooling, interpolation, `flatten` before a linear layer, residual additions,
    depthwise and grouped convolutions. A value that anything else reads (a softmax, an output, a SiLU) is left alone.

    Args:
        model: a float module (an eval copy of it is traced and fused), or a graph of one. It stays as it is.
        example_inputs: as for `trace`.
        takes_part: which layers' weights may be changed.
        clips: scale through ReLU6 too, which becomes a ReLU and a minimum with one bound for each channel. ONNX
            Runtime has no integer kernel for that, and a ReLU6 evens out activations by itself, so
            `prepare_calibration_fx` does it for TensorRT with per-tensor weights only.

    Returns:
        A fused graph. `meta["equalize_report"]` is a list of (names of the layers that write a value, what was done).

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
        >>> equalize_fx(model).meta["equalize_report"]
        [('_0', "equalized with '_2'"), ('_2', "'output' reads them and is not scaled along")]
    """
    gm = copy_graph_module(fused_float(model, example_inputs))
    groups = channel_groups(gm, takes_part, clips=clips)
    open_groups = [group for group in groups if group.reason is None and group.readers]
    layers = scaled_layers(open_groups)
    factors = _settle(open_groups, layers)
    for node, scaled in layers.items():
        set_parameters(gm, node, *scaled.parameters())
    for group, factor in zip(open_groups, factors, strict=True):
        for node, bound in group.clips.items():
            _clip_by_channel(gm, node, bound / factor, group)
    gm.meta["equalize_report"] = [(", ".join(n.name for n in g.writers), _what(g)) for g in groups]
    delete_unused(gm)
    gm.graph.lint()
    gm.recompile()
    return gm


def _settle(groups: list[ChannelGroup], layers: dict[Node, ScaledLayer]) -> list[Tensor]:
    """Adjust the factors of `layers` until nothing moves; what the values of every group were divided by."""
    total = [torch.ones(outputs_of(group), dtype=torch.float64) for group in groups]
    for _ in range(_SWEEPS):
        moved = 0.0
        for index, group in enumerate(groups):
            factor = _factor(group, layers)
            scale_group(group, layers, factor)
            total[index] = total[index] * factor
            moved = max(moved, float(factor.log().abs().max()))
        if moved < _CONVERGED:
            break
    return total


def _factor(group: ChannelGroup, layers: dict[Node, ScaledLayer]) -> Tensor:
    """What to divide every channel of a group's values by; 1 for a channel that is dead on either side."""
    written = torch.stack([layers[node].output_ranges() for node in group.writers]).amax(0)
    read = torch.stack([layers[node].input_ranges() for node in group.readers]).amax(0)
    return usable((written / read).sqrt(), written, read)


def _clip_by_channel(gm: GraphModule, node: Node, bounds: Tensor, group: ChannelGroup) -> None:
    """Make `node` a ReLU followed by a minimum with the bound of every channel."""
    layer = next(iter(group.writers.values()))
    window = 0 if layer.op == "linear" else layer.weight.dim() - 2
    path = f"{node.name}_bounds"
    set_buffer(gm, path, bounds.float().to(layer.weight.device).reshape(-1, *[1] * window))
    with gm.graph.inserting_before(node):
        relu = inherit_meta(gm.graph.call_function(torch.relu, (node.args[0],)), node)
        limit = inherit_meta(gm.graph.get_attr(path), node)
    node.op, node.target, node.args, node.kwargs = "call_function", torch.minimum, (relu, limit), {}


def _what(group: ChannelGroup) -> str:
    if group.reason is not None:
        return group.reason
    if not group.readers:
        return "no layer reads them"
    return "equalized with " + ", ".join(f"'{node.name}'" for node in group.readers)
