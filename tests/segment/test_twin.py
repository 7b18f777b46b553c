"""The float twin: what a program computes without its quantization, with nothing else changed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import convert_fx, prepare_calibration_fx
from lowering.segment.program import TensorSpec
from lowering.segment.to_aten import to_aten
from lowering.segment.twin import float_twin, partial_twin

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Shared(nn.Module):
    """One convolution called twice: its int8 weight has two readers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.conv = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = F.relu(self.stem(x))
        return (self.conv(y) + self.conv(y * 0.5),)


def _program(target):
    prepared = prepare_calibration_fx(Shared(), IMAGES, target=target)
    prepared(IMAGES)
    return to_aten(convert_fx(prepared), [TensorSpec.static("x", IMAGES)], (IMAGES,))


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt-rtx", "onnxruntime"])
def test_twin_has_no_quantization_and_stays_close(target):
    program = _program(target)
    before = [str(node) for node in program.graph.nodes]
    twin = float_twin(program)
    assert not any("quantize" in str(node.target) for node in twin.call_nodes())
    assert any("quantize" in str(node.target) for node in program.call_nodes())
    assert [str(node) for node in program.graph.nodes] == before
    (expected,), (int8,), (actual,) = Shared()(IMAGES), program(IMAGES), twin(IMAGES)
    # The twin keeps the rounding of the weights alone: nearer to float than the int8 program, and not equal to it.
    assert 0 < (actual - expected).norm() < (int8 - expected).norm()
    assert (actual - expected).abs().max() < 0.02 * expected.abs().max()


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 1)

    def forward(self, x):
        return (self.second(F.relu(self.first(x))),)


def _ops(program):
    return [str(n.target).split(".")[-2] for n in program.graph.nodes if "quantized" in str(n.target)]


@pytest.mark.parametrize("weight", ["per_tensor", "per_channel"])
@pytest.mark.parametrize("wanted", ["per_tensor", "per_channel", None])
def test_a_partial_twin_keeps_the_named_layer_with_the_granularity_asked_for(weight, wanted):
    prepared = prepare_calibration_fx(Two(), IMAGES, qconfig={"": {"weight": weight}})
    prepared(IMAGES)
    program = to_aten(convert_fx(prepared), [TensorSpec.static("x", IMAGES)], (IMAGES,))
    twin = partial_twin(program, {"second": wanted})
    form = wanted or weight
    assert sorted(_ops(twin)) == sorted([f"dequantize_{form}", "quantize_per_tensor", "dequantize_per_tensor"])
    (whole,), (partial,) = program(IMAGES), twin(IMAGES)
    # The first layer's rounding is gone; the second's changes by a step of its weights at most.
    assert (whole - partial).abs().max() < 0.05 * whole.abs().max()
    assert sorted(_ops(partial_twin(program, {"first": None, "second": None}))) == sorted(_ops(program))
    assert _ops(partial_twin(program, {})) == []
