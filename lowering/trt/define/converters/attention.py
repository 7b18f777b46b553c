"""Scaled dot-product attention."""

from __future__ import annotations

import math

import torch

from lowering.trt.define.net import Net, Tensor, Value
from lowering.trt.define.registry import converts

aten = torch.ops.aten


def _no_dropout(dropout_p=0.0) -> str | None:
    return "attention dropout is random" if dropout_p else None


@converts(aten.scaled_dot_product_attention.default, check=_no_dropout)
def attention(
    net: Net,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``softmax(q k' * scale + mask) v``, written out; TensorRT's compiler fuses it where it has a kernel."""
    if enable_gqa:
        key, value = (_spread_heads(net, v, net.size(query, -3)) for v in (key, value))
    width = net.size(query, -1)
    factor = 1 / math.sqrt(width) if scale is None else scale
    scores = net.matmul(net.mul(query, factor), key, transpose_b=True)
    if is_causal:
        scores = net.where(_causal_mask(net, query, key), scores, float("-inf"), net.dtype(scores))
    if attn_mask is None:
        return net.matmul(net.softmax(scores, -1), value)
    if net.dtype(attn_mask) != torch.bool:
        scores = net.sum(scores, attn_mask, net.dtype(scores))
        return net.matmul(net.softmax(scores, -1), value)
    scores = net.where(attn_mask, scores, float("-inf"), net.dtype(scores))
    weights = net.softmax(scores, -1)
    if not (isinstance(attn_mask, torch.Tensor) and bool(attn_mask.any(-1).all())):
        # a query that may look at nothing gets zeros, not the NaN of an empty softmax
        weights = net.where(attn_mask, weights, 0.0, net.dtype(weights))
    return net.matmul(weights, value)


def _causal_mask(net: Net, query: Value, key: Value) -> Value:
    rows, columns = net.size(query, -2), net.size(key, -2)
    if isinstance(rows, int) and isinstance(columns, int):
        return torch.ones(rows, columns, dtype=torch.bool).tril()
    row = net.unsqueeze(net.iota(rows, 0, 1, torch.int64), [1])
    column = net.unsqueeze(net.iota(columns, 0, 1, torch.int64), [0])
    return net.logical_not(net.greater(column, row))


def _spread_heads(net: Net, x: Value, heads) -> Tensor:
    """Every key head repeated for its group of query heads (grouped-query attention)."""
    *lead, own, length, width = net.dims(x)
    if isinstance(own, int) and isinstance(heads, int) and own == heads:
        return net.tensor(x)
    times = heads // own
    wide = net.expand(net.unsqueeze(x, [len(lead) + 1]), [*lead, own, times, length, width])
    return net.reshape(wide, [*lead, own * times, length, width])
