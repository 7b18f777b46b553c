"""profile_nodes: every call measured, memory as it is, state and inputs as they were."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch import nn

from fx_passes import profile_nodes, trace, wrap
from fx_passes.errors import InputError

torch.set_num_threads(1)
runs = []


@wrap
def slow(x):
    runs.append(1)
    time.sleep(0.02)
    return x * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        return slow(y) + y.view(-1, 4)


def test_times_and_order():
    runs.clear()
    profile = profile_nodes(trace(Net()), torch.rand(2, 4), iterations=3, warmup=1)
    assert [n.name for n in profile.nodes] == ["fc", "slow", "view", "add"]
    assert len(runs) == 4
    times = {n.name: n.milliseconds for n in profile.nodes}
    assert times["slow"] >= 20 > times["view"] > 0
    assert profile.milliseconds == pytest.approx(sum(times.values()))
    assert (profile.iterations, profile.warmup, profile.threads, profile.device) == (3, 1, 1, "cpu")


def test_memory_is_that_of_live_tensors():
    profile = profile_nodes(trace(Net()), torch.rand(2, 4), iterations=1, warmup=0)
    # x and y; + slow; the view adds nothing; at add: x, y, slow, add
    assert [n.memory_bytes for n in profile.nodes] == [64, 96, 96, 128]
    assert profile.peak_bytes == 128


def test_state_inputs_and_randomness_stay():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(4)
            self.register_buffer("count", torch.zeros(1))
            self.weight = nn.Parameter(torch.ones(1), requires_grad=False)

        def forward(self, x):
            self.count.add_(1)
            self.weight.mul_(2)
            return nn.functional.dropout(self.bn(x.add_(1)), 0.5, True)

    model = Stateful().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.zeros(3, 4)
    state = torch.random.get_rng_state()
    profile_nodes(trace(model), x)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(x, torch.zeros(3, 4)) and torch.equal(torch.random.get_rng_state(), state)


def test_text_and_plain_data():
    profile = profile_nodes(trace(Net()), torch.rand(2, 4), iterations=1)
    lines = profile.table().splitlines()
    assert lines[0].split()[:2] == ["node", "op"] and len(lines) == 1 + 4 + 2
    assert "test_profile.py:" in lines[1] and "median of 1 runs after 3, 1 threads, cpu" in lines[-1]
    assert profile.table(top=1).splitlines()[1].startswith("slow")
    assert json.loads(json.dumps(profile.as_dict()))["nodes"][1]["name"] == "slow"


def test_bad_counts():
    with pytest.raises(InputError, match="iterations=0"):
        profile_nodes(trace(Net()), torch.rand(2, 4), iterations=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda():
    profile = profile_nodes(trace(nn.Linear(4, 4).cuda()), torch.rand(2, 4, device="cuda"))
    assert profile.device == torch.cuda.get_device_name() and profile.peak_bytes > 0
