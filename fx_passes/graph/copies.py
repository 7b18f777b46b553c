"""Copies of modules that share their tensors, and of inputs that share none."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fx_passes.graph.functions import rebind_functions

__all__ = ["copied_inputs", "eval_copy", "shared_copy"]


def shared_copy(model: nn.Module) -> Any:
    """A deep copy of a module that shares parameters and buffers with it, but for those made in inference mode.

    Functions that it holds and that know the module, or a part of it, know the copy's.
    """
    root = model.__dict__.get("_self")
    modules = [model, root] if isinstance(root, nn.Module) else [model]
    shared: dict[int, Any] = {id(t): _ordinary(t) for m in modules for t in (*m.parameters(), *m.buffers())}
    for module in (child for m in modules for child in m.modules()):
        # Results of autograd that a module keeps (the weight of the older weight_norm) cannot be copied.
        shared.update({id(t): t for t in vars(module).values() if isinstance(t, Tensor) and t.grad_fn is not None})
    new = copy.deepcopy(model, shared)
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
