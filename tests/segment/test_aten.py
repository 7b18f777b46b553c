"""to_aten: the normal form, dynamic dimensions, mutation, where nodes come from, and what is said when export fails."""

from __future__ import annotations

import operator
from inspect import signature

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import trace
from fx_passes.errors import ExportError, InputError
from fx_passes.quantize.decomposed import decomposed
from lowering import lower_to_onnx
from lowering.segment.program import AtenProgram, TensorSpec, WriteBack, output_values
from lowering.segment.to_aten import to_aten

aten = torch.ops.aten


def graph_of(function) -> torch.fx.GraphModule:
    """A segment: an FX graph that takes tensors and returns a tuple of tensors."""
    if not isinstance(function, nn.Module):
        names = ", ".join(signature(function).parameters)
        scope = {"function": function}
        exec(f"def forward(self, {names}):\n    return function({names})", scope)
        function = type("Net", (nn.Module,), {"forward": scope["forward"]})().eval()
    graph_module = trace(function)
    output = graph_module.graph.output_node()
    if not isinstance(output.args[0], tuple):
        output.args = ((output.args[0],),)
    graph_module.recompile()
    return graph_module


def specs_of(graph: torch.fx.GraphModule, tensors, batch: tuple[int, int, int] | None) -> list[TensorSpec]:
    names = [n.name for n in graph.graph.find_nodes(op="placeholder")]
    if batch is None:
        return [TensorSpec.static(n, t) for n, t in zip(names, tensors, strict=True)]
    return [TensorSpec(n, t.dtype, *((b, *t.shape[1:]) for b in batch)) for n, t in zip(names, tensors, strict=True)]


def lower(function, *tensors: torch.Tensor, batch: tuple[int, int, int] | None = None) -> AtenProgram:
    graph = graph_of(function)
    return to_aten(graph, specs_of(graph, tensors, batch), tensors)


def ops(program: AtenProgram) -> list[str]:
    return [
        n.target.__name__ if n.target is operator.getitem else str(n.target).removesuffix(".default")
        for n in program.call_nodes()
    ]


def check_form(program: AtenProgram) -> None:
    """What every program promises."""
    program.graph.lint()
    program.exported.validate()
    assert all("val" in n.meta for n in program.graph.nodes if n.op != "output")
    assert not any("stack_trace" in n.meta or "custom" in n.meta for n in program.graph.nodes)
    names = [s.name for s in program.inputs]
    assert [n.name for n in program.input_nodes()] == names and all(name.isidentifier() for name in names)
    assert len(set(program.outputs + names)) == len(program.outputs) + len(names)
    outputs = output_values(program.graph)
    assert len(outputs) == len(program.outputs) == len(set(outputs))
    assert all(n.op == "call_function" for n in outputs)


