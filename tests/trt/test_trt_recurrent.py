"""Recurrent layers become loops: eager's numbers, and as many layers for a long sequence as for a short one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowering import lower_to_trt


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y, state = self.layer(x)
        return (y, *state) if isinstance(state, tuple) else (y, state)


KINDS = {
    "lstm": lambda: nn.LSTM(6, 5),
    "lstm, both ways, two layers, batch first": lambda: nn.LSTM(6, 5, 2, bidirectional=True, batch_first=True),
    "lstm with a projection": lambda: nn.LSTM(6, 5, proj_size=3, bidirectional=True),
    "lstm without biases": lambda: nn.LSTM(6, 5, bias=False),
    "gru, both ways, two layers": lambda: nn.GRU(6, 5, 2, bidirectional=True),
    "gru without biases": lambda: nn.GRU(6, 5, bias=False, batch_first=True),
    "rnn of tanh": lambda: nn.RNN(6, 5, batch_first=True),
    "rnn of relu, both ways": lambda: nn.RNN(6, 5, nonlinearity="relu", bidirectional=True),
}


def sequence(steps=7, batch=4):
    return torch.randn(steps, batch, 6, generator=torch.Generator().manual_seed(0))


def made(kind):
    torch.manual_seed(0)
    return Recurrent(KINDS[kind]()).eval()


@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-4), ("fp16", 1e-2)])
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_last_states(kind, precision, tolerance):
    model = made(kind)
    lowered = lower_to_trt(model, sequence(), precision=precision)
    for actual, expected in zip(lowered.simulate(sequence()), model(sequence()), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert (len(lowered.segments), lowered.fallbacks) == (1, [])


def test_initial_states_are_used():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(6, 5)

        def forward(self, x, h, c):
            return self.layer(x, (h, c))[0]

    torch.manual_seed(0)
    model, inputs = Given().eval(), (sequence(), torch.randn(1, 4, 5), torch.randn(1, 4, 5))
    lowered = lower_to_trt(model, inputs, precision="fp32")
    torch.testing.assert_close(lowered.simulate(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)


def test_a_free_batch():
    model = made("lstm, both ways, two layers, batch first")
    x = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(0))
    lowered = lower_to_trt(model, x[:2], precision="fp32", dynamic_batch=(1, 2, 5))
    for batch in (1, 3, 5):
        for actual, expected in zip(lowered.simulate(x[:batch]), model(x[:batch]), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert (len(lowered.segments), lowered.fallbacks) == (1, [])


@pytest.mark.parametrize("kind", ["lstm", "gru, both ways, two layers"])
def test_a_long_sequence_has_no_more_layers(kind):
    counts = []
    for steps in (3, 256):
        lowered = lower_to_trt(made(kind), sequence(steps), precision="fp16")
        (segment,) = lowered.backend_segments()
        counts.append(len(segment.backend.reference.record.layers))
    assert counts[0] == counts[1]
