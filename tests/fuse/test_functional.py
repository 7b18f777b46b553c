"""functionalize: the same values bit for bit, the same writes to inputs and state, and no write that can be avoided."""

from __future__ import annotations

import copy
import operator
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fx_passes import fuse_fx, trace, wrap
from fx_passes.functional.functional import functionalize, remove_dead_code
from fx_passes.ops import is_inplace, setitem, write_view

torch.set_num_threads(1)


def same(a, b, where="output"):
    assert type(a) is type(b), f"{where}: {type(a)} is not {type(b)}"
    if isinstance(a, (tuple, list)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{where}: {a.dtype} {a.shape}, {b.dtype} {b.shape}"
        assert torch.equal(a, b), f"{where}: differ by {(a.double() - b.double()).abs().max()}"
    else:
        assert a == b, where


def check(model, *inputs, left=0):
    """functionalize(trace(model)) equals eager, writes to inputs and state as eager does, and leaves `left` writes."""
    gm = trace(model)
    before = str(gm.graph)
    new = functionalize(gm)
    assert str(gm.graph) == before and gm.meta["stage"] == "traced"
    assert new.meta["stage"] == "functionalized"
    assert list(new.state_dict()) == list(model.state_dict())
    equals_eager(new, model, *inputs)
    writes = [n for n in new.graph.nodes if is_inplace(n, new) or n.target == "fill_diagonal_"]
    if left is not None:
        assert len(writes) == left, new.graph
    assert all("aliased" in n.meta for n in writes)
    return new


def equals_eager(new, model, *inputs):
    """Same outputs, same inputs and same state afterwards, bit for bit; `model` itself is not run."""
    eager = copy.deepcopy(model)
    expected_inputs, actual_inputs = copy.deepcopy(inputs), copy.deepcopy(inputs)
    memory.clear()
    expected = eager(*expected_inputs)
    memory.clear()
    actual = new(*actual_inputs)
    same(actual, expected)
    same(actual_inputs, expected_inputs, "inputs")
    for name, value in new.state_dict().items():  # fusing drops what no node reads
        same(value, eager.state_dict()[name], name)


memory: list[torch.Tensor] = []


@wrap
def remember(x):
    memory.append(x)
    return x.shape[0]


@wrap
def recall(x):
    return memory[-1] if memory else torch.zeros(())


@wrap
def double_in_place(x):
    return x.mul_(2)


@wrap
def first_element(values):
    return values[0]


def model_of(function, **state):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.relu, self.relu6 = nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True), nn.ReLU6(inplace=True)
            self.drop, self.identity, self.flatten = nn.Dropout(0.5, inplace=True), nn.Identity(), nn.Flatten()
            self.register_buffer("count", torch.zeros(4))
            self.weight = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x):
            return function(self, x)

    return Model().eval().requires_grad_(False)


REWRITTEN = {}
LEFT = {}


def rewritten(function):
    REWRITTEN[function.__name__] = function
    return function


def left(count):
    def register(function):
        LEFT[function.__name__] = (function, count)
        return function

    return register


@rewritten
def module_twice(m, x):
    y = m.conv(x)
    return m.relu(y) + m.relu(y * 2) + y


@rewritten
def unused_methods(m, x):
    y = m.conv(x)
    y.mul_(0.5)
    y.add_(1.0)
    return y


@rewritten
def augmented_assignments(m, x):
    y = m.conv(x)
    alias = y
    y += 2
    y *= 3
    y -= x.sum()
    y /= 2
    y **= 2
    return y, alias


@rewritten
def item_assignments(m, x):
    z = m.conv(x) * 2
    z[:, 0] = 0
    z[:, 1:3] = torch.sigmoid(z[:, 1:3])
    z[..., -1] += 1
    z[z > 1] = 0.5
    return z


@rewritten
def residual_reads_what_relu_wrote(m, x):
    y = m.conv(x)
    r = m.relu(y)
    out = r * 2
    out += y
    return m.relu6(out)


@rewritten
def functions(m, x):
    y = m.conv(x)
    F.relu(y, inplace=True)
    F.leaky_relu(y, 0.2, True)
    torch.relu_(y)
    F.hardtanh_(y)
    torch.sigmoid_(y)
    F.threshold_(y, 0.1, 0.2)
    return y


