"""What is on in torch around a lowering is not inherited, and a lowered module runs whatever is on."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from routes import agrees, same_on
from torch import nn
from tracing import image

from fx_passes import convert_fx, fuse_fx, prepare_calibration_fx, prepare_qat_fx, trace
from fx_passes.entry.ambient import TorchState, as_caller, is_plain, plain_state
from lowering import lower_to_onnx, lower_to_trt

X = image()
pytestmark = pytest.mark.filterwarnings("ignore:int8 is calibrated on the example")


class Net(nn.Module):
    """New tensors in forward, whose type and device the defaults of torch would decide."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        y = self.head(torch.relu(self.norm(self.conv(x))))
        return y + torch.linspace(0, 1, y.shape[3]) * torch.full((1,), 0.5)


class Python(Net):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


@contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES = {
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad off": lambda: torch.set_grad_enabled(False),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype": default_dtype,
    "default device meta": lambda: default_device("meta"),
    "default device cpu": lambda: default_device("cpu"),
    "device context": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
}


def made(cls=Net, weights_in_inference_mode=False):
    with torch.inference_mode(weights_in_inference_mode):
        torch.manual_seed(0)
        return cls().eval()


@pytest.mark.parametrize("state", STATES)
def test_graphs_are_the_same(state):
    model = made()
    with STATES[state]():
        before = TorchState.now()
        graphs = [trace(model, X), fuse_fx(model, X)]
        prepared = prepare_calibration_fx(model, X, target="onnxruntime")
        qat = prepare_qat_fx(model, X, target="onnxruntime")
        assert TorchState.now() == before
    for graph in graphs:
        same_on(graph, model, X, exact=True)
    prepared(X)
    same_on(convert_fx(prepared), model, X, exact=False)
    qat.train()(X).sum().backward()
    assert all(p.grad is not None for p in qat.parameters())


@pytest.mark.parametrize("state", STATES)
def test_a_lowering_is_the_same_and_runs_there(state):
    model = made()
    with STATES[state]():
        before = TorchState.now()
        lowered = lower_to_onnx(model, X)
        inside = lowered(X)
        assert TorchState.now() == before
    assert inside.dtype is torch.float32
    torch.testing.assert_close(inside.clone(), lowered(X))
    torch.testing.assert_close(lower_to_onnx(model, X)(X), lowered(X))


@pytest.mark.parametrize("state", ["autocast", "default dtype", "device context"])
def test_what_stays_in_python_does_not_inherit_it_either(state):
    model = made(Python)
    with STATES[state]():
        lowered = lower_to_trt(model, X, precision="fp32")
        inside = lowered.simulate(X)
    same_on(lambda _: inside.clone(), model, X, exact=True)


@pytest.mark.parametrize("state", ["autocast", "default device meta"])
def test_what_runs_in_torch_is_not_cast(state):
    lowered = lower_to_onnx(made(Python), X, precision="fp32")
    with STATES[state]():
        inside = lowered(X)
    torch.testing.assert_close(inside, lowered(X), rtol=0, atol=0)


@pytest.mark.parametrize("route", ["fuse", "ptq", "qat", "onnx int8", "trt fp32"])
def test_weights_made_in_inference_mode(route):
    model = made(weights_in_inference_mode=True)
    agrees(route, model, X)
    assert all(p.is_inference() for p in model.parameters())


def test_inputs_made_in_inference_mode():
    class InPlace(Net):
        def forward(self, x):
            return super().forward(x.mul_(2))

    with torch.inference_mode():
        x, batches = image(), [image(seed=1), image(seed=2)]
    model = made(InPlace)
    lowered = lower_to_onnx(model, x, calibration=batches)
    same_on(lowered, model, X, exact=False)
    assert torch.equal(x, X)
    assert torch.equal(batches[1], image(seed=2))


def test_calibrating_in_inference_mode():
    prepared = prepare_calibration_fx(made(), target="onnxruntime")
    with torch.inference_mode():
        prepared(X)
    prepared(image(seed=1))  # and once more outside
    same_on(lower_to_onnx(prepared), made(), X, exact=False)


def test_generated_batches_are_made_in_the_callers_state():
    seen = []

    def batches():
        seen.append(TorchState.now())
        yield X

    model = made()
    with default_dtype(), torch.no_grad():
        expected = TorchState.now()
        lower_to_onnx(model, X, calibration=batches())
    assert seen == [expected] != [TorchState()]


def test_plain_state_leaves_what_is_plain():
    assert is_plain()
    with plain_state():
        assert TorchState.now() == TorchState()
    with default_dtype():
        assert not is_plain()
        with plain_state():
            assert is_plain()
            assert list(as_caller(torch.get_default_dtype() for _ in range(2))) == [torch.float64] * 2
            assert torch.get_default_dtype() is torch.float32
        with pytest.raises(KeyError), plain_state():
            raise KeyError
        assert torch.get_default_dtype() is torch.float64


def test_what_is_shared_by_threads_is_plain_until_the_last_of_them_ends():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with plain_state():
            inside.set()
            leave.wait(10)

    with default_dtype():
        thread = threading.Thread(target=other)
        thread.start()
        inside.wait(10)
        with plain_state():
            assert [torch.float64] == list(as_caller(torch.get_default_dtype() for _ in range(1)))
        assert torch.get_default_dtype() is torch.float32
        leave.set()
        thread.join()
        assert torch.get_default_dtype() is torch.float64


def test_compiled_functions_run_as_they_are_and_dynamo_is_not_loaded():
    with plain_state():
        pass
    if "torch._dynamo" not in sys.modules:
        trace(made(), X)
        assert "torch._dynamo" not in sys.modules
