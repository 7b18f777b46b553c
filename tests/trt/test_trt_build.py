"""Building: determinism, capabilities, errors of the native log, progress, cancellation, profiles."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trt_checks import assert_same, aten_program, eager, lower

from fx_passes.errors import BackendUnavailableError, BuildError, InputError, UnsupportedOpError
from lowering.segment.program import TensorSpec
from lowering.trt import bindings
from lowering.trt.builder import build as build_module
from lowering.trt.builder import capabilities
from lowering.trt.builder.build import BuildOptions, build_engine
from lowering.trt.builder.progress import progress_monitor, run_cancellable
from lowering.trt.builder.terminal import quiet_stderr, terminal
from lowering.trt.define.network import build_network, supports
from lowering.trt.reference import read_network

IMAGE = torch.randn(2, 3, 12, 12)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(400, 5))


# -- determinism and settings ---------------------------------------------------------------------------------------


def test_same_bytes_again() -> None:
    first, second = (build_engine(lower(small(), IMAGE)).data for _ in range(2))
    assert first == second


def test_weights_are_not_copied() -> None:
    model = small()
    network = lower(model, IMAGE)
    held = {tensor.data_ptr() for tensor in network.kept}
    assert model[0].weight.data_ptr() in held
    assert model[3].weight.data_ptr() in held


@pytest.mark.parametrize(
    ("precision", "converted"), [("fp32", False), ("fp16", False), ("int8", False), ("int8", True)]
)
def test_what_the_caller_does_to_the_weights_later_changes_nothing(precision: str, converted: bool) -> None:
    from fx_passes import convert_fx, prepare_calibration_fx
    from lowering import lower_to_trt

    def model() -> nn.Module:
        if not converted:
            return small().eval()
        prepared = prepare_calibration_fx(small().eval(), IMAGE, target="tensorrt-rtx")
        prepared(IMAGE)
        return convert_fx(prepared)

    changed = model()
    lowered = lower_to_trt(changed, IMAGE, precision=precision, calibration=[IMAGE])
    with torch.no_grad():
        for value in (*changed.parameters(), *changed.buffers()):
            value.zero_()
    expected = lower_to_trt(model(), IMAGE, precision=precision, calibration=[IMAGE])
    assert torch.equal(lowered.simulate(IMAGE), expected.simulate(IMAGE))
    assert lowered.simulate(IMAGE).abs().sum() > 0


def test_weights_that_were_cast_are_one_copy_in_network_and_simulation() -> None:
    from lowering.request.settings import Settings
    from lowering.trt.backend import TensorRTBackend

    program = aten_program(small(), IMAGE)
    backend = TensorRTBackend("fp16", None, Settings(float_type="fp16"))
    assert backend.unsupported("segment_0", program) == {}
    network = backend._defined[id(program)][1]
    _, reference = backend._build(program, "segment_0")
    held = {value.data_ptr() for value in network.kept}
    cast = [value for value in reference.record.weights.values() if value.dtype == torch.float16]
    assert len(cast) == 4
    assert all(value.data_ptr() in held for value in cast)


def test_workspace_too_small_is_an_error_with_the_logs_first_line(capfd, caplog) -> None:
    network = lower(small(), IMAGE)
    with pytest.raises(BuildError, match=r"gives no engine for network 'test'.*workspace limit"):
        build_engine(network, settings=BuildOptions(workspace_bytes=1))
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a driver the build succeeds")
@pytest.mark.parametrize("option", ["refit", "strip_weights"])
def test_an_option_that_needs_a_driver_says_so_and_the_compiler_keeps_quiet(option: str, capfd, caplog) -> None:
    with (
        caplog.at_level(logging.DEBUG, logger="lowering.tensorrt"),
        pytest.raises(BuildError, match=r"CUDA_SUCCESS(?s:.*)need a CUDA driver"),
    ):
        build_engine(lower(small(), IMAGE), settings=BuildOptions(**{option: True}))
    assert capfd.readouterr() == ("", "")  # the compiler writes to stderr past the logger
    assert "Internal Error: MyelinCheckException" in caplog.text


def test_the_layer_at_fault_is_in_the_message() -> None:
    network = lower(small(), IMAGE)
    network.log.errors.clear()
    log = bindings.BuilderLog()
    log.add("ERROR", f"Error Code 10: no tactic for {network.definition.get_layer(2).name}. In f at g")
    log.add("ERROR", "something later")
    error = build_module._failure(network, BuildOptions(), log)
    label = network.definition.get_layer(2).metadata.strip("[]")
    assert f"(in {label}): Error Code 10" in str(error)
    assert "something later" not in str(error)


def test_what_others_write_to_stderr_is_passed_on(capfd, caplog) -> None:
    with caplog.at_level(logging.DEBUG, logger="lowering.tensorrt"), quiet_stderr(), quiet_stderr():
        os.write(2, b"from another thread\n")
        os.write(2, b"Internal Error: MyelinCheckException: x\n")
        with terminal() as bar:
            bar.write("a bar\n")
    assert capfd.readouterr().err == "a bar\nfrom another thread\n"
    assert "MyelinCheckException" in caplog.text


def test_options_are_read_from_settings() -> None:
    from dataclasses import fields

    from lowering.request.settings import Settings

    settings = Settings(optimization_level=2, workspace_bytes=1 << 26, progress=False, timing_cache="t", refit=True)
    options = BuildOptions.of(settings)
    assert (options.optimization_level, options.workspace_bytes, options.progress) == (2, 1 << 26, False)
    assert (options.timing_cache, options.refit) == ("t", True)
    assert BuildOptions.of(None) == BuildOptions() == BuildOptions.of(Settings())
    assert {f.name for f in fields(BuildOptions)} <= {f.name for f in fields(Settings)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"profiling_verbosity": "loud"}, {"refit": 1}, {"engine_cache": 3}, {"engine_cache_bytes": 0},
        {"workspace_bytes": 1.5}, {"optimization_level": 6}, {"cuda_graphs": "yes"}, {"threads": True},
    ],
    ids=lambda wrong: next(iter(wrong)),
)  # fmt: skip
def test_wrong_settings_are_refused_by_name(wrong: dict) -> None:
    from lowering.request.settings import Settings

    with pytest.raises(InputError, match=f"settings.{next(iter(wrong))} is"):
        Settings(**wrong)


@pytest.fixture
def configured(monkeypatch) -> list:
    """The `IBuilderConfig`s that were built with."""
    seen: list = []
    real = build_module._configure

    def kept(network, config, *arguments):
        real(network, config, *arguments)
        seen.append(config)

    monkeypatch.setattr(build_module, "_configure", kept)
    return seen


def test_every_option_reaches_the_builder(configured) -> None:
    options = BuildOptions(optimization_level=1, workspace_bytes=1 << 26, version_compatible=True)
    assert build_engine(lower(small(), IMAGE), settings=options).data
    (config,) = configured
    assert config.builder_optimization_level == 1
    assert config.get_memory_pool_limit(bindings.trt.MemoryPoolType.WORKSPACE) == 1 << 26
    assert config.get_flag(bindings.trt.BuilderFlag.VERSION_COMPATIBLE)
    assert config.get_flag(bindings.trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)
    assert not config.get_flag(bindings.trt.BuilderFlag.REFIT)


@pytest.mark.parametrize(("verbosity", "member"), [("names", "LAYER_NAMES_ONLY"), ("none", "NONE")])
def test_a_quiet_engine_has_the_same_report(configured, verbosity: str, member: str) -> None:
    loud = build_engine(lower(small(), IMAGE))
    quiet = build_engine(lower(small(), IMAGE), settings=BuildOptions(profiling_verbosity=verbosity))
    assert [c.profiling_verbosity.name for c in configured] == ["DETAILED", member, "DETAILED"]
    assert quiet.report == replace(loud.report, engine_bytes=len(quiet.data))


def test_hardware_compatible_is_said_not_to_matter_on_rtx(caplog) -> None:
    assert build_engine(lower(small(), IMAGE), settings=BuildOptions(hardware_compatible=True), report=False).data
    assert "hardware_compatible is not used" in caplog.text


def test_nothing_goes_to_the_terminal(capfd, caplog) -> None:
    with caplog.at_level(logging.DEBUG, logger="lowering.tensorrt"):
        build_engine(lower(small(), IMAGE))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert any("Engine generation completed" in record.message for record in caplog.records)


# -- capabilities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("8.9", "8.9"), ("sm89", "8.9"), ("SM_120", "12.0"), (8.6, "8.6"), (89, "8.9"), ((12, 0), "12.0"),
        ("compute_86", "8.6"), ("RTX 4090", "8.9"), ("NVIDIA GeForce RTX 3060 Ti", "8.6"), ("rtx5090", "12.0"),
        ("RTX A6000", "8.6"), ("NVIDIA RTX 6000 Ada Generation", "8.9"), ("NVIDIA A10", "8.6"), ("L40S", "8.9"),
        ("Tesla T4", "7.5"), ("GeForce GTX 1660", "7.5"), ("A100-SXM4-80GB", "8.0"), ("H100", "9.0"), ("Ada", "8.9"),
    ],
)  # fmt: skip
def test_capability_by_any_name(name, wanted: str) -> None:
    assert capabilities.parse_capability(name) == wanted


@pytest.mark.parametrize("name", ["", "rtx", "8.9.1", "GeForce", None, True, [8, 9, 1]])
def test_unknown_capability(name) -> None:
    with pytest.raises(InputError):
        capabilities.parse_capability(name)


def test_an_unknown_gpu_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'Voodoo2'(?s:.*)\"RTX 4090\".*a100.*rtx 50.*turing"):
        capabilities.parse_capability("Voodoo2")


def test_capabilities_in_order_and_once() -> None:
    assert capabilities.resolve_capabilities(["12.0", "RTX 4090", "8.9", (8, 6)]) == ("8.6", "8.9", "12.0")
    assert capabilities.resolve_capabilities((8, 9)) == ("8.9",)
    assert capabilities.resolve_capabilities(None) is None
    with pytest.raises(InputError, match="empty"):
        capabilities.resolve_capabilities([])
    with pytest.raises(InputError, match=r"not for 9\.0"):
        capabilities.resolve_capabilities(["H100"])


# -- errors ---------------------------------------------------------------------------------------------------------


class Unsupported(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(x)
        return torch.linalg.inv(y[0, 0]) + 1, y * 2


def test_an_op_without_converter_is_named() -> None:
    with pytest.raises(UnsupportedOpError, match=r"no TensorRT converter for aten\.linalg_inv"):
        lower(Unsupported(), IMAGE)


def test_dry_run_goes_on_after_a_failure() -> None:
    program = aten_program(Unsupported(), IMAGE)
    reasons = supports(program)
    assert [(node.name.startswith("linalg_inv"), "no TensorRT converter" in why) for node, why in reasons.items()] == [
        (True, True)
    ]


@pytest.mark.parametrize(
    ("program", "inputs", "reason"),
    [
        (lambda x: x.double() * 2, (IMAGE,), "float64"),
        (lambda x, y: x & y, (torch.arange(4),) * 2, "bitwise operations on bool only"),
        (lambda x: x[x > 0], (torch.randn(4),), "boolean-mask selection depends on the data"),
        (lambda x: F.max_pool2d(x, 2), (torch.ones(1, 1, 4, 4, dtype=torch.int64),), "pools floats only"),
        (lambda x: x.topk(4000), (torch.randn(5000),), "at most 3840"),
        (lambda x: x.view(2, 3, 2, 2, 3, 1, 1, 1, 12), (IMAGE,), "9 dimensions"),
        (lambda x: F.dropout(x, 0.5, True), (IMAGE,), "random"),
    ],
    ids=[
        "double",
        "bitwise_int",
        "mask",
        "int_pool",
        "topk",
        "rank_9",
        "dropout",
    ],
)
def test_refused_with_the_reason(program, inputs, reason: str) -> None:
    from fx_passes.errors import LoweringError

    with pytest.raises(LoweringError, match=reason):
        lower(program, *inputs)


def test_errors_carry_the_users_line() -> None:
    program = aten_program(Unsupported(), IMAGE)
    for node in program.call_nodes():
        node.meta["source"] = ("/home/user/model.py", 12)
    with pytest.raises(UnsupportedOpError, match=r"model\.py:12"):
        build_network(program, name="n")


def test_builder_error_while_defining_names_the_node() -> None:
    program = aten_program(small(), IMAGE)
    conv = next(node for node in program.call_nodes() if "conv2d" in str(node.target))
    conv.args = (*conv.args[:3], [-1, 1], *conv.args[4:])
    with pytest.raises(BuildError, match=rf"TensorRT refuses.*\n  at: node '{conv.name}'"):
        build_network(program, name="n")


def test_a_wrong_dtype_or_shape_of_a_converter_is_found(monkeypatch) -> None:
    from lowering.trt.define import registry

    relu = registry.converter_for(torch.ops.aten.relu.default)
    wrong = registry.Converter(lambda net, x: net.flatten(x), None, relu.targets)
    monkeypatch.setitem(registry._REGISTRY, torch.ops.aten.relu.default, wrong)
    with pytest.raises(BuildError, match="defect of the converter"):
        lower(lambda x: torch.relu(x), IMAGE)


# -- inputs and outputs ---------------------------------------------------------------------------------------------


def test_names_of_inputs_and_outputs_are_the_programs() -> None:
    program = aten_program(lambda x: (x, x * 2, x), IMAGE)
    definition = build_network(program, name="n").definition
    assert [definition.get_input(i).name for i in range(definition.num_inputs)] == ["x0"]
    assert [definition.get_output(i).name for i in range(definition.num_outputs)] == program.outputs


def test_tensors_are_found_by_node() -> None:
    model = small()
    program = aten_program(model, IMAGE)
    network = build_network(program, name="n")
    reference = read_network(network.definition)
    relu = next(node for node in program.call_nodes() if "relu" in str(node.target))
    found = reference.run(IMAGE, outputs=[network.tensors[relu.name]])
    assert_same(found, eager(model[:2], IMAGE))


def test_double_input_is_refused() -> None:
    program = aten_program(lambda x: x * 2, IMAGE)
    program.inputs = [TensorSpec("x0", torch.float64, *[tuple(IMAGE.shape)] * 3)]
    with pytest.raises(InputError, match="float64"):
        build_network(program, name="n")


# -- dynamic shapes -------------------------------------------------------------------------------------------------


def test_profiles_follow_the_specs() -> None:
    program = aten_program(nn.Conv2d(3, 4, 3), IMAGE, dynamic={0: (1, 8)})
    network = build_network(program, name="n")
    assert network.profiles == [{"x0": ((1, 3, 12, 12), (2, 3, 12, 12), (8, 3, 12, 12))}]
    assert network.definition.get_input(0).shape[0] == -1


def test_several_profiles_from_a_list_of_batch_ranges() -> None:
    from lowering import lower_to_trt

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    images = torch.randn(2, 3, 12, 12)
    lowered = lower_to_trt(model, images, precision="fp32", dynamic_batch=[(1, 1, 2), (4, 8, 16)])
    (segment,) = lowered.backend_segments()
    assert [[shape[0] for shape in profile] for profile in segment.backend.inputs[0].profiles] == [
        [1, 1, 2],
        [4, 8, 16],
    ]
    for rows in (1, 2, 4, 16):
        image = torch.randn(rows, 3, 12, 12)
        assert_same([lowered.simulate(image)], eager(model, image))
    with pytest.raises(InputError, match=r"this segment takes from \(1, .* or from \(4, "):
        lowered.simulate(torch.randn(3, 3, 12, 12))


def test_bad_profile_is_an_error_of_ours() -> None:
    program = aten_program(nn.Conv2d(3, 4, 3), IMAGE, dynamic={0: (1, 8)})
    shapes = {"x0": ((4, 3, 12, 12), (2, 3, 12, 12), (8, 3, 12, 12))}
    with pytest.raises(BuildError, match="min <= opt <= max"):
        build_engine(build_network(program, name="n", profiles=[shapes]))


# -- progress and cancellation --------------------------------------------------------------------------------------


def test_cancelled_build_gives_no_engine() -> None:
    network = lower(small(), IMAGE)
    cancelled = threading.Event()
    cancelled.set()
    config = network.builder.create_builder_config()
    monitor = progress_monitor(cancelled)
    config.progress_monitor = monitor
    with bindings.collect_log() as log:
        assert network.builder.build_serialized_network(network.definition, config) is None
    assert any("ancel" in text for text in log.errors)


@pytest.mark.parametrize("what", ["work", "build"])
def test_an_interrupt_stops_what_runs_and_is_raised(what) -> None:
    """In a process of its own: a signal that is a moment late would end the test run."""
    script = Path(__file__).parents[1] / "interrupts.py"
    done = subprocess.run([sys.executable, script, what], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("as it should be")


def test_error_in_the_worker_is_raised_here() -> None:
    def work() -> None:
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        run_cancellable(work, threading.Event())


def test_progress_bar_is_told_every_phase() -> None:
    class Bar:
        def __init__(self) -> None:
            self.tasks, self.started = [], []

        def add_task(self, name: str, total: int) -> int:
            self.started.append(name)
            self.tasks.append(type("Task", (), {"total": total}))
            return len(self.tasks) - 1

        @property
        def task_ids(self) -> list[int]:
            return list(range(len(self.tasks)))

        def update(self, task: int, completed: float) -> None:
            assert completed >= 0

    network, bar = lower(small(), IMAGE), Bar()
    config = network.builder.create_builder_config()
    config.progress_monitor = progress_monitor(threading.Event(), bar)
    with bindings.collect_log():
        assert network.builder.build_serialized_network(network.definition, config) is not None
    assert "Building engine" in bar.started


# -- bindings -------------------------------------------------------------------------------------------------------


def test_flavour_without_a_gpu_is_rtx(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bindings.flavour() == "rtx"


def test_tensorrt_is_preferred_with_a_gpu_if_importable(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bindings, "_importable", lambda module: True)
    assert bindings.flavour() == "tensorrt"
    monkeypatch.setattr(bindings, "_importable", lambda module: module == "tensorrt_rtx")
    assert bindings.flavour() == "rtx"


def test_no_tensorrt_at_all_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(bindings, "_importable", lambda module: False)
    with pytest.raises(BackendUnavailableError, match="pip install tensorrt-rtx"):
        bindings.flavour()


def test_stubs_are_not_tensorrt() -> None:
    assert not bindings._importable("tensorrt") or bindings._importable("tensorrt_libs")


def test_unknown_flavour() -> None:
    with pytest.raises(BackendUnavailableError, match="unknown TensorRT flavour"):
        bindings.use_flavour("onnx")


def test_messages_go_to_the_thread_that_asked() -> None:
    with bindings.collect_log() as outer:
        bindings._receive("WARNING", "one")
        with bindings.collect_log() as inner:
            bindings._receive("ERROR", "two")
    assert outer.warnings == ["one"]
    assert inner.errors == ["two"]
