"""What a call does with memory, as far as the op table tells: gives new memory, a view, writes, or nobody knows."""

from __future__ import annotations

import enum
import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from fx_passes.ops import Role, bind, is_inplace, is_size, module_of, op_of

__all__ = ["Effect", "effect_of", "has_effects", "makes_fresh_elements", "receiver", "returns_container", "view_step"]


class Effect(enum.Enum):
    """What a call does with memory."""

    SIZE = "size"  # the result is no tensor
    FRESH = "fresh"
    VIEW = "view"  # of the receiver, for certain
    MAYBE = "maybe"  # may share memory with any tensor argument, writes to none
    WRITE = "write"  # to the receiver (or to out=), and returns it
    SAME = "same"  # gives back the receiver itself
    RETYPE = "retype"  # changes the receiver's shape, not its memory (`squeeze_`)
    OPAQUE = "opaque"  # may write to, keep or return any argument


def receiver(node: Node) -> Node | None:
    """The tensor that a view or an in-place op works on: its first argument, however it is passed."""
    first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    return first if isinstance(first, Node) else None


def effect_of(node: Node, root: nn.Module) -> Effect:
    """What the call of `node` does with memory; what is not understood is OPAQUE."""
    op = op_of(node, root)
    if op is None:
        return _effect_outside_table(node, root)
    if op.role is Role.SHAPE:
        return Effect.SIZE
    if is_inplace(node, root):
        first = receiver(node)
        if first is not None and returns_container(first):
            return Effect.OPAQUE  # `pieces += (...)` on a tuple
        return Effect.RETYPE if op.result == "view" and node.kwargs.get("out") is None else Effect.WRITE
    if op.name in ("identity", "positive"):
        return Effect.SAME
    if op.name == "getitem":
        return _effect_of_index(node)
    if op.result == "fresh":
        return Effect.FRESH
    return Effect.VIEW if op.result == "view" and receiver(node) is not None else Effect.MAYBE


def _effect_of_index(node: Node) -> Effect:
    index = node.args[1]
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(p, (list, Tensor)) for p in parts):
        return Effect.FRESH
    return Effect.VIEW if all(_is_position(p) for p in parts) else Effect.MAYBE


def _is_position(part: Any) -> bool:
    """Whether it is of basic indexing. (`True` is not; an index tensor of no dimensions may still give a view.)"""
    if isinstance(part, Node):
        return is_size(part)
    return part is None or part is Ellipsis or isinstance(part, (slice, str)) or type(part) is int


def _effect_outside_table(node: Node, root: nn.Module) -> Effect:
    if node.meta.get("python"):
        return Effect.OPAQUE
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target._schema.is_mutable:
            return Effect.OPAQUE
        results = target._schema.returns
        single = len(results) == 1 and str(results[0].type) == "Tensor"
        return Effect.FRESH if single and results[0].alias_info is None else Effect.MAYBE
    if node.op == "call_module":
        module = module_of(node, root)
        known = module is not None and type(module).__module__.startswith(("torch.nn.modules", "torch.export"))
        hooked = module is not None and (module._forward_hooks or module._forward_pre_hooks)
        return Effect.MAYBE if known and not hooked and not getattr(module, "inplace", False) else Effect.OPAQUE
    if node.op == "call_method":
        if not hasattr(Tensor, target) or target.startswith("_") or not _on_tensor(node):
            return Effect.OPAQUE
        return Effect.WRITE if target.endswith("_") else Effect.MAYBE
    module_name = getattr(target, "__module__", None) or ""
    pure = module_name.split(".")[0] in ("torch", "math", "builtins", "_operator")
    writes = getattr(target, "__name__", "_").endswith("_") or "out" in node.kwargs or node.kwargs.get("inplace")
    return Effect.MAYBE if pure and not writes and target is not setattr else Effect.OPAQUE


def _on_tensor(node: Node) -> bool:
    first = receiver(node)
    if first is None or first.op != "get_attr":
        return True
    value: Any = first.graph.owning_module
    for name in str(first.target).split("."):
        value = getattr(value, name, None)
    return isinstance(value, Tensor)


_PIECES = frozenset({"chunk", "split", "unbind", "broadcast_tensors", "meshgrid"})
_PAIRS = frozenset({"topk", "sort", "kthvalue", "cummax", "cummin", "aminmax", "std_mean", "var_mean"})
_PAIRS_WITH_DIM = frozenset({"max", "min", "median"})


def returns_container(node: Node) -> bool:
    """Whether the call gives a tuple or list of tensors, so that getitem takes an element of it."""
    op = op_of(node)
    if op is None:
        return False
    if op.role is Role.POOL_MAX:
        flag = getattr(module_of(node), "return_indices", None) if node.op == "call_module" else None
        named = "with_indices" in str(getattr(node.target, "__name__", node.target))
        return bool(flag) or named or bool(bind(node).get("return_indices", False))
    if op.name in _PAIRS_WITH_DIM:
        return len(node.args) > 1 or "dim" in node.kwargs
    return op.name in _PIECES or op.name in _PAIRS


def makes_fresh_elements(node: Node) -> bool:
    """Whether it is a container of tensors with memory of their own."""
    op = op_of(node)
    return returns_container(node) and op is not None and op.name not in _PIECES


def view_step(node: Node) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    """A view node as data for `fx_passes.ops.write_view`; ("", (), {}) if it changes nothing; None if unknown."""
    op = op_of(node)
    if op is None:
        return None
    args, kwargs = tuple(node.args[1:]), {k: v for k, v in node.kwargs.items() if k not in ("input", "self")}
    if op.name in ("detach", "requires_grad_"):
        return "", (), {}
    if node.op == "call_module":
        module: Any = module_of(node)
        return ("unflatten", (module.dim, tuple(module.unflattened_size)), {}) if op.name == "unflatten" else None
    if node.op == "call_method":
        return str(node.target).removesuffix("_"), args, kwargs
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.name(), args, kwargs
    if node.target is operator.getitem:
        return "getitem", args, {}
    if node.target is getattr:
        return str(args[0]), (), {}
    name = getattr(node.target, "__name__", "")
    return (name, args, kwargs) if hasattr(Tensor, name) else None


def has_effects(node: Node, root: nn.Module) -> bool:
    """Whether a call does more than give a result: it writes, draws random numbers, updates statistics, or may."""
    effect = effect_of(node, root)
    if effect in (Effect.OPAQUE, Effect.WRITE, Effect.RETYPE):
        return True
    op = op_of(node, root)
    if op is None:
        return not isinstance(node.target, torch._ops.OpOverload) or node.is_impure()
    if not op.effects:
        return False
    if node.op == "call_module":
        module = module_of(node, root)
        return module is None or module.training
    bound = bind(node)
    if op.name == "scaled_dot_product_attention":
        return bool(bound.get("dropout_p", 0.0))
    if op.name == "batch_norm" and "running_mean" in bound and bound["running_mean"] is bound["running_var"] is None:
        return False  # statistics of the batch, kept nowhere
    return bound.get("training", bound.get("train", bound.get("use_input_stats", True))) is not False
