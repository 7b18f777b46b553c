"""The layer report: parsing, counting, bytes, modules, profiles."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from trt_checks import aten_program, lower

from lowering.trt.builder.build import build_engine
from lowering.trt.builder.layers import Layer, first_profile, layer_report, parse_layers
from lowering.trt.define.network import build_network


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


def one(name: str, kind: str, inputs: list[str], constants: list[str], output: str) -> Layer:
    """The layer of a listing that consists of one line; tensors are written "Half[1,8]"."""

    def tensors(items: list[str]) -> str:
        parts = [item.rstrip("]").split("[") for item in items]
        return ", ".join(tensor(f"t{i}", dims, dtype) for i, (dtype, dims) in enumerate(parts))

    text = line(name, kind, tensors(inputs), tensors(constants), tensors([output]))
    (layer,) = parse_layers(f"Layers:\n{text}\n\nI/O Tensors:")
    return layer


OPERATIONS = {
    "convolution": (
        "c/convolution_myl0_1", "correlation", ["Half[1,64,8,8]", "Half[1,32,8,8]"],
        ["Half[32,64,3,3]", "Float[1]", "Half[1,32,1,1]"], "Half[1,32,8,8]", 2 * 32 * 64 * 64 * 9,
    ),
    "grouped": ("c_myl0_1", "correlation", ["Half[2,8,4]"], ["Half[8,1,3]"], "Half[2,8,4]", 2 * 64 * 3),
    "computed kernel": (
        "c_myl0_1", "correlation", ["Half[1,64,8,8]", "Half[32,64,1,1]", "Half[1,32,8,8]"], ["Half[1,32,1,1]"],
        "Half[1,32,8,8]", 2 * 32 * 64 * 64,
    ),
    "transposed": ("d_myl0_1", "deconv", ["Half[1,6,4,4]"], ["Half[6,2,2,2]"], "Half[1,2,8,8]", 2 * 6 * 16 * 8),
    "fused convolution": (
        "__myl_CorrSilu_myl0_1", "runtime_fusion", ["Half[1,4,8,8]"], ["Half[32,4,3,3]", "Half[1,32,1,1]"],
        "Half[1,32,4,4]", 2 * 32 * 16 * 36,
    ),
    "linear": ("g_myl0_1", "gemm", ["Int8[7,16]"], ["Int8[16,10]", "Float[1]"], "Half[7,10]", 2 * 7 * 16 * 10),
    "1x1 convolution as a product": (
        "__myl_FcAddRelu_myl0_1", "runtime_fusion", ["Half[1,512,784]"], ["Half[1,256,1]", "Half[1,256,512]"],
        "Half[1,256,784]", 2 * 256 * 512 * 784,
    ),
    "with a residual": (
        "__myl_FcAddAdd_myl0_1", "runtime_fusion", ["Half[1,197,768]", "Half[1,197,3072]"],
        ["Half[1,1,768]", "Half[1,3072,768]"], "Half[1,197,768]", 2 * 197 * 3072 * 768,
    ),
    "batched": ("m_myl0_1", "gemm", ["Half[12,5,64]", "Half[12,64,9]"], [], "Half[12,5,9]", 2 * 12 * 5 * 64 * 9),
    "attention": (
        "_gemm_mha_v2_myl0_1", "kgen", ["Half[12,5,64]", "Half[12,64,9]", "Half[12,9,64]"], [], "Half[12,5,64]",
        4 * 12 * 5 * 64 * 9,
    ),
    "pointwise": ("__myl_AddRelu_myl0_1", "kgen", ["Half[1,8]", "Half[1,8]"], [], "Half[1,8]", 0),
    "dynamic": ("g_myl0_1", "gemm", ["Half[-1,16]"], ["Half[16,10]"], "Half[-1,10]", 0),
}  # fmt: skip


@pytest.mark.parametrize("case", OPERATIONS.values(), ids=list(OPERATIONS))
def test_operations_follow_from_the_sizes(case: tuple) -> None:
    *layer, operations = case
    assert one(*layer).operations == operations


@pytest.mark.parametrize(
    ("name", "inputs", "constants", "output", "overhead"),
    [
        ("__myl_CastMulMinMaxRounCast_myl0_2", ["Half[1,8]"], ["Float[1]"], "Int8[1,8]", "quantize"),
        ("__myl_CastMulCast_myl0_2", [], ["Int8[4,8]"], "Half[4,8]", "quantize"),
        ("__myl_CastMulMinMax_myl0_2", ["Half[1,8]"], [], "Half[1,8]", None),
        ("__myl_MoveReshTran_myl0_8", ["Int8[1,8]"], [], "Int8[8,1]", "reformat"),
        ("__myl_CastConc_myl0_0", ["Float[1,3,8]"], ["Half[1,1,8]"], "Half[1,4,8]", "reformat"),
        ("__myl_AddReluMulMinMaxRounCast_myl0_2", ["Half[1,8]"], [], "Int8[1,8]", None),
        ("_gemm_mha_v2_myl0_2", ["Half[1,8]"], [], "Half[1,8]", None),
    ],
)
def test_kernels_that_only_quantize_or_move_are_told_apart(
    name: str, inputs: list[str], constants: list[str], output: str, overhead: str | None
) -> None:
    assert one(name, "kgen", inputs, constants, output).overhead == overhead


def test_a_fused_convolution_counts_as_compute() -> None:
    layer = one("__myl_CorrSilu_myl0_1", "runtime_fusion", ["Half[1,4,8,8]"], ["Half[8,4,1,1]"], "Half[1,8,8,8]")
    assert (layer.is_compute, layer.is_int8) == (True, False)


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
