"""aten ops that torch's ONNX exporter has no form for, or a wrong one, in other ops that it translates as they are.

Found by running every case of the converter tests through the exporter and ONNX Runtime (torch 2.14).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from fx_passes.errors import ExportError
from lowering.segment.normal_form.edit import arguments, inline, is_static, shape_of

__all__ = ["check_translations", "legalize"]

aten = torch.ops.aten
Rewrite = Callable[..., Any]


def legalize(graph: Graph) -> None:
    """Rewrite, in place, the calls of an aten graph that the exporter would refuse or get wrong.

    Args:
        graph: functional, every node with its fake value in `meta["val"]`.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and (choose := _REWRITES.get(node.target)) is not None:
            rewrite = choose(node, arguments(node))
            if rewrite is not None:
                inline(node, rewrite)


def check_translations(graph: Graph) -> None:
    """Refuse what the exporter accepts and gets wrong, and what nothing here rewrites.

    Raises:
        ExportError: naming the node.
    """
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if (reason := _WRONG.get(node.target)) is not None:
            raise _refusal(node, reason)
        if (choose := _REWRITES.get(node.target)) is not None:
            choose(node, arguments(node))


_WRONG = {
    aten.logcumsumexp.default: "torch's ONNX exporter writes logcumsumexp as log(cumsum(exp(x))), which overflows",
}


# -- pooling ----------------------------------------------------------------------------------------------------------


def _pool_with_divisor(spatial: int) -> Callable[[Node, dict[str, Any]], Rewrite | None]:
    """The exporter leaves `divisor_override` out: pad by hand, average over whole windows, scale."""

    def choose(node: Node, given: dict[str, Any]) -> Rewrite | None:
        if given["divisor_override"] is None:
            return None
        kernel = _spread(given["kernel_size"], spatial)
        stride = _spread(given["stride"] or kernel, spatial)
        padding = _spread(given["padding"], spatial)
        sizes, results = shape_of(node.args[0])[-spatial:], shape_of(node)[-spatial:]
        after = [
            (out - 1) * step + window - size - before
            for out, step, window, size, before in zip(results, stride, kernel, sizes, padding, strict=True)
        ]
        if not all(is_static(size) for size in after):
            raise _refusal(node, "torch's ONNX exporter ignores divisor_override, and the size is free here")
        sides = [side for pair in zip(padding[::-1], after[::-1], strict=True) for side in pair]
        pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[spatial - 1]
        factor = prod(kernel) / given["divisor_override"]

        def rewrite(x: Tensor, *_: Any, **__: Any) -> Tensor:
            # Windows that end before the edge leave a negative side: what they do not reach is cut off.
            return pool(F.pad(x, sides), kernel, stride) * factor

        return rewrite

    return choose


