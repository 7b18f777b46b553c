"""estimate_cost: FLOPs as torch counts them, bytes and peak memory by hand."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fx_passes import estimate_cost, fuse_fx, propagate_shapes, trace, wrap
from fx_passes.errors import InputError

torch.set_num_threads(1)


def counted(model, *inputs) -> int:
    # The counter does not know the fused attention of the CPU.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*inputs)
    return counter.get_total_flops()


class Functions(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.k, self.t = (nn.Parameter(torch.randn(*s)) for s in ((5, 6), (4, 2, 3, 3), (4, 2, 2, 2)))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x):
        y = F.conv2d(x, weight=self.k, groups=2)
        z = F.conv_transpose2d(y, self.t, stride=2, groups=2)
        a = torch.addmm(self.bias, y.flatten(1)[:, :6], self.w.t()) + F.linear(z.flatten(1)[:, :6], self.w)
        b = torch.bmm(y[0], y[1]) @ y[0, 0]
        c = torch.einsum("ncij,ncjk->nik", y, y) + torch.baddbmm(y[:, 0], y[:, 0], y[:, 1])
        return a, b, c, F.scaled_dot_product_attention(y, y, y), torch.mm(self.w, self.w.t())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.lstm = nn.LSTM(8, 4)

    def forward(self, x):
        return self.lstm(self.attention(x))[0]


MODELS = {
    "conv-groups": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Conv2d(8, 8, 3, groups=8)), (2, 4, 9, 9)),
    "conv1d-3d": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.Unflatten(1, (1, 4)), nn.Conv2d(1, 2, 2)), (2, 3, 9)),
    "deconv": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), nn.ReLU()), (2, 4, 5, 5)),
    "linear": (lambda: nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 7)), (3, 4, 5)),
    "functions": (Functions, (2, 4, 5, 5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_flops_equal_those_of_flop_counter_mode(name):
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(*shape)
    cost = estimate_cost(trace(model), x)
    assert cost.flops == counted(model, x) > 0
    assert cost.unknown == []


@pytest.mark.filterwarnings("ignore")
def test_flops_of_layers_without_a_formula_are_counted():
    torch.manual_seed(0)
    model, x = Attention().train(), torch.randn(2, 3, 8)
    lstm = nn.LSTM(8, 4)
    cost = estimate_cost(trace(model), x)
    straight = estimate_cost(fuse_fx(model), x)
    attention = sum(n.flops for n in straight.nodes if n.op != "LSTM" and n.name != "lstm")
    assert attention == counted(model.attention, x)
    assert next(n.flops for n in cost.nodes if n.name == "lstm") == counted(lstm, x)


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "shufflenet_v2_x0_5"])
def test_flops_of_torchvision_models(name):
    models = pytest.importorskip("torchvision").models
    model = models.get_model(name).eval()
    x = torch.randn(1, 3, 64, 64)
    assert estimate_cost(trace(model), x).flops == counted(model, x)


class Bytes(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 8)

    def forward(self, x):
        y = self.fc(x)
        z = y.view(-1).relu()
        return (y * y).sum() + z.sum()


def test_bytes_by_hand():
    cost = estimate_cost(trace(Bytes()), torch.rand(2, 4))
    rows = {n.name: (n.read_bytes, n.written_bytes, n.parameter_bytes) for n in cost.nodes}
    assert rows == {
        "fc": (4 * (8 + 32 + 8), 4 * 16, 4 * 40),
        "view": (0, 0, 0),
        "relu": (64, 64, 0),
        "mul": (64, 64, 0),
        "sum_1": (64, 4, 0),
        "sum_2": (64, 4, 0),
        "add": (8, 4, 0),
    }
    assert (cost.parameter_bytes, cost.input_bytes) == (160, 32)
    assert cost.read_bytes == 192 + 64 * 4 + 8 and cost.written_bytes == 64 * 3 + 12
    assert cost.arithmetic_intensity == pytest.approx(cost.flops / (cost.read_bytes + cost.written_bytes))


def test_peak_memory_by_liveness():
    # At `mul`: x (32), y (64), relu (64), mul (64). `view` adds nothing.
    assert estimate_cost(trace(Bytes()), torch.rand(2, 4)).peak_activation_bytes == 32 + 3 * 64


def test_peak_memory_of_a_chain_holds_two_values_and_the_input():
    model = nn.Sequential(*[nn.Sigmoid() for _ in range(5)])
    assert estimate_cost(trace(model), torch.rand(10)).peak_activation_bytes == 3 * 40


def test_in_place_ops_move_data_but_add_no_memory():
    cost = estimate_cost(trace(nn.Sequential(nn.Sigmoid(), nn.ReLU(inplace=True))), torch.rand(10))
    assert [(n.read_bytes, n.written_bytes) for n in cost.nodes] == [(40, 40), (40, 40)]
    assert cost.peak_activation_bytes == 80


def test_shared_parameters_count_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.a(self.a(x)) + self.b(x)

    assert estimate_cost(trace(Twice()), torch.rand(1, 4)).parameter_bytes == 64


@wrap
def in_python(x):
    return x


def test_python_calls_are_unknown():
    class Wrapped(nn.Module):
        def forward(self, x):
            return in_python(x * 2) + 1

    cost = estimate_cost(trace(Wrapped()), torch.rand(2))
    assert cost.unknown == ["in_python"] and "FLOPs unknown for in_python" in str(cost)


def test_shapes_on_the_graph_dynamic_ones_too():
    gm = propagate_shapes(trace(nn.Linear(3, 4)), torch.rand(2, 3), dynamic_shapes={"input_1": {0: "n"}})
    cost = estimate_cost(gm)
    assert (cost.flops, cost.nodes[0].shape) == (2 * 2 * 12, "[n, 4]")
    with pytest.raises(InputError, match="the graph has no shapes"):
        estimate_cost(trace(nn.Linear(3, 4)))


def test_exported_graph():
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).eval(),
        torch.rand(1, 3, 4, 4),
    )
    program = torch.export.export(model, (x,)).run_decompositions({})
    assert estimate_cost(program.graph_module).flops == counted(model, x)


def test_table_and_plain_data():
    cost = estimate_cost(trace(Bytes()), torch.rand(2, 4))
    lines = cost.table().splitlines()
    assert lines[0].split()[:3] == ["node", "op", "shape"] and len(lines) == 2 + len(cost.nodes) + 2
    assert "test_cost.py:" in cost.table()
    assert cost.table(top=1).splitlines()[2].startswith("fc ")
    data = json.loads(json.dumps(cost.as_dict()))
    assert data["flops"] == cost.flops and data["nodes"][0]["name"] == "fc"
