"""propagate_shapes: shapes and dtypes without computing, dynamic dimensions by name, errors that name the line."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fx_passes import propagate_shapes, trace, wrap
from fx_passes.analysis.shapes import concrete_shape, shape_text
from fx_passes.errors import InputError

torch.set_num_threads(1)
calls = []


@wrap
def in_python(x):
    calls.append(x)
    return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x):
        y = self.bn(self.conv(x)).relu_()
        a, b = y.chunk(2, 1)[0], y.max(1)
        n = x.shape[0]
        return self.fc(y.mean((2, 3))).view(n, -1), a, b.values.long(), y.reshape(n, 4, -1)


def test_shapes_and_dtypes_equal_those_of_a_run():
    model = Net().eval()
    x = torch.rand(2, 3, 8, 8)
    gm = propagate_shapes(trace(model), x)
    expected = model(x)
    values = gm.graph.output_node().meta["val"]
    for fake, real in zip(values, expected, strict=True):
        assert (concrete_shape(fake), fake.dtype) == (tuple(real.shape), real.dtype)
    assert all("val" in n.meta for n in gm.graph.nodes)


def test_the_input_graph_and_its_buffers_are_untouched():
    model = Net().train()
    traced = trace(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.random.get_rng_state()
    propagate_shapes(traced, torch.rand(2, 3, 8, 8, generator=torch.Generator()))
    assert not any("val" in n.meta for n in traced.graph.nodes)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_dynamic_dimensions_are_symbols(batch):
    gm = propagate_shapes(
        trace(Net().eval()),
        torch.rand(batch, 3, 8, 9),
        dynamic_shapes={"x": {0: torch.export.Dim("batch"), 2: "height"}},
    )
    texts = {n.name: shape_text(n) for n in gm.graph.nodes}
    assert texts["x"] == "[batch, 3, height, 9]"
    assert texts["fc"] == "[batch, 5]"
    assert texts["conv"].startswith("[batch, 4, ") and texts["conv"].endswith(", 7]") and "8" not in texts["conv"]


def test_dimensions_of_one_name_are_one_symbol():
    class Add(nn.Module):
        def forward(self, x, y):
            return x + y

    dims = {"x": {0: "n"}, "y": {0: "n"}}
    gm = propagate_shapes(trace(Add()), torch.rand(2, 3), torch.rand(2, 3), dynamic_shapes=dims)
    assert shape_text(gm.graph.output_node()) == "[n, 3]"
    with pytest.raises(InputError, match="dimension 'n' is 2 and 3"):
        propagate_shapes(trace(Add()), torch.rand(2, 3), torch.rand(3, 3), dynamic_shapes=dims)


def test_a_node_that_fixes_a_dynamic_dimension_is_named():
    class Fixed(nn.Module):
        def forward(self, x):
            return x.view(6) * 2

    with pytest.raises(InputError, match=r"dynamic dimension 'n' is fixed at 2(.|\n)*node 'view'(.|\n)*test_shapes.py"):
        propagate_shapes(trace(Fixed()), torch.rand(2, 3), dynamic_shapes={"x": {0: "n"}})


def test_a_node_that_refuses_its_input_is_named():
    with pytest.raises(
        InputError, match=r"shapes do not fit: (.|\n)*x: \[2, 4, 8, 8\](.|\n)*node 'conv'(.|\n)*test_shapes.py:\d+"
    ):
        propagate_shapes(trace(Net().eval()), torch.rand(2, 4, 8, 8))


@pytest.mark.parametrize(
    "inputs, dynamic, message",
    [
        ((), None, "takes 1 to 1 inputs"),
        ((torch.rand(2, 3, 8, 8),), {"z": {0: "n"}}, "no inputs of the graph"),
        ((torch.rand(2, 3, 8, 8),), {"x": {4: "n"}}, "has 4 dimensions"),
        (("text",), {"x": {0: "n"}}, "which is a str"),
    ],
    ids=["missing", "unknown-name", "unknown-dimension", "no-tensor"],
)
def test_bad_input(inputs, dynamic, message):
    with pytest.raises(InputError, match=message):
        propagate_shapes(trace(Net().eval()), *inputs, dynamic_shapes=dynamic)


def test_python_calls_are_not_run():
    class Wrapped(nn.Module):
        def forward(self, x):
            return in_python(x * 2) + 1, x + 1

    calls.clear()
    gm = propagate_shapes(trace(Wrapped()), torch.rand(2))
    assert calls == []
    assert {n.name for n in gm.graph.nodes if "val" not in n.meta} == {"in_python", "add", "output"}


def test_data_dependent_sizes_are_symbols():
    class Nonzero(nn.Module):
        def forward(self, x):
            return x.nonzero()

    gm = propagate_shapes(trace(Nonzero()), torch.rand(4))
    assert shape_text(gm.graph.output_node()).endswith(", 1]")
