"""export_onnx: same numbers, readable names, the forms that runtimes fuse, and nothing private in the file."""

from __future__ import annotations

from collections import Counter

import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import trace
from fx_passes.errors import ArtifactError, ExportError
from fx_passes.quantize.decomposed import decomposed
from lowering.onnx import export
from lowering.onnx.export import export_onnx
from lowering.onnx.session import OnnxSession
from lowering.segment.program import AtenProgram, TensorSpec
from lowering.segment.to_aten import cast_float_part, to_aten

q = decomposed()


def lower(net: nn.Module, *tensors: torch.Tensor, batch: tuple[int, int, int] | None = None) -> AtenProgram:
    graph = trace(net.eval())
    names = [n.name for n in graph.graph.find_nodes(op="placeholder")]
    specs = [
        TensorSpec(n, t.dtype, *((b, *t.shape[1:]) for b in batch or [t.shape[0]] * 3))
        for n, t in zip(names, tensors, strict=True)
    ]
    output = graph.graph.output_node()
    if not isinstance(output.args[0], tuple):
        output.args = ((output.args[0],),)
    return to_aten(graph, specs, tensors)


def run_unoptimised(model: onnx.ModelProto, *tensors: torch.Tensor) -> list[torch.Tensor]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options)
    feeds = {i.name: t.numpy() for i, t in zip(session.get_inputs(), tensors, strict=True)}
    return [torch.from_numpy(r) for r in session.run(None, feeds)]


def op_types(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


image = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
CASES = {
    "shapes": lambda x: x.flatten(2).transpose(1, 2).unsqueeze(1).expand(-1, 2, -1, -1).chunk(2, 2)[1],
    "hardswish": F.hardswish,
    "gelu": F.gelu,
    "layer norm": lambda x: F.layer_norm(x, [6, 6]),
    "group norm": lambda x: F.group_norm(x, 2),
    "group norm of one group": lambda x: F.group_norm(x, 1, torch.arange(4.0), torch.arange(4.0) - 1),
    "group norm of as many groups as channels": lambda x: F.group_norm(x, 4),
    "instance norm": lambda x: F.instance_norm(x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "einsum in capitals": lambda x: torch.einsum("B C H W, B D H W -> B C D", x, x),
    "adaptive pool, unequal windows": lambda x: F.adaptive_avg_pool2d(x, 4),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "ceil mode": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1), value=1.5),
    "integer and float": lambda x: x + x.argmax(1, keepdim=True),
    "comparison": lambda x: torch.where(x > 0, x, x * 0.1),
    "softmax": lambda x: x.softmax(1),
    "reduction": lambda x: x.amax((2, 3)) + x.sum((2, 3)),
    "slices": lambda x: x[:, 1:3, ::2],
    "size": lambda x: x.reshape(x.shape[0], -1) / x.shape[2],
}


@pytest.mark.parametrize("case", CASES)
def test_unoptimised_onnx_runtime_agrees(case):
    program = lower(Apply(CASES[case]), image, batch=(1, 2, 5))
    model = export_onnx(program)
    assert [o.name for o in model.graph.output] == program.outputs
    assert model.opset_import[0].version == 21
    for n in (2, 5, 1):
        x = torch.randn(n, 4, 6, 6, generator=torch.Generator().manual_seed(n))
        for got, want in zip(run_unoptimised(model, x), program(x), strict=True):
            assert got.shape == want.shape and got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.conv2(F.relu(self.conv1(x))) + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer1 = nn.Sequential(Block(), Block())
        self.fc = nn.Linear(4, 3)

    def forward(self, image):
        return self.fc(F.adaptive_avg_pool2d(self.layer1(image), 1).flatten(1))


