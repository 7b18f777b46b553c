"""OnnxSession: what goes in and out, what it refuses, and that calls may overlap."""

from __future__ import annotations

import copy
import threading

import onnx
import pytest
import torch
from torch import nn

from fx_passes.errors import InputError, LoweringError
from fx_passes.quantize.decomposed import decomposed
from lowering.onnx.export import export_onnx
from lowering.onnx.session import OnnxSession
from lowering.segment.program import TensorSpec
from lowering.segment.to_aten import to_aten


def spec(name: str, tensor: torch.Tensor, batch: tuple[int, int, int] | None = None) -> TensorSpec:
    if batch is None:
        return TensorSpec.static(name, tensor)
    return TensorSpec(name, tensor.dtype, *((size, *tensor.shape[1:]) for size in batch))


def session(function, *specs: TensorSpec, **options) -> OnnxSession:
    if isinstance(function, nn.Module):
        graph = torch.fx.GraphModule(function, _BufferTracer().trace(function))
    else:
        graph = torch.fx.symbolic_trace(function)
    example = tuple(
        torch.zeros([max(2, n) if s.is_dynamic(d) else n for d, n in enumerate(s.opt)], dtype=s.dtype) for s in specs
    )
    program = to_aten(graph, list(specs), example)
    return OnnxSession(export_onnx(program), program.inputs, program.outputs, **options)


class _BufferTracer(torch.fx.Tracer):
    proxy_buffer_attributes = True


