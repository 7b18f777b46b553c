"""The layer report: parsing, counting, bytes, modules, profiles."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from trt_checks import aten_program, lower

from lowering.trt.build import build_engine
from lowering.trt.layers import first_profile, layer_report, parse_layers
from lowering.trt.network import build_network


def tensor(name: str, dims: str, dtype: str = "Half") -> str:
    return (
        f"{{ Name: {name}, Dimensions: [{dims}], Strides: [{dims}], StrideOrder: [1,0], Datatype: {dtype}, "
        "Format: (Linear) Row major linear format }"
    )


def line(name: str, kind: str, inputs: str, constants: str, outputs: str, metadata: str = "", tactic: str = "t") -> str:
    return (
        f"Name: {name}, LayerType: {kind}, Inputs: [ {inputs}], Constants: [ {constants}], Outputs: [ {outputs}], "
        f"TacticName: {tactic}, StreamId: 0, Metadata: {metadata}"
    )


LOG = "\n".join(
    [
        "Name: not a layer, this is before the listing",
        "Total Weights Memory: 4242 bytes",
        "Layers:",
        line("__myl_Move_myl0_0", "kgen", tensor("x", "2,8", "Float"), "", tensor("a", "2,8", "Int8"), "[x_quantize]"),
        line("c/convolution_myl0_1", "correlation", tensor("a", "2,8", "Int8") + ", " + tensor("r", "2,4"),
             tensor("w", "4,8", "Int8"), tensor("b", "2,4"), "[layer1.conv | net.py:3][relu]__note"),
        "[second]",
        line("__mye1_myl0_1", "signal", "", "", ""),
        line("__myl_CastMulFc_myl0_2", "runtime_fusion", tensor("b", "2,4", "Int8"), tensor("v", "4,3", "Int8"),
             tensor("d", "2,3")),
        line("g_myl0_3", "gemm", tensor("d", "2,3"), tensor("w", "4,8", "Int8"), tensor("e", "2,-1", "Float")),
        "",
        "I/O Tensors:",
        line("after", "kgen", "", "", ""),
    ]
)  # fmt: skip


def test_lines_become_layers() -> None:
    layers = parse_layers(LOG)
    assert [layer.kind for layer in layers] == ["kgen", "correlation", "signal", "runtime_fusion", "gemm"]
    conv = layers[1]
    assert conv.name == "c/convolution_myl0_1"
    assert (conv.modules, conv.sources) == (("layer1.conv", "relu", "second"), ("net.py:3",))
    assert [t.dims for t in conv.inputs] == [(2, 8), (2, 4)]
    assert [(t.name, t.dtype) for t in conv.constants] == [("w", "Int8")]
    assert conv.tactic == "t"


def test_counts_and_bytes() -> None:
    report = layer_report(LOG, 1000)
    assert (report.kernels, report.int8_compute, report.float_compute) == (4, 1, 2)
    moved = (2 * 8 * 4 + 2 * 8) + (2 * 8 + 2 * 4 * 2 + 2 * 4 * 2) + (2 * 4 + 2 * 3 * 2) + (2 * 3 * 2 + 2 * 4)
    assert report.activation_bytes == moved == sum(row["bytes"] for row in report.rows)
    assert (report.weight_bytes, report.engine_bytes) == (4242, 1000)
    assert report.rows[1]["modules"] == ["layer1.conv", "relu", "second"]
    assert report.rows[1]["sources"] == ["net.py:3"]


def test_weights_are_counted_once_without_the_builders_own_total() -> None:
    log = LOG.replace("Total Weights Memory: 4242 bytes", "")
    assert layer_report(log, 1).weight_bytes == 4 * 8 + 4 * 3


def test_a_log_without_a_listing_has_no_layers() -> None:
    assert parse_layers("Name: x, LayerType: kgen\nnothing") == []


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.stem(x)))


@pytest.fixture(scope="module")
def image() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16)


def test_rows_name_the_modules(image: torch.Tensor) -> None:
    rows = build_engine(lower(Small(), image)).report.rows
    named = {module for row in rows for module in row["modules"]}
    assert {"layer.stem", "layer.head"} <= named


def test_bytes_of_a_dynamic_engine_are_those_at_opt(image: torch.Tensor) -> None:
    program = aten_program(Small(), image, dynamic={0: (1, 8)})
    dynamic = build_engine(build_network(program, name="n")).report
    static = build_engine(lower(Small(), image)).report
    assert dynamic.shapes == "opt"
    assert dynamic.activation_bytes == static.activation_bytes
    assert (dynamic.kernels, dynamic.float_compute) == (static.kernels, static.float_compute)


def test_a_second_profile_does_not_double_the_kernels(image: torch.Tensor) -> None:
    program = aten_program(Small(), image, dynamic={0: (1, 8)})
    shapes = {"x0": ((1, 3, 16, 16), (2, 3, 16, 16), (8, 3, 16, 16))}
    engine = build_engine(build_network(program, name="n", profiles=[shapes, shapes]))
    everything = parse_layers(engine.log.text)
    assert len(everything) == 2 * len(first_profile(everything))
    assert engine.report.kernels == build_engine(build_network(program, name="n")).report.kernels