class TestFile:
    def test_names_come_from_the_module_path(self):
        model = export_onnx(lower(Net(), image, batch=(1, 2, 5)))
        names = [node.name for node in model.graph.node]
        assert len(set(names)) == len(names)
        assert {"layer1.0.conv1", "layer1.1.conv2", "layer1.0.relu", "layer1.1.add_1", "fc"} <= set(names)
        assert {i.name for i in model.graph.initializer} >= {"layer1.0.conv1.weight", "fc.bias"}
        assert [i.name for i in model.graph.input] == ["image"]
        assert [d.dim_param or d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim] == [
            "batch",
            4,
            6,
            6,
        ]
        assert [d.dim_param or d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim] == ["batch", 3]

    def test_dimensions_have_the_callers_names(self):
        spec = TensorSpec("x", torch.float32, (1, 4, 2), (2, 4, 6), (5, 4, 9), symbols=("n", None, "length"))
        program = to_aten(_tuple_graph(lambda x: torch.cat([x, x], 2)), [spec], (torch.randn(2, 4, 6),))
        model = export_onnx(program)
        dims = [
            [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
            for v in (*model.graph.input, *model.graph.output)
        ]
        assert dims == [["n", 4, "length"], ["n", 4, "2*length"]]

    def test_only_base_names_of_files_are_written(self):
        model = export_onnx(lower(Net(), image))
        data = model.SerializeToString()
        assert b"test_onnx_export.py:" in data, "the user's line is there"
        for secret in (b"/work", b"site-packages", b"stack_trace", b"def forward", str(__file__).encode()):
            assert secret not in data
        assert {p.key for node in model.graph.node for p in node.metadata_props} == {"source"}

    def test_the_same_program_gives_the_same_bytes(self):
        program = lower(Net(), image, batch=(1, 2, 5))
        first, again = export_onnx(program), export_onnx(lower(Net(), image, batch=(1, 2, 5)))
        assert first.SerializeToString(deterministic=True) == export_onnx(program).SerializeToString(deterministic=True)
        assert first.SerializeToString(deterministic=True) == again.SerializeToString(deterministic=True)

    def test_tied_weights_are_stored_once(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
                self.b.weight = self.a.weight

            def forward(self, x):
                return self.b(F.relu(self.a(x)))

        model = export_onnx(lower(Tied(), torch.randn(2, 64)))
        assert sum(i.dims == [64, 64] for i in model.graph.initializer) == 1

    def test_the_program_is_not_changed(self):
        program = lower(Net(), image)
        before, expected = str(program.graph), program(image)[0]
        export_onnx(program)
        assert str(program.graph) == before and torch.equal(program(image)[0], expected)

    def test_writing(self, tmp_path):
        program = lower(Net(), image)
        model = export_onnx(program, tmp_path / "deep" / "net.onnx")
        assert [p.name for p in (tmp_path / "deep").iterdir()] == ["net.onnx"], "no temporary file stays"
        assert (tmp_path / "deep" / "net.onnx").read_bytes() == model.SerializeToString(deterministic=True)

    def test_an_unwritable_folder_is_named(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ArtifactError, match="cannot write"):
            export_onnx(lower(Net(), image), tmp_path / "file" / "net.onnx")

    def test_large_weights_go_beside_the_file(self, tmp_path, monkeypatch):
        monkeypatch.setattr(export, "_LARGEST_MESSAGE", 100)
        program = lower(Net(), image)
        with pytest.raises(ExportError, match="above 2 GB"):
            export_onnx(program)
        model = export_onnx(program, tmp_path / "net.onnx")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["net.onnx", "net.onnx.data"]
        assert len(model.SerializeToString()) < (tmp_path / "net.onnx.data").stat().st_size + 5000
        session = ort.InferenceSession(str(tmp_path / "net.onnx"))
        got = session.run(None, {"image": image.numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(got), program(image)[0], rtol=1e-4, atol=1e-5)

    def test_mutation_is_an_output(self):
        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("seen", torch.zeros(1))

            def forward(self, x):
                self.seen.add_(1)
                return x + self.seen

        program = lower(Counting(), torch.randn(2, 3))
        x, seen = torch.randn(2, 3), torch.full((1,), 4.0)
        result, count = run_unoptimised(export_onnx(program), x, seen)
        assert torch.equal(result, x + 5) and count.item() == 5


def _tuple_graph(function) -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(lambda x: (function(x),))


class Quantized(nn.Module):
    """conv - ReLU - mean - flatten - linear with Q/DQ as for ONNX Runtime."""

    def __init__(self, pool=lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1), dtype=torch.uint8):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.pool, self.dtype = pool, dtype
        for name, shape in (("conv", (8, 4, 3, 3)), ("fc", (5, 8))):
            self.register_buffer(
                f"{name}_weight", torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
            )
            self.register_buffer(f"{name}_scale", torch.full((shape[0],), 0.01))
            self.register_buffer(
                f"{name}_bias", torch.randint(-500, 500, shape[:1], dtype=torch.int32, generator=generator)
            )
            self.register_buffer(f"{name}_bias_scale", torch.full(shape[:1], 0.0003))

    def around(self, x, scale, zero_point):
        low, high = (0, 255) if self.dtype == torch.uint8 else (-128, 127)
        zero_point = zero_point if self.dtype == torch.uint8 else 0
        x = q.quantize_per_tensor(x, scale, zero_point, low, high, self.dtype)
        return q.dequantize_per_tensor(x, scale, zero_point, low, high, self.dtype)

    def parameters_of(self, name):
        weight, scale = getattr(self, f"{name}_weight"), getattr(self, f"{name}_scale")
        bias, bias_scale = getattr(self, f"{name}_bias"), getattr(self, f"{name}_bias_scale")
        return (
            q.dequantize_per_channel(weight, scale, None, 0, -127, 127, torch.int8),
            q.dequantize_per_channel(bias, bias_scale, None, 0, -(2**31), 2**31 - 1, torch.int32),
        )

    def forward(self, x):
        x = F.relu(F.conv2d(self.around(x, 0.03, 128), *self.parameters_of("conv")))
        x = self.around(self.pool(self.around(x, 0.05, 0)), 0.02, 0)
        return F.linear(x, *self.parameters_of("fc"))


POOLS = {
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1), True),
    "mean": (lambda x: x.mean((2, 3)), True),
    "mean of negative axes, kept": (lambda x: x.mean((-1, -2), keepdim=True).flatten(1), True),
    "avg_pool over all": (lambda x: F.avg_pool2d(x, 4).flatten(1), True),
    "mean over one axis": (lambda x: x.mean(3).flatten(1)[:, :8], False),
    "avg_pool over a part": (lambda x: F.avg_pool2d(x, 3).flatten(1), False),
    "avg_pool with padding": (lambda x: F.avg_pool2d(x, 4, padding=2)[:, :, 0, 0], False),
}


