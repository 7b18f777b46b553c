"""From a graph node to its `Op`, whatever way the op is spelled there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from fx_passes.ops.compute import enter_compute
from fx_passes.ops.movement import enter_movement
from fx_passes.ops.op import Op, Role
from fx_passes.ops.spelling import Table

__all__ = ["OPS", "is_inplace", "is_size", "module_of", "op_of", "out_of_place"]

OPS = Table()
enter_compute(OPS)
enter_movement(OPS)

_ATTRIBUTES = {
    **dict.fromkeys(("T", "mT", "H", "mH", "data", "real", "imag"), "attribute_view"),
    **dict.fromkeys(("values", "indices"), "getitem"),  # of the named tuples that max, sort, topk return
    **dict.fromkeys(("shape", "ndim", "dtype", "device", "layout", "itemsize", "nbytes", "requires_grad"), "attribute"),
    **dict.fromkeys(("is_cuda", "is_cpu", "is_quantized", "is_sparse", "is_meta", "is_mps", "is_leaf"), "attribute"),
}
# Functions of packages that the table does not import: module path and name -> op name.
_BY_PATH = {
    "torchvision.ops.stochastic_depth.stochastic_depth": "stochastic_depth",
    "torchvision.ops.stochastic_depth.StochasticDepth": "stochastic_depth",
    "timm.layers.drop.DropPath": "stochastic_depth",
    "timm.layers.drop.drop_path": "stochastic_depth",
    "torchvision.ops.misc.FrozenBatchNorm2d": "batch_norm",
}
# Python's arithmetic, which in a graph may work on sizes as well as on tensors.
_PYTHON_OPERATORS = frozenset(
    f
    for op in OPS.values()
    for f in (*op.functions, *op.inplace)
    if getattr(f, "__module__", None) == "_operator" or f in OPS["shape_arithmetic"].functions
)

_TWINS = {spelled: twin for op in OPS.values() for spelled, twin in op.inplace.items()}
_MODULES: dict[type, Op] = {}
_FUNCTIONS: dict[Any, Op] = {}
_METHODS: dict[str, Op] = {}
_PACKETS: dict[str, Op] = {}
for _op in OPS.values():
    _MODULES.update(dict.fromkeys(_op.modules, _op))
    _FUNCTIONS.update(dict.fromkeys(_op.functions, _op))
    _METHODS.update(dict.fromkeys(_op.methods, _op))
    _PACKETS.update(dict.fromkeys(_op.aten, _op))
    for _spelling in _op.inplace:
        (_METHODS if isinstance(_spelling, str) else _FUNCTIONS)[_spelling] = _op  # type: ignore[index]


def op_of(node: Node, root: nn.Module | None = None) -> Op | None:
    """The op that a node computes, or None where that is not known.

    Args:
        node: a node of an FX graph or of an aten graph.
        root: the module that owns the graph; default `node.graph.owning_module`. Needed for `call_module`.

    Returns:
        None for placeholder, get_attr and output nodes, calls that stay Python (`meta["python"]`), modules with forward
        hooks, subclasses of known modules, and everything that is not in the table.
    """
    if node.op in ("placeholder", "get_attr", "output") or node.meta.get("python"):
        return None
    if node.op == "call_module":
        return _op_of_module(module_of(node, root))
    if node.op == "call_method":
        return _op_of_method(node)
    return _op_of_function(node)


def module_of(node: Node, root: nn.Module | None = None) -> nn.Module | None:
    """The module that a `call_module` node calls, None if there is none at that path."""
    root = root if root is not None else node.graph.owning_module
    module: Any = root
    for name in str(node.target).split(".") if node.target else ():
        module = getattr(module, name, None)
    return module if isinstance(module, nn.Module) else None


def _op_of_module(module: nn.Module | None) -> Op | None:
    if module is None or module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return None
    cls = type(module)
    if cls in _MODULES:
        return _MODULES[cls]
    # torch.nn.utils.parametrize gives the instance a class of its own, with the same forward.
    if len(cls.__bases__) == 1 and cls.__name__.startswith("Parametrized") and "forward" not in vars(cls):
        return _MODULES.get(cls.__bases__[0])
    return _by_path(cls)


def _op_of_method(node: Node) -> Op | None:
    receiver = node.args[0] if node.args else None
    if isinstance(receiver, Node) and receiver.op == "get_attr" and not _may_be_tensor(receiver):
        return None  # a method of the user's object, which may bear any name
    return _METHODS.get(str(node.target))


def _may_be_tensor(node: Node) -> bool:
    value: Any = node.graph.owning_module
    if value is None:
        return True
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value is None or isinstance(value, Tensor)


def _op_of_function(node: Node) -> Op | None:
    target = node.target
    if target is getattr:
        return OPS.get(_ATTRIBUTES.get(str(node.args[1]), ""))
    if isinstance(target, torch._ops.OpOverload):
        op = _of_packet(target._schema.name)
    elif isinstance(target, torch._ops.OpOverloadPacket):
        op = _of_packet(target._qualified_op_name)
    else:
        try:
            op = _FUNCTIONS.get(target)
        except TypeError:  # an unhashable callable
            return None
        op = op or _by_path(target)
    if op is None:
        return None
    if op.name in ("max", "min") and _is_binary(node):
        return OPS[op.name + "imum"]
    if target in _PYTHON_OPERATORS and is_size(node):
        return OPS["shape_arithmetic"]
    return None if op.name == "shape_arithmetic" and not getattr(target, "__module__", "").startswith("torch") else op


def _of_packet(name: str) -> Op | None:
    return _PACKETS.get(name) or _PACKETS.get(name.removesuffix("_"))


def _is_binary(node: Node) -> bool:
    """`torch.max(a, b)` is the elementwise maximum; `torch.max(a, dim)` a reduction."""
    other = node.args[1] if len(node.args) > 1 else node.kwargs.get("other")
    return isinstance(other, Node) and not is_size(other)


def _by_path(target: Any) -> Op | None:
    name = _BY_PATH.get(f"{getattr(target, '__module__', None)}.{getattr(target, '__qualname__', None)}")
    return OPS[name] if name else None


def is_size(node: Node) -> bool:
    """Whether a node's value is no tensor but a size, a dtype, a device, or arithmetic on such values."""
    if node.op == "call_function" and node.target in _PYTHON_OPERATORS:
        inputs = node.all_input_nodes
        return bool(inputs) and all(is_size(i) for i in inputs)
    op = op_of(node)
    return op is not None and op.role is Role.SHAPE


