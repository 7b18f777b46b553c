"""Where each target puts quantize-dequantize pairs, with the reason, and where it must not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reported_cases import CASES
from torch import nn

from fx_passes import fuse_fx
from fx_passes.errors import InputError
from fx_passes.quantize.annotation import Annotation, annotation_of, quantized_values
from fx_passes.quantize.place.annotate import annotate

torch.set_num_threads(1)
TARGETS = ("tensorrt", "tensorrt-rtx", "onnxruntime")
MODELS = {case.name: case.model for case in CASES}


def model(forward: Any, **modules: nn.Module) -> nn.Module:
    """An eval module of the given children whose forward is `forward(self, x)`."""
    torch.manual_seed(0)
    cls = type("Model", (nn.Module,), {"forward": forward})
    instance = cls()
    for name, module in modules.items():
        instance.add_module(name, module)
    return instance.eval()


def conv(*args: int, **options: Any) -> nn.Conv2d:
    torch.manual_seed(sum(args))
    return nn.Conv2d(*args, **options)


def placed(net: nn.Module, target: str, qconfig: Any = None) -> dict[str, Annotation]:
    gm = annotate(fuse_fx(net), target, qconfig)
    return {node.name: annotation_of(node) for node in gm.graph.nodes if annotation_of(node) is not None}


def edges(net: nn.Module, target: str, qconfig: Any = None) -> set[str]:
    """ "producer>reader" of every dequantized value that is read."""
    gm = annotate(fuse_fx(net), target, qconfig)
    return {f"{v.node.name}>{reader.name}" for v in quantized_values(gm.graph) for reader in v.readers}


CASE_EDGES = {
    # Only the shortcut of an add, and the inputs of convolutions (NVIDIA/Model-Optimizer #425, NVIDIA/TensorRT #1992).
    ("ResidualPlacement", "tensorrt"): {
        "x>c1",
        "relu>c2",
        "x>add",
        "relu_1>c3",
        "relu_2>c4",
        "relu_1>cs",
        "cs>add_1",
    },
    ("ResidualPlacement", "tensorrt-rtx"): {"x>c1", "relu>c2", "relu_1>c3", "relu_2>c4", "relu_1>cs"},
    ("ResidualPlacement", "onnxruntime"): {
        "x>c1",
        "relu>c2",
        "c2>add",
        "x>add",
        "relu_1>c3",
        "relu_2>c4",
        "relu_1>cs",
        "c4>add_1",
        "cs>add_1",
    },
}


@pytest.mark.parametrize(("name", "target"), CASE_EDGES, ids=lambda v: v)
def test_residual_block_reads_quantized_values(name, target):
    assert edges(MODELS[name](), target) == CASE_EDGES[name, target]


def test_shortcut_is_the_shallower_branch_whatever_the_order_of_operands():
    def forward(self, x):
        return self.short(x) + self.b(F.relu(self.a(x)))

    net = model(forward, a=conv(4, 4, 1), b=conv(4, 4, 1), short=conv(4, 4, 1))
    assert "short>add" in edges(net, "tensorrt") and "b>add" not in edges(net, "tensorrt")


MUST_NOT_QUANTIZE_ADD = {
    "both_branches_float": lambda self, x: F.relu(self.a(x)) + F.relu(self.b(x)),
    "conv_read_twice": lambda self, x: (lambda y: (y + x) * y)(self.a(x)),
    "scaled": lambda self, x: torch.add(self.a(x), x, alpha=2),
    "with_number": lambda self, x: self.a(x) + 1.0,
    "with_itself": lambda self, x: (lambda y: y + y)(self.a(x)),
    "difference": lambda self, x: self.a(x) - x,
}


@pytest.mark.parametrize("forward", MUST_NOT_QUANTIZE_ADD.values(), ids=list(MUST_NOT_QUANTIZE_ADD))
def test_add_that_fuses_with_nothing_stays_float_for_tensorrt(forward):
    found = placed(model(forward, a=conv(4, 4, 1), b=conv(4, 4, 1)), "tensorrt")
    adds = [a for name, a in found.items() if name.startswith(("add", "sub"))]
    assert adds and not any(a.quantized for a in adds)
    assert all(a.reason for a in adds)


DEPTHWISE = {"tensorrt": False, "tensorrt-rtx": False, "onnxruntime": True}


@pytest.mark.parametrize("target", TARGETS)
def test_depthwise(target):
    net = model(lambda self, x: self.pw(self.dw(x)), dw=conv(8, 8, 3, groups=8), pw=conv(8, 8, 1))
    found = placed(net, target)
    assert found["pw"].weight is not None
    assert (found["dw"].weight is not None) == DEPTHWISE[target]
    assert DEPTHWISE[target] or "depthwise" in found["dw"].reason


def test_grouped_convolution_is_no_depthwise_one():
    found = placed(model(lambda self, x: self.g(x), g=conv(8, 8, 3, groups=4)), "tensorrt")
    assert found["g"].weight == "per_channel"


def test_configuration_overrides_the_target():
    net = model(lambda self, x: self.pw(self.dw(x)), dw=conv(8, 8, 3, groups=8), pw=conv(8, 8, 1))
    found = placed(net, "tensorrt", {"dw": {"dtype": "int8"}, "pw": None})
    assert found["dw"].weight == "per_channel" and found["pw"].weight is None
    assert "configuration" in found["pw"].reason


def test_per_tensor_weights_only_where_every_channel_survives():
    even, uneven = conv(8, 8, 3), conv(8, 8, 3)
    with torch.no_grad():
        uneven.weight[3] *= 1e-2
    net = model(lambda self, x: self.uneven(self.even(x)), even=even, uneven=uneven)
    found = placed(net, "tensorrt-rtx")
    assert (found["even"].weight, found["uneven"].weight) == ("per_tensor", "per_channel")
    assert "dB" in found["even"].reason and "dB" in found["uneven"].reason
    assert placed(net, "tensorrt")["even"].weight == "per_channel"


def test_dead_channels_do_not_forbid_per_tensor_weights():
    layer = conv(8, 8, 3)
    with torch.no_grad():
        layer.weight[2].zero_()
    assert placed(model(lambda self, x: self.c(x), c=layer), "tensorrt-rtx")["c"].weight == "per_tensor"


TRANSPOSED = {"tensorrt": "per_tensor", "tensorrt-rtx": None, "onnxruntime": None}


@pytest.mark.parametrize("target", TARGETS)
def test_transposed_convolution_beside_a_convolution(target):
    net = model(lambda self, x: self.up(self.c(x)), c=conv(4, 4, 3), up=nn.ConvTranspose2d(4, 4, 2))
    assert placed(net, target)["up"].weight == TRANSPOSED[target]


def test_transposed_convolution_alone_stores_int8_weights():
    found = placed(model(lambda self, x: self.up(x), up=nn.ConvTranspose2d(4, 4, 2)), "tensorrt-rtx")
    assert found["up"].weight == "per_channel" and not found["up"].quantized_inputs
    assert "computes in float" in found["up"].reason


ORT_EDGES: dict[str, tuple[Any, set[str], set[str]]] = {
    # forward, edges that are quantized, edges that are not
    "relu_vanishes": (lambda s, x: s.b(F.relu(s.a(x))), {"x>a", "relu>b", "b>output"}, {"a>relu"}),
    "relu6_vanishes": (lambda s, x: s.b(F.relu6(s.a(x))), {"relu6>b"}, {"a>relu6"}),
    "clamp_around_zero_vanishes": (lambda s, x: s.b(s.a(x).clamp(-1, 1)), {"clamp>b"}, {"a>clamp"}),
    "clamp_above_zero_stays": (lambda s, x: s.b(s.a(x).clamp(0.5, 1)), {"a>clamp", "clamp>b"}, set()),
    "relu_of_value_read_twice": (
        lambda s, x: (lambda y: s.b(F.relu(y)) + y)(s.a(x)),
        {"a>relu", "relu>b", "a>add", "b>add"},
        {"add>output"},
    ),
    "max_pool_passes": (lambda s, x: s.b(F.max_pool2d(s.a(x), 2)), {"a>max_pool2d", "max_pool2d>b"}, set()),
    "max_pool_at_the_end": (lambda s, x: F.max_pool2d(s.a(x), 2), {"a>max_pool2d"}, {"max_pool2d>output"}),
    "hardswish_has_no_kernel": (lambda s, x: s.b(F.hardswish(s.a(x))), {"a>hardswish", "hardswish>b"}, set()),
    "add_of_float_values": (lambda s, x: s.a(torch.exp(x) + torch.exp(x)), {"add>a"}, {"exp>add", "exp_1>add"}),
    "add_at_the_end": (lambda s, x: s.a(x) + s.b(x), {"a>add", "b>add"}, {"add>output"}),
    "add_between": (lambda s, x: s.a(s.a(x) + s.b(x)), {"add>a_1"}, set()),
    "number_added": (lambda s, x: s.b(s.a(x) + 1.0), {"a>add", "add>b"}, set()),
    "concat": (lambda s, x: s.c(torch.cat([s.a(x), s.b(x)], 1)), {"a>cat", "b>cat", "cat>c"}, set()),
    "zero_padding": (lambda s, x: s.b(F.pad(s.a(x), (0, 1, 0, 1))), {"a>pad"}, {"pad>b"}),
    "other_padding": (lambda s, x: s.b(F.pad(s.a(x), (0, 1, 0, 1), value=2.0)), {"a>pad", "pad>b"}, set()),
    "gate": (
        lambda s, x: (lambda y: s.b(y * torch.sigmoid(s.b(y))))(s.a(x)),
        {"a>mul", "sigmoid>mul", "mul>b_1"},
        set(),
    ),
}


@pytest.mark.parametrize("name", ORT_EDGES)
def test_onnxruntime_edges(name):
    forward, quantized, not_quantized = ORT_EDGES[name]
    found = edges(model(forward, a=conv(4, 4, 1), b=conv(4, 4, 1), c=conv(8, 4, 1)), "onnxruntime")
    assert quantized <= found, found
    assert not (not_quantized & found), found


def test_linear_writes_integers_only_where_they_are_read():
    net = model(lambda s, x: s.b(F.relu(s.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    found = edges(net, "onnxruntime")
    assert found == {"x>a", "relu>b"}


def test_pooling_and_reshaping_keep_the_scale_of_their_input():
    def forward(self, x):
        return self.fc(torch.flatten(F.max_pool2d(self.a(x), 2), 1))

    net = model(forward, a=conv(4, 4, 1), fc=nn.Linear(16, 2))
    gm = annotate(fuse_fx(net), "onnxruntime")
    scale_of = {v.node.name: v.scale_of.name for v in quantized_values(gm.graph)}
    assert scale_of["max_pool2d"] == "a" and scale_of["flatten"] == "a"


@pytest.mark.parametrize("target", TARGETS)
def test_value_that_may_be_aliased_gets_no_pair(target):
    net = model(lambda self, x: self.b(self.a(x)), a=conv(4, 4, 1), b=conv(4, 4, 1))
    fused = fuse_fx(net)
    next(n for n in fused.graph.nodes if n.name == "a").meta["aliased"] = "written through a list"
    gm = annotate(fused, target)
    found = {n.name: annotation_of(n) for n in gm.graph.nodes}
    assert not any(v.node.name == "a" for v in quantized_values(gm.graph))
    assert not found["b"].quantized and "written through a list" in found["b"].reason
    if target == "onnxruntime":  # which needs integers behind a convolution, too
        assert not found["a"].quantized and "written through a list" in found["a"].reason


def test_shared_activation_module_has_one_scale_per_call():
    gm = annotate(fuse_fx(MODELS["SharedReluTwoRanges"]()), "onnxruntime")
    relus = [v for v in quantized_values(gm.graph) if v.node.name.startswith("relu")]
    assert len(relus) == 2 and all(v.scale_of is v.node for v in relus)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"WrappedLoopPostProcess"}))  # which needs a wrap()
def test_every_node_has_a_reason(name, target):
    gm = annotate(fuse_fx(MODELS[name]()), target)
    for node in gm.graph.nodes:
        if node.op != "output":
            assert annotation_of(node).reason, node.name


def test_annotating_leaves_the_fused_graph_as_it_is():
    fused = fuse_fx(MODELS["ResidualPlacement"]())
    annotate(fused, "tensorrt")
    assert not any("quantization" in node.meta for node in fused.graph.nodes) and "target" not in fused.meta


def test_unknown_target():
    with pytest.raises(InputError, match="tensorrt-rtx"):
        annotate(fuse_fx(model(lambda self, x: self.a(x), a=conv(4, 4, 1))), "tpu")
