"""The runtime module, driven through a recorded fake of the TensorRT runtime; simulation; artifacts.

The fake computes ``y = x * 2`` on the addresses it was given, so a wrong address, size or order shows in the result.
What only a GPU can show is in the tests marked `gpu`.
"""

from __future__ import annotations

import copy
import ctypes
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trt_checks import aten_program, eager

from fx_passes.errors import ArtifactError, BackendUnavailableError, BuildError, InputError
from lowering.trt import runtime
from lowering.trt.build import build_engine
from lowering.trt.engine import TrtEngine
from lowering.trt.network import build_network
from lowering.trt.reference import read_network
from lowering.trt.runtime import EngineRunner

CPU = torch.device("cpu")
STREAM = 4711


class FakeContext:
    def __init__(self, engine: FakeEngine):
        self.engine, self.calls = engine, []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.thread = threading.get_ident()

    def _note(self, *call: Any) -> bool:
        assert threading.get_ident() == self.thread, "a context was used by two threads"
        self.calls.append(call)
        return call[0] not in self.engine.refuses

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        return self._note("profile", profile, stream)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return self._note("shape", name, shape)

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address, "a null address"
        self.addresses[name] = address
        return self._note("address", name)

    def infer_shapes(self) -> list[str]:
        self._note("infer")
        return [name for name in self.engine.inputs if name not in self.shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        shape = self.shapes[self.engine.inputs[0]]
        return (-1, *shape[1:]) if self.engine.data_dependent else shape

    def execute_async_v3(self, stream: int) -> bool:
        done = self._note("run", stream)
        for source, target in zip(self.engine.inputs, self.engine.outputs, strict=True):
            count = torch.Size(self.shapes[source]).numel()
            read = (ctypes.c_float * count).from_address(self.addresses[source])
            write = (ctypes.c_float * count).from_address(self.addresses[target])
            for i in range(count):
                write[i] = read[i] * 2
        return done


class FakeEngine:
    """Two inputs a and b, two outputs p = 2a and q = 2b, float32, any number of profiles."""

    inputs, outputs = ("a", "b"), ("p", "q")

    def __init__(self, ranges: list[tuple[tuple[int, ...], tuple[int, ...]]]):
        self.ranges = ranges
        self.contexts: list[FakeContext] = []
        self.refuses: set[str] = set()
        self.data_dependent = False
        self.num_optimization_profiles = len(ranges)

    def create_execution_context(self) -> FakeContext:
        self.contexts.append(FakeContext(self))
        return self.contexts[-1]

    def get_tensor_profile_shape(self, name: str, profile: int) -> tuple:
        smallest, largest = self.ranges[profile]
        return smallest, smallest, largest

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        low, high = self.ranges[0]
        return tuple(a if a == b else -1 for a, b in zip(low, high, strict=True))

    def get_tensor_dtype(self, name: str) -> Any:
        return runtime.trt.float32


@pytest.fixture
def make(monkeypatch):
    """Builds a runner over a fake engine with the given profile ranges."""

    def build(*ranges: tuple[tuple[int, ...], tuple[int, ...]], outputs=("p", "q")) -> tuple[EngineRunner, FakeEngine]:
        engine = FakeEngine(list(ranges) or [((1, 3), (4, 3))])

        class Runtime:
            def __init__(self, logger: Any):
                pass

            def deserialize_cuda_engine(self, data: bytes) -> FakeEngine | None:
                return engine if data == b"plan" else None

        class Names:
            float32 = runtime.trt.float32

        Names.Runtime = Runtime
        monkeypatch.setattr(runtime, "trt", Names)
        return EngineRunner(b"plan", ["a", "b"], outputs, CPU, lambda device: STREAM), engine

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


@pytest.mark.parametrize("call", ["shape", "address", "run"])
def test_a_refusal_of_the_runtime_is_an_error(make, call: str) -> None:
    runner, engine = make()
    engine.refuses.add(call)
    with pytest.raises(BuildError, match="TensorRT refuses"):
        runner(torch.ones(2, 3), torch.ones(2, 3))


def test_data_dependent_output_size_is_an_error(make) -> None:
    runner, engine = make()
    engine.data_dependent = True
    with pytest.raises(BuildError, match="depend on the data"):
        runner(torch.ones(2, 3), torch.ones(2, 3))


def test_engine_that_cannot_be_loaded(make, monkeypatch) -> None:
    make()
    with pytest.raises(BackendUnavailableError, match="cannot load this engine"):
        EngineRunner(b"other", ["a", "b"], ["p"], CPU, lambda device: STREAM)


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
    assert (tmp_path / "segment_0.engine").read_bytes() == engine.data
    loaded = TrtEngine.from_artifact(tmp_path, "segment_0", engine.artifact_record())
    assert torch.equal(loaded.simulate(IMAGE)[0], engine.simulate(IMAGE)[0])
    assert loaded.inputs == engine.inputs


def test_artifact_without_network_cannot_simulate(engine: TrtEngine, tmp_path) -> None:
    bare = TrtEngine(engine.data, None, engine.inputs, engine.outputs)
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


@pytest.mark.gpu
def test_on_a_gpu(engine: TrtEngine, model: nn.Module) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.testing.assert_close(engine(IMAGE.cuda())[0].cpu(), eager(model, IMAGE)[0], rtol=1e-2, atol=1e-2)
