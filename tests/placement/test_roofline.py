"""The roofline floor: by hand on small listings, the memory model, the figures of the GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from fx_passes.errors import InputError
from lowering.roofline import Gpu, engine_floor, gpu_named, gpus, kernel_floors, representative_gpu

MIB = 2**20
# 1 byte a microsecond from DRAM, 4 from a cache of 100 bytes; 10 and 20 operations a microsecond.
SMALL = Gpu("small", "8.9", memory=1e6, l2_bytes=100, l2=4e6, rates={"fp16": 1e7, "int8": 2e7, "fp32": 5e6}, source="")


def kernel(reads: dict[str, int], writes: dict[str, int], constants: dict[str, int] | None = None, **more: Any) -> dict:
    row = {"inputs": ["Half[1]"], "int8": False, "operations": 0, **more}
    for key, tensors in (("reads", reads), ("constants", constants or {}), ("writes", writes)):
        row[key] = [list(item) for item in tensors.items()]
    return row


def floor(*rows: dict[str, Any], gpu: Gpu = SMALL) -> list[tuple[float, float]]:
    return [(round(memory, 9), round(compute, 9)) for memory, compute in kernel_floors(list(rows), gpu)]


def test_input_and_weights_come_from_dram_and_an_activation_from_the_cache() -> None:
    first = kernel({"image": 20}, {"a": 8}, {"weight": 10})
    second = kernel({"a": 8}, {"b": 4})
    # 30 bytes from DRAM, 38 through the cache (9.5 us); then 12 bytes through the cache alone.
    assert floor(first, second) == [(30.0, 0.0), (3.0, 0.0)]


def test_an_evicted_activation_is_written_to_and_read_from_dram() -> None:
    rows = [
        kernel({}, {"a": 40}),
        kernel({"x": 70}, {"b": 1}),  # 111 bytes touched: "a" is gone
        kernel({"a": 40}, {"c": 1}),
    ]
    assert floor(*rows) == [(40.0, 0.0), (70.0, 0.0), (40.0, 0.0)]


def test_a_recently_used_activation_outlives_older_ones() -> None:
    rows = [
        kernel({}, {"a": 40}),
        kernel({}, {"b": 40}),
        kernel({"a": 40}, {"c": 15}),  # "a" is used again, so "b" goes first
        kernel({"x": 20}, {"d": 1}),
        kernel({"a": 40}, {"e": 1}),
    ]
    assert floor(*rows)[4] == (10.25, 0.0)


def test_what_does_not_fit_in_the_cache_goes_to_dram() -> None:
    assert floor(kernel({}, {"a": 101}), kernel({"a": 101}, {"b": 0})) == [(101.0, 0.0), (101.0, 0.0)]


def test_slices_of_one_tensor_are_fetched_once() -> None:
    row = kernel({}, {"b": 0})
    row["reads"] = [["qkv", 30], ["qkv", 30]]
    assert floor(row) == [(30.0, 0.0)]


@pytest.mark.parametrize(
    ("more", "microseconds"),
    [
        ({"inputs": ["Half[2,8]"]}, 10.0),
        ({"inputs": ["Float[2,8]"]}, 20.0),
        ({"inputs": ["Int8[2,8]"], "int8": True}, 5.0),
        ({"inputs": ["Int8[2,8]", "Half[8]"]}, 10.0),  # int8 that is dequantized on the way in
    ],
    ids=["half", "float", "int8", "int8 as half"],
)
def test_operations_go_at_the_rate_of_the_type(more: dict[str, Any], microseconds: float) -> None:
    assert floor(kernel({}, {}, operations=100, **more)) == [(0.0, microseconds)]


def test_the_floor_adds_the_larger_of_both_and_the_launches() -> None:
    rows = [kernel({"x": 8}, {}, operations=20), kernel({"y": 8}, {}, operations=200)]
    found = engine_floor(rows, SMALL, launch_us=3.0)
    assert (found.memory_us, found.compute_us, found.launch_us) == pytest.approx((16.0, 22.0, 6.0))
    assert found.total_us == pytest.approx(8.0 + 20.0 + 6.0)
    assert found.as_dict()["kernels"] == 2


def test_no_kernels_take_no_time() -> None:
    assert engine_floor([], "L4").total_us == 0.0


def test_rows_of_an_older_artifact_are_refused() -> None:
    with pytest.raises(InputError, match="without the bytes"):
        engine_floor([{"name": "conv", "bytes": 12}], "L4")


@pytest.mark.parametrize("name", ["RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "rtx-4090"])
def test_a_gpu_has_many_spellings(name: str) -> None:
    assert gpu_named(name).name == "RTX 4090"


def test_an_unknown_gpu_is_named_with_those_that_are_known() -> None:
    with pytest.raises(InputError, match=r"(?s)'GTX 1080'.*RTX 4090"):
        gpu_named("GTX 1080")


@pytest.mark.parametrize(
    ("capabilities", "name"),
    [(None, "RTX 4070"), (("8.6",), "RTX 3090"), (("12.0", "8.9"), "RTX 5090"), (("9.0",), "RTX 4070")],
)
def test_a_capability_has_a_representative(capabilities: tuple[str, ...] | None, name: str) -> None:
    assert representative_gpu(capabilities).name == name


# Dense operations per SM and clock, a multiply-add being two, from NVIDIA's architecture white papers.
PER_CLOCK = {
    "7.5": {"fp16": 1024, "int8": 2048},
    "8.6": {"fp16": 1024, "int8": 2048, "fp32": 256},
    "8.7": {"fp16": 2048, "int8": 4096, "fp32": 1024},
    "8.9": {"fp16": 1024, "int8": 2048, "fp32": 256},
    "12.0": {"fp16": 1024, "int8": 2048, "fp32": 256},
}
DATA_CENTRE = {"A10", "L4", "L40S"}  # float32 accumulation at full rate, TF32 at twice the GeForce rate


@pytest.mark.parametrize("name", list(gpus()))
def test_rates_are_those_of_the_architecture(name: str) -> None:
    from lowering.roofline import _data

    gpu, figures = gpus()[name], _data()["gpus"][name]
    clock = figures["sms"] * figures["sm_mhz"] * 1e6
    assert gpu.source
    assert 2 * MIB <= gpu.l2_bytes <= 128 * MIB
    assert gpu.memory < gpu.l2
    for kind, operations in PER_CLOCK[gpu.compute_capability].items():
        if kind == "fp32" and name in DATA_CENTRE:
            operations *= 2
        assert gpu.rates[kind] == pytest.approx(operations * clock, rel=0.02), kind
    assert gpu.rates["fp32"] <= gpu.rates["bf16"] <= gpu.rates["fp16"] <= gpu.rates["int8"]