x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
image = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))
pairs = {
    "flatten": (lambda t: t.flatten(1) * 2, x, ["aten.reshape", "aten.mul.Tensor"]),
    "view of a copy": (lambda t: t.transpose(1, 2).contiguous().view(2, -1), x, ["aten.permute", "aten.reshape"]),
    "reshape to the same": (lambda t: t.reshape(2, 3, 4) + 1, x, ["aten.add.Tensor"]),
    "unflatten": (lambda t: t.unflatten(2, (2, 2)) + 1, x, ["aten.reshape", "aten.add.Tensor"]),
    "view_as": (lambda t: t.view_as(t) + 1, x, ["aten.add.Tensor"]),
    "movedim": (lambda t: t.movedim(0, 2) + 1, x, ["aten.permute", "aten.add.Tensor"]),
    "movedim of two": (lambda t: t.movedim((0, 1), (2, 0)) + 1, x, ["aten.permute", "aten.add.Tensor"]),
    "mT": (lambda t: t.mT + 1, x, ["aten.permute", "aten.add.Tensor"]),
    "identity permute": (lambda t: t.permute(0, 1, 2) + 1, x, ["aten.add.Tensor"]),
    "swapaxes": (lambda t: t.swapaxes(0, -1) + 1, x, ["aten.permute", "aten.add.Tensor"]),
    "chunk": (lambda t: t.chunk(2, 2)[0] + 1, x, ["aten.split.Tensor", "getitem", "aten.add.Tensor"]),
    "narrow": (lambda t: t.narrow(2, 1, 2) + 1, x, ["aten.slice.Tensor", "aten.add.Tensor"]),
    "full slices": (lambda t: t[:, 1:] + 1, x, ["aten.slice.Tensor", "aten.add.Tensor"]),
    "squeeze of nothing": (lambda t: t.squeeze(1) + 1, x, ["aten.add.Tensor"]),
    "squeeze": (lambda t: t[:1].squeeze() + 1, x, ["aten.slice.Tensor", "aten.squeeze.dims", "aten.add.Tensor"]),
    "expand to the same": (lambda t: t.expand(2, 3, 4) + 1, x, ["aten.add.Tensor"]),
    "expand_as": (lambda t: t[:1].expand_as(t) + 1, x, ["aten.slice.Tensor", "aten.expand", "aten.add.Tensor"]),
    "cast to the same": (lambda t: t.float().to(torch.float32).type_as(t) + 1, x, ["aten.add.Tensor"]),
    "cast": (lambda t: t.to(torch.int64).float(), x, ["aten._to_copy", "aten._to_copy"]),
    "clone, detach, contiguous": (lambda t: t.clone().detach().contiguous() + 1, x, ["aten.add.Tensor"]),
    "dropout in eval": (lambda t: F.dropout(t, 0.5, False) + 1, x, ["aten.add.Tensor"]),
    "composites stay whole": (
        lambda t: F.hardswish(F.layer_norm(F.linear(t, t[0]), [3])),
        x,
        ["aten.select.int", "aten.linear", "aten.layer_norm", "aten.hardswish"],
    ),
    "attention stays whole": (
        lambda t: F.scaled_dot_product_attention(t, t, t),
        x,
        ["aten.scaled_dot_product_attention"],
    ),
    "adaptive pool to 1x1": (lambda t: F.adaptive_avg_pool2d(t, 1), image, ["aten.avg_pool2d"]),
    "adaptive pool with equal windows": (lambda t: F.adaptive_avg_pool2d(t, (3, 2)), image, ["aten.avg_pool2d"]),
    "adaptive pool to the same": (lambda t: F.adaptive_avg_pool2d(t, 6) + 1, image, ["aten.add.Tensor"]),
    "adaptive pool with unequal windows": (lambda t: F.adaptive_avg_pool2d(t, 4), image, ["aten.adaptive_avg_pool2d"]),
    "in-place on own memory": (lambda t: (t + 1).relu_() * 2, x, ["aten.add.Tensor", "aten.relu", "aten.mul.Tensor"]),
    "dead code": (lambda t: (t.sin(), t + 1)[1], x, ["aten.add.Tensor"]),
    "an input as an output": (lambda t: t, x, ["aten.clone"]),
    "a view of an input as an output": (lambda t: t.view(-1, 3, 4), x, ["aten.clone"]),
    "one value returned twice": (lambda t: (u := t + 1, u), x, ["aten.add.Tensor", "aten.clone"]),
}  # fmt: skip


