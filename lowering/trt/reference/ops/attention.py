"""ATTENTION_INPUT, ATTENTION_OUTPUT, ROTARY_EMBEDDING, KV_CACHE_UPDATE."""

from __future__ import annotations

import torch

from lowering.trt.reference.kernel import Kernel, Layer

__all__ = ["attention_input", "attention_output", "kv_cache_update", "rotary_embedding"]


def attention_input(layer: Layer) -> Kernel:
    """Inputs: query (B, Hq, S, D), key and value (B, H, T, D), and a mask → the attention's result.

    TensorRT brackets an attention in two boundary layers; the first has all inputs and computes here, the second
    passes its input on. Scores are not scaled: the network scales the query. Query heads share key heads in groups.
    """
    forms = {layer.record.attributes.get(name, "PADDED_BHND") for name in ("query_form", "key_value_form")}
    if forms != {"PADDED_BHND"} or layer.record.attributes.get("key_value_lengths") is not None:
        raise layer.unsupported("has packed or variable lengths")
    if layer.record.attributes.get("normalization_quantize_scale") is not None:
        raise layer.unsupported("quantizes its normalization")
    layer.require_same_dtypes(0, 1, 2)
    soft = layer["norm_op"] == "SOFTMAX"
    kind = str(layer.record.attributes.get("causal_kind", "NONE"))
    if kind == "NONE" and layer.record.attributes.get("causal"):
        kind = "UPPER_LEFT"

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        scores = torch.matmul(query, key.mT)
        if kind != "NONE":
            rows, columns = scores.shape[-2:]
            diagonal = columns - rows if kind == "LOWER_RIGHT" else 0
            scores = scores.masked_fill(~torch.ones(rows, columns, dtype=torch.bool).tril(diagonal), float("-inf"))
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        return torch.matmul(torch.softmax(scores, -1) if soft else scores, value)

    return layer.same(run)


def attention_output(layer: Layer) -> Kernel:
    """Input: what ATTENTION_INPUT computed."""
    return layer.same(lambda x: x, exact=True)


def rotary_embedding(layer: Layer) -> Kernel:
    """Inputs: data (B, H, S, D), cosines and sines ((B, S, D/2), or (P, D/2) picked by position ids (B, S))."""
    interleaved, dim = bool(layer["interleaved"]), int(layer["rotary_embedding_dim"])
    layer.require_same_dtypes(0, 1, 2)

    def run(
        x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        rotated, rest = (x, x[..., :0]) if dim == 0 else (x[..., :dim], x[..., dim:])
        if position_ids is not None:
            cos, sin = cos[position_ids.to(torch.int64)], sin[position_ids.to(torch.int64)]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # one for all heads
        if interleaved:
            a, b = rotated[..., 0::2], rotated[..., 1::2]
        else:
            a, b = rotated.chunk(2, -1)
        real, imaginary = a * cos - b * sin, a * sin + b * cos
        if interleaved:
            turned = torch.stack((real, imaginary), -1).reshape(rotated.shape)
        else:
            turned = torch.cat((real, imaginary), -1)
        return torch.cat((turned, rest), -1)

    return layer.same(run)


def kv_cache_update(layer: Layer) -> Kernel:
    """Inputs: cache (B, H, T, D), update (B, H, S, D), write indices (B,) → the cache with the update in place."""
    layer.require_same_dtypes(0, 1)
    if layer.record.attributes.get("update_form", "PADDED_BHND") != "PADDED_BHND":
        raise layer.unsupported("takes packed updates")

    def run(cache: torch.Tensor, update: torch.Tensor, write_indices: torch.Tensor) -> torch.Tensor:
        length = update.shape[2]
        position = write_indices.to(torch.int64).reshape(-1, 1) + torch.arange(length)
        index = position[:, None, :, None].expand_as(update)
        return cache.scatter(2, index, update)

    return layer.same(run, exact=True)
