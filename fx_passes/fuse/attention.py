"""Scaled dot-product attention as its two products, so that each can be quantized or kept float by itself."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fx_passes.graph.module import copy_graph_module
from fx_passes.graph.node_meta import inherit_meta
from fx_passes.ops import bind, op_of

__all__ = ["write_out_attention"]


def write_out_attention(
    gm: GraphModule, wanted: Callable[[Node], bool] = lambda node: True
) -> tuple[GraphModule, list[tuple[str, str]]]:
    """Replace calls of `scaled_dot_product_attention` by ``softmax((q * scale) k' + mask) v``.

    Left as they are: calls with `is_causal`, with dropout, with fewer key heads than query heads, or with a mask that
    may be bool (what `nn.MultiheadAttention` makes of its masks is not).

    Args:
        gm: a functional graph in eval mode; it stays as it is.
        wanted: which calls to replace.

    Returns:
        A copy, and of every call that was replaced the names of the two nodes that multiply.
    """
    gm = copy_graph_module(gm)
    products = []
    for node in list(gm.graph.nodes):
        op = op_of(node, gm)
        if op is None or op.name != "scaled_dot_product_attention":
            continue
        arguments = bind(node)
        if arguments and wanted(node) and _plain(arguments, gm):
            products.append(_write_out(gm, node, arguments))
    gm.graph.lint()
    gm.recompile()
    return gm, products


def _plain(arguments: dict[str, Any], gm: GraphModule) -> bool:
    mask, causal = arguments.get("attn_mask"), arguments.get("is_causal")
    additive = isinstance(mask, Node) and (op := op_of(mask, gm)) is not None and op.name == "attention_mask"
    if mask is not None and not additive:
        return False
    return causal is False and arguments.get("dropout_p") == 0.0 and not arguments.get("enable_gqa")


def _write_out(gm: GraphModule, node: Node, arguments: dict[str, Any]) -> tuple[str, str]:
    query, key, value, scale = (arguments[name] for name in ("query", "key", "value", "scale"))

    def call(target: Any, args: tuple[Any, ...], name: str) -> Node:
        return inherit_meta(gm.graph.create_node("call_function", target, args, {}, f"{node.name}_{name}"), node)

    with gm.graph.inserting_before(node):
        if scale is None:
            width = inherit_meta(gm.graph.call_method("size", (query, -1)), node)
            scale = call(operator.pow, (width, -0.5), "scale")
        scaled = call(operator.mul, (query, scale), "query")
        scores = call(torch.matmul, (scaled, call(torch.transpose, (key, -2, -1), "key")), "scores")
        masked = (
            scores if (mask := arguments.get("attn_mask")) is None else call(operator.add, (scores, mask), "masked")
        )
        result = call(torch.matmul, (call(torch.softmax, (masked, -1), "weights"), value), "values")
    node.replace_all_uses_with(result)
    gm.graph.erase_node(node)
    return scores.name, result.name