@pytest.mark.parametrize("case", pairs)
@pytest.mark.parametrize("batch", [None, (1, 2, 5)], ids=["static", "dynamic"])
def test_normal_form(case, batch):
    function, tensor, expected = pairs[case]
    if batch and case in ("view of a copy", "reshape to the same", "expand to the same", "squeeze"):
        pytest.skip("the function fixes the batch")
    program = lower(function, tensor, batch=batch)
    check_form(program)
    assert [o for o in ops(program) if not o.startswith("aten.sym_size")] == expected
    for n in (2, 1, 5) if batch else (2,):
        value = torch.randn(n, *tensor.shape[1:], generator=torch.Generator().manual_seed(n))
        wanted = function(value.clone())
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for got, want in zip(program(value), wanted, strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def painted(t):
    mask = t.new_zeros(3, 4)
    mask[1:, :2] = 1
    mask[0] = mask[1] + 2
    mask[:, -1].zero_()
    return t * mask


def read_elsewhere(t):
    whole = t + 1
    rows = whole.view(-1)
    whole[:, 1:] = 5
    return rows * 2 + whole.view(-1)


@pytest.mark.parametrize(("function", "scattered"), [(painted, True), (read_elsewhere, False)])
def test_writes_into_parts_of_own_memory(function, scattered, monkeypatch):
    """Scatters where nothing else reads the memory; torch's second trace, which is slower, where something does."""
    from torch.export import ExportedProgram

    second_traces = []
    original = ExportedProgram.run_decompositions
    monkeypatch.setattr(
        ExportedProgram, "run_decompositions", lambda self, table: second_traces.append(1) or original(self, table)
    )
    graph = torch.fx.Graph()
    graph.output((graph.call_function(function, (graph.placeholder("t"),)),))
    program = to_aten(torch.fx.GraphModule(nn.Module(), graph), [TensorSpec.static("t", x)], (x,))
    check_form(program)
    assert bool(second_traces) is not scattered
    torch.testing.assert_close(program(x)[0], function(x.clone()), rtol=0, atol=0)


def test_one_free_size_is_minus_one_and_needs_no_size_arithmetic():
    program = lower(
        lambda t: t.reshape(t.shape[0], -1).unsqueeze(1).expand(t.shape[0], 2, -1) + 0.5, x, batch=(1, 2, 5)
    )
    assert ops(program) == ["aten.reshape", "aten.unsqueeze", "aten.expand", "aten.add.Tensor"]
    reshape, _, expand, _ = program.call_nodes()
    assert reshape.args[1] == [-1, 12] and expand.args[1] == [-1, 2, -1]


def test_two_free_sizes_are_read_from_the_input():
    spec = TensorSpec("t", torch.float32, (1, 3, 2), (2, 3, 4), (5, 3, 8))
    program = to_aten(graph_of(lambda t: t.flatten(0, 1).unflatten(0, (-1, 3)) + t), [spec], (x,))
    check_form(program)
    for shape in ((1, 3, 2), (5, 3, 7)):
        value = torch.randn(shape)
        torch.testing.assert_close(program(value)[0], value * 2)


class TestBatchNorm:
    @pytest.mark.parametrize("affine", [True, False])
    def test_fixed_statistics_become_scale_and_shift(self, affine):
        torch.manual_seed(0)
        norm = nn.BatchNorm2d(4, affine=affine).eval()
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.3, 2)
        program = lower(nn.Sequential(norm), image)
        assert ops(program) == ["aten.mul.Tensor", "aten.add.Tensor"]
        torch.testing.assert_close(program(image)[0], norm(image), rtol=1e-5, atol=1e-5)

    def test_statistics_of_the_batch_are_computed(self):
        norm = nn.BatchNorm2d(4, track_running_stats=False).eval()
        program = lower(nn.Sequential(norm), image, batch=(1, 2, 5))
        assert not any("batch_norm" in op for op in ops(program))
        value = torch.randn(5, 4, 6, 6)
        torch.testing.assert_close(program(value)[0], norm(value), rtol=1e-5, atol=1e-5)

    def test_statistics_that_are_inputs_stay_a_batch_norm(self):
        program = lower(lambda t, m, v: F.batch_norm(t, m, v), image, torch.zeros(4), torch.ones(4))
        assert any("batch_norm" in op for op in ops(program))


