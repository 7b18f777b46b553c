"""What is asked of one aten node on its way into a network: its name, its arguments, what no converter could do."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from lowering.trt.bindings import has_dtype

if TYPE_CHECKING:
    from lowering.trt.define.definition import Program

__all__ = ["MAX_RANK", "filled", "foreign", "general_reason", "is_run_time", "label_of", "op_name"]

MAX_RANK = 8


def label_of(program: Program, node: Node) -> str:
    """The module that a node stands for, such as "layer1.0.conv2"; near enough where the node has no module of its own.

    A weighted op is called as the owner of its weight; anything else as its FX node, whose name begins with the path
    of the module if it was a call of that module.
    """
    for argument in node.all_input_nodes:
        origin = argument.all_input_nodes[0] if _is_dequantize(argument) else argument
        fqn = program.constant_name(origin)
        if fqn is not None and fqn.endswith("weight") and "." in fqn:
            return fqn.rpartition(".")[0]
    name = str(node.meta.get("fx_node") or node.name)
    path = str(node.meta.get("module_path") or "")
    prefix = path.replace(".", "_") + "_"
    if path and name.startswith(prefix):
        return f"{path}.{name.removeprefix(prefix)}"
    return f"{path}/{name}" if path else name


def _is_dequantize(node: Node) -> bool:
    return str(node.target).startswith("quantized_decomposed.dequantize") and bool(node.all_input_nodes)


def is_run_time(value: Any) -> bool:
    return not isinstance(
        value,
        torch.Tensor
        | bool
        | int
        | float
        | str
        | None
        | torch.dtype
        | torch.device
        | torch.layout
        | torch.memory_format,
    )


def filled(node: Node, value_of: Callable[[Node], Any]) -> Any:
    """The node's arguments with values in place of nodes."""
    return torch.fx.node.map_arg((node.args, node.kwargs), value_of)


def op_name(node: Node) -> str:
    return str(node.target) if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "__name__", "?")


def general_reason(node: Node) -> str | None:
    """Limits of TensorRT that hold for every op: its dtypes and ranks, complex numbers and sparse tensors."""
    used = [node.meta.get("val")]
    if isinstance(used[0], tuple | list):
        indices = {user.args[1] for user in node.users if user.target is operator.getitem}
        used = [v for i, v in enumerate(used[0]) if i in indices]
    for fake in [*used, *(n.meta.get("val") for n in node.all_input_nodes)]:
        if not isinstance(fake, torch.Tensor):
            continue
        if not has_dtype(fake.dtype) and not (fake.dim() == 0 and fake.dtype == torch.float64):
            return f"TensorRT has no {str(fake.dtype).removeprefix('torch.')} tensors"
        if fake.dim() > MAX_RANK:
            return f"{fake.dim()} dimensions, TensorRT takes at most {MAX_RANK}"
        if fake.layout != torch.strided:
            return f"layout {fake.layout}"
    return None


def foreign(value: Any) -> str | None:
    """What TensorRT has no tensor for: a float64 one, or one of too many dimensions; None for anything else."""
    if not isinstance(value, torch.Tensor):
        return None
    if not has_dtype(value.dtype):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor, which TensorRT does not have"
    return f"a tensor of {value.dim()} dimensions, TensorRT takes {MAX_RANK}" if value.dim() > MAX_RANK else None