class TestFusions:
    @pytest.mark.parametrize("case", POOLS)
    def test_a_mean_over_space_is_a_global_pool(self, case):
        pool, fires = POOLS[case]
        program = lower(Apply(lambda x: pool(x[:, :, :4, :4])), image)
        model = export_onnx(program)
        assert (op_types(model)["GlobalAveragePool"] == 1) == fires
        got, want = run_unoptimised(model, image)[0], program(image)[0]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

    def test_everything_between_q_and_dq_runs_on_integers(self):
        program = lower(Quantized(), image, batch=(1, 2, 5))
        session = OnnxSession(export_onnx(program), program.inputs, program.outputs)
        ops = session.optimized_ops()
        wanted = {"QLinearConv": 1, "QLinearGlobalAveragePool": 1, "QGemm": 1, "QuantizeLinear": 1}
        assert {op: ops[op] for op in wanted} == wanted
        assert not any(
            ops[op] for op in ("Conv", "Relu", "Gemm", "DequantizeLinear", "ReduceMean", "GlobalAveragePool")
        )

    def test_weights_do_not_share_a_zero_point(self):
        class Two(Quantized):
            def forward(self, x):
                zeros = torch.zeros(8, dtype=torch.int8)
                second = q.dequantize_per_channel(
                    self.conv_weight[:, :, :1, :1], self.conv_scale, zeros, 0, -127, 127, torch.int8
                )
                weight = q.dequantize_per_channel(self.conv_weight, self.conv_scale, zeros, 0, -127, 127, torch.int8)
                x = self.around(x, 0.03, 128)
                return F.conv2d(x, weight)[:, :, :2, :2], F.conv2d(x, second)

        model = export_onnx(lower(Two(), image))
        stored = {i.name for i in model.graph.initializer}
        used = [n.input[2] for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in stored]
        assert len(used) == len(set(used)) >= 1


