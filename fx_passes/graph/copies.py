"""Copies of modules that share their tensors, and of inputs that share none."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fx_passes.graph.functions import rebind_functions

__all__ = ["CopiedResults", "copied_inputs", "deep_copy", "eval_copy", "shared_copy"]

T = TypeVar("T")


class CopiedResults(TorchFunctionMode):
    """While it is on, `copy.deepcopy` copies tensors that autograd has computed as well, as values without a history.

    A model may keep such tensors from a call: features in a list, the weight of the older weight_norm. One that was
    made in inference mode becomes an ordinary one.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__ or (args[0].is_leaf and not args[0].is_inference()):
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone()
        return memo[id(tensor)]


def deep_copy(value: T, memo: dict[int, Any] | None = None) -> T:
    """`copy.deepcopy`, for models that have been called with gradients, too."""
    with CopiedResults():
        return copy.deepcopy(value, memo)


def shared_copy(model: nn.Module) -> Any:
    """A deep copy of a module that shares parameters and buffers with it, but for those made in inference mode.

    Functions that it holds and that know the module, or a part of it, know the copy's.
    """
    root = model.__dict__.get("_self")
    modules = [model, root] if isinstance(root, nn.Module) else [model]
    shared: dict[int, Any] = {id(t): _ordinary(t) for m in modules for t in (*m.parameters(), *m.buffers())}
    new: Any = deep_copy(model, shared)
    for ours, theirs in zip(new.modules(), model.modules(), strict=True):
        # nn.TransformerDecoderLayer.__setstate__ puts F.relu before an activation that is a module.
        if isinstance(ours, nn.TransformerDecoderLayer) and "activation" not in vars(theirs):
            vars(ours).pop("activation", None)
    rebind_functions(new, model)
    if isinstance(root, nn.Module):
        rebind_functions(new.__dict__["_self"], root)
    return new


def eval_copy(model: nn.Module) -> Any:
    """A copy of a module, in eval mode, that shares parameters and buffers with it."""
    return shared_copy(model).eval()


def _ordinary(tensor: Tensor) -> Tensor:
    """The tensor itself; one made in inference mode, which nothing may be computed or saved from elsewhere, copied."""
    if not tensor.is_inference():
        return tensor
    value = tensor.detach().clone()
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def copied_inputs(inputs: Any) -> Any:
    """The same structure with tensors of its own memory, for a run of a model that may write to what it is given.

    A tensor that is there twice is copied once. They need no gradients: only inference is run on them.
    """
    copies: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone()
        return copies[id(tensor)]

    return pytree.tree_map_only(Tensor, copied, inputs)
