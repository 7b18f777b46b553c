"""The runtime module, driven through a recorded fake of the TensorRT runtime (`trt_fake`); simulation; artifacts.

What only a GPU can show is in the tests marked `gpu`.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from trt_checks import aten_program, eager
from trt_fake import FakeCapturer, FakeEngine, FakeStreams, Range, fake_module

from fx_passes.errors import ArtifactError, BackendUnavailableError, InputError, LoweringError
from lowering.trt import bindings
from lowering.trt.builder.build import build_engine
from lowering.trt.builder.targets import EngineTarget, fitting
from lowering.trt.define.network import build_network
from lowering.trt.reference import read_network
from lowering.trt.run import engine as engine_module
from lowering.trt.run import runtime
from lowering.trt.run.engine import EngineFile, TrtEngine
from lowering.trt.run.graphs import GraphedRunner
from lowering.trt.run.runtime import EngineRunner

CPU = torch.device("cpu")
STREAM = 4711


@pytest.fixture
def make(monkeypatch):
    """Builds a runner over a fake engine with the given profile ranges."""

    def build(*ranges: Range, outputs=("p", "q"), host=(), **options):
        engine = FakeEngine(list(ranges) or [((1, 3), (4, 3))])
        engine.host.update(host)
        monkeypatch.setattr(runtime, "trt", fake_module(engine, b"plan"))
        return EngineRunner(b"plan", ["a", "b"], outputs, CPU, FakeStreams(STREAM), **options), engine

    return build


def test_one_run_sets_shapes_addresses_then_runs_on_the_callers_stream(make) -> None:
    runner, engine = make()
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    p, q = runner(a, b)
    assert torch.equal(p, a * 2)
    assert torch.equal(q, b * 2)
    assert engine.contexts[0].calls == [
        ("shape", "a", (2, 3)),
        ("address", "a"),
        ("shape", "b", (2, 3)),
        ("address", "b"),
        ("infer",),
        ("address", "p"),
        ("address", "q"),
        ("run", STREAM),
    ]


def test_outputs_come_in_the_programs_order(make) -> None:
    runner, _ = make(outputs=("q", "p"))
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    q, p = runner(a, b)
    assert torch.equal(q, b * 2)
    assert torch.equal(p, a * 2)


def test_input_memory_is_used_in_place_if_packed(make) -> None:
    runner, engine = make()
    a, b = torch.randn(2, 3), torch.randn(3, 2).t()
    p, q = runner(a, b)
    assert engine.contexts[0].addresses["a"] == a.data_ptr()
    assert engine.contexts[0].addresses["b"] != b.data_ptr()
    assert torch.equal(q, b * 2)
    assert engine.contexts[0].addresses["p"] == p.data_ptr()


def test_inputs_are_not_changed_and_outputs_are_new_each_time(make) -> None:
    runner, engine = make()
    a, b = torch.ones(2, 3), torch.ones(2, 3)
    first = runner(a, b)
    second = runner(a + 1, b)
    assert torch.equal(a, torch.ones(2, 3))
    assert torch.equal(first[0], torch.full((2, 3), 2.0))
    assert torch.equal(second[0], torch.full((2, 3), 4.0))
    assert len(engine.contexts) == 1


def test_empty_batch_has_an_address_and_an_empty_result(make) -> None:
    runner, _ = make(((0, 3), (4, 3)))
    p, q = runner(torch.empty(0, 3), torch.empty(0, 3))
    assert p.shape == q.shape == (0, 3)


def test_profile_by_size_each_with_a_context_of_its_own(make) -> None:
    runner, engine = make(((1, 3), (2, 3)), ((3, 3), (8, 3)))
    runner(torch.ones(2, 3), torch.ones(2, 3))
    runner(torch.ones(5, 3), torch.ones(5, 3))
    runner(torch.ones(8, 3), torch.ones(8, 3))
    assert [context.calls[0] for context in engine.contexts] == [("profile", 0, STREAM), ("profile", 1, STREAM)]


def test_another_stream_waits_for_the_last_run_of_the_context(make) -> None:
    """Two runs of one context share its scratch memory, so they must not overlap."""
    runner, engine = make(((1, 3), (2, 3)), ((3, 3), (8, 3)))
    runner(torch.ones(2, 3), torch.ones(2, 3))
    runner.streams.stream = 12
    runner(torch.ones(5, 3), torch.ones(5, 3))  # another context
    assert runner.streams.waits == []
    runner(torch.ones(2, 3), torch.ones(2, 3))
    runner(torch.ones(2, 3), torch.ones(2, 3))
    assert runner.streams.waits == [(12, STREAM)]
    assert [call for call in engine.contexts[0].calls if call[0] == "run"] == [("run", s) for s in (STREAM, 12, 12)]
    assert runner.streams.finished == [STREAM, 12]  # once for each context, when its profile was set


@pytest.mark.parametrize("name", ["a", "q"])
def test_a_binding_in_host_memory_is_refused(make, name: str) -> None:
    with pytest.raises(LoweringError, match=f"'{name}' of this engine lies in host memory"):
        make(host=[name])


def test_beyond_the_profiles_raises_and_runs_nothing(make) -> None:
    runner, engine = make(((1, 3), (2, 3)), ((3, 3), (8, 3)))
    with pytest.raises(InputError, match=r"a=\(9, 3\).*from \(1, 3\) to \(2, 3\).*or .*from \(3, 3\) to \(8, 3\)"):
        runner(torch.ones(9, 3), torch.ones(9, 3))
    with pytest.raises(InputError, match="no optimization profile"):
        runner(torch.ones(2, 3), torch.ones(5, 3))
    assert engine.contexts == []


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.ones(2, 3),), "takes 2 inputs, 1 were given"),
        ((torch.ones(2, 3), torch.ones(2, 3).double()), "'b' is torch.float64, the engine takes torch.float32"),
        ((torch.ones(3), torch.ones(2, 3)), "'a' has 1 dimensions, the engine takes 2"),
        ((torch.ones(2, 3, device="meta"), torch.ones(2, 3)), "'a' is on meta, the engine runs on cpu"),
    ],
    ids=["count", "dtype", "rank", "device"],
)
def test_wrong_inputs(make, inputs: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()[0](*inputs)


def test_each_thread_has_contexts_of_its_own(make) -> None:
    runner, engine = make()
    results: list[Tensor] = []

    def work(value: float) -> None:
        for _ in range(20):
            results.append(runner(torch.full((2, 3), value), torch.ones(2, 3))[0] / value)

    threads = [threading.Thread(target=work, args=(float(i + 1),)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 60
    assert all(torch.equal(result, torch.full((2, 3), 2.0)) for result in results)
    assert len(engine.contexts) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("shape", "refuses the shape of a"),
        ("address", "refuses the address of a"),
        ("run", "does not start the run"),
        ("infer", "cannot infer the sizes of the outputs: shape inference fails"),
    ],
)
def test_a_refusal_of_the_runtime_is_an_error_and_the_next_call_starts_afresh(make, call: str, message: str) -> None:
    runner, engine = make()
    engine.refuses.add(call)
    with pytest.raises(LoweringError, match=message):
        runner(torch.ones(2, 3), torch.ones(2, 3))
    engine.refuses.clear()
    assert torch.equal(runner(torch.ones(2, 3), torch.ones(2, 3))[0], torch.full((2, 3), 2.0))
    assert len(engine.contexts) == 2


def test_no_execution_context(make) -> None:
    runner, engine = make()
    engine.refuses.add("context")
    with pytest.raises(BackendUnavailableError, match="no execution context"):
        runner(torch.ones(2, 3), torch.ones(2, 3))


def test_output_whose_size_depends_on_the_data(make) -> None:
    runner, engine = make()
    engine.data_dependent.add("q")
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    p, q = runner(a, b)
    assert torch.equal(p, a * 2)
    assert q.shape == (2, 3)
    assert torch.equal(q, b[:2] * 2)
    assert engine.contexts[0].calls[-3:] == [("address", "p"), ("allocator", "q"), ("run", STREAM)]
    assert runner(a[:1], b[:1])[1].shape == (0, 3)


def test_engine_that_cannot_be_loaded_says_what_it_is_and_why(make) -> None:
    make()
    with pytest.raises(BackendUnavailableError, match=r"cannot load.*made by another version\n.*RTX 1\.7 \(for 8\.9\)"):
        EngineRunner(b"other", ["a", "b"], ["p"], CPU, FakeStreams(STREAM), described="the engine is RTX 1.7 (for 8.9)")


def test_a_lean_runtime_is_loaded_from_the_callers_path(make) -> None:
    runner, _ = make(lean_runtime="libnvinfer_lean.so")
    assert torch.equal(runner(torch.ones(2, 3), torch.ones(2, 3))[0], torch.full((2, 3), 2.0))
    with pytest.raises(BackendUnavailableError, match="cannot load this engine"):
        make(lean_runtime="another.so")


def test_native_graphs_are_a_setting_of_the_context(make) -> None:
    runner, engine = make(native_graphs=True)
    runner(torch.ones(2, 3), torch.ones(2, 3))
    assert engine.contexts[0].configuration.cuda_graph_strategy == "WHOLE_GRAPH_CAPTURE"


# -- CUDA graphs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def graphed(make):
    """A graphed runner, its fake engine, its fake CUDA, and its streams."""
    runner, engine = make(((1, 3), (2, 3)), ((3, 3), (32, 3)))
    capturer = FakeCapturer(engine)
    return GraphedRunner(runner, capturer), engine, capturer, runner.streams


def _ask(run, rows: int) -> None:
    a, b = torch.randn(rows, 3), torch.randn(rows, 3)
    p, q = run(a, b)
    assert torch.equal(p, a * 2)
    assert torch.equal(q, b * 2)


def test_a_graph_is_captured_once_for_each_shape(graphed) -> None:
    run, engine, capturer, _ = graphed
    for rows in (2, 5, 2, 5, 2):
        _ask(run, rows)
    assert capturer.captures == 2
    assert capturer.replays == [0, 1, 0, 1, 0]
    # a context of its own for each graph, in the profile that covers the shape, enqueued on the capturing stream
    assert [context.current_profile for context in engine.contexts] == [0, 1]
    assert all(("run", FakeCapturer.SIDE) in context.calls for context in engine.contexts)


def test_results_of_a_graph_are_the_callers_own(graphed) -> None:
    run = graphed[0]
    first = run(torch.ones(2, 3), torch.ones(2, 3))[0]
    kept = first.clone()
    second = run(torch.zeros(2, 3), torch.zeros(2, 3))[0]
    assert torch.equal(first, kept)
    assert torch.equal(second, torch.zeros(2, 3))


def test_another_stream_drops_the_graphs_after_their_work(graphed) -> None:
    run, _, capturer, streams = graphed
    _ask(run, 2)
    streams.stream = 12
    _ask(run, 2)
    assert capturer.captures == 2
    assert capturer.synchronized == [STREAM]


def test_graphs_are_bounded_and_the_oldest_goes(graphed) -> None:
    run, _, capturer, _ = graphed
    for rows in range(3, 13):
        _ask(run, rows)
    _ask(run, 12)
    assert capturer.captures == 10
    _ask(run, 3)
    assert capturer.captures == 11
    assert set(capturer.synchronized) == {STREAM}


def test_inside_a_capture_of_the_callers_nothing_is_captured(graphed) -> None:
    run, engine, capturer, _ = graphed
    capturer.inside = True
    _ask(run, 2)
    assert capturer.captures == 0
    assert ("run", STREAM) in engine.contexts[0].calls


def test_data_dependent_sizes_run_without_a_graph(graphed, caplog) -> None:
    run, engine, capturer, _ = graphed
    engine.data_dependent.add("q")
    for _ in range(3):
        assert run(torch.ones(5, 3), torch.ones(5, 3))[1].shape == (4, 3)
    assert capturer.captures == 0
    assert caplog.text.count("without a CUDA graph") == 1


def test_a_failed_capture_is_an_error(graphed, monkeypatch) -> None:
    run, _, capturer, _ = graphed

    def fails(device, record):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(capturer, "capture", fails)
    with pytest.raises(LoweringError, match=r"cannot be captured.*not permitted when stream is capturing\n.*graphs"):
        run(torch.ones(2, 3), torch.ones(2, 3))


def test_graphs_check_their_inputs_and_belong_to_a_thread(graphed) -> None:
    run, _, capturer, _ = graphed
    with pytest.raises(InputError, match="no optimization profile"):
        run(torch.ones(40, 3), torch.ones(40, 3))
    threads = [threading.Thread(target=_ask, args=(run, 2)) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert capturer.captures == 2


# -- which engine ---------------------------------------------------------------------------------------------------

RTX = EngineTarget("rtx", "1.7.1.116")
AMPERE = EngineTarget("tensorrt", "10.13.3.9", ("8.0",), "A100")
LATER = replace(AMPERE, version_compatible=True)


@pytest.mark.parametrize(
    ("targets", "machine", "index"),
    [
        ([RTX], ("rtx", "1.7.1.116", "8.9", "RTX 4090"), 0),
        ([RTX, replace(RTX, compute_capabilities=("8.9",))], ("rtx", "1.7.1.116", "8.9", "RTX 4090"), 1),
        ([RTX, replace(RTX, compute_capabilities=("8.6",))], ("rtx", "1.7.1.116", "8.9", "RTX 4090"), 0),
        (
            [replace(AMPERE, gpu="A30"), AMPERE],
            ("tensorrt", "10.13.3.9", "8.0", "A100"),
            1,
        ),
        ([replace(LATER, hardware_compatible=True)], ("tensorrt", "10.15.0.1", "9.0", "H100"), 0),
        ([RTX, EngineTarget("tensorrt", "11.4.0.106", ("9.0",), "H100")], ("tensorrt", "11.4.0.106", "9.0", "H100"), 1),
    ],
    ids=["only", "specific", "portable", "same-gpu", "compatible", "flavour"],
)  # fmt: skip
def test_the_fitting_engine_is_chosen(targets, machine, index: int) -> None:
    assert fitting(targets, *machine) == index


@pytest.mark.parametrize(
    ("target", "machine"),
    [
        (replace(RTX, compute_capabilities=("8.6", "8.9")), ("rtx", "1.7.1.116", "12.0", "RTX 5090")),
        (RTX, ("rtx", "1.7.1.116", "7.5", "T4")),
        (RTX, ("rtx", "1.8.0.1", "8.9", "RTX 4090")),
        (RTX, ("tensorrt", "1.7.1.116", "8.9", "RTX 4090")),
        (AMPERE, ("tensorrt", "10.13.3.9", "9.0", "H100")),
        (LATER, ("tensorrt", "11.4.0.1", "8.0", "A100")),
        (LATER, ("tensorrt", "10.12.0.1", "8.0", "A100")),
    ],
    ids=["capability", "turing", "version", "flavour", "gpu", "major", "older"],
)  # fmt: skip
def test_where_none_fits_the_error_says_what_there_is_and_what_the_gpu_is(target, machine) -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        fitting([target], *machine)
    assert str(target) in str(caught.value)
    assert machine[3] in str(caught.value)
    assert machine[2] in str(caught.value)


# -- the module -----------------------------------------------------------------------------------------------------

IMAGE = torch.randn(2, 3, 12, 12)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()


@pytest.fixture(scope="module")
def engine(model: nn.Module) -> TrtEngine:
    program = aten_program(model, IMAGE, dynamic={0: (1, 4)})
    network = build_network(program, name="n")
    return TrtEngine(build_engine(network), read_network(network.definition), program.inputs, program.outputs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_names_simulate(engine: TrtEngine) -> None:
    with pytest.raises(BackendUnavailableError, match="simulate"):
        engine(IMAGE)


def test_simulate_runs_the_network(engine: TrtEngine, model: nn.Module) -> None:
    torch.testing.assert_close(engine.simulate(IMAGE), eager(model, IMAGE))
    torch.testing.assert_close(engine.simulate(IMAGE[:1]), eager(model, IMAGE[:1]))


@pytest.mark.parametrize("inputs", [(IMAGE.repeat(3, 1, 1, 1),), (IMAGE[0],), (IMAGE, IMAGE), ()])
def test_simulate_refuses_what_the_engine_would(engine: TrtEngine, inputs: tuple[Tensor, ...]) -> None:
    with pytest.raises(InputError):
        engine.simulate(*inputs)


def test_artifact_round_trip(engine: TrtEngine, tmp_path) -> None:
    for name, write in engine.artifact_files("segment_0").items():
        write(tmp_path / name)
    assert (tmp_path / "segment_0.engine").read_bytes() == engine.engines[0].data
    loaded = TrtEngine.from_artifact(tmp_path, "segment_0", engine.artifact_record())
    assert torch.equal(loaded.simulate(IMAGE)[0], engine.simulate(IMAGE)[0])
    assert loaded.inputs == engine.inputs


def test_artifact_without_network_cannot_simulate(engine: TrtEngine, tmp_path) -> None:
    bare = TrtEngine(engine.engines, None, engine.inputs, engine.outputs)
    files = engine.artifact_files("s", include_network=False)
    assert list(files) == ["s.engine"]
    files["s.engine"](tmp_path / "s.engine")
    loaded = TrtEngine.from_artifact(tmp_path, "s", bare.artifact_record())
    with pytest.raises(BackendUnavailableError, match="include_network=True"):
        loaded.simulate(IMAGE)


@pytest.mark.parametrize("gone", ["s.engine", "s.network.json", "s.network.safetensors"])
def test_missing_artifact_file(engine: TrtEngine, tmp_path, gone: str) -> None:
    for name, write in engine.artifact_files("s").items():
        write(tmp_path / name)
    (tmp_path / gone).unlink()
    with pytest.raises(ArtifactError, match=gone):
        TrtEngine.from_artifact(tmp_path, "s", engine.artifact_record())


def test_copies_share_the_network(engine: TrtEngine) -> None:
    twin = copy.deepcopy(engine)
    assert twin.reference is engine.reference
    assert torch.equal(twin.simulate(IMAGE)[0], engine.simulate(IMAGE)[0])


def test_engines_for_several_gpus_are_one_module(engine: TrtEngine, tmp_path) -> None:
    other = EngineFile(b"another", replace(engine.engines[0].target, compute_capabilities=("12.0",)))
    both = TrtEngine([*engine.engines, other], engine.reference, engine.inputs, engine.outputs)
    for name, write in both.artifact_files("s").items():
        write(tmp_path / name)
    assert (tmp_path / "s.1.engine").read_bytes() == b"another"
    assert TrtEngine.from_artifact(tmp_path, "s", both.artifact_record()).engines == both.engines


def test_cuda_graphs_are_a_setting_that_an_artifact_keeps(tmp_path) -> None:
    from lowering import load, lower_to_trt

    lowered = lower_to_trt(nn.ReLU(), IMAGE, precision="fp32", settings={"cuda_graphs": True})
    assert lowered.backend_segments()[0].backend.cuda_graphs
    lowered.save(tmp_path / "a")
    assert load(tmp_path / "a").backend_segments()[0].backend.cuda_graphs


class FakeCuda:
    """What `TrtEngine` asks torch about the GPU, on a machine without one."""

    def __init__(self, monkeypatch, capability: tuple[int, int] = (8, 9), name: str = "NVIDIA GeForce RTX 4090"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(bindings, "flavour", lambda: "rtx")
        self.runners: list[tuple] = []
        monkeypatch.setattr(engine_module, "EngineRunner", self.runner)

    def runner(self, data, *arguments, **options):
        self.runners.append((data, options))
        return object()


def test_the_runner_gets_the_engine_for_its_gpu_once(engine: TrtEngine, monkeypatch) -> None:
    cuda = FakeCuda(monkeypatch)
    blackwell = EngineFile(b"12", replace(engine.engines[0].target, compute_capabilities=("12.0",)))
    ada = EngineFile(b"89", replace(engine.engines[0].target, compute_capabilities=("8.9",)))
    module = TrtEngine([blackwell, ada], None, engine.inputs, engine.outputs, cuda_graphs=True)
    device = torch.device("cuda", 0)
    threads = [threading.Thread(target=module._runner, args=(device,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [data for data, _ in cuda.runners] == [b"89"]
    assert cuda.runners[0][1]["native_graphs"]
    assert "for 8.9" in cuda.runners[0][1]["described"]
    assert "RTX 4090" in cuda.runners[0][1]["described"]


def test_a_version_compatible_engine_in_a_later_version_asks_for_its_lean_runtime(engine, monkeypatch) -> None:
    cuda = FakeCuda(monkeypatch, (8, 0), "A100")
    monkeypatch.setattr(bindings, "flavour", lambda: "tensorrt")
    monkeypatch.setattr(bindings, "version", lambda: "10.15.0.1")
    module = TrtEngine([EngineFile(b"80", LATER)], None, engine.inputs, engine.outputs)
    with pytest.raises(BackendUnavailableError, match=r"lean runtime of 10\.13\.3\.9(?s:.*)attribute lean_runtime"):
        module._runner(torch.device("cuda", 0))
    module.lean_runtime = "libnvinfer_lean.so"
    module._runner(torch.device("cuda", 0))
    assert cuda.runners[0][1]["lean_runtime"] == "libnvinfer_lean.so"


def test_no_engine_for_this_gpu(engine: TrtEngine, monkeypatch) -> None:
    FakeCuda(monkeypatch, (12, 0), "NVIDIA GeForce RTX 5090")
    ada = EngineFile(b"89", replace(engine.engines[0].target, compute_capabilities=("8.9",)))
    with pytest.raises(BackendUnavailableError, match=r"RTX 5090 \(compute capability 12\.0\).*\(for 8\.9\)"):
        TrtEngine([ada], None, engine.inputs, engine.outputs)._runner(torch.device("cuda", 0))


def test_several_profiles_from_the_specs_to_the_engine_and_the_simulation(model: nn.Module) -> None:
    program = aten_program(model, IMAGE, dynamic={0: (1, 16)})
    shapes = [tuple((n, 3, 12, 12) for n in sizes) for sizes in ((1, 1, 2), (8, 8, 16))]
    program.inputs = [replace(program.inputs[0], profiles=tuple(shapes))]
    network = build_network(program, name="n")
    assert network.profiles == [{"x0": shapes[0]}, {"x0": shapes[1]}]
    built = build_engine(network)
    module = TrtEngine(built, read_network(network.definition), program.inputs, program.outputs)
    for rows in (1, 2, 8):
        image = torch.randn(rows, 3, 12, 12)
        torch.testing.assert_close(module.simulate(image), eager(model, image))
    with pytest.raises(InputError, match=r"\(4, 3, 12, 12\), this segment takes from .* or from"):
        module.simulate(torch.randn(4, 3, 12, 12))


# -- on a GPU -------------------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine")


def _close(module: TrtEngine, model: nn.Module, image: Tensor) -> None:
    """The device may multiply in TF32: 10 bits of mantissa."""
    found = module(image.cuda())[0].cpu()
    torch.testing.assert_close(found, eager(model, image)[0], rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["plain", "graphs"])
def test_on_a_gpu_at_changing_sizes(engine: TrtEngine, model: nn.Module, cuda_graphs: bool) -> None:
    module = TrtEngine(engine.engines, None, engine.inputs, engine.outputs, cuda_graphs=cuda_graphs)
    for rows in (1, 4, 2, 4, 1):
        _close(module, model, torch.randn(rows, 3, 12, 12))
    with pytest.raises(InputError, match="no optimization profile"):
        module(torch.randn(5, 3, 12, 12).cuda())


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_on_a_stream_of_the_callers(engine: TrtEngine, model: nn.Module) -> None:
    image = torch.randn(2, 3, 12, 12)
    stream = torch.cuda.Stream()
    on_device = image.cuda()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        (found,) = engine(on_device)
    stream.synchronize()
    torch.testing.assert_close(found.cpu(), eager(model, image)[0], rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["plain", "graphs"])
def test_on_a_gpu_changing_streams_without_waiting(engine: TrtEngine, model: nn.Module, cuda_graphs: bool) -> None:
    module = TrtEngine(engine.engines, None, engine.inputs, engine.outputs, cuda_graphs=cuda_graphs)
    images = [torch.randn(4, 3, 12, 12) for _ in range(8)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for index, image in enumerate(images):
        with torch.cuda.stream(streams[index % 2]):
            found.append(module(image.cuda())[0])
    torch.cuda.synchronize()
    for image, result in zip(images, found, strict=True):
        torch.testing.assert_close(result.cpu(), eager(model, image)[0], rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_from_several_threads(engine: TrtEngine, model: nn.Module) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for rows in (1, 3, 2):
                    _close(engine, model, torch.randn(rows, 3, 12, 12))
        except BaseException as error:  # told to the main thread, which fails with it
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_non_contiguous_and_empty_and_wrong_inputs(engine: TrtEngine, model: nn.Module) -> None:
    image = torch.randn(2, 12, 12, 3).permute(0, 3, 1, 2)
    found = engine(image.cuda())[0].cpu()
    torch.testing.assert_close(found, eager(model, image)[0], rtol=1e-2, atol=1e-2)
    with pytest.raises(InputError, match="takes CUDA tensors"):
        engine(image)
    with pytest.raises(InputError, match=r"takes torch\.float32"):
        engine(image.cuda().half())