class TestHalf:
    def test_opset_23_and_a_dq_that_yields_half(self):
        program = cast_float_part(lower(Quantized(dtype=torch.int8), image), torch.float16)
        model = export_onnx(program)
        assert model.opset_import[0].version == 23
        assert model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        dequantized = {n.output[0] for n in model.graph.node if n.op_type == "DequantizeLinear"}
        assert not any(n.op_type == "Cast" and n.input[0] in dequantized for n in model.graph.node)
        scales = {
            n.input[1] for n in model.graph.node if "QuantizeLinear" in n.op_type or "DequantizeLinear" in n.op_type
        }
        assert {i.data_type for i in model.graph.initializer if i.name in scales} == {onnx.TensorProto.FLOAT}
        got, want = run_unoptimised(model, image)[0], program(image)[0]
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)

    def test_a_lower_opset_is_refused(self):
        program = cast_float_part(lower(Quantized(dtype=torch.int8), image), torch.float16)
        with pytest.raises(ExportError, match="Half tensors is invalid before opset 23"):
            export_onnx(program, opset=21)

    def test_half_without_quantization_stays_at_21(self):
        assert export_onnx(cast_float_part(lower(Net(), image), torch.float16)).opset_import[0].version == 21


class TestRefusals:
    def test_opset_before_the_exporters(self):
        with pytest.raises(ExportError, match="opset 17 is too low"):
            export_onnx(lower(Net(), image), opset=17)

    def test_an_op_without_translation_is_named(self):
        program = lower(Apply(lambda x: torch.linalg.svdvals(x)), image)
        with pytest.raises(ExportError, match="svd") as caught:
            export_onnx(program)
        assert caught.value.node is not None and caught.value.hint


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_nvidias_parser_takes_the_file(dtype):
    pytest.importorskip("tensorrt_rtx")
    from lowering.onnx.tensorrt_file import check_parser

    class Symmetric(Quantized):
        def parameters_of(self, name):
            bias = getattr(self, f"{name}_bias") * 0.0003
            return super().parameters_of(name)[0], bias

    program = lower(Symmetric(dtype=torch.int8), image, batch=(1, 2, 5))
    if dtype != torch.float32:
        program = cast_float_part(program, dtype)
    check_parser(export_onnx(program).SerializeToString())


@pytest.mark.parametrize("case", CASES)
def test_nvidias_parser_reads_what_was_written(case):
    """The network that it makes of the file, executed, gives eager's values, at the example's batch and at others."""
    pytest.importorskip("tensorrt_rtx")
    from lowering.trt.reference.parser import network_from_onnx

    for batch, sizes in ((None, (2,)), ((1, 2, 5), (1, 5))):
        network = network_from_onnx(export_onnx(lower(Apply(CASES[case]), image, batch=batch)))
        for n in sizes:
            x = torch.randn(n, 4, 6, 6, generator=torch.Generator().manual_seed(n))
            torch.testing.assert_close(network.run(x)[0], CASES[case](x), rtol=1e-4, atol=1e-4)


def test_nvidias_parser_says_what_it_refuses():
    pytest.importorskip("tensorrt_rtx")
    from lowering.onnx.tensorrt_file import check_parser

    node = onnx.helper.make_node("NotAnOp", ["x"], ["y"], name="odd one")
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph([node], "g", [value("x", 1, [1])], [value("y", 1, [1])])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    with pytest.raises(ExportError, match="NotAnOp"):
        check_parser(model.SerializeToString())
