"""The float twin: what a program computes without its quantization, with nothing else changed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import convert_fx, prepare_calibration_fx
from lowering.aten import TensorSpec, to_aten
from lowering.twin import float_twin

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