@rewritten
def base_read_after_view_written(m, x):
    y = m.conv(x)
    a, b = y.chunk(2, dim=1)
    a.mul_(3)
    a.add_(b)
    return y, a, b


@rewritten
def view_read_after_base_written(m, x):
    y = m.conv(x)
    row, transposed = y[:, 0], y.transpose(1, 2)
    y.relu_()
    return row, transposed, y.view(-1)


@rewritten
def view_of_a_view(m, x):
    y = m.conv(x)
    inner = y.permute(0, 2, 3, 1)[..., 1:3].unsqueeze(0).select(1, 0)
    inner.neg_()
    inner.squeeze(0)[0].zero_()
    return y


@rewritten
def attribute_views(m, x):
    y = m.conv(x).sum((0, 1))
    y.T.mul_(2)
    y.data.add_(1)
    y.detach()[0] = 7
    return y


@rewritten
def split_unbind_narrow(m, x):
    y = m.conv(x)
    parts = y.split([1, 3], 1)
    parts[1].mul_(2)
    y.unbind(0)[1].add_(1)
    y.narrow(1, 0, 2).abs_()
    return y, parts[0]


@rewritten
def module_view(m, x):
    y = m.conv(x)
    m.identity(y).mul_(2)
    return y


@rewritten
def flatten_then_relu_with_the_base_dead(m, x):
    y = m.conv(x)
    flat = m.flatten(y)
    return m.relu(flat)


@rewritten
def dropout_in_place(m, x):
    y = m.conv(x)
    m.drop(y)
    return F.dropout(y, 0.5, False, True)


@rewritten
def dtype_of_the_written_tensor_is_kept(m, x):
    y = m.conv(x)
    y += torch.ones(4, 1, 1, dtype=torch.float64)
    mask = y * 1
    mask.gt_(0.5)
    half = (y * 1).half()
    half.mul_(y)
    return y, mask, half


@rewritten
def out_arguments(m, x):
    y = m.conv(x)
    z = torch.empty_like(y)
    torch.mul(y, 2, out=z)
    torch.add(z, y, out=y)
    return y, z


@rewritten
def copy_fill_zero(m, x):
    y = m.conv(x)
    z, w, v = torch.empty_like(y), y * 1, y * 1
    z.copy_(x[:, :1])
    w.fill_(2)
    v.zero_()
    return z, w, v


@rewritten
def masked_and_indexed(m, x):
    y = m.conv(x)
    y.masked_fill_(y > 0.5, 0)
    y.index_fill_(1, torch.tensor([1]), 4)
    y.clamp_(min=0, max=3)
    return y


@rewritten
def reshaped_in_place(m, x):
    y = m.conv(x)
    view = y[0]
    y.unsqueeze_(0)
    y.squeeze_(0)
    y.transpose_(1, 2)
    view.mul_(2)
    return y, view


@rewritten
def elements_of_topk(m, x):
    values, indices = m.conv(x).topk(2, dim=1)
    values.mul_(2)
    indices.add_(1)
    best = m.conv(x).max(1)
    best.values.mul_(3)
    return values, indices, best.values, best.indices


@rewritten
def numbers(m, x):
    n = x.shape[0]
    k = n
    n += 1
    n *= 2
    y = m.conv(x)
    y += n
    return y, n, k


@rewritten
def written_before_a_wrapped_call(m, x):
    y = m.conv(x)
    y.relu_()
    return y, first_element(y)


@rewritten
def harmless_underscores(m, x):
    y = m.conv(x)
    y.detach_()
    return y.requires_grad_(False)


@rewritten
def dead_write(m, x):
    y = m.conv(x)
    z = y * 2
    z.add_(1)
    return y


@left(1)
def input_written(m, x):
    x.mul_(2)
    return m.conv(x)


@left(2)
def input_written_through_views(m, x):
    flat = x.view(-1)
    flat[0] = 3
    m.relu(x)
    return x.sum()


@left(1)
def input_written_through_reshape(m, x):
    x.reshape(-1).add_(1)
    return x


@left(1)
def input_written_through_a_cast_that_does_nothing(m, x):
    y = x.float()
    y += 1
    return x, y


@left(2)
def buffer_and_parameter_written(m, x):
    m.count.add_(1)
    m.weight[0] = 5
    return m.conv(x) * m.weight.view(1, -1, 1, 1) + m.count.view(1, -1, 1, 1)


