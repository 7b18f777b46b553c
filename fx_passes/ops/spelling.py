"""How table entries are written: a word stands for every place where torch spells the op with that word."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_passes.ops.op import Op, Role

__all__ = ["Table"]


class Table(dict[str, Op]):
    """Canonical name -> `Op`, filled by `add`."""

    def add(
        self,
        name: str,
        role: Role,
        words: str | None = None,
        *,
        modules: Iterable[type] = (),
        functions: Iterable[Callable[..., Any]] = (),
        operators: str = "",
        methods: str = "",
        aten: str = "",
        inplace: bool = True,
        twins: Mapping[Callable[..., Any] | str, Callable[..., Any] | str] | None = None,
        **properties: Any,
    ) -> None:
        """Enter one op.

        Args:
            name: canonical name.
            role: quantization role.
            words: space-separated spellings looked up in `torch`, `torch.nn.functional`, as a tensor method and as an
                aten packet (default: `name`). With `inplace`, the same words with a trailing underscore are their
                in-place spellings.
            modules, functions: exact classes and callables besides.
            operators: names in Python's `operator` module; a name of an augmented assignment ("iadd") maps to the
                first name.
            methods, aten: spellings that exist only there (a packet may carry its namespace:
                "quantized_decomposed::x").
            inplace: whether trailing-underscore spellings are looked up.
            twins: in-place spellings whose out-of-place function has another name.
            properties: further fields of `Op`.
        """
        found_functions: dict[Callable[..., Any], None] = dict.fromkeys(functions)
        found_methods: dict[str, None] = dict.fromkeys(methods.split())
        packets = [a if "::" in a else f"aten::{a}" for a in aten.split()]
        found_inplace: dict[Callable[..., Any] | str, Callable[..., Any] | str] = dict(twins or {})
        for word in (name if words is None else words).split():
            packets.append(f"aten::{word}")
            for namespace in (torch, F):
                function = getattr(namespace, word, None)
                if function is not None:
                    found_functions[function] = None
                twin = getattr(namespace, word + "_", None) if inplace else None
                if twin is not None:
                    found_inplace[twin] = function or getattr(F, word)
            if hasattr(Tensor, word):
                found_methods[word] = None
                if inplace and hasattr(Tensor, word + "_"):
                    found_inplace[word + "_"] = word
        plain, *augmented = operators.split() or [""]
        if plain:
            found_functions[getattr(operator, plain)] = None
        for spelled in augmented:
            found_inplace[getattr(operator, spelled)] = getattr(operator, plain)
        if name in self:
            raise ValueError(f"op '{name}' is entered twice")
        self[name] = Op(
            name,
            role,
            modules=tuple(modules),
            functions=tuple(found_functions),
            methods=tuple(found_methods),
            aten=tuple(dict.fromkeys(packets)),
            inplace=found_inplace,
            **properties,
        )
