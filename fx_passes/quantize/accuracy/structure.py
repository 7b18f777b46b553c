"""Is a converted graph the float graph plus quantization, and nothing else?"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.fx import GraphModule, Node

from fx_passes.errors import StageError
from fx_passes.graph.module import copy_graph_module, delete_unused, set_buffer
from fx_passes.quantize.decomposed import is_dequantize, is_quantize
from fx_passes.quantize.weights.layer import layer_of

__all__ = ["strip_quantization"]


def strip_quantization(converted: GraphModule, fused: GraphModule, keep: Collection[str] = ()) -> GraphModule:
    """`converted` with every quantize-dequantize pair made an identity and the float parameters put back.

    The result equals `fused` to 1e-5, or placement has changed more than precision: the check that a similarity with
    the float model can't replace (a wrong residual block still had cosine 0.992).

    Args:
        converted: from `convert_fx`.
        fused: the fused float graph that it was prepared from.
        keep: names of the nodes that go on reading quantized values and weights.

    Raises:
        StageError: `converted` is not converted, or has quantized parameters that `fused` does not know.
    """
    if converted.meta.get("stage") != "converted":
        raise StageError(f"the graph is at stage {converted.meta.get('stage')!r}, not converted")
    gm = copy_graph_module(converted)
    originals = {node.name: node for node in fused.graph.nodes}
    for node in list(gm.graph.nodes):
        if not is_dequantize(node):
            continue
        source: Any = node.args[0]
        if is_quantize(source):
            node.replace_all_uses_with(source.args[0], delete_user_cb=lambda user: user.name not in keep)
        else:
            for reader in [user for user in node.users if user.name not in keep]:
                _restore(gm, reader, fused, originals.get(reader.name))
    for node in reversed(list(gm.graph.nodes)):
        if (is_dequantize(node) or is_quantize(node) or node.op == "get_attr") and not node.users:
            gm.graph.erase_node(node)
    delete_unused(gm)
    gm.graph.lint()
    gm.recompile()
    if not keep:
        gm.meta["stage"] = "fused"
    return gm


def _restore(gm: GraphModule, reader: Node, fused: GraphModule, original: Node | None) -> None:
    """Give `reader` the float weight and bias of the node of the fused graph that has its name."""
    layer = "it is not there" if original is None else layer_of(fused, original)
    if isinstance(layer, str):
        raise StageError(f"the float graph has no layer '{reader.name}': {layer}", node=reader)
    restored: list[Node | None] = []
    for name, value in (("weight", layer.weight), ("bias", layer.bias)):
        if value is None:
            restored.append(None)
            continue
        path = f"{reader.name}_float.{name}"
        set_buffer(gm, path, value)
        with gm.graph.inserting_before(reader):
            restored.append(gm.graph.get_attr(path))
    reader.args = (reader.args[0], *restored, *reader.args[3:])