def _spread(value: Any, count: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _refusal(node: Node, reason: str) -> ExportError:
    return ExportError(reason, node=node, hint="wrap() the function around this line so that it stays in Python")


def _adaptive(spatial: int, reduce: Callable[[Tensor, int], Tensor], whole: int) -> Callable[..., Rewrite | None]:
    """Windows of unequal sizes, one slice each, axis by axis: a window is a box, and so is the reduction over it.

    Args:
        spatial: pooled dimensions.
        reduce: (values, dimension) to the values without it.
        whole: results of the op; the second one, places, can be asked for by nobody.
    """

    def choose(node: Node, given: dict[str, Any]) -> Rewrite | None:
        if not all(is_static(size) for size in shape_of(node.args[0])[-spatial:]):
            return None
        if whole == 2 and any(user.args[1] != 0 for user in node.users):
            return None

        def rewrite(x: Tensor, output_size: Sequence[int]) -> Any:
            for axis, count in zip(range(-spatial, 0), output_size, strict=True):
                size = x.shape[axis]
                edges = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
                x = torch.stack([reduce(x.narrow(axis, a, b - a), axis) for a, b in edges], axis)
            return x if whole == 1 else (x, x)

        return rewrite

    return choose


# -- the rest ---------------------------------------------------------------------------------------------------------


def _mean(node: Node, given: dict[str, Any]) -> Rewrite | None:
    """The exporter averages integers first and converts then."""
    dtype, x = given["dtype"], node.args[0].meta["val"]  # type: ignore[union-attr]
    if dtype is None or dtype == x.dtype:
        if node.target is aten.mean.default or given["dim"] or x.dim() == 0:
            return None
        every = list(range(x.dim()))  # None or an empty list, of which the exporter makes no input at all
        return lambda x, dim=None, keepdim=False, **_: x.mean(every, keepdim)
    if node.target is aten.mean.default:
        return lambda x, **_: x.to(dtype).mean()
    return lambda x, dim=None, keepdim=False, **_: x.to(dtype).mean(dim, keepdim)


def _any(node: Node, given: dict[str, Any]) -> Rewrite | None:
    """Over nothing the exporter's maximum is true."""
    if 0 not in shape_of(node.args[0]):
        return None
    if node.target is aten.any.default:
        return lambda x: (x != 0).to(torch.int64).sum() > 0
    return lambda x, dim, keepdim=False: (x != 0).to(torch.int64).sum(dim, keepdim) > 0


def _is_integer(node: Node, _: dict[str, Any]) -> bool:
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    return not value.dtype.is_floating_point


def _rounding(node: Node, given: dict[str, Any]) -> Rewrite | None:
    """ONNX rounds floating point values only."""
    return (lambda x, **_: x.clone()) if _is_integer(node, given) else None


def _add_bools(node: Node, given: dict[str, Any]) -> Rewrite | None:
    values = [n.meta["val"].dtype for n in node.all_input_nodes]
    both = len(node.all_input_nodes) == 2 and all(dtype is torch.bool for dtype in values)
    return (lambda x, y, **_: torch.logical_or(x, y)) if both and given.get("alpha", 1) == 1 else None


def _attention(node: Node, given: dict[str, Any]) -> Rewrite | None:
    """The exporter takes four dimensions; this is attention as torch's documentation of the op defines it."""
    if len(shape_of(given["query"])) == 4 or given["enable_gqa"] or given["dropout_p"]:
        return None
    scale = given["scale"] if given["scale"] is not None else int(shape_of(given["query"])[-1]) ** -0.5

    def rewrite(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Tensor:
        scores = query @ key.transpose(-1, -2) * scale
        if is_causal:
            attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        return scores.softmax(-1) @ value

    return rewrite


def _rrelu(node: Node, given: dict[str, Any]) -> Rewrite | None:
    if given["training"]:
        return None
    slope = (given["lower"] + given["upper"]) / 2
    if node.target is aten.rrelu.default:
        return lambda x, *_, **__: F.leaky_relu(x, slope)
    return lambda x, noise, *_, **__: (F.leaky_relu(x, slope), noise)


def _always(rewrite: Rewrite) -> Callable[[Node, dict[str, Any]], Rewrite | None]:
    return lambda node, given: rewrite


def _log_sigmoid(x: Tensor, *_: Any) -> Tensor:
    """The exporter takes the logarithm of a sigmoid, which is 0 from -100 on."""
    return torch.clamp(x, max=0) - torch.log1p(torch.exp(-x.abs()))


def _stable_sort(x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """ONNX's TopK keeps the order of equal values anyway."""
    return aten.sort.default(x, dim, descending)


def _maximum(x: Tensor, dim: int) -> Tensor:
    return x.amax(dim)


def _average(x: Tensor, dim: int) -> Tensor:
    return x.mean(dim)


def _place_of_all(node: Node, given: dict[str, Any]) -> Rewrite | None:
    """The exporter drops `keepdim` where no dimension is given."""
    if given["dim"] is not None or not given["keepdim"]:
        return None
    rank = len(shape_of(node.args[0]))
    return lambda x, *_, **__: node.target(x.reshape(-1), 0).reshape([1] * rank)  # type: ignore[operator]


def _median(node: Node, given: dict[str, Any]) -> Rewrite | None:
    """The lower of the two values in the middle, or NaN if there is one."""
    dim, keepdim = given.get("dim"), given.get("keepdim", False)
    shape = shape_of(node.args[0])
    size = prod(shape) if dim is None else (shape[dim] if shape else 1)
    if not is_static(size) or size == 0:
        return None

    def median(x: Tensor, *_: Any, **__: Any) -> Any:
        axis = 0 if dim is None or not shape else dim
        ordered, places = torch.sort(x.reshape(-1) if dim is None or not shape else x, dim=axis)
        middle = (int(size) - 1) // 2
        value, place = ordered.select(axis, middle), places.select(axis, middle)
        if x.is_floating_point():  # NaN is sorted to the end
            last, at = ordered.select(axis, int(size) - 1), places.select(axis, int(size) - 1)
            value, place = torch.where(last.isnan(), last, value), torch.where(last.isnan(), at, place)
        if dim is None:
            return value
        return (value.unsqueeze(dim), place.unsqueeze(dim)) if keepdim and shape else (value, place)

    return median


def _distances(x: Tensor, y: Tensor, p: float = 2.0, *_: Any) -> Tensor:
    """The exporter has no cdist."""
    return torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, dim=-1)


_REWRITES: dict[Any, Callable[[Node, dict[str, Any]], Rewrite | None]] = {
    aten.avg_pool2d.default: _pool_with_divisor(2),
    aten.avg_pool3d.default: _pool_with_divisor(3),
    aten.adaptive_max_pool2d.default: _adaptive(2, _maximum, 2),
    aten.adaptive_max_pool3d.default: _adaptive(3, _maximum, 2),
    aten.adaptive_avg_pool3d.default: _adaptive(3, _average, 1),
    aten._adaptive_avg_pool3d.default: _adaptive(3, _average, 1),
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.argmax.default: _place_of_all,
    aten.argmin.default: _place_of_all,
    aten.median.default: _median,
    aten.median.dim: _median,
    aten.cdist.default: _always(_distances),
    aten.any.default: _any,
    aten.any.dim: _any,
    aten.any.dims: _any,
    **dict.fromkeys((aten.floor.default, aten.ceil.default, aten.round.default, aten.trunc.default), _rounding),
    aten.add.Tensor: _add_bools,
    aten.scaled_dot_product_attention.default: _attention,
    aten.rrelu.default: _rrelu,
    aten.rrelu_with_noise_functional.default: _rrelu,
    aten.log_sigmoid.default: _always(_log_sigmoid),
    aten.log_sigmoid_forward.default: _always(lambda x: (_log_sigmoid(x), x)),
    aten.sort.stable: _always(_stable_sort),
    aten.__lshift__.Tensor: _always(lambda x, y: x * torch.pow(2, y)),
    aten.__lshift__.Scalar: _always(lambda x, y: x * 2**y),
    aten.bitwise_left_shift.Tensor: _always(lambda x, y: x * torch.pow(2, y)),
    aten.bitwise_left_shift.Tensor_Scalar: _always(lambda x, y: x * 2**y),
    aten.__rshift__.Tensor: _always(lambda x, y: torch.div(x, torch.pow(2, y), rounding_mode="floor")),
    aten.__rshift__.Scalar: _always(lambda x, y: torch.div(x, 2**y, rounding_mode="floor")),
    aten.bitwise_right_shift.Tensor: _always(lambda x, y: torch.div(x, torch.pow(2, y), rounding_mode="floor")),
    aten.bitwise_right_shift.Tensor_Scalar: _always(lambda x, y: torch.div(x, 2**y, rounding_mode="floor")),
}
