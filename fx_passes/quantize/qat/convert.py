"""From a trained QAT module back to the annotated float graph, with the ranges that training found."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from fx_passes.graph.module import copy_graph_module, set_buffer, set_submodule
from fx_passes.graph.node_meta import inherit_meta
from fx_passes.quantize.calibrated import Found, leave_float
from fx_passes.quantize.insertion import placed_for
from fx_passes.quantize.qat.layer import QatLayer
from fx_passes.quantize.qat.prepare import FAKES, LAYERS
from fx_passes.quantize.ranges.fake_quant import FakeQuantize

__all__ = ["without_fake_quantization"]


def without_fake_quantization(qat: GraphModule) -> tuple[GraphModule, Found]:
    """The fused float graph of a QAT module.

    Returns:
        The graph, BatchNorm folded by the arithmetic of the module's eval mode, and the ranges.

    Raises:
        StageError: the module has seen no data.
    """
    gm = copy_graph_module(qat)
    learned = {}
    for node in list(gm.graph.nodes):
        if placed_for(gm, LAYERS, node) is not None:
            module: Any = gm.get_submodule(str(node.target))
            if module.step is not None:
                learned[node.name] = module.step.detach().abs()
            _deploy(gm, node, module)
    fakes = _remove_fakes(gm)
    for node in list(gm.graph.nodes):
        if node.meta.get("inert"):
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            gm.graph.erase_node(node)
        elif node.op == "get_attr" and not node.users:
            gm.graph.erase_node(node)
    leave_float(gm.graph, {n: f.observer.seen_type for n, f in fakes.items() if f.observer.seen_type is not None})
    return gm, Found({n: f.qparams() for n, f in fakes.items() if f.observer.seen_type is None}, learned)


def _remove_fakes(gm: GraphModule) -> dict[str, FakeQuantize]:
    fakes = {}
    for node in list(gm.graph.nodes):
        if (name := placed_for(gm, FAKES, node)) is not None:
            fakes[name] = gm.get_submodule(str(node.target))
            node.replace_all_uses_with(node.all_input_nodes[0])
            gm.graph.erase_node(node)
    return fakes  # type: ignore[return-value]


def _deploy(gm: GraphModule, node: Node, module: QatLayer) -> None:
    """Make `node` the call of the float layer that it was, with the BatchNorm folded in."""
    activation, weight_node, bias_node, norm, _ = node.args
    op, target = node.meta["deployed"]
    weight, bias = _tensor(gm, weight_node), _tensor(gm, bias_node)
    statistics = None if norm is None else tuple(_tensor(gm, n) for n in norm)  # type: ignore[union-attr]
    if norm is not None:
        weight, bias = module.folded(weight, bias, statistics)
    if op == "call_module":
        set_submodule(gm, target, module.deployed(weight, bias))
        node.op, node.target, node.args = op, target, (activation,)
        return
    parameters = [weight_node, bias_node]
    if norm is not None:
        with gm.graph.inserting_before(node):
            for i, (name, tensor) in enumerate((("weight", weight), ("bias", bias))):
                set_buffer(gm, f"{node.name}_folded.{name}", nn.Parameter(tensor))
                parameters[i] = inherit_meta(gm.graph.get_attr(f"{node.name}_folded.{name}"), node)
    node.op, node.target = "call_function", module.function
    node.args = (activation, *parameters, *module.options)


def _tensor(gm: GraphModule, node: Any) -> Any:
    if node is None:
        return None
    value: Any = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value.detach()
