"""LSTM layers written out step by step.

torch has a decomposition too, which takes the wrong dimension out of the last states before torch 2.13: they have one
more than they should, and a free batch becomes 1. It also ends in one kernel of oneDNN unless that is switched off for
the whole process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["lstm"]


def lstm(
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten.lstm.input`: the results [steps, batch, out], the last hidden and cell states [layers, batch, ...].

    Raises:
        NotImplementedError: dropout between the layers is on.
    """
    if train and dropout > 0 and num_layers > 1:
        raise NotImplementedError("dropout between recurrent layers is random")
    ways = 2 if bidirectional else 1
    projected = hx[0].shape[2] != hx[1].shape[2]
    each = (4 if has_biases else 2) + projected
    x = input.transpose(0, 1) if batch_first else input
    hidden, cells = [], []
    for layer in range(num_layers):
        results = []
        for way in range(ways):
            index = layer * ways + way
            weights = params[index * each : (index + 1) * each]
            result, h, c = _one_way(x, hx[0][index], hx[1][index], weights, has_biases, projected, backwards=way == 1)
            results.append(result)
            hidden.append(h)
            cells.append(c)
        x = torch.cat(results, 2) if bidirectional else results[0]
    return x.transpose(0, 1) if batch_first else x, torch.stack(hidden), torch.stack(cells)


def _one_way(
    x: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor], has_biases: bool, projected: bool, backwards: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer in one direction; the product with all inputs is one."""
    of_input, of_hidden = weights[:2]
    input_bias, hidden_bias = weights[2:4] if has_biases else (None, None)
    steps = F.linear(x, of_input, input_bias).unbind(0)
    results = []
    for step in reversed(steps) if backwards else steps:
        enter, keep, new, leave = (step + F.linear(h, of_hidden, hidden_bias)).chunk(4, 1)
        c = torch.sigmoid(keep) * c + torch.sigmoid(enter) * torch.tanh(new)
        h = torch.sigmoid(leave) * torch.tanh(c)
        if projected:
            h = F.linear(h, weights[-1])
        results.append(h)
    return torch.stack(results[::-1] if backwards else results), h, c
