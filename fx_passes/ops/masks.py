"""The mask of an attention layer as one call in a graph: how it is built depends on ranks, known when it runs."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attention_mask"]


def attention_mask(
    query: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, heads: int, appended: int = 0
) -> Tensor:
    """The additive mask for scores of shape (N, heads, L, S) or (heads, L, S).

    Args:
        query: (N, heads, L, head size) or (heads, L, head size); gives rank and dtype.
        attn_mask: (L, S) or (N * heads, L, S), bool (True: not attended) or floating (added).
        key_padding_mask: (N, S) or (S,), likewise.
        heads: number of heads.
        appended: keys appended to S that no mask covers (bias_k, add_zero_attn).

    Returns:
        Of the dtype of `query`, broadcastable to the scores, whose S counts the appended keys.
    """
    mask = None
    if attn_mask is not None:
        mask = _additive(attn_mask, query.dtype)
        if mask.dim() == 3 and query.dim() == 4:
            mask = mask.unflatten(0, (-1, heads))
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, query.dtype)
        padding = padding[:, None, None, :] if padding.dim() == 2 else padding
        mask = padding if mask is None else mask + padding
    if mask is None:
        raise ValueError("attention_mask needs attn_mask or key_padding_mask")
    return torch.nn.functional.pad(mask, (0, appended)) if appended else mask


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if torch.is_floating_point(mask):
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
