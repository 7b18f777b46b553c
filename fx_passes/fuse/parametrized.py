"""Layers whose weight is computed from other parameters (weight norm, spectral norm) as plain layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fx_passes.graph.module import set_submodule
from fx_passes.ops import OPS, Role, module_of

__all__ = ["is_parametrized", "plain_module", "resolve_parametrizations", "resolved_root"]

_CLASSES = frozenset(cls for op in OPS.values() if op.role is Role.WEIGHTED for cls in op.modules)


def resolve_parametrizations(gm: GraphModule, report: list[tuple[str, str]]) -> None:
    """Put plain layers, with the weights as they are now, in place of torch's own weight-normalised ones.

    Edits `gm`, in eval mode. A layer stays if its parametrization is not torch's (it may do anything) or if the graph
    reads the parameters behind it.
    """
    plain: dict[int, nn.Module] = {}
    for node in gm.graph.nodes:
        module = module_of(node, gm) if node.op == "call_module" else None
        if module is None or not is_parametrized(module) or node.meta.get("python"):
            continue
        reason = _why_not(gm, str(node.target), module)
        if reason is not None:
            report.append((node.name, f"its weight stays computed: {reason}"))
            continue
        if id(module) not in plain:
            plain[id(module)] = plain_module(module)
            report.append((node.name, "its weight, which was computed from other parameters, was made a parameter"))
        set_submodule(gm, str(node.target), plain[id(module)])


def resolved_root(model: nn.Module) -> nn.Module:
    """The same for a model that is one such layer: as a root it is no call, so its weight is made plain beforehand."""
    return plain_module(model) if is_parametrized(model) and _why_foreign(model) is None else model


def is_parametrized(module: nn.Module) -> bool:
    """Whether a convolution or linear layer computes its weight, by a parametrization or by a hook of torch's."""
    if hasattr(module, "parametrizations") and type(module).__bases__[0] in _CLASSES:
        return True
    return type(module) in _CLASSES and any(_is_norm_hook(h) for h in module._forward_pre_hooks.values())


def _is_norm_hook(hook: Any) -> bool:
    return isinstance(hook, (WeightNorm, SpectralNorm))


def _why_not(gm: GraphModule, path: str, module: nn.Module) -> str | None:
    if module._forward_hooks or not all(_is_norm_hook(h) for h in module._forward_pre_hooks.values()):
        return "it has hooks"
    if (foreign := _why_foreign(module)) is not None:
        return foreign
    reader = next((n for n in gm.graph.nodes if n.op == "get_attr" and str(n.target).startswith(path + ".")), None)
    return f"its parameters are read by '{reader.name}'" if reader is not None else None


def _why_foreign(module: nn.Module) -> str | None:
    for parametrization in _parametrizations(module):
        if not type(parametrization).__module__.startswith("torch.nn.utils."):
            return f"{type(parametrization).__name__} is not a parametrization of torch"
    return None


def _parametrizations(module: nn.Module) -> list[nn.Module]:
    table: Any = getattr(module, "parametrizations", {})
    return [p for chain in table.values() for p in chain]


def plain_module(module: nn.Module) -> nn.Module:
    """A module of the plain class with the same settings and hooks, and with `weight` and `bias` as plain parameters.

    Its own tables, but the same tensors where they were parameters already.
    """
    cls = type(module) if type(module) in _CLASSES else type(module).__bases__[0]
    new: Any = object.__new__(cls)
    new.__dict__.update(module.__dict__)
    for key, value in nn.Module().__dict__.items():
        if isinstance(value, (dict, set)):
            new.__dict__[key] = type(value)(module.__dict__[key])
    new._modules.pop("parametrizations", None)
    for key, hook in list(new._forward_pre_hooks.items()):
        if _is_norm_hook(hook):
            _drop_norm_hook(new, key, hook)
    for name in ("weight", "bias"):
        if name not in new._parameters or name in getattr(module, "parametrizations", {}):
            new._parameters[name] = _as_parameter(getattr(module, name))
    return new


def _as_parameter(value: torch.Tensor | None) -> nn.Parameter | None:
    if value is None:
        return None
    return nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)


def _drop_norm_hook(new: Any, key: int, hook: Any) -> None:
    """Compute the weight as the hook would before a call in eval mode, and forget the hook and its parameters."""
    name = hook.name
    with torch.no_grad():
        if isinstance(hook, WeightNorm):
            weight, trained = hook.compute_weight(new), new._parameters[f"{name}_v"].requires_grad
        else:
            weight = hook.compute_weight(new, do_power_iteration=False)
            trained = new._parameters[f"{name}_orig"].requires_grad
    own = [f"{name}_{suffix}" for suffix in ("g", "v", "u", "orig")]
    for table in (new._parameters, new._buffers, new.__dict__):
        for entry in (*own, name):
            table.pop(entry, None)
    new._non_persistent_buffers_set.difference_update(own)
    new._parameters[name] = nn.Parameter(weight.detach().clone(), requires_grad=trained)
    del new._forward_pre_hooks[key]
    new._forward_pre_hooks_with_kwargs.pop(key, None)