def is_inplace(node: Node, root: nn.Module | None = None) -> bool:
    """Whether a node whose op is known writes to its first tensor argument (or to `out=`)."""
    op = op_of(node, root)
    if op is None or op.role is Role.SHAPE:
        return False
    if node.kwargs.get("out") is not None:
        return True
    if node.op == "call_module":
        return bool(getattr(module_of(node, root), "inplace", False))
    if node.target in op.inplace:
        return True
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _packet_name(node.target).endswith("_") and not _packet_name(node.target).endswith("__")
    return _inplace_flag(node) is True


def _inplace_flag(node: Node) -> Any:
    if "inplace" in node.kwargs:
        return node.kwargs["inplace"]
    from fx_passes.ops.arguments import bind

    return bind(node).get("inplace", False) if len(node.args) > 1 and _has_inplace(node.target) else False


def _has_inplace(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and "inplace" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _packet_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return target._qualified_op_name


def out_of_place(node: Node) -> Callable[..., Any] | str | None:
    """The function, or method name, that computes anew what the in-place spelling `node.target` writes; else None."""
    op = op_of(node)
    if op is None:
        return None
    if node.op != "call_module" and node.target in _TWINS:
        return _TWINS[node.target]  # type: ignore[index]
    if isinstance(node.target, torch._ops.OpOverload):
        namespace, name = node.target._schema.name.split("::")
        packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
        return getattr(packet, node.target._overloadname, None)
    return None