@left(2)
def reshape_written_while_its_base_lives(m, x):
    y = m.conv(x)
    y.transpose(1, 2).reshape(-1)[0] = 0
    y.reshape(-1).mul_(2)
    return y


@left(1)
def kept_by_a_wrapped_call(m, x):
    y = m.conv(x)
    remember(y)
    y.mul_(2)
    return recall(x) + y


@left(1)
def result_of_a_wrapped_call(m, x):
    y = m.conv(x)
    z = first_element(y)
    z += 1
    return y, z


@left(1)
def out_argument_that_is_a_view(m, x):
    y = m.conv(x)
    torch.mul(x[:, 0], 2, out=y[:, 0])
    return y


@left(1)
def view_that_write_view_does_not_know(m, x):
    y = m.conv(x) * 1j
    torch.view_as_real(y).mul_(2)
    return y


@left(1)
def no_out_of_place_form(m, x):
    y = m.conv(x)[0, 0]
    y.fill_diagonal_(0.0)
    return y


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten(name):
    new = check(model_of(REWRITTEN[name]), torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1)))
    assert not any("aliased" in n.meta for n in new.graph.nodes) or name == "written_before_a_wrapped_call"


@pytest.mark.parametrize("name", LEFT)
def test_left_in_place_and_marked(name):
    function, count = LEFT[name]
    check(model_of(function), torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1)), left=count)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("input_written", "an input, which is the caller's memory"),
        ("buffer_and_parameter_written", "a parameter or buffer of the model"),
        ("kept_by_a_wrapped_call", "'remember' may have kept"),
        ("result_of_a_wrapped_call", "the result of 'first_element', which is not understood"),
        ("reshape_written_while_its_base_lives", "may share memory with 'conv'"),
        ("out_argument_that_is_a_view", "written by out= of 'mul', which may resize it"),
        ("view_that_write_view_does_not_know", "through a view that is not understood"),
        ("no_out_of_place_form", "no out-of-place form"),
    ],
)
def test_reasons(name, reason):
    gm = functionalize(trace(model_of(LEFT[name][0])))
    reasons = [n.meta["aliased"] for n in gm.graph.nodes if "aliased" in n.meta]
    assert any(reason in r for r in reasons), reasons


@pytest.mark.parametrize("keep", [True, False], ids=["read-again", "last-use"])
def test_argument_of_a_wrapped_call_is_marked_only_if_it_is_read_again(keep):
    def forward(m, x):
        y = m.conv(x)
        z = double_in_place(y)
        return (y.sum(), z) if keep else z

    gm = check(model_of(forward), torch.randn(1, 3, 2, 2))
    conv = next(n for n in gm.graph.nodes if n.name == "conv")
    assert ("aliased" in conv.meta) is keep


def test_one_module_called_on_an_input_and_on_a_fresh_value():
    def forward(m, x):
        return m.relu(x) + m.relu(x * 2)

    model = model_of(forward)
    gm = check(model, torch.randn(1, 3, 2, 2), left=1)
    assert gm.relu.inplace and not gm.relu_out_of_place.inplace and model.relu.inplace


def test_training_graph_keeps_batch_norm_and_dropout():
    def forward(m, x):
        m.bn(x)
        F.dropout(x, 0.5, True)
        x * 2
        return m.conv(x)

    model = model_of(forward)
    model.bn = nn.BatchNorm2d(3)
    names = [n.name for n in functionalize(trace(model.train())).graph.nodes]
    assert names == ["x", "bn", "dropout", "conv", "output"]
    names = [n.name for n in functionalize(trace(model.eval())).graph.nodes]
    assert names == ["x", "dropout", "conv", "output"]  # F.dropout was given training=True


def test_dead_code_behind_hooks_and_wrapped_calls_stays():
    def forward(m, x):
        m.relu6(x * 1)
        remember(x)
        x.sum()
        return m.conv(x)

    model = model_of(forward)
    model.relu6.register_forward_hook(lambda *_: None)
    gm = functionalize(trace(model))
    assert [n.name for n in gm.graph.nodes] == ["x", "mul", "relu6", "remember", "conv", "output"]
    assert not remove_dead_code(gm)


