"""From a float model to one with observers in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.fx import GraphModule

from fx_passes.capture.exclusive import in_turn
from fx_passes.entry.ambient import plain_state
from fx_passes.fuse.attention import write_out_attention
from fx_passes.ops import op_of
from fx_passes.quantize.annotation import quantized_values
from fx_passes.quantize.channels.bias import channel_axes
from fx_passes.quantize.channels.equalize import equalize_fx
from fx_passes.quantize.channels.smooth import smoothed_values
from fx_passes.quantize.float_graph import fused_float
from fx_passes.quantize.insertion import claim, insert_module, place_of, placed_for, record_example
from fx_passes.quantize.place.annotate import annotate
from fx_passes.quantize.qat.prepare import prepare_qat_fx
from fx_passes.quantize.qconfig import QConfig
from fx_passes.quantize.ranges.names import observer_for
from fx_passes.quantize.ranges.observers import Observer
from fx_passes.quantize.scheme import target_scheme

__all__ = [
    "OBSERVERS",
    "observers_of",
    "prepare_calibration_fx",
    "prepare_qat_fx",
    "record_example",
]

OBSERVERS = "observers"
DEFAULT_OBSERVER = "minmax"


@in_turn
@plain_state()
def prepare_calibration_fx(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    target: str = "tensorrt-rtx",
    qconfig: QConfig | Mapping[Any, Any] | str | os.PathLike[str] | None = None,
) -> GraphModule:
    """A module with an observer at every value that the target wants in int8; run calibration data through it.

    Args:
        model: a float module (an eval copy of it is traced, made free of in-place ops, and fused), or a graph of one
            that was traced in eval mode. It stays as it is; the result shares its tensors.
        example_inputs: what a later lowering takes as its example: a tensor, a tuple of arguments or a dict of keyword
            arguments. None: the first inputs that the module is called with.
        target: "tensorrt", "tensorrt-rtx" or "onnxruntime".
        qconfig: what to do otherwise, and where (see `QConfig`), or the file that says so.

    Returns:
        A GraphModule that computes what the float model does. Its observers are under `observers.<node name>`.

    Raises:
        StageError: the graph was traced in train mode, or is prepared or converted already.
        InputError: unknown target, or a configuration that names what is not there.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        >>> prepared = prepare_calibration_fx(model, target="onnxruntime")
        >>> _ = prepared(torch.rand(2, 3, 8, 8))
        >>> sorted(name for name, _ in prepared.observers.named_children())
        ['_1', 'input_1']
    """
    scheme = target_scheme(target)
    fused, config = _attention_written_out(fused_float(model, example_inputs), QConfig.of(qconfig))
    gm = annotate(_equalized(fused, target, config), target, config)
    claim(gm, OBSERVERS)
    axes, smoothed = channel_axes(gm), smoothed_values(gm)
    for value in quantized_values(gm.graph):
        if value.scale_of is value.node:
            observer = observer_for(value.node, value.readers, scheme.activation, DEFAULT_OBSERVER)
            observer.channel_axis = axes.get(value.node.name)
            if value.node.name in smoothed:
                observer.channel_axis = smoothed[value.node.name]
                observer.channel_statistics |= {"low"}
            insert_module(gm, value.node, value.readers, place_of(gm, OBSERVERS, value.node.name), observer)
    gm.graph.lint()
    gm.recompile()
    gm.meta["stage"] = "prepared"
    record_example(gm, example_inputs)
    return gm


def _attention_written_out(fused: GraphModule, config: QConfig) -> tuple[GraphModule, QConfig]:
    """Attention as two products where they are to be int8, and the configuration with the products in its place."""
    asked = {node for node, options in config.resolve(fused, strict=False).items() if options.dtype == "int8"}
    if not any((op := op_of(node, fused)) and op.name == "scaled_dot_product_attention" for node in asked):
        return fused, config
    graph, products = write_out_attention(fused, lambda node: node.name in {n.name for n in asked})
    names = {node.name for node in graph.graph.nodes}
    gone = {node.name for node in asked} - names
    rest = QConfig({key: config[key] for key in config if key not in gone})
    return graph, rest.merged({name: {"dtype": "int8"} for pair in products for name in pair if name not in config})


def _equalized(fused: GraphModule, target: str, config: QConfig) -> GraphModule:
    """`fused`, or where its configuration asks for it a copy with equalized channels."""
    asked = {node.name: options for node, options in config.resolve(fused).items() if options.equalize}
    if not asked:
        return fused
    # A ReLU6 evens out ranges by itself: scaling through it helps weights that share one scale, and costs elsewhere.
    # ONNX Runtime makes no integer kernel of a convolution before a clip with a bound for each channel.
    clips = target != "onnxruntime" and all(options.weight == "per_tensor" for options in asked.values())
    return equalize_fx(fused, takes_part=lambda node: node.name in asked, clips=clips)


def observers_of(gm: GraphModule) -> dict[str, Observer]:
    """The observers of a prepared module by the name of the node that they watch."""
    return {
        name: gm.get_submodule(str(node.target))  # type: ignore[misc]
        for node in gm.graph.nodes
        if (name := placed_for(gm, OBSERVERS, node)) is not None
    }
