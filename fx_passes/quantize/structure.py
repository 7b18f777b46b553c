"""Is a converted graph the float graph plus quantization, and nothing else?"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from fx_passes.errors import StageError
from fx_passes.graph_module import copy_graph_module, delete_unused, set_buffer
from fx_passes.quantize.decomposed import is_dequantize, is_quantize

__all__ = ["strip_quantization"]


def strip_quantization(converted: GraphModule, fused: GraphModule) -> GraphModule:
    """`converted` with every quantize-dequantize pair made an identity and the float parameters put back.

    The result equals `fused` to 1e-5, or placement has changed more than precision: the check that a similarity with
    the float model can't replace (a wrong residual block still had cosine 0.992).

    Args:
        converted: from `convert_fx`.
        fused: the fused float graph that it was prepared from.

    Raises:
        StageError: `converted` is not converted, or has quantized parameters that `fused` does not know.
    """
    if converted.meta.get("stage") != "converted":
        raise StageError(f"the graph is at stage {converted.meta.get('stage')!r}, not converted")
    gm = copy_graph_module(converted)
    for node in list(gm.graph.nodes):
        if not is_dequantize(node):
            continue
        source: Any = node.args[0]
        if is_quantize(source):
            node.replace_all_uses_with(source.args[0])
        else:
            _restore(gm, node, source, fused)
    for node in reversed(list(gm.graph.nodes)):
        if (is_dequantize(node) or is_quantize(node) or node.op == "get_attr") and not node.users:
            gm.graph.erase_node(node)
    delete_unused(gm)
    gm.graph.lint()
    gm.recompile()
    gm.meta["stage"] = "fused"
    return gm


def _restore(gm: GraphModule, dequantize: Node, stored: Node, fused: GraphModule) -> None:
    reader = next(iter(dequantize.users))
    original = _parameter(fused, reader, is_bias=str(stored.target).rsplit(".", 1)[-1].startswith("bias"))
    path = f"{stored.target}_float"
    set_buffer(gm, path, original)
    with gm.graph.inserting_before(dequantize):
        dequantize.replace_all_uses_with(gm.graph.get_attr(path))


def _parameter(fused: GraphModule, reader: Node, is_bias: bool) -> Tensor:
    """The float parameter of the node of the fused graph that has the reader's name."""
    from fx_passes.quantize.layer import layer_of

    for node in fused.graph.nodes:
        if node.name == reader.name:
            layer = layer_of(fused, node)
            if not isinstance(layer, str):
                found = layer.bias if is_bias else layer.weight
                if found is not None:
                    return found
    raise StageError(f"the float graph has no parameter for '{reader.name}'", node=reader)
