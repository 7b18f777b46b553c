"""A node's arguments by name: one op has several argument orders (`F.batch_norm`, `torch.batch_norm`, a module)."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

__all__ = ["bind"]


def bind(node: Node) -> dict[str, Any]:
    """Arguments of a call_function or call_method node by parameter name, defaults filled in.

    Returns:
        Names as the spelling itself has them ("input" in `torch.nn.functional`, "self" in aten). Empty where the
        signature is unknown or the arguments do not fit it.
    """
    for signature in _signatures(node.target if node.op == "call_function" else str(node.target)):
        try:
            bound = signature.bind(*node.args, **node.kwargs)
        except TypeError:
            continue
        bound.apply_defaults()
        return dict(bound.arguments)
    return {}


@lru_cache(maxsize=1024)
def _signatures(target: Any) -> tuple[inspect.Signature, ...]:
    if isinstance(target, str):
        target = getattr(torch.ops.aten, target, None)
        if target is None:
            return ()
    if isinstance(target, torch._ops.OpOverload):
        return (_of_schema(target._schema),)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return tuple(_of_schema(getattr(target, name)._schema) for name in target.overloads())
    try:
        return (inspect.signature(target),)
    except (TypeError, ValueError):  # a builtin
        from torch.fx.operator_schemas import get_signature_for_torch_op

        return tuple(get_signature_for_torch_op(target) or ())


def _of_schema(schema: torch._C.FunctionSchema) -> inspect.Signature:
    parameters = []
    for argument in schema.arguments:
        kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        parameters.append(inspect.Parameter(argument.name, kind, default=default))
    return inspect.Signature(parameters)
