"""Weights that a forward computes: folded where parameters alone decide them, left alone where anything else does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import convert_fx, fuse_fx, prepare_calibration_fx, prepare_qat_fx
from lowering import lower_to_onnx


def image(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


class Standardized(nn.Conv2d):
    """Weight standardization (Qiao et al., arXiv 1903.10520), as its users write it."""

    def forward(self, x):
        weight = self.weight
        mean = weight.mean((1, 2, 3), keepdim=True)
        weight = (weight - mean) / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Scaled(nn.Conv2d):
    """The same by batch_norm over the weight, with a gain, as in normalizer-free networks."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)

    def forward(self, x):
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, weight=self.gain.view(-1), training=True, momentum=0.0)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, self.stride, self.padding)


class Net(nn.Module):
    def __init__(self, layer: type[nn.Conv2d]):
        super().__init__()
        self.stem = layer(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = layer(8, 4, 1)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.stem(x))))


@pytest.fixture(params=[Standardized, Scaled])
def net(request):
    torch.manual_seed(0)
    model = Net(request.param)
    model.norm.running_mean.normal_()
    return model.eval()


def test_the_weight_becomes_a_parameter_and_the_function_stays(net):
    before = {name: value.clone() for name, value in net.state_dict().items()}
    fused = fuse_fx(net)
    torch.testing.assert_close(fused(image()), net(image()), rtol=1e-4, atol=1e-5)
    assert {node.target for node in fused.graph.nodes if node.op == "call_function"} <= {F.conv2d, torch.relu}
    assert any("was computed from other parameters" in what for _, what in fused.meta["fuse_report"])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert "head.weight" in fused.state_dict()


def test_it_then_runs_in_int8(net):
    lowered = lower_to_onnx(net, image(), calibration=[image()])
    assert lowered.segments[0].engines[0]["ops"]["QLinearConv"] == 2
    prepared = prepare_calibration_fx(net, image(), target="onnxruntime")
    prepared(image())
    converted = convert_fx(prepared)
    assert converted.get_buffer("head.weight").dtype is torch.int8
    error = (converted(image()) - net(image())).abs().max() / net(image()).abs().max()
    assert error < 0.05  # a few steps of 1/255


def test_training_for_int8_keeps_it_computed(net):
    qat = prepare_qat_fx(net.train(), image(), target="onnxruntime")
    qat(image()).sum().backward()
    assert qat.get_parameter("head.weight").grad is not None


class Shared(nn.Module):
    """One computed weight for two convolutions, of a parameter that is read elsewhere too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 3, 3))

    def forward(self, x):
        weight = self.weight * 0.5
        return F.conv2d(F.conv2d(x, weight, padding=1), weight, padding=1) + self.weight.sum()


def test_one_weight_for_two_readers_beside_the_original():
    model = Shared().eval()
    fused = fuse_fx(model)
    torch.testing.assert_close(fused(image()), model(image()))
    reads = [node.target for node in fused.graph.nodes if node.op == "get_attr"]
    assert sorted(reads) == ["computed_weight", "weight"]


class FromInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 1, 1))

    def forward(self, x):
        return F.conv2d(x, self.weight * x.mean())


class FromState(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 1, 1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return F.conv2d(x, self.weight * self.calls)


class Random(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 1, 1))

    def forward(self, x):
        return F.conv2d(x, F.dropout(self.weight, 0.5, training=True))


@pytest.mark.parametrize("make", [FromInput, FromState, Random])
def test_what_changes_from_call_to_call_stays_computed(make):
    torch.manual_seed(0)
    model = make().eval()
    fused = fuse_fx(model)
    assert "computed_weight" not in fused.state_dict()
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = model(image(seed)).clone()
        if make is FromState:
            model.calls -= 1  # the graph counts in the same buffer
        torch.manual_seed(seed)
        torch.testing.assert_close(fused(image(seed)), expected)