class TestState:
    def test_constants_by_name(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(4, 4)
                self.b = nn.Linear(4, 4, bias=False)
                self.b.weight = self.a.weight
                self.register_buffer("unused", torch.zeros(3))

            def forward(self, t):
                return self.b(self.a(t))

        net = Net()
        program = lower(net, x)
        named = {program.constant_name(n): program.constant(n) for n in program.graph.nodes if program.constant_name(n)}
        assert set(named) == {"a.weight", "a.bias"}, "tied weights once, unused state dropped"
        assert named["a.weight"].data_ptr() == net.a.weight.data_ptr(), "state is shared, not copied"
        assert program.constant(program.input_nodes()[0]) is None

    def test_the_segment_is_not_changed(self):
        graph = graph_of(lambda t: t.view(2, 12).relu_())
        before, metas = str(graph.graph), [dict(n.meta) for n in graph.graph.nodes]
        to_aten(graph, [TensorSpec.static("t", x)], (x,))
        assert str(graph.graph) == before and [dict(n.meta) for n in graph.graph.nodes] == metas

    def test_int8_weights_stay_int8(self):
        q = decomposed()

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("weight", torch.randint(-127, 128, (5, 4), dtype=torch.int8))
                self.register_buffer("scale", torch.rand(5))

            def forward(self, t):
                weight = q.dequantize_per_channel(self.weight, self.scale, None, 0, -127, 127, torch.int8)
                t = q.quantize_per_tensor(t, 0.02, 0, -128, 127, torch.int8)
                return F.linear(q.dequantize_per_tensor(t, 0.02, 0, -128, 127, torch.int8), weight)

        program = lower(Net(), x)
        assert ops(program)[-1] == "aten.linear" and len(ops(program)) == 4
        assert {str(v.dtype) for _, v in program.constants.values()} == {"torch.int8", "torch.float32"}


class TestMutation:
    def test_of_a_buffer_and_an_input(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("count", torch.zeros(1))

            def forward(self, t):
                t.mul_(2)
                self.count.add_(1)
                return t + self.count

        graph = graph_of(Net())
        program = to_aten(graph, [TensorSpec.static("t", x)], (x,))
        assert program.buffer_inputs == ["count"] and [s.name for s in program.inputs] == ["t", "count"]
        assert sorted(program.writebacks, key=lambda w: w.kind) == [
            WriteBack(1, "buffer", "count"),
            WriteBack(2, "input", 0),
        ]
        result, count, new = program(x, torch.full((1,), 6.0))
        assert torch.equal(result, x * 2 + 7) and count.item() == 7 and torch.equal(new, x * 2)
        check_form(program)

    def test_through_a_view(self):
        def function(t):
            y = t * 2
            y[:, 0] = 0
            y[:, 1:].add_(1)
            return y

        program = lower(function, x, batch=(1, 2, 5))
        check_form(program)
        value = torch.randn(5, 3, 4)
        assert torch.equal(program(value)[0], function(value)) and not program.writebacks

    def test_that_a_view_sees_is_not_mistaken_for_a_local_one(self):
        def function(t):
            y = t + 1
            view = y[0]
            y.relu_()
            return view * 2

        assert torch.equal(lower(function, x)(x)[0], function(x))

    def test_in_place_that_would_promote_keeps_its_dtype(self):
        half = x.half()

        def function(h, t):
            y = h + 1
            y.add_(t)
            return y

        program = lower(function, half, x)
        assert program(half, x)[0].dtype == torch.float16


class TestOrigin:
    def test_source_line_module_path_and_fx_node_come_through(self):
        graph = graph_of(lambda t: t.view(2, 12).chunk(2, 1)[1].relu())
        for i, node in enumerate(graph.graph.nodes):
            node.meta |= {"source": ("/home/user/net.py", 10 + i), "module_path": "block.act"}
        program = to_aten(graph, [TensorSpec.static("t", x)], (x,))
        by_target = {str(n.target): n for n in program.call_nodes()}
        assert by_target["aten.relu.default"].meta["fx_node"] == "relu"
        assert by_target["aten.split.Tensor"].meta["fx_node"] == "chunk"
        for node in program.call_nodes():
            assert node.meta["module_path"] == "block.act" and node.meta["source"][0].endswith("net.py")

    def test_every_node_has_an_origin_after_functionalization_by_torch(self):
        def function(t):
            y = t * 2
            y[:, 0] = 0
            return y.flatten(1)

        program = lower(function, x)
        assert all("fx_node" in n.meta for n in program.call_nodes())


class TestDynamic:
    def test_equal_ranges_share_a_size_and_others_are_free(self):
        specs = [
            TensorSpec("a", torch.float32, (1, 4), (2, 4), (8, 4)),
            TensorSpec("b", torch.float32, (1, 4), (2, 4), (8, 4)),
            TensorSpec("c", torch.float32, (1, 4), (3, 4), (9, 4)),
        ]
        graph = graph_of(lambda a, b, c: (a + b, c * 2))
        program = to_aten(graph, specs, (torch.ones(2, 4), torch.ones(2, 4), torch.ones(3, 4)))
        a, b, c = (n.meta["val"].shape[0] for n in program.input_nodes())
        assert str(a) == str(b) != str(c)

    def test_height_and_width_of_one_range_may_differ(self):
        spec = TensorSpec("t", torch.float32, (1, 1, 4, 4), (1, 1, 8, 8), (1, 1, 16, 16))
        program = to_aten(graph_of(lambda t: t.flatten(2) + t.shape[3]), [spec], (torch.randn(1, 1, 8, 8),))
        value = torch.randn(1, 1, 4, 16)
        assert torch.equal(program(value)[0], value.flatten(2) + 16)

    def test_a_relation_between_inputs_is_found(self):
        specs = [
            TensorSpec("a", torch.float32, (1, 4), (2, 4), (8, 4)),
            TensorSpec("b", torch.float32, (2, 4), (4, 4), (16, 4)),
        ]
        program = to_aten(graph_of(lambda a, b: a.repeat(2, 1) + b), specs, (torch.ones(2, 4), torch.ones(4, 4)))
        a, b = torch.randn(3, 4), torch.randn(6, 4)
        assert torch.equal(program(a, b)[0], a.repeat(2, 1) + b)

    def test_named_dimensions(self):
        specs = [
            TensorSpec("a", torch.float32, (1, 4), (2, 4), (8, 4), symbols=("n", None)),
            TensorSpec("b", torch.float32, (1, 4), (2, 4), (8, 4), symbols=("m", None)),
        ]
        program = to_aten(graph_of(lambda a, b: torch.cat([a, b])), specs, (torch.ones(2, 4), torch.ones(2, 4)))
        assert program(torch.ones(3, 4), torch.ones(5, 4))[0].shape == (8, 4)

    def test_sizes_of_factories_follow_the_input(self):
        def function(t):
            return t + torch.arange(t.shape[2], dtype=t.dtype) + torch.zeros(t.shape[0], 1, 1)

        spec = TensorSpec("t", torch.float32, (1, 3, 2), (2, 3, 4), (5, 3, 8))
        program = to_aten(graph_of(function), [spec], (x,))
        value = torch.randn(1, 3, 7)
        assert torch.equal(program(value)[0], function(value))

    def test_a_frozen_dimension_is_an_error_that_names_the_line(self):
        graph = graph_of(lambda t: (t * 2).view(2, 12) + 1)
        for node in graph.graph.nodes:
            node.meta["source"] = ("/home/user/net.py", 7)
        spec = TensorSpec("t", torch.float32, (1, 3, 4), (2, 3, 4), (5, 3, 4))
        with pytest.raises(ExportError) as caught:
            to_aten(graph, [spec], (x,))
        assert caught.value.node is not None and caught.value.node.name == "view"
        assert "net.py:7" in str(caught.value) and "/home/user" not in str(caught.value)


class TestErrors:
    def test_the_node_that_cannot_be_exported_is_named(self):
        graph = graph_of(lambda t: torch.nonzero(t).view(3, -1) + 1)
        spec = TensorSpec.static("t", x)
        with pytest.raises(ExportError) as caught:
            to_aten(graph, [spec], (x,))
        assert caught.value.node is not None and caught.value.node.name == "view"
        assert caught.value.hint

    @pytest.mark.parametrize(
        ("example", "text"),
        [
            (torch.zeros(2, 3, 4, dtype=torch.float64), "is torch.float64 of rank 3"),
            (torch.zeros(2, 3), "of rank 2"),
            (torch.zeros(9, 3, 4), "has size 9 in dimension 0"),
            (torch.zeros(1, 3, 4), "has size 1 in dynamic dimension 0"),
        ],
        ids=["dtype", "rank", "outside the range", "batch of one"],
    )
    def test_an_example_that_does_not_fit_its_spec(self, example, text):
        spec = TensorSpec("t", torch.float32, (1, 3, 4), (2, 3, 4), (8, 3, 4))
        with pytest.raises(InputError, match=text):
            to_aten(graph_of(lambda t: t + 1), [spec], (example,))


def test_a_range_up_to_two_stays_dynamic():
    graph = graph_of(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"))
    x = torch.randn(2, 3, 4, 4)
    program = to_aten(graph, [TensorSpec("x", x.dtype, (1, 3, 4, 4), (1, 3, 4, 4), (2, 3, 4, 4))], (x,))
    for n in (1, 2):
        torch.testing.assert_close(program(x[:n])[0], graph(x[:n])[0])


class ChainedWrites(nn.Module):
    """In-place calls on the result of in-place calls: of an input and of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        x.sub_(0.5).div_(0.25)
        self.mean.mul_(0.9).add_(1.0)
        return torch.relu(x) + self.mean


def test_the_last_of_several_writes_is_what_is_written_back():
    lowered, model = lower_to_onnx(ChainedWrites().eval(), torch.rand(2, 4), precision="fp32"), ChainedWrites().eval()
    assert not lowered.fallbacks
    for _ in range(3):
        ours = torch.rand(2, 4)
        theirs = ours.clone()
        torch.testing.assert_close(lowered(ours), model(theirs))
        torch.testing.assert_close(ours, theirs)


class KeepingTheLast(nn.Module):
    """A buffer that every call overwrites before it is read, and one that is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(2, 4))
        self.register_buffer("seen", torch.zeros(2, 4))

    def forward(self, x):
        self.last.copy_(x * 2)
        self.seen.copy_(x.exp())
        return torch.relu(x) + self.last, self.last


def test_a_buffer_that_is_written_before_it_is_read_needs_no_state():
    model = KeepingTheLast().eval()
    lowered = lower_to_onnx(model, torch.rand(2, 4), precision="fp32")
    assert not lowered.fallbacks
    for _ in range(3):
        x = torch.rand(2, 4)
        for ours, theirs in zip(lowered(x), model(x), strict=True):
            torch.testing.assert_close(ours, theirs)
