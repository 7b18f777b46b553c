"""The op table: one op, whatever the spelling."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes.ops import OPS, Role, bind, is_inplace, is_size, op_of, out_of_place

aten = torch.ops.aten


def node_of(kind, target, *args, root=None, **kwargs):
    """One node over placeholders x, y."""
    graph = torch.fx.Graph()
    tensors = {name: graph.placeholder(name) for name in ("x", "y")}
    args = tuple(tensors.get(a, a) if isinstance(a, str) else a for a in args)
    node = graph.create_node(kind, target, args, kwargs)
    graph.output(node)
    graph.owning_module = root or nn.Module()  # no GraphModule: its code is never generated
    return node


SPELLINGS = [
    ("relu", "call_function", torch.relu, ("x",)),
    ("relu", "call_function", F.relu, ("x",)),
    ("relu", "call_function", torch.relu_, ("x",)),
    ("relu", "call_method", "relu_", ("x",)),
    ("relu", "call_function", aten.relu.default, ("x",)),
    ("relu", "call_function", aten.relu_.default, ("x",)),
    ("relu", "call_function", aten.relu, ("x",)),
    ("add", "call_function", operator.add, ("x", "y")),
    ("add", "call_function", operator.iadd, ("x", "y")),
    ("add", "call_function", aten.add_.Tensor, ("x", "y")),
    ("add", "call_method", "add_", ("x", 1)),
    ("sub", "call_function", operator.isub, ("x", "y")),
    ("div", "call_function", operator.truediv, ("x", 2)),
    ("matmul", "call_function", operator.matmul, ("x", "y")),
    ("conv2d", "call_function", F.conv2d, ("x", "y")),
    ("conv2d", "call_function", aten.conv2d.default, ("x", "y")),
    ("conv_transpose2d", "call_function", aten.conv_transpose2d.input, ("x", "y")),
    ("convolution", "call_function", aten.convolution.default, ("x", "y")),
    ("linear", "call_function", F.linear, ("x", "y")),
    ("max_pool2d", "call_function", F.max_pool2d, ("x", 2)),
    ("max_pool2d", "call_function", aten.max_pool2d_with_indices.default, ("x", [2])),
    ("adaptive_avg_pool2d", "call_function", F.adaptive_avg_pool2d, ("x", 1)),
    ("adaptive_avg_pool2d", "call_function", aten._adaptive_avg_pool2d.default, ("x", [1, 1])),
    ("batch_norm", "call_function", aten._native_batch_norm_legit_no_training.default, ("x",)),
    ("flatten", "call_method", "flatten", ("x", 1)),
    ("view", "call_method", "view", ("x", -1)),
    ("unfold_view", "call_method", "unfold", ("x", 1, 2, 2)),
    ("unfold", "call_function", F.unfold, ("x", 3)),
    ("cat", "call_function", torch.concat, (["x", "y"],)),
    ("max", "call_function", torch.max, ("x", 1)),
    ("max", "call_method", "max", ("x",)),
    ("maximum", "call_function", torch.max, ("x", "y")),
    ("maximum", "call_method", "maximum", ("x", "y")),
    ("minimum", "call_function", aten.min.other, ("x", "y")),
    ("attribute", "call_function", getattr, ("x", "shape")),
    ("getitem", "call_function", getattr, ("x", "values")),
    ("attribute_view", "call_function", getattr, ("x", "T")),
    ("size", "call_function", aten.sym_size.int, ("x", 0)),
    ("interpolate", "call_function", aten.upsample_bilinear2d.vec, ("x",)),
    ("pad", "call_function", aten.constant_pad_nd.default, ("x", [1, 1])),
    ("to", "call_function", aten._to_copy.default, ("x",)),
    ("softmax", "call_function", aten._softmax.default, ("x", 1, False)),
]


def _word(target):
    """A name for a test id: the same in every process."""
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


@pytest.mark.parametrize("name, kind, target, args", SPELLINGS, ids=[f"{c[0]}-{c[1]}-{_word(c[2])}" for c in SPELLINGS])
def test_spelling(name, kind, target, args):
    assert op_of(node_of(kind, target, *args)).name == name


def test_every_word_of_the_table_is_found_again_as_its_own_op():
    for op in OPS.values():
        functions = [f for f in op.functions if op.name != "shape_arithmetic"]
        for kind, target in [("call_function", f) for f in functions] + [("call_method", m) for m in op.methods]:
            assert op_of(node_of(kind, target, "x")) is op, (op.name, target)


@pytest.mark.parametrize("op", [o for o in OPS.values() if o.modules], ids=lambda o: o.name)
def test_modules_are_matched_by_exact_type(op):
    for cls in op.modules:
        root = nn.Module()
        root.m = cls.__new__(cls)
        nn.Module.__init__(root.m)
        assert op_of(node_of("call_module", "m", "x", root=root)) is op
        sub = type("Sub", (cls,), {})
        root.m.__class__ = sub
        assert op_of(node_of("call_module", "m", "x", root=root)) is None


def test_subclass_hook_python_call_and_user_method_are_unknown():
    root = nn.Module()
    root.m, root.act = nn.ReLU(), nn.ReLU()
    root.m.register_forward_hook(lambda *a: None)
    assert op_of(node_of("call_module", "m", "x", root=root)) is None
    node = node_of("call_module", "act", "x", root=root)
    assert op_of(node) is OPS["relu"]
    node.meta["python"] = "wrapped"
    assert op_of(node) is None

    graph = torch.fx.Graph()
    node = graph.call_method("view", (graph.get_attr("act"), graph.placeholder("x")))
    graph.output(node)
    torch.fx.GraphModule(root, graph)
    assert op_of(node) is None


def test_parametrized_module_keeps_its_op():
    root = nn.Module()
    root.c = torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 1, 1))
    assert op_of(node_of("call_module", "c", "x", root=root)) is OPS["conv2d"]


def test_sizes_and_arithmetic_on_them():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    n = graph.call_function(operator.getitem, (graph.call_method("size", (x,)), 0))
    twice = graph.call_function(operator.iadd, (graph.call_function(operator.mul, (n, 2)), 1))
    scaled = graph.call_function(operator.mul, (x, twice))
    graph.output(scaled)
    assert op_of(n).role is op_of(twice).role is Role.SHAPE
    assert is_size(twice) and not is_size(scaled)
    assert op_of(scaled) is OPS["mul"]
    assert not is_inplace(twice)


INPLACE = [
    ("call_function", torch.relu_, ("x",), {}, True),
    ("call_function", F.relu, ("x",), {"inplace": True}, True),
    ("call_function", F.relu, ("x", True), {}, True),
    ("call_function", F.relu, ("x", False), {}, False),
    ("call_function", F.leaky_relu, ("x", 0.1, True), {}, True),
    ("call_function", F.relu, ("x",), {}, False),
    ("call_function", torch.add, ("x", 1), {"out": "y"}, True),
    ("call_function", aten.add_.Tensor, ("x", "y"), {}, True),
    ("call_function", aten.__and__.Tensor, ("x", "y"), {}, False),
    ("call_function", operator.setitem, ("x", 0, 1), {}, True),
    ("call_method", "add_", ("x", 1), {}, True),
    ("call_method", "add", ("x", 1), {}, False),
    ("call_method", "requires_grad_", ("x",), {}, False),
]


@pytest.mark.parametrize("kind, target, args, kwargs, expected", INPLACE, ids=lambda v: str(getattr(v, "__name__", v)))
def test_is_inplace(kind, target, args, kwargs, expected):
    assert is_inplace(node_of(kind, target, *args, **kwargs)) is expected


@pytest.mark.parametrize("op", [o for o in OPS.values() if o.inplace], ids=lambda o: o.name)
def test_out_of_place_twin_is_a_spelling_of_the_same_op(op):
    for spelled, twin in op.inplace.items():
        node = node_of("call_method" if isinstance(spelled, str) else "call_function", spelled, "x")
        assert out_of_place(node) is twin
        assert not is_inplace(node_of("call_method" if isinstance(twin, str) else "call_function", twin, "x"))


def test_out_of_place_of_an_aten_overload():
    assert out_of_place(node_of("call_function", aten.add_.Tensor, "x", "y")) is aten.add.Tensor


@pytest.mark.parametrize(
    "target, args",
    [
        (F.batch_norm, ("x", "y", "y", None, None, False, 0.1, 1e-3)),
        (torch.batch_norm, ("x", None, None, "y", "y", False, 0.1, 1e-3, True)),
        (aten.batch_norm.default, ("x", None, None, "y", "y", False, 0.1, 1e-3, True)),
    ],
    ids=["functional", "torch", "aten"],
)
def test_bind_names_arguments_across_orders(target, args):
    bound = bind(node_of("call_function", target, *args))
    assert (bound["running_mean"].name, bound["weight"], bound["eps"], bound["training"]) == ("y", None, 1e-3, False)


@pytest.mark.parametrize(
    "name, operands, output, expected",
    [
        ("conv2d", ((1, 3, 8, 8), (4, 3, 3, 3)), (1, 4, 6, 6), 2 * 4 * 36 * 27),
        ("conv_transpose2d", ((1, 4, 5, 5), (4, 3, 2, 2)), (1, 6, 10, 10), 2 * 100 * 12),
        ("linear", ((7, 5), (3, 5)), (7, 3), 2 * 7 * 3 * 5),
        ("matmul", ((2, 4, 5), (2, 5, 6)), (2, 4, 6), 2 * 2 * 4 * 6 * 5),
    ],
)
def test_flops(name, operands, output, expected):
    assert OPS[name].flops(operands, output) == expected
