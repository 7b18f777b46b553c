"""trace: the model, global state and other threads are left as they were."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from equality import same
from torch import nn
from tracing import image

from fx_passes import trace
from fx_passes.errors import CaptureError

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return F.relu(self.conv(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Block(), nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.b(self.a(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = self.b = nn.Conv2d(3, 3, 1)
        self.c = nn.Conv2d(3, 3, 1)
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(self.a(x))) + self.c.weight.sum()


# -- nothing else changes ---------------------------------------------------------------------------------------------


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.calls, self.last, self.table = 0, None, torch.zeros(1)
        self.seen = []

    def forward(self, x):
        self.calls += 1
        self.table.add_(1)
        y = self.bn(self.conv(x))
        self.last = y
        if self.fail:
            raise RuntimeError("as asked")
        return y + torch.rand(())

    fail = False


@pytest.mark.parametrize("fail", [False, True], ids=["traced", "refused"])
def test_the_model_and_global_state_stay_as_they_were(fail):
    model = Stateful()
    model.fail = fail
    calls = []
    model.conv.register_forward_hook(lambda *a: calls.append(1))
    before, attributes = copy.deepcopy(model.state_dict()), dict(model.__dict__)
    torch.manual_seed(3)
    rng = torch.random.get_rng_state()
    functions = (torch.zeros, torch.rand, nn.Module.__call__, nn.Module.__getattr__, nn.Module.__setattr__)
    if fail:
        with pytest.raises(CaptureError, match="as asked"):
            trace(model)
    else:
        trace(model)
    assert functions == (torch.zeros, torch.rand, nn.Module.__call__, nn.Module.__getattr__, nn.Module.__setattr__)
    assert torch.equal(torch.random.get_rng_state(), rng)
    assert dict(model.__dict__) == attributes and model.training
    assert model.calls == 0 and model.last is None and model.table.item() == 0 and calls == []
    assert len(model.conv._forward_hooks) == 1
    same(dict(model.state_dict()), dict(before))


def test_other_threads_are_undisturbed_while_one_traces():
    traced, eager = Net().eval(), nn.Sequential(Net(), Tied()).eval()
    x = image()
    expected, failures, done = eager(x), [], threading.Event()

    def run():
        while not done.is_set():
            out = eager(x)
            sizes = torch.zeros(2, 3).shape, torch.rand(2).shape
            if not (isinstance(out, torch.Tensor) and torch.equal(out, expected)) or sizes != ((2, 3), (2,)):
                failures.append(out)
                return

    threads = [threading.Thread(target=run) for _ in range(2)]
    for t in threads:
        t.start()
    graphs = [str(trace(traced).graph) for _ in range(10)]
    done.set()
    for t in threads:
        t.join()
    assert failures == [] and len(set(graphs)) == 1


def test_two_threads_may_trace():
    results = {}

    def run(name, model):
        results[name] = [str(trace(model).graph) for _ in range(5)]

    threads = [threading.Thread(target=run, args=a) for a in (("net", Net()), ("tied", Tied()))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert set(results["net"]) == {str(trace(Net()).graph)} and set(results["tied"]) == {str(trace(Tied()).graph)}
