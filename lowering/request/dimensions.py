"""`dynamic_shapes` as users give them, in the forms of `torch.export`: what varies, how far, and what is one size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fx_passes.errors import InputError
from fx_passes.graph.resized import brought_to

__all__ = ["Dimension", "DynamicShapes", "settings_apart"]

_LARGEST = 2**24


@dataclass(frozen=True)
class Dimension:
    """A size that varies: a `torch.export.Dim`, or one dimension for which `Dim.AUTO` or `Dim.DYNAMIC` is given.

    Attributes:
        name: the Dim's, or one made of the input and the dimension.
        min, usual, max: the range, and the size in the example.
    """

    name: str
    min: int
    usual: int
    max: int


class DynamicShapes:
    """Dynamic dimensions of the arguments of one call.

    Args:
        given: as `torch.export` takes them: by name of the argument, or in order; for a tensor a dict or a sequence of
            `Dim(name, min=, max=)`, of ``2 * dim``, of `Dim.AUTO(min=, max=)` or `Dim.DYNAMIC(min=, max=)`; None, an
            int or `Dim.STATIC` where a dimension does not vary; the structure of the argument around them.
        arguments: by name, those of the example.

    Attributes:
        dimensions: by name. Dimensions of one name have one size, those of two names are independent.

    Raises:
        InputError: names the argument, the dimension and what is wrong with it.
    """

    def __init__(self, given: Any, arguments: dict[str, Any]):
        if not isinstance(given, (dict, tuple, list)):
            raise InputError(
                f"dynamic_shapes is a {type(given).__name__}",
                hint='pass a dict by name, for example {"x": {2: torch.export.Dim("height", min=64, max=512)}}',
            )
        if not isinstance(given, dict):
            if len(given) > len(arguments):
                raise InputError(f"dynamic_shapes has {len(given)} entries, and the call {len(arguments)} arguments")
            given = dict(zip(arguments, given, strict=False))
        if unknown := [name for name in given if name not in arguments]:
            raise InputError(
                f"dynamic_shapes names {', '.join(map(repr, unknown))}", hint=f"the inputs are {', '.join(arguments)}"
            )
        self.given, self.arguments = given, arguments
        self.dimensions: dict[str, Dimension] = {}
        for name, dims in given.items():
            for where, tensor, d, dim in _places(name, arguments[name], dims):
                self._add(where, tensor.shape[d], dim)

    def at(self, sizes: dict[str, int]) -> dict[str, Any]:
        """The arguments with these sizes of the dimensions: tensors are repeated or cut."""

        def resized(name: str, value: Any, dims: Any) -> Any:
            if dims is None:
                return value
            if isinstance(value, Tensor):
                shape = list(value.shape)
                for where, _, d, dim in _places(name, value, dims):
                    root, follows = _root(where, dim)
                    shape[d] = follows(sizes[root])
                return brought_to(value, shape)
            return _mapped(name, value, dims, resized)

        return {
            name: resized(name, value, self.given[name]) if name in self.given else value
            for name, value in self.arguments.items()
        }

    def _add(self, where: str, size: int, dim: Any) -> None:
        name, follows = _root(where, dim)
        source = getattr(dim, "root", dim)
        least, most = _bound(where, source, "min"), _bound(where, source, "max")
        usual, rest = divmod(size - follows(0), follows(1) - follows(0))
        if rest or not least <= usual <= most:
            raise InputError(
                f"{where} is {size} in the example, and its range is {follows(least)} to {follows(most)}",
                hint="give a range that the example is in",
            )
        found = Dimension(name, least, usual, most)
        known = self.dimensions.setdefault(name, found)
        if (known.min, known.max) != (found.min, found.max):
            raise InputError(
                f"the dimension '{name}' is given as {known.min} to {known.max} and, at {where}, as {least} to {most}",
                hint="use one Dim for sizes that are equal, and other names for others",
            )
        if known.usual != found.usual:
            raise InputError(
                f"the dimension '{name}' is {known.usual} in the example and, at {where}, {usual}",
                hint="give dimensions that may differ Dims of different names",
            )


def _places(name: str, value: Any, dims: Any) -> Iterator[tuple[str, Tensor, int, Any]]:
    """("x.shape[2]", the tensor, 2, what is given for it) for each dimension that varies."""
    if dims is None:
        return
    if not isinstance(value, Tensor):
        for path, item, inner in _children(name, value, dims):
            yield from _places(path, item, inner)
        return
    if not isinstance(dims, (dict, tuple, list)):
        kind = type(dims).__name__
        raise InputError(f"dynamic_shapes has a {kind} for '{name}'", hint="pass a dict {dimension: Dim}")
    if not isinstance(dims, dict) and len(dims) != value.dim():
        raise InputError(f"dynamic_shapes has {len(dims)} dimensions for '{name}', which has {value.dim()}")
    for d, dim in dims.items() if isinstance(dims, dict) else enumerate(dims):
        where = f"{name}.shape[{d}]"
        if not isinstance(d, int) or not -value.dim() <= d < value.dim():
            raise InputError(f"dynamic_shapes names {where}, and '{name}' has {value.dim()} dimensions")
        d %= value.dim()
        if isinstance(dim, int) and not isinstance(dim, bool):
            if dim != value.shape[d]:
                raise InputError(f"dynamic_shapes says {where} is {dim}, and the example has {value.shape[d]}")
        elif dim is not None and getattr(getattr(dim, "type", None), "name", None) != "STATIC":
            yield where, value, d, dim


def _children(name: str, value: Any, dims: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(value, dict) and isinstance(dims, dict) and dims.keys() <= value.keys():
        return [(f"{name}[{key!r}]", value[key], inner) for key, inner in dims.items()]
    if isinstance(value, (list, tuple)) and isinstance(dims, (list, tuple)) and len(dims) == len(value):
        return [(f"{name}[{i}]", item, inner) for i, (item, inner) in enumerate(zip(value, dims, strict=True))]
    raise InputError(
        f"dynamic_shapes has a {type(dims).__name__} for '{name}', which is a {type(value).__name__}",
        hint="give it the structure of the argument, with None where nothing varies",
    )


def _mapped(name: str, value: Any, dims: Any, change: Callable[[str, Any, Any], Any]) -> Any:
    """A container of the same type with its items changed."""
    changed = [change(path, item, inner) for path, item, inner in _children(name, value, dims)]
    if isinstance(value, dict):
        return type(value)({**value, **dict(zip(dims, changed, strict=True))})
    return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)


def _root(where: str, dim: Any) -> tuple[str, Callable[[int], int]]:
    """The name of the dimension, and how the size at this place follows from it: twice of it for ``2 * dim``."""
    if (root := getattr(dim, "root", None)) is not None:
        return root.__name__, dim.fn
    if (name := getattr(dim, "__name__", None)) is not None and hasattr(dim, "max"):
        return name, lambda size: size
    if getattr(getattr(dim, "type", None), "name", None) in ("AUTO", "DYNAMIC"):
        return "".join(c if c.isalnum() else "_" for c in where.replace(".shape", "")).strip("_"), lambda size: size
    raise InputError(
        f"dynamic_shapes has {dim!r} for {where}", hint="use torch.export.Dim(name, min=, max=), an int or None"
    )


def _bound(where: str, dim: Any, which: str) -> int:
    value = getattr(dim, which, None)
    if not isinstance(value, int) or value > _LARGEST:
        shown = f"the dimension {dim.__name__!r}" if hasattr(dim, "__name__") else f"{where} ({dim})"
        raise InputError(
            f"{shown} has no {which}", hint="give it both, for example torch.export.Dim('height', min=64, max=512)"
        )
    return max(value, 1)  # a model is lowered for something, if the user did not say how little it may be


def settings_apart(dimensions: Sequence[Dimension]) -> list[dict[str, int]]:
    """Sizes for as many calls as it takes until no two dimensions have been at the same end of their ranges in all.

    What follows from one of them can then be told from what follows from another, though their ranges are the same.
    """
    bits = range((len(dimensions) - 1).bit_length())
    codes = [[index >> bit & 1 for index in range(len(dimensions))] for bit in bits]
    return [
        {dim.name: dim.max if high != flipped else dim.min for dim, high in zip(dimensions, code, strict=True)}
        for code in codes
        for flipped in (False, True)
    ]
