"""Lowered children of a model that itself stays Python: what each takes, and what becomes of any other call."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fx_passes.errors import ArtifactError, InputError
from fx_passes.graph.copies import eval_copy
from lowering.request.arguments import bound_arguments, leaves_of, signature_of
from lowering.segment.segment import Segment

__all__ = ["Accepts", "LoweredChild", "TensorRange", "WithChildren", "own_copy"]


@dataclass(frozen=True)
class TensorRange:
    """A tensor argument: its type, and the smallest and largest sizes that were lowered."""

    dtype: torch.dtype
    min: tuple[int, ...]
    max: tuple[int, ...]


@dataclass(frozen=True)
class Accepts:
    """The calls that a lowered child takes.

    Args:
        signature: of the child's forward, without annotations.
        places: for each place among the arguments ("features[0]"), in order, a `TensorRange`, or the value that the
            argument has: None, a boolean, a number or a string.
    """

    signature: str
    places: tuple[tuple[str, Any], ...]

    def refusal(self, arguments: dict[str, Any]) -> str | None:
        """Why a call with these arguments (by name, defaults filled in) is none of them; None if it is."""
        leaves = leaves_of(arguments)
        if [where for where, _ in leaves] != [where for where, _ in self.places]:
            return "its arguments have another structure than those that it was lowered for"
        shared: dict[tuple[int, int, int], int] = {}
        for (where, leaf), (_, known) in zip(leaves, self.places, strict=True):
            if not isinstance(known, TensorRange):
                if type(leaf) is not type(known) or leaf != known:
                    return f"'{where}' is not {known!r}, which it was lowered for"
            elif not isinstance(leaf, Tensor) or leaf.dtype != known.dtype or leaf.dim() != len(known.min):
                return f"'{where}' is no tensor of {len(known.min)} dimensions and type {known.dtype}"
            elif (reason := _misfit(leaf, known, shared)) is not None:
                return f"'{where}' has {reason}"
        return None


def _misfit(tensor: Tensor, known: TensorRange, shared: dict[tuple[int, int, int], int]) -> str | None:
    """Which size is out of range, or differs from one in `shared`: equal ranges of two arguments are one symbol."""
    seen: Counter[tuple[int, int]] = Counter()
    for d, (size, low, high) in enumerate(zip(tensor.shape, known.min, known.max, strict=True)):
        if not low <= size <= high:
            return f"size {size} in dimension {d}, and it was lowered for {low if low == high else f'{low} to {high}'}"
        if low != high:
            other = shared.setdefault((low, high, seen[low, high]), size)
            if other != size:
                return f"size {size} in dimension {d}, and another argument has {other}"
            seen[low, high] += 1
    return None


def own_copy(model: nn.Module) -> nn.Module:
    """An eval copy over the same memory, with parameter objects of its own: moving it moves nobody else's."""
    root, own = eval_copy(model), dict[int, nn.Parameter]()
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = own.setdefault(id(parameter), nn.Parameter(parameter.detach(), parameter.requires_grad))
                module._parameters[name] = new
    return root


class LoweredChild(nn.Module):
    """A lowered submodule, which takes the place of its original's forward.

    A call outside of what was lowered is run by the original in PyTorch, so that its result is never wrong or cut: with
    a warning the first time, and counted in `outside`. A call with an empty tensor computes nothing and is not counted.

    Args:
        path: qualified name of the submodule in the model.
        accepts: the calls that were lowered.
        glue: runs them: segments and Python.
    """

    def __init__(self, path: str, accepts: Accepts, glue: nn.Module):
        super().__init__()
        self.path, self.accepts, self.glue = path, accepts, glue
        self.outside: Counter[str] = Counter()
        # Whether a call changes something before it may find that it is none of those that were lowered.
        self._writes = any(isinstance(m, Segment) and m.writebacks for m in glue.modules())
        self._original: Callable[..., Any]
        self._signature: inspect.Signature

    def attach(self, model: nn.Module) -> nn.Module:
        """Take the place of the forward of this child of `model`. The child stays what it is for the code around it.

        Returns:
            The child of `model`.

        Raises:
            ArtifactError: `model` has no such submodule, or one with another signature.
        """
        try:
            module = model.get_submodule(self.path)
        except AttributeError as error:
            raise ArtifactError(
                f"{type(model).__name__} has no submodule '{self.path}'", hint="pass the model that was lowered"
            ) from error
        if (found := signature_of(module.forward)) != self.accepts.signature:
            raise ArtifactError(
                f"'{self.path}' has the signature {found}; the lowered one had {self.accepts.signature}",
                hint="pass the model that was lowered",
            )
        self._original, self._signature = module.forward, inspect.signature(module.forward)
        module.__dict__["forward"] = self.forward
        return module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments = bound_arguments(self._signature, args, kwargs)
        if any(isinstance(leaf, Tensor) and leaf.numel() == 0 for _, leaf in leaves_of(arguments)):
            return self._original(*args, **kwargs)
        reason = self.accepts.refusal(arguments)
        if reason is None:
            try:
                return self.glue(*args, **kwargs)
            except InputError as error:
                if not error.other_sizes or self._writes:
                    raise
                reason = error.what
        if not self.outside:
            warnings.warn(
                f"'{self.path}' is run by PyTorch for this call: {reason}. Lower with example inputs, calibration or "
                "dynamic_shapes that cover such calls; summary() counts them",
                stacklevel=2,
            )
        self.outside[reason] += 1
        return self._original(*args, **kwargs)


class WithChildren(nn.Module):
    """A module that calls lowered children: the user's own model, or the glue graph around leaves of it.

    Args:
        module: what is called.
        lowered: the lowered children, in place in `model`.
        model: a copy of the user's model. None: `module` is it.
    """

    model: nn.Module

    def __init__(self, module: nn.Module, lowered: list[LoweredChild], model: nn.Module | None = None):
        super().__init__()
        self.module = module
        self.lowered = nn.ModuleList(lowered)
        # Not a child: the parts of it that are called are children of the glue graph.
        self.__dict__["model"] = module if model is None else model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
