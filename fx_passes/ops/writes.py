"""Out-of-place forms of writes that torch has only in place. `functionalize` puts calls of them into graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["setitem", "write_view"]


def setitem(tensor: Tensor, index: Any, value: Any) -> Tensor:
    """What `tensor` would be after `tensor[index] = value`: a new tensor of the same shape and dtype.

    Example:
        >>> setitem(torch.zeros(3), 0, 5.0)
        tensor([5., 0., 0.])
    """
    result = tensor.clone()
    result[index] = value
    return result


def write_view(base: Tensor, value: Tensor, *steps: tuple[str, tuple[Any, ...], dict[str, Any]]) -> Tensor:
    """What `base` would be after writing `value` into a view of it: a new tensor of the same shape and dtype.

    Args:
        base: any shape.
        value: the view's new content, of the view's shape.
        steps: the views that lead from `base` to the written one, outermost first, each (name, arguments, keyword
            arguments): a tensor method, "getitem", an attribute ("T", with no arguments) or an aten overload by its
            qualified name.

    Example:
        >>> write_view(torch.zeros(2, 2), torch.ones(2), ("t", (), {}), ("getitem", (0,), {}))
        tensor([[1., 0.],
                [1., 0.]])
    """
    result = base.clone()
    view: Any = result
    for name, args, kwargs in steps:
        if name == "getitem":
            view = view[args[0]]
        elif "::" in name:
            namespace, packet = name.split("::")
            view = getattr(getattr(torch.ops, namespace), packet.split(".")[0])(view, *args, **kwargs)
        else:
            attribute = getattr(view, name)
            view = attribute if isinstance(attribute, Tensor) else attribute(*args, **kwargs)
    view.copy_(value)
    return result
