"""The same ONNX file in OpenVINO: results, types that run, threads, artifacts, errors."""

from __future__ import annotations

import copy
import sys
import threading

import pytest
import torch
from test_onnx_session import spec
from torch import nn

from fx_passes.errors import BackendUnavailableError, InputError, LoweringError
from lowering import load, lower_to_onnx
from lowering.onnx.export import export_onnx
from lowering.segment.to_aten import to_aten

openvino = pytest.importorskip("openvino", reason="OpenVINO is an optional runtime and is not installed")

from lowering.onnx.openvino import OpenVinoSession  # noqa: E402

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)).eval()


def session(function, *specs, **options) -> OpenVinoSession:
    example = tuple(
        torch.zeros([max(2, n) if s.is_dynamic(d) else n for d, n in enumerate(s.opt)], dtype=s.dtype) for s in specs
    )
    program = to_aten(torch.fx.symbolic_trace(function), list(specs), example)
    return OpenVinoSession(export_onnx(program), program.inputs, program.outputs, **options)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_it_agrees_with_onnx_runtime_on_the_same_file(precision: str):
    lowered = lower_to_onnx(net(), IMAGES, precision=precision, calibration=[IMAGES], runtime="openvino")
    other = lower_to_onnx(net(), IMAGES, precision=precision, calibration=[IMAGES])
    assert [s.backend.bytes for s in lowered.backend_segments()] == [s.backend.bytes for s in other.backend_segments()]
    assert lowered.details["flops_share"] == 1.0
    step = 0.0 if precision == "fp32" else 0.01  # two runtimes may round one value to neighbouring integers
    torch.testing.assert_close(lowered(IMAGES), other(IMAGES), rtol=1e-4, atol=1e-4 + step * other(IMAGES).abs().max())


def test_the_report_says_device_threads_and_what_really_runs_in_int8():
    lowered = lower_to_onnx(
        net(), IMAGES, calibration=[IMAGES], runtime="openvino", settings={"threads": 2}
    )  # fmt: skip
    (segment,) = lowered.report()["segments"]
    assert segment["backend"].startswith(f"openvino {openvino.__version__.split('-')[0]} on CPU (")
    assert segment["engines"][0]["ops"]["Convolution u8"] == 2
    assert lowered.report()["threads"] == 2
    backend = lowered.backend_segments()[0].backend
    assert backend._compiled.get_property("INFERENCE_NUM_THREADS") == 2
    floats = lower_to_onnx(net(), IMAGES, precision="fp32", runtime="openvino").report()["segments"][0]
    assert floats["engines"][0]["ops"]["Convolution f32"] == 2  # not bfloat16, whatever the processor prefers


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_types_cross_the_boundary_unchanged(dtype: torch.dtype):
    values = (torch.arange(12).reshape(4, 3) % 2).to(dtype)
    run = session(lambda x: (x.reshape(x.shape[0], 3, 1).transpose(1, 2),), spec("x", values, (1, 2, 8)))
    for rows in (4, 1, 3):
        (result,) = run(values[:rows])
        assert result.dtype == dtype
        assert torch.equal(result, values[:rows].reshape(rows, 1, 3))


def test_bfloat16_at_the_boundary_is_refused():
    with pytest.raises(InputError, match=r"'x' is torch\.bfloat16"):
        session(lambda x: (x + x,), spec("x", torch.zeros(2, 3, dtype=torch.bfloat16)))


def test_changing_sizes_non_contiguous_inputs_and_results_that_stay():
    run = session(lambda x: (x * 2, x.sum(1)), spec("x", torch.zeros(2, 3), (1, 2, 8)))
    first = run(torch.ones(2, 3))
    x = torch.randn(3, 5).t()
    doubled, summed = run(x)
    torch.testing.assert_close(doubled, x * 2)
    torch.testing.assert_close(summed, x.sum(1))
    assert torch.equal(first[0], torch.full((2, 3), 2.0))
    assert torch.equal(x, x.clone())


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.zeros(9, 3), torch.zeros(9, 3)), r"takes from \(1, 3\) to \(8, 3\)"),
        ((torch.zeros(2, 3), torch.zeros(3, 3)), "must equal 2"),
        ((torch.zeros(2, 3),), "takes 2 inputs"),
        ((torch.zeros(2, 3), torch.zeros(2, 3).double()), r"is torch\.float64"),
        ((torch.zeros(2, 3), torch.zeros(3)), "has rank 1"),
        ((torch.zeros(2, 3), torch.zeros(2, 3, device="meta")), "on meta"),
    ],
    ids=["size", "tied", "count", "dtype", "rank", "device"],
)
def test_wrong_inputs(inputs, message: str):
    x = spec("x", torch.zeros(2, 3), (1, 2, 8))
    run = session(lambda x, y: (x + y,), x, spec("y", torch.zeros(2, 3), (1, 2, 8)))
    with pytest.raises(InputError, match=message):
        run(*inputs)


def test_calls_from_several_threads():
    run = session(lambda x: (x * 2,), spec("x", torch.zeros(2, 64), (1, 2, 64)), threads=1)
    wrong: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for i in range(50):
            x = torch.randn(1 + (seed * 7 + i) % 64, 64, generator=generator)
            if not torch.equal(run(x)[0], x * 2):
                wrong.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_artifact_round_trip_and_copies(tmp_path):
    lowered = lower_to_onnx(net(), IMAGES, calibration=[IMAGES], runtime="openvino")
    lowered.save(tmp_path / "a")
    again = load(tmp_path / "a")
    assert isinstance(again.backend_segments()[0].backend, OpenVinoSession)
    assert torch.equal(again(IMAGES), lowered(IMAGES))
    backend = lowered.backend_segments()[0].backend
    assert torch.equal(copy.deepcopy(backend)(IMAGES)[0], backend(IMAGES)[0])


def test_bytes_that_are_no_model_are_refused():
    with pytest.raises(LoweringError, match="OpenVINO refuses the model"):
        OpenVinoSession(b"no model", [], [])


def test_without_openvino_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(BackendUnavailableError, match=r"cannot be imported(?s:.*)fx-trt-lowering\[openvino\]"):
        lower_to_onnx(net(), IMAGES, precision="fp32", runtime="openvino")
