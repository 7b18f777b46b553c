"""Recurrent layers, as loops of one step: a sequence of any length is as many layers.

The product of the inputs with their weights is one for all steps, before the loop. Equations and the order of the gates
in the weights: the documentation of `torch.nn.LSTM`, `GRU` and `RNN`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lowering.trt.define.net import Net, Tensor, Value
from lowering.trt.define.registry import converts

aten = torch.ops.aten
# (net, step, states, weights) -> new states; the first one is the result of the step
Cell = Callable[[Net, Tensor, "list[Tensor]", "list[Value]"], "list[Tensor]"]


def _no_dropout(dropout, train, num_layers) -> str | None:
    return "dropout between recurrent layers is random" if train and dropout > 0 and num_layers > 1 else None


@converts(aten.lstm.input, check=_no_dropout)
def lstm(
    net: Net,
    x: Value,
    hx: Sequence[Value],
    params: Sequence[Value],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    layers = _Layers(net, params, has_biases, num_layers, bidirectional, batch_first)
    return layers.run(x, list(hx), _lstm_cell, shared_bias=True)


@converts(aten.gru.input, check=_no_dropout)
def gru(
    net: Net,
    x: Value,
    hx: Value,
    params: Sequence[Value],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    # the reset gate is between the hidden bias and the new value, so that bias stays in the loop
    layers = _Layers(net, params, has_biases, num_layers, bidirectional, batch_first)
    return layers.run(x, [hx], _gru_cell, shared_bias=False)


def _rnn(
    activation: str,
    net: Net,
    x: Value,
    hx: Value,
    params: Sequence[Value],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    layers = _Layers(net, params, has_biases, num_layers, bidirectional, batch_first)
    return layers.run(x, [hx], partial(_rnn_cell, activation), shared_bias=True)


@converts(aten.rnn_tanh.input, check=_no_dropout)
def rnn_tanh(
    net: Net,
    x: Value,
    hx: Value,
    params: Sequence[Value],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    return _rnn("TANH", net, x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)


@converts(aten.rnn_relu.input, check=_no_dropout)
def rnn_relu(
    net: Net,
    x: Value,
    hx: Value,
    params: Sequence[Value],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    return _rnn("RELU", net, x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)


class _Layers:
    """The layers of one recurrent module, each in one or two directions."""

    def __init__(
        self,
        net: Net,
        params: Sequence[Value],
        has_biases: bool,
        num_layers: int,
        bidirectional: bool,
        batch_first: bool,
    ):
        self.net, self.has_biases, self.batch_first = net, has_biases, batch_first
        self.num_layers, self.ways = num_layers, 2 if bidirectional else 1
        each = len(params) // (num_layers * self.ways)  # 2, 4, or with a projection one more
        self.weights = [list(params[i : i + each]) for i in range(0, len(params), each)]

    def run(self, x: Value, states: list[Value], cell: Cell, *, shared_bias: bool) -> tuple[Tensor, ...]:
        """The results, and the last of each state [layers x directions, batch, ...]."""
        net = self.net
        x = net.permute(x, [1, 0, 2]) if self.batch_first else x
        last: list[list[Tensor]] = [[] for _ in states]
        for layer in range(self.num_layers):
            results = []
            for way in range(self.ways):
                index = layer * self.ways + way
                first = [net.select(state, 0, index) for state in states]
                result, ends = self._one_way(x, first, self.weights[index], cell, shared_bias, backwards=way == 1)
                results.append(result)
                for found, end in zip(last, ends, strict=True):
                    found.append(net.unsqueeze(end, [0]))
            x = net.concat(results, 2) if len(results) > 1 else results[0]
        x = net.permute(x, [1, 0, 2]) if self.batch_first else x
        return net.tensor(x), *(net.concat(ends, 0) if len(ends) > 1 else ends[0] for ends in last)

    def _one_way(
        self, x: Value, states: list[Tensor], weights: list[Value], cell: Cell, shared_bias: bool, *, backwards: bool
    ) -> tuple[Tensor, list[Tensor]]:
        net = self.net
        of_input, of_hidden, *rest = weights
        biases, projection = (rest[:2], rest[2:]) if self.has_biases else ([], rest)
        steps = net.matmul(x, of_input, transpose_b=True)
        for bias in biases if shared_bias else biases[:1]:
            steps = net.sum(steps, bias)
        inner = [of_hidden, None if shared_bias or not biases else biases[1], *projection]

        def body(step: Tensor, now: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            new = cell(net, step, now, inner)
            return new[0], new

        return net.scan(steps, states, body, backwards=backwards)


def _parts(net: Net, gates: Tensor, count: int) -> list[Tensor]:
    width = int(gates.shape[1]) // count
    return [net.narrow(gates, 1, i * width, width) for i in range(count)]


def _hidden(net: Net, h: Tensor, weights: list[Any]) -> Tensor:
    product = net.matmul(h, weights[0], transpose_b=True)
    return product if weights[1] is None else net.sum(product, weights[1])


def _lstm_cell(net: Net, step: Tensor, states: list[Tensor], weights: list[Value]) -> list[Tensor]:
    h, c = states
    enter, keep, new, leave = _parts(net, net.sum(step, _hidden(net, h, weights)), 4)
    c = net.sum(net.mul(net.sigmoid(keep), c), net.mul(net.sigmoid(enter), net.tanh(new)))
    h = net.mul(net.sigmoid(leave), net.tanh(c))
    if len(weights) > 2:
        h = net.matmul(h, weights[2], transpose_b=True)
    return [h, c]


def _gru_cell(net: Net, step: Tensor, states: list[Tensor], weights: list[Value]) -> list[Tensor]:
    h = states[0]
    reset, update, new = _parts(net, step, 3)
    hidden_reset, hidden_update, hidden_new = _parts(net, _hidden(net, h, weights), 3)
    reset, update = net.sigmoid(net.sum(reset, hidden_reset)), net.sigmoid(net.sum(update, hidden_update))
    new = net.tanh(net.sum(new, net.mul(reset, hidden_new)))
    return [net.sum(new, net.mul(update, net.sub(h, new)))]


def _rnn_cell(activation: str, net: Net, step: Tensor, states: list[Tensor], weights: list[Value]) -> list[Tensor]:
    return [net.activation(activation, net.sum(step, _hidden(net, states[0], weights)))]
