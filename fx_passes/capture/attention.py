"""`nn.MultiheadAttention` and the transformer layers around it as straight lines of tensor ops.

Their own `forward` branches on ranks, dtypes and devices and takes fused fast paths, so it cannot be traced
symbolically. The functions here compute the same from the same parameters, for batched and unbatched inputs alike,
without a branch on a traced value.

`straight_forward(module)` gives the replacement for a module's forward, or None. `QuantizationTracer` calls it where
it meets such a module, instead of making the module a leaf; the module, its path and its parameters' names stay.
`replace_attention(model)` does the same to a copy of a whole model, for `torch.export` and others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from fx_passes.errors import InputError
from fx_passes.graph.copies import shared_copy
from fx_passes.ops import attention_mask

__all__ = ["multi_head_attention", "replace_attention", "straight_forward"]

torch.fx.wrap("attention_mask")  # one node: it looks at ranks and dtypes


def straight_forward(module: nn.Module) -> Callable[..., Any] | None:
    """A traceable function with the signature and the results of `module.forward`, or None if none is needed or known.

    None also for a subclass with a forward of its own, and for modules with hooks: only a call of the module runs them.
    """
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return None
    function = _STRAIGHT.get(type(module).forward)
    return partial(function, module) if function is not None else None


def replace_attention(model: nn.Module) -> nn.Module:
    """A copy of `model`, sharing its tensors, whose attention and transformer layers have traceable forwards.

    Their classes become subclasses of what they were; paths and state dict keys stay.

    Example:
        >>> attention = nn.MultiheadAttention(8, 2)
        >>> sorted(replace_attention(attention).state_dict()) == sorted(attention.state_dict())
        True
    """
    new = shared_copy(model)
    for module in new.modules():
        function = straight_forward(module)
        if function is not None:
            cls, namespace = type(module), {"forward": function.func, "__module__": __name__}  # type: ignore[attr-defined]
            module.__class__ = type(cls.__name__, (cls,), namespace)
    return new


def multi_head_attention(
    m: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What `nn.MultiheadAttention.forward` computes (Vaswani et al., "Attention Is All You Need", 2017).

    Args:
        m: the module whose parameters are used.
        query, key, value: (L, N, E), (N, L, E) if `m.batch_first`, or (L, E); the rank is not looked at.
        key_padding_mask: (N, S) or (S,), bool (True: ignored) or float (added).
        need_weights: return the weights too; without them the product is `scaled_dot_product_attention`.
        attn_mask: (L, S) or (N * heads, L, S), bool or float.
        average_attn_weights: the mean of the weights over the heads.
        is_causal: a hint that `attn_mask` is causal; the mask itself is used.

    Raises:
        InputError: `is_causal` without a mask, which eager refuses too.
    """
    if is_causal and attn_mask is None:
        raise InputError("is_causal=True is given without attn_mask", hint="pass the causal mask as attn_mask")
    q, k, v = (_split_heads(m, x) for x in _in_projection(m, query, key, value))
    if m.bias_k is not None and m.bias_v is not None:
        k, v = _append(k, m.bias_k.view(m.num_heads, 1, -1)), _append(v, m.bias_v.view(m.num_heads, 1, -1))
    if m.add_zero_attn:
        k, v = (torch.cat([x, torch.zeros_like(x[..., :1, :])], dim=-2) for x in (k, v))
    appended = (m.bias_k is not None) + m.add_zero_attn
    # Eager drops the mask for the hint here, which hides the appended keys too.
    causal = bool(is_causal and appended and key_padding_mask is None and not need_weights)
    mask = None
    if causal:
        attn_mask = None
    if attn_mask is not None or key_padding_mask is not None:
        mask = attention_mask(q, attn_mask, key_padding_mask, m.num_heads, appended)
    dropout = m.dropout if m.training else 0.0
    if not need_weights:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        return m.out_proj(_merge_heads(m, out)), None
    scores = (q * math.sqrt(1.0 / m.head_dim)) @ k.transpose(-2, -1)
    weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
    if dropout:
        weights = F.dropout(weights, dropout)
    out = m.out_proj(_merge_heads(m, weights @ v))
    return out, weights.mean(dim=-3) if average_attn_weights else weights


