"""Mixed precision: which op runs in which precision, as few casts as possible, and the numbers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import autocast_fx, propagate_shapes, trace
from fx_passes.errors import InputError, StageError
from fx_passes.quantize.decomposed import decomposed
from lowering.segment.program import AtenProgram, TensorSpec
from lowering.segment.to_aten import cast_float_part, to_aten

aten = torch.ops.aten
q = decomposed()
HALF = torch.float16
SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class Apply(nn.Module):
    def __init__(self, function, *modules: nn.Module):
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(modules)

    def forward(self, x):
        result = self.function(x, *self.layers)
        return result if isinstance(result, tuple) else (result,)


def lower(net: nn.Module, x: torch.Tensor) -> AtenProgram:
    torch.manual_seed(0)
    return to_aten(trace(net.eval()), [TensorSpec.static("x", x)], (x,))


def cast(
    function, *modules: nn.Module, x: torch.Tensor | None = None, dtype=HALF, keep=()
) -> tuple[AtenProgram, AtenProgram]:
    torch.manual_seed(0)
    program = lower(Apply(function, *modules), image if x is None else x)
    return program, cast_float_part(program, dtype, keep)


def ops(program: AtenProgram) -> list[str]:
    """`name:dtype of the result` of every op; casts as `cast:dtype`."""
    found = []
    for node in program.call_nodes():
        value = node.meta["val"]
        value = value[0] if isinstance(value, (list, tuple)) else value
        name = "cast" if node.target is aten._to_copy.default else node.target._schema.name.split("::")[1]
        found.append(f"{name}:{SHORT.get(value.dtype, str(value.dtype).removeprefix('torch.'))}")
    return found


image = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
conv = lambda: nn.Conv2d(4, 4, 3, padding=1)  # noqa: E731
POLICY = {
    "lower": (lambda x, c: c(x), [conv], "cast:fp16 conv2d:fp16 cast:fp32"),
    "two readers, one cast": (
        lambda x, a, b: (a(x), b(x)),
        [conv, conv],
        "cast:fp16 conv2d:fp16 conv2d:fp16 cast:fp32 cast:fp32",
    ),
    "follow": (
        lambda x, c: F.max_pool2d(F.relu(c(x)), 2),
        [conv],
        "cast:fp16 conv2d:fp16 relu:fp16 max_pool2d:fp16 cast:fp32",
    ),
    "float32 op": (lambda x, c: c(x).softmax(1), [conv], "cast:fp16 conv2d:fp16 cast:fp32 softmax:fp32"),
    "nothing to lower": (lambda x: F.relu(x) + 1, [], "relu:fp32 add:fp32"),
    "promote to the wider": (lambda x, c: c(x) + x, [conv], "cast:fp16 conv2d:fp16 cast:fp32 add:fp32"),
    "constants do not widen": (lambda x, c: c(x) * c.bias.view(-1, 1, 1), [conv], None),
    "float32 result goes on in float32": (
        lambda x, c: F.relu(c(x).softmax(1)),
        [conv],
        "cast:fp16 conv2d:fp16 cast:fp32 softmax:fp32 relu:fp32",
    ),
    "comparison": (lambda x, c: torch.where(c(x) > 0, 1, 2), [conv], None),
    "integers stay": (lambda x, c: c(x).argmax(1) + 1, [conv], "cast:fp16 conv2d:fp16 argmax:int64 add:int64"),
    "split": (lambda x, c: c(x).chunk(2, 1)[0] * 2, [conv], None),
    "asked for float32": (
        lambda x, c: c(x).mean(1, dtype=torch.float32),
        [conv],
        "cast:fp16 conv2d:fp16 cast:fp32 mean:fp32",
    ),
    "a number too large": (
        lambda x, c: c(x).masked_fill(x > 0, -1e9),
        [conv],
        "cast:fp16 conv2d:fp16 gt:bool cast:fp32 masked_fill:fp32",
    ),
    "a number too small": (lambda x, c: c(x) + 1e-9, [conv], "cast:fp16 conv2d:fp16 cast:fp32 add:fp32"),
    "infinity is fine": (
        lambda x, c: F.relu(c(x)).clamp(max=float("inf")),
        [conv],
        "cast:fp16 conv2d:fp16 relu:fp16 clamp:fp16 cast:fp32",
    ),
    "factory": (
        lambda x, c: c(x) + torch.zeros(x.shape[0], 1, 1, 1),
        [conv],
        "cast:fp16 conv2d:fp16 zeros:fp16 add:fp16 cast:fp32",
    ),
    "layer norm": (
        lambda x, c, n: c(n(c(x))),
        [conv, lambda: nn.LayerNorm([6, 6])],
        "cast:fp16 conv2d:fp16 cast:fp32 layer_norm:fp32 cast:fp16 conv2d:fp16 cast:fp32",
    ),
}


@pytest.mark.parametrize("case", POLICY)
def test_policy(case):
    function, modules, expected = POLICY[case]
    program, half = cast(function, *(m() for m in modules))
    if expected is not None:
        assert ops(half) == expected.split()
    half.exported.validate()
    for got, want in zip(half(image), program(image), strict=True):
        assert got.dtype == want.dtype
        if got.is_floating_point():
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    assert [n.meta["val"].dtype for n in half.input_nodes()] == [torch.float32]


@pytest.mark.parametrize("case", POLICY)
def test_meta_says_what_runs(case):
    """The recorded dtype of every node is the one it computes."""
    function, modules, _ = POLICY[case]
    _, half = cast(function, *(m() for m in modules))
    seen = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n):
            seen[n] = super().run_node(n)
            return seen[n]

    values = [v for _, v in half.constants.values()]
    with torch.no_grad():
        Recorder(half.exported.graph_module).run(*values, image, enable_io_processing=False)
    for node, value in seen.items():
        if isinstance(value, torch.Tensor) and node.op != "output":
            assert (value.dtype, value.shape) == (node.meta["val"].dtype, node.meta["val"].shape), node.format_node()


class TestWeights:
    def test_are_cast_now_and_keep_their_names(self):
        program, half = cast(lambda x, c: c(x), conv())
        named = {fqn: value.dtype for fqn, value in half.constants.values()}
        assert named == {"layers.0.weight": HALF, "layers.0.bias": HALF}
        assert all(v.dtype == torch.float32 for _, v in program.constants.values()), "the first program is as it was"

    def test_read_in_both_precisions_exist_twice(self):
        _, half = cast(lambda x, c: c(x).softmax(1) + c.weight.sum(), conv())
        named = {fqn: value.dtype for fqn, value in half.constants.values()}
        assert named["layers.0.weight"] == torch.float32 and named["layers.0.weight.float16"] == HALF

    def test_that_overflow_keep_their_op_in_float32(self):
        large = conv()
        with torch.no_grad():
            large.weight[0, 0, 0, 0] = 1e6
        program, half = cast(lambda x, c: c(x), large)
        assert ops(half) == ["conv2d:fp32"]
        assert "does not fit" in next(iter(half.call_nodes())).meta["amp"]
        assert torch.equal(half(image)[0], program(image)[0])
        _, wide = cast(lambda x, c: c(x), large, dtype=torch.bfloat16)
        assert ops(wide) == ["cast:bf16", "conv2d:bf16", "cast:fp32"]

    def test_behind_a_transpose_stay_free_of_run_time_casts(self):
        _, half = cast(lambda x, layer: torch.matmul(x, layer.weight.t()), nn.Linear(6, 5))
        assert ops(half) == ["cast:fp16", "permute:fp16", "matmul:fp16", "cast:fp32"]


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("weight", torch.randint(-127, 128, (4, 4, 3, 3), dtype=torch.int8, generator=generator))
        self.register_buffer("scale", torch.full((4,), 1e-3))
        self.register_buffer("bias", torch.randn(4, generator=generator))

    def forward(self, x):
        def around(t):
            t = q.quantize_per_tensor(t, 0.03, 0, -128, 127, torch.int8)
            return q.dequantize_per_tensor(t, 0.03, 0, -128, 127, torch.int8)

        weight = q.dequantize_per_channel(self.weight, self.scale, None, 0, -127, 127, torch.int8)
        y = F.relu(F.conv2d(around(x), weight, self.bias))
        return (F.max_pool2d(around(y), 2).softmax(1),)


class TestQuantized:
    def test_dq_yields_half_and_q_takes_it(self):
        half = cast_float_part(lower(Quantized(), image), HALF)
        around = ["quantize_per_tensor:int8", "dequantize_per_tensor:fp16"]
        computed = ["dequantize_per_channel:fp16", "conv2d:fp16", "relu:fp16"]
        last = ["max_pool2d:fp16", "cast:fp32", "softmax:fp32"]
        # where a constant's DQ stands among the others does not matter
        assert sorted(ops(half)) == sorted([*around, *computed, *around, *last])

    def test_scales_stay_float32(self):
        half = cast_float_part(lower(Quantized(), image), HALF)
        assert {fqn: v.dtype for fqn, v in half.constants.values()} == {
            "weight": torch.int8,
            "scale": torch.float32,
            "bias": HALF,
        }

    def test_the_numbers(self):
        program = lower(Quantized(), image)
        half = cast_float_part(program, HALF)
        torch.testing.assert_close(half(image)[0], program(image)[0], rtol=1e-2, atol=1e-2)

    def test_a_dq_read_in_both_precisions_is_made_twice(self):
        def function(x, c):
            t = q.dequantize_per_tensor(
                q.quantize_per_tensor(x, 0.1, 0, -128, 127, torch.int8), 0.1, 0, -128, 127, torch.int8
            )
            return c(t), t.softmax(1)

        _, half = cast(function, conv())
        assert Counter(ops(half))["cast:fp16"] == 0
        assert {"dequantize_per_tensor:fp16", "dequantize_per_tensor:fp32"} <= set(ops(half))


class TestKeep:
    @pytest.mark.parametrize("pattern", ["layers_0", "layers_*", "layers.0"])
    def test_by_node_or_module(self, pattern):
        graph = trace(Apply(lambda x, a, b: b(a(x)), conv(), conv()).eval())
        for node in graph.graph.nodes:
            if node.name == "layers_0":
                node.meta["module_path"] = "layers.0"
        program = to_aten(graph, [TensorSpec.static("x", image)], (image,))
        half = cast_float_part(program, HALF, keep=[pattern])
        kept = [n for n in half.call_nodes() if n.meta.get("amp") == "kept by the caller"]
        assert len(kept) == (2 if pattern == "layers_*" else 1)
        assert all(n.meta["val"].dtype == torch.float32 for n in kept)

    def test_a_name_that_matches_nothing_is_refused(self):
        with pytest.raises(InputError, match="matches no node"):
            cast(lambda x, c: c(x), conv(), keep=["nothing"])


def test_other_dtypes_are_refused():
    with pytest.raises(InputError, match="autocast to torch\\.int8"):
        cast(lambda x, c: c(x), conv(), dtype=torch.int8)


def test_dynamic_sizes_stay_free():
    spec = TensorSpec("x", torch.float32, (1, 4, 6, 6), (2, 4, 6, 6), (5, 4, 6, 6))
    torch.manual_seed(0)
    net = Apply(lambda x, c: c(x).flatten(1) + torch.arange(x.shape[0], dtype=x.dtype)[:, None], conv())
    program = to_aten(trace(net.eval()), [spec], (image,))
    half = cast_float_part(program, HALF)
    x = torch.randn(5, 4, 6, 6)
    torch.testing.assert_close(half(x)[0], program(x)[0], rtol=1e-2, atol=1e-2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.fc = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.randn(1, 4, 1, 1))

    def forward(self, x):
        x = self.conv(x - self.mean)
        x = F.relu(self.norm(x)).mean((2, 3))
        return {"scores": self.fc(x).softmax(1), "features": x}


class TestFx:
    def graph(self):
        return propagate_shapes(trace(Model().eval()), image)

    def test_numbers_dtypes_and_structure(self):
        graph = self.graph()
        expected = graph(image)
        half = autocast_fx(graph, HALF)
        result = half(image)
        assert list(result) == ["scores", "features"]
        for key, value in result.items():
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, expected[key], rtol=1e-2, atol=1e-2)
        assert not torch.equal(result["features"], expected["features"]), "something ran in half"

    def test_weights_are_cast_and_the_input_graph_is_untouched(self):
        graph = self.graph()
        before = {k: v.data_ptr() for k, v in graph.state_dict().items()}
        half = autocast_fx(graph, HALF)
        assert {k: v.data_ptr() for k, v in graph.state_dict().items()} == before
        assert all(v.dtype == torch.float32 for v in graph.state_dict().values() if v.is_floating_point())
        dtypes = {k: v.dtype for k, v in half.state_dict().items()}
        assert dtypes["norm.weight"] == torch.float32
        assert sorted(k for k, d in dtypes.items() if d == HALF) == [
            "conv_fp16.bias",
            "conv_fp16.weight",
            "fc_fp16.bias",
            "fc_fp16.weight",
        ]

    def test_dtypes_must_be_known(self):
        with pytest.raises(StageError, match="propagate_shapes"):
            autocast_fx(trace(Model().eval()), HALF)

    def test_in_place_ops_are_refused(self):
        class InPlace(nn.Module):
            def forward(self, x):
                return (x + 1).relu_()

        with pytest.raises(StageError, match="functionalize"):
            autocast_fx(propagate_shapes(trace(InPlace()), image), HALF)

    def test_a_shared_module_is_cast_once(self):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = conv()

            def forward(self, x):
                return self.conv(self.conv(x))

        half = autocast_fx(propagate_shapes(trace(Twice().eval()), image), HALF)
        assert list(half.state_dict()) == ["conv_fp16.weight", "conv_fp16.bias"]
        targets = Counter(n.target for n in half.graph.nodes if n.op == "call_module")
        assert targets == {"conv_fp16": 2}