def test_writes():
    x = torch.arange(6.0).view(2, 3)
    assert setitem(x, (0, slice(1, None)), 9.0).tolist() == [[0, 9, 9], [3, 4, 5]]
    assert write_view(x, torch.zeros(2), ("T", (), {}), ("getitem", (1,), {})).tolist() == [[0, 0, 2], [3, 0, 5]]
    step = ("aten::slice.Tensor", (1, 0, 2), {})
    assert write_view(x, torch.zeros(2, 2), step).tolist() == [[0, 0, 2], [0, 0, 5]]
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


# --- random programs

FRESH = [
    lambda a, b, m: a * 2 + 1,
    lambda a, b, m: torch.sigmoid(a),
    lambda a, b, m: a + b,
    lambda a, b, m: torch.cat([a, b]),
    lambda a, b, m: a.clone(),
    lambda a, b, m: F.relu(a),
    lambda a, b, m: a @ b,
]
VIEWS = [
    lambda a, b, m: a[0],
    lambda a, b, m: a[:, 1:3],
    lambda a, b, m: a.transpose(0, 1),
    lambda a, b, m: a.T,
    lambda a, b, m: a.view(-1),
    lambda a, b, m: a.unsqueeze(0),
    lambda a, b, m: a.chunk(2)[1],
    lambda a, b, m: a.unbind(1)[0],
    lambda a, b, m: a.detach(),
    lambda a, b, m: m.identity(a),
    lambda a, b, m: a.reshape(-1),
    lambda a, b, m: m.flatten(a),
    lambda a, b, m: a.contiguous(),
    lambda a, b, m: a.float(),
    lambda a, b, m: m.drop(a),
    lambda a, b, m: a[a.shape[0] - 1],
    lambda a, b, m: a.view_as(b),
]
WRITES = [
    lambda a, b, m: a.mul_(0.5),
    lambda a, b, m: a.add_(b),
    lambda a, b, m: operator.iadd(a, 1),
    lambda a, b, m: m.relu(a),
    lambda a, b, m: F.relu6(a, inplace=True),
    lambda a, b, m: operator.setitem(a, 0, 3.0),
    lambda a, b, m: operator.setitem(a, (slice(None), 1), b[:, 0] * 2),
    lambda a, b, m: a.copy_(b),
    lambda a, b, m: a.zero_(),
    lambda a, b, m: a.fill_diagonal_(2.0),
    lambda a, b, m: a.gt_(b),
    lambda a, b, m: a.squeeze_(),
    lambda a, b, m: a.t_(),
    lambda a, b, m: torch.mul(b, 2, out=a),
    lambda a, b, m: m.count.add_(1),
]
CALLS = [
    lambda a, b, m: double_in_place(a),
    lambda a, b, m: first_element([a, b]),
    lambda a, b, m: remember(a),
    lambda a, b, m: recall(a),
]
OPERATIONS = [("fresh", f) for f in FRESH] + [("view", f) for f in VIEWS] * 2 + [("write", f) for f in WRITES] * 2
OPERATIONS += [("call", f) for f in CALLS]
PLAN = st.lists(st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 9), st.integers(0, 9)), max_size=14)


def pick(values, i):
    return values[-1 - i % len(values)]  # small numbers are the latest values, so programs shrink to dense ones


class Program(nn.Module):
    def __init__(self, steps, returned):
        super().__init__()
        self.steps, self.returned = steps, returned
        self.relu, self.identity, self.flatten = nn.ReLU(inplace=True), nn.Identity(), nn.Flatten(0)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x, y):
        values = [x, y, self.count, x * 2, y * 3]
        for op, i, j in self.steps:
            result = OPERATIONS[op][1](pick(values, i), pick(values, j), self)
            if result is not None and OPERATIONS[op][1] is not CALLS[2]:
                values.append(result)
        return [pick(values, i) for i in self.returned]


def valid_steps(plan):
    """The steps of the plan that eager accepts, each in the state that those before it leave."""
    steps = []
    for step in plan:
        memory.clear()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # out= of another shape, .T of another rank than 2
                Program([*steps, step], []).eval()(torch.randn(4, 4), torch.randn(4, 4))
        except (RuntimeError, IndexError, TypeError, UserWarning):
            continue
        steps.append(step)
    return steps


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(PLAN, st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_random_programs_equal_eager(plan, returned):
    model = Program(valid_steps(plan), returned).eval()
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)
    check(model, *inputs, left=None)
    equals_eager(fuse_fx(copy.deepcopy(model)), model, *inputs)