def _in_projection(m: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    weight, bias, size = m.in_proj_weight, m.in_proj_bias, m.embed_dim
    if m._qkv_same_embed_dim and query is key and key is value:
        parts = F.linear(query, weight, bias).chunk(3, dim=-1)
        return parts[0], parts[1], parts[2]  # a traced value cannot be iterated over
    if m._qkv_same_embed_dim:
        weights = [weight[i * size : (i + 1) * size] for i in range(3)]
    else:
        weights = [m.q_proj_weight, m.k_proj_weight, m.v_proj_weight]
    biases = [None if bias is None else bias[i * size : (i + 1) * size] for i in range(3)]
    return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))


def _split_heads(m: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """(N, L, E), (L, N, E) or (L, E) to (N, heads, L, E / heads) or (heads, L, E / heads)."""
    x = x.unflatten(-1, (m.num_heads, m.head_dim))
    return x.transpose(-3, -2) if m.batch_first else x.movedim(0, -2)


def _merge_heads(m: nn.MultiheadAttention, x: Tensor) -> Tensor:
    x = x.transpose(-3, -2) if m.batch_first else x.movedim(-2, 0)
    return x.flatten(-2)


def _append(x: Tensor, row: Tensor) -> Tensor:
    return torch.cat([x, row.expand_as(x[..., :1, :])], dim=-2)


# --- the layers around it


def _encoder_layer(
    m: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    x = src
    if m.norm_first:
        x = x + m._sa_block(m.norm1(x), src_mask, src_key_padding_mask, is_causal=is_causal)
        return x + m._ff_block(m.norm2(x))
    x = m.norm1(x + m._sa_block(x, src_mask, src_key_padding_mask, is_causal=is_causal))
    return m.norm2(x + m._ff_block(x))


def _encoder(
    m: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """Padded positions hold what the layers give there; eager's nested-tensor fast path puts zeros there."""
    x = src
    for layer in m.layers:
        x = layer(x, src_mask=mask, is_causal=bool(is_causal), src_key_padding_mask=src_key_padding_mask)
    return m.norm(x) if m.norm is not None else x


def _decoder(
    m: nn.TransformerDecoder,
    tgt: Tensor,
    memory: Tensor,
    tgt_mask: Tensor | None = None,
    memory_mask: Tensor | None = None,
    tgt_key_padding_mask: Tensor | None = None,
    memory_key_padding_mask: Tensor | None = None,
    tgt_is_causal: bool | None = None,
    memory_is_causal: bool = False,
) -> Tensor:
    x = tgt
    for layer in m.layers:
        x = layer(
            x,
            memory,
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=bool(tgt_is_causal),
            memory_is_causal=memory_is_causal,
        )
    return m.norm(x) if m.norm is not None else x


def _transformer(
    m: nn.Transformer,
    src: Tensor,
    tgt: Tensor,
    src_mask: Tensor | None = None,
    tgt_mask: Tensor | None = None,
    memory_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    tgt_key_padding_mask: Tensor | None = None,
    memory_key_padding_mask: Tensor | None = None,
    src_is_causal: bool | None = None,
    tgt_is_causal: bool | None = None,
    memory_is_causal: bool = False,
) -> Tensor:
    memory = m.encoder(src, mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal)
    return m.decoder(
        tgt,
        memory,
        tgt_mask=tgt_mask,
        memory_mask=memory_mask,
        tgt_key_padding_mask=tgt_key_padding_mask,
        memory_key_padding_mask=memory_key_padding_mask,
        tgt_is_causal=tgt_is_causal,
        memory_is_causal=memory_is_causal,
    )


_STRAIGHT: dict[Any, Callable[..., Any]] = {
    nn.MultiheadAttention.forward: multi_head_attention,
    nn.TransformerEncoderLayer.forward: _encoder_layer,
    nn.TransformerEncoder.forward: _encoder,
    nn.TransformerDecoderLayer.forward: nn.TransformerDecoderLayer.forward,  # is a straight line as it is
    nn.TransformerDecoder.forward: _decoder,
    nn.Transformer.forward: _transformer,
}