DTYPES = [
    torch.float32,
    torch.float16,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("batch", [None, (1, 2, 8)], ids=["static", "dynamic"])
def test_every_dtype_crosses_the_boundary_unchanged(dtype, batch):
    values = (torch.arange(12).reshape(4, 3) % 2).to(dtype)
    run = session(lambda x: (x.reshape(x.shape[0], 3, 1).transpose(1, 2),), spec("x", values, batch))
    for _ in range(2):  # the second call writes into a buffer of the shape seen in the first
        (result,) = run(values)
        assert result.dtype == dtype
        assert torch.equal(result, values.reshape(4, 3, 1).transpose(1, 2))


def test_sizes_change_from_call_to_call():
    run = session(lambda x: (x.flatten(), x * 2), spec("x", torch.zeros(2, 3), (1, 2, 8)))
    for n in (1, 3, 8, 1, 3):
        x = torch.randn(n, 3)
        flat, double = run(x)
        assert torch.equal(flat, x.flatten()) and torch.equal(double, x * 2)


def test_a_size_that_depends_on_the_data_is_never_remembered():
    node = onnx.helper.make_node("NonZero", ["x"], ["y"])
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph([node], "g", [value("x", 1, [4])], [value("y", 7, [1, "count"])])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    run = OnnxSession(model, [TensorSpec.static("x", torch.zeros(4))], ["y"])
    for x in (torch.tensor([1.0, 0, 2, 0]), torch.tensor([0.0, 0, 0, 3]), torch.zeros(4), torch.ones(4)):
        assert torch.equal(run(x)[0], x.nonzero().T)


def test_inputs_may_be_views_and_need_grad():
    base = torch.randn(3, 4, requires_grad=True)
    run = session(lambda x: (x + 1,), spec("x", torch.zeros(4, 3)))
    (result,) = run(base.T)
    assert torch.equal(result, (base.T + 1).detach()) and not result.requires_grad


def test_results_are_new_memory_each_call():
    run = session(lambda x: (x + 1,), spec("x", torch.zeros(2)))
    first, second = run(torch.zeros(2))[0], run(torch.ones(2))[0]
    assert first.tolist() == [1, 1] and second.tolist() == [2, 2]


def test_an_input_that_is_returned_comes_back_as_a_copy():
    x = torch.randn(3)
    (result,) = session(lambda x: (x,), spec("x", x))(x)
    assert torch.equal(result, x) and result.data_ptr() != x.data_ptr()


REFUSED = {
    "count": ((), "takes 1 inputs, 0"),
    "type": ((None,), "input 'image' is a NoneType"),
    "dtype": ((torch.zeros(2, 3, dtype=torch.float64),), "input 'image' is torch.float64"),
    "rank": ((torch.zeros(3),), "input 'image' has rank 1"),
    "static size": ((torch.zeros(2, 4),), r"input 'image' has shape \(2, 4\)"),
    "above the range": ((torch.zeros(9, 3),), r"input 'image' has shape \(9, 3\)"),
    "empty batch": ((torch.zeros(0, 3),), r"input 'image' has shape \(0, 3\)"),
    "device": ((torch.zeros(2, 3, device="meta"),), "input 'image' is on meta"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_inputs_are_refused_by_name(case):
    inputs, text = REFUSED[case]
    run = session(lambda image: (image * 2,), spec("image", torch.zeros(2, 3), (1, 2, 8)))
    with pytest.raises(InputError, match=text):
        run(*inputs)


def test_inputs_that_share_a_dimension_must_agree():
    x = torch.zeros(2, 3)
    run = session(lambda a, b: (a + b,), spec("a", x, (1, 2, 8)), spec("b", x, (1, 2, 8)))
    with pytest.raises(InputError, match="input 'b' has size 4 in dimension 0, which must equal 3"):
        run(torch.zeros(3, 3), torch.zeros(4, 3))


def test_an_empty_tensor_goes_through():
    run = session(lambda x: (torch.cat([x, x * 2]),), spec("x", torch.zeros(0, 3)))
    assert run(torch.zeros(0, 3))[0].shape == (0, 3)


def test_threads_are_torchs_at_creation():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        run = session(lambda x: (x * 2,), spec("x", torch.zeros(2)))
        torch.set_num_threads(2)
        assert run.threads == 1
        assert copy.deepcopy(run).threads == 1
        assert session(lambda x: (x * 2,), spec("x", torch.zeros(2)), threads=2).threads == 2
    finally:
        torch.set_num_threads(before)


def test_calls_from_several_threads_do_not_mix():
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    run = session(_Tuple(layer), spec("x", torch.zeros(2, 16), (1, 2, 64)))
    failures: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for i in range(50):
            x = torch.randn(1 + (seed * 7 + i) % 64, 16, generator=generator)
            with torch.no_grad():
                difference = (run(x)[0] - layer(x)).abs().max()
            if not difference < 1e-5:
                failures.append(f"thread {seed}, call {i}: {difference}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


class _Tuple(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return (self.inner(x),)


def test_optimized_ops_count_what_runs():
    torch.manual_seed(0)
    net = _Tuple(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))
    run = session(net, spec("x", torch.zeros(1, 3, 8, 8)))
    ops = run.optimized_ops()
    assert ops["Relu"] == 0 and sum(ops.values()) >= 1  # the ReLU is part of the convolution
    assert any("Conv" in op for op in ops)


def test_artifact_round_trip(tmp_path):
    x = torch.randn(2, 3)
    run = session(lambda x: (x * 2,), spec("x", x, (1, 2, 8)))
    files = run.artifact_files("segment_0")
    assert set(files) == {"segment_0.onnx"}
    for name, write in files.items():
        write(tmp_path / name)
    again = OnnxSession.from_artifact(tmp_path, "segment_0", run.artifact_record())
    assert torch.equal(again(x)[0], x * 2)
    onnx.checker.check_model(str(tmp_path / "segment_0.onnx"))


def test_a_file_for_tensorrt_brings_its_command_line(tmp_path):
    run = session(lambda x: (x * 2,), spec("x", torch.zeros(2, 3), (1, 2, 8)), target="tensorrt")
    files = run.artifact_files("segment_0")
    files["segment_0.trtexec.txt"](tmp_path / "line.txt")
    line = (tmp_path / "line.txt").read_text().split()
    assert line[:2] == ["trtexec", "--onnx=segment_0.onnx"]
    assert {"--minShapes=x:1x3", "--optShapes=x:2x3", "--maxShapes=x:8x3"} <= set(line)


def test_bytes_that_are_no_model_are_refused():
    with pytest.raises(LoweringError, match="ONNX Runtime refuses the model"):
        OnnxSession(b"no model", [], [])


class _Saturating(nn.Module):
    """Products of two neighbours do not fit into 16 bits: 2 * 255 * 127."""

    def __init__(self, weight: int):
        super().__init__()
        self.register_buffer("weight", torch.full((16, 16, 3, 3), weight, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        q = decomposed()
        x = q.dequantize_per_tensor(q.quantize_per_tensor(x, 1.0, 0, 0, 255, torch.uint8), 1.0, 0, 0, 255, torch.uint8)
        weight = q.dequantize_per_channel(self.weight, self.scale, None, 0, -128, 127, torch.int8)
        y = q.quantize_per_tensor(nn.functional.conv2d(x, weight), 2.0e4, 0, 0, 255, torch.uint8)
        return (q.dequantize_per_tensor(y, 2.0e4, 0, 0, 255, torch.uint8),)


def test_sums_that_overflow_16_bits_are_noticed_on_the_probe():
    net, x = _Saturating(127), torch.full((1, 16, 8, 8), 255.0)
    run = session(net, spec("x", x))
    run.settle_exactness([x])
    assert run.optimized_ops()["QLinearConv"] == 1
    assert torch.equal(run(x)[0], net(x)[0])
    assert torch.equal(copy.deepcopy(run)(x)[0], net(x)[0])


def test_where_nothing_overflows_the_fast_kernels_stay():
    x = torch.full((1, 16, 8, 8), 255.0)
    other = session(_Saturating(60), spec("x", x))
    other.settle_exactness([x])
    assert not other.exact
