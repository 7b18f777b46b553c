"""Lowering changes nothing that the caller owns: model, inputs, calibration data, global state."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from lowering import lower_to_onnx, lower_to_trt


class Counting(nn.Module):
    """Buffers that every call changes: in place, by assignment, and through a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.calls += 1
        self.mean = self.mean * 0.9 + x.mean((0, 2, 3)) * 0.1
        return torch.relu(self.norm(self.conv(x - self.mean[:, None, None]))) + self.calls


class Branching(nn.Module):
    """A root that asks for values: it stays Python, and its child is lowered."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Counting()
        self.tail = nn.Conv2d(4, 4, 3)

    def forward(self, x):
        y = self.child(x)
        return self.tail(y) if y.sum() > 0 else self.tail(-y)


def global_state() -> tuple:
    return (
        torch.random.get_rng_state().sum().item(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        gc.isenabled(),
        torch.backends.mkldnn.enabled,
    )


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("lower", [lower_to_onnx, lower_to_trt])
@pytest.mark.parametrize("make", [Counting, Branching])
@pytest.mark.filterwarnings("ignore")
def test_nothing_of_the_callers_changes(make, lower, precision):
    torch.manual_seed(0)
    model = make().train()
    model.register_forward_hook(lambda *_: None)
    images = [torch.randn(2, 3, 8, 8, requires_grad=True) for _ in range(3)]
    model(images[0]).sum().backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    parts = [(name, type(m), m.training, list(m._forward_hooks)) for name, m in model.named_modules()]
    attributes = {name: sorted(vars(m)) for name, m in model.named_modules()}
    before = global_state(), copy.deepcopy([image.detach() for image in images])

    lowered = lower(model, images[0], precision=precision, calibration=images if precision == "int8" else None)

    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert [(name, type(m), m.training, list(m._forward_hooks)) for name, m in model.named_modules()] == parts
    assert {name: sorted(vars(m)) for name, m in model.named_modules()} == attributes
    assert global_state() == before[0]
    assert all(torch.equal(a, b) for a, b in zip(images, before[1], strict=True))

    run = lowered if lower is lower_to_onnx else lowered.simulate
    first = run(images[0].detach())
    second = run(images[0].detach())
    assert torch.equal(model.state_dict()[next(n for n in state if n.endswith("calls"))], torch.tensor(1.0))
    assert not torch.equal(first, second)  # the lowered module counts on its own


class Normalizing(nn.Module):
    """Writes to its input, as preprocessing within a model often does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        x.sub_(0.5).div_(0.25)
        return self.second(torch.relu(self.first(x)))


class BranchingNormalizing(Normalizing):
    """The same where it stays Python, with its convolutions lowered one by one."""

    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("lower", [lower_to_onnx, lower_to_trt])
@pytest.mark.parametrize("make", [Normalizing, BranchingNormalizing])
@pytest.mark.filterwarnings("ignore")
def test_inputs_that_the_model_writes_to_are_copied_for_every_run(make, lower, precision):
    torch.manual_seed(0)
    model = make().eval()
    images = [torch.rand(2, 3, 8, 8) for _ in range(3)]
    before = copy.deepcopy(images)
    for data in (None, images):
        if precision == "fp32" and data is not None:
            continue
        lowered = lower(model, images[0], precision=precision, calibration=data)
        assert all(torch.equal(a, b) for a, b in zip(images, before, strict=True))
        run = lowered if lower is lower_to_onnx else lowered.simulate
        ours, theirs = images[0].clone(), images[0].clone()
        with torch.no_grad():
            result, expected = run(ours), model(theirs)
        assert torch.equal(ours, theirs)  # a call writes to its input, as the model does
        # An input that is normalised twice has five times the range: int8 of it is far above this.
        limit = (1e-5 if precision == "fp32" else 0.05) * expected.abs().max()
        assert (result - expected).abs().max() <= limit


class ReturningItsBuffer(nn.Module):
    """A buffer that a call changes and returns: read where it was written, not where the lowering began."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x):
        self.total.add_(x)
        self.last.copy_(x * 2)
        return self.total, self.last, torch.relu(x) + 1


@pytest.mark.parametrize("lower", [lower_to_onnx, lower_to_trt])
def test_a_buffer_that_is_changed_and_returned_has_its_new_value(lower):
    model, source = ReturningItsBuffer().eval(), ReturningItsBuffer().eval()
    lowered = lower(source, torch.rand(4), precision="fp32")
    run = lowered if lower is lower_to_onnx else lowered.simulate
    inputs = list(torch.rand(3, 4))
    results = [[value.clone() for value in run(x)] for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        for ours, theirs in zip(result, model(x), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert all(not value.any() for value in source.buffers())  # the lowered module counts on its own
