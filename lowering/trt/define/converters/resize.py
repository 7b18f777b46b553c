"""Interpolation and grid sampling.

A resize whose scale is exactly output size / input size is TensorRT's resize layer. Any other static one (a scale
factor that does not divide evenly, antialiasing, a one-pixel result with aligned corners) is a lookup or a matrix
product per dimension, with weights that torch itself computes here: exact by construction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from lowering.trt.bindings import trt
from lowering.trt.define.net import Net, Size, Tensor, Value, is_static
from lowering.trt.define.registry import converts

aten = torch.ops.aten
Scales = Sequence[float] | None
_MATRIX_LIMIT = 1 << 22


def _target(net: Net, x: Value, output_size: Sequence[Size] | None, scales: Scales) -> list[Size]:
    known = list(net.result.shape)[2:]
    if all(isinstance(d, int) for d in known):
        return known
    if output_size is not None:
        return list(output_size)
    assert scales is not None
    sizes: list[Size] = []
    for size, scale in zip(net.dims(x)[2:], scales, strict=True):
        if isinstance(size, int):
            sizes.append(int(size * scale))
        elif float(scale).is_integer():
            sizes.append(size * int(scale))
        else:
            product = net.cast(net.scalar_op("PROD", size, float(scale)).tensor, torch.int64)
            sizes.append(net.scalar(product))
    return sizes


def _plain_ratio(inner: Sequence[Size], sizes: Sequence[Size], scales: Scales) -> bool:
    """Whether the scale torch uses is output / input, which is what the resize layer derives from the sizes."""
    if scales is None:
        return True
    if is_static(inner):
        return all(s is None or abs(i * s - o) < 1e-6 for i, o, s in zip(inner, sizes, scales, strict=True))
    return all(s is None or float(s).is_integer() for s in scales)


def _resize(
    net: Net, x: Value, output_size, scales: Scales, mode: str, align: bool = False, antialias: bool = False
) -> Tensor:
    scales = list(scales) if scales is not None and any(s is not None for s in scales) else None
    sizes = _target(net, x, output_size, scales)
    inner = net.dims(x)[2:]
    exact = _plain_ratio(inner, sizes, scales) and not (align and any(isinstance(s, int) and s == 1 for s in sizes))
    if exact and not antialias:
        return _layer(net, x, sizes, mode, align)
    if not (is_static(inner) and is_static(sizes)):
        raise net.unsupported("a dynamic size resized by a factor that does not divide evenly")
    if mode.startswith("nearest"):
        return _lookup(net, x, sizes, scales, mode)
    return _products(net, x, sizes, scales, mode, align, antialias)


def _layer(net: Net, x: Value, sizes: Sequence[Size], mode: str, align: bool) -> Tensor:
    x = net.tensor(x)
    one_dimensional = net.rank(x) == 3
    if one_dimensional:
        x, sizes = net.unsqueeze(x, [2]), [1, *sizes]
    layer = net.definition.add_resize(x)
    shape = [*net.dims(x)[:2], *sizes]
    if is_static(shape):
        layer.shape = tuple(shape)
    else:
        layer.set_input(1, net.shape_tensor(shape))
    coordinates = trt.ResizeCoordinateTransformation
    if mode == "nearest":
        layer.resize_mode = trt.InterpolationMode.NEAREST
        layer.coordinate_transformation = coordinates.ASYMMETRIC
        layer.nearest_rounding = trt.ResizeRoundMode.FLOOR
    elif mode == "nearest-exact":
        layer.resize_mode = trt.InterpolationMode.NEAREST
        layer.coordinate_transformation = coordinates.HALF_PIXEL
        layer.nearest_rounding = trt.ResizeRoundMode.HALF_UP
    else:
        cubic = mode == "bicubic"
        layer.resize_mode = trt.InterpolationMode.CUBIC if cubic else trt.InterpolationMode.LINEAR
        layer.coordinate_transformation = coordinates.ALIGN_CORNERS if align else coordinates.HALF_PIXEL
        if cubic:
            layer.cubic_coeff = -0.75
    y = net.add("resize", layer)
    return net.squeeze(y, [2]) if one_dimensional else y


def _lookup(net: Net, x: Value, sizes: Sequence[int], scales: Scales, mode: str) -> Tensor:
    """Nearest neighbours by index, one dimension after the other; the indices are what torch picks of a ramp."""
    y = net.tensor(x)
    for axis, (inner, out) in enumerate(zip(net.dims(x)[2:], sizes, strict=True)):
        scale = None if scales is None else scales[axis]
        if inner == out and scale in (None, 1.0):
            continue
        ramp = torch.arange(inner, dtype=torch.float64).reshape(1, 1, inner)
        picked = _torch_1d(ramp, out, scale, mode, False, False)
        y = net.gather(y, picked.reshape(-1).to(torch.int64), axis + 2)
    return y


def _torch_1d(x: torch.Tensor, out: int, scale: float | None, mode: str, align: bool, antialias: bool) -> torch.Tensor:
    """torch's own resize of (N, C, L) along L to `out`, by its size or by its scale factor."""
    planar = mode in ("bilinear", "bicubic")
    if planar:  # needs two dimensions; the first one is left as it is
        x = x.unsqueeze(2)
    options = {} if mode.startswith("nearest") else {"align_corners": align, "antialias": antialias}
    if scale is None:
        return F.interpolate(x, size=(1, out) if planar else out, mode=mode, **options)
    factor = (1.0, scale) if planar else scale
    return F.interpolate(x, scale_factor=factor, recompute_scale_factor=False, mode=mode, **options)


def _products(
    net: Net, x: Value, sizes: Sequence[int], scales: Scales, mode: str, align: bool, antialias: bool
) -> Tensor:
    """Separable weights as one matrix per dimension, applied one after the other."""
    kind = {"trilinear": "linear", "bilinear": "bilinear", "linear": "linear", "bicubic": "bicubic"}[mode]
    y, rank = net.tensor(x), net.rank(x)
    for axis, (inner, out) in enumerate(zip(net.dims(x)[2:], sizes, strict=True)):
        if inner * out > _MATRIX_LIMIT:
            raise net.unsupported(f"a resize from {inner} to {out} by a factor that does not divide evenly")
        scale = None if scales is None else scales[axis]
        unit = torch.eye(inner).reshape(inner, 1, inner)
        matrix = _torch_1d(unit, out, scale, kind, align, antialias).reshape(inner, out)
        moved = net.transpose(y, axis + 2, rank - 1)
        y = net.transpose(net.matmul(moved, matrix.to(net.dtype(x))), axis + 2, rank - 1)
    return y


def _float_input(x) -> str | None:
    return None if x.dtype.is_floating_point else f"TensorRT resizes floats only, not {x.dtype}"


def _float_or_bytes(x) -> str | None:
    return None if x.dtype in (torch.uint8, torch.int8) else _float_input(x)


def _nearest(mode: str, *targets) -> None:
    @converts(*(t for t in targets if t is not None), check=_float_or_bytes)
    def nearest(
        net: Net,
        x: Value,
        output_size=None,
        scale_factors: Scales = None,
        scales=None,
        scales_d=None,
        scales_h=None,
        scales_w=None,
    ):
        factors = scale_factors or _given(scales_d, scales_h, scales_w, scales)
        if not net.dtype(x).is_floating_point:  # 8-bit integers, all of which float32 has
            return net.in_dtype(torch.float32, x, lambda y: _resize(net, y, output_size, factors, mode))
        return _resize(net, x, output_size, factors, mode)


def _given(*scales: float | None) -> Scales:
    """Per-dimension factors of the overloads that have them one by one, or None if there are none."""
    found = [s for s in scales if s is not None]
    return found or None


_nearest("nearest", aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec)
_nearest("nearest", aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default)
_nearest(
    "nearest-exact",
    aten._upsample_nearest_exact1d.vec,
    aten._upsample_nearest_exact2d.vec,
    aten._upsample_nearest_exact3d.vec,
)
_nearest(
    "nearest-exact",
    aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default,
)


def _smooth(mode: str, antialias: bool, *targets) -> None:
    @converts(*targets, check=_float_input)
    def smooth(
        net: Net,
        x: Value,
        output_size=None,
        align_corners: bool = False,
        scale_factors: Scales = None,
        scales=None,
        scales_d=None,
        scales_h=None,
        scales_w=None,
    ) -> Tensor:
        factors = scale_factors or _given(scales_d, scales_h, scales_w, scales)
        return _resize(net, x, output_size, factors, mode, align_corners, antialias)


_smooth("linear", False, aten.upsample_linear1d.vec, aten.upsample_linear1d.default)
_smooth("bilinear", False, aten.upsample_bilinear2d.vec, aten.upsample_bilinear2d.default)
_smooth("trilinear", False, aten.upsample_trilinear3d.vec, aten.upsample_trilinear3d.default)
_smooth("bicubic", False, aten.upsample_bicubic2d.vec, aten.upsample_bicubic2d.default)
_smooth("bilinear", True, aten._upsample_bilinear2d_aa.vec, aten._upsample_bilinear2d_aa.default)
_smooth("bicubic", True, aten._upsample_bicubic2d_aa.vec, aten._upsample_bicubic2d_aa.default)


# -- sampling -------------------------------------------------------------------------------------------------------

_INTERPOLATION = {0: "LINEAR", 1: "NEAREST", 2: "CUBIC"}
_BORDER = {0: "FILL", 1: "CLAMP", 2: "REFLECT"}


@converts(aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, check=_float_input)
def grid_sampler(
    net: Net, x: Value, grid: Value, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    layer = net.definition.add_grid_sample(net.tensor(x), net.cast(grid, net.dtype(x)))
    net.check("grid_sample", refused=layer is None)
    layer.interpolation_mode = getattr(trt.InterpolationMode, _INTERPOLATION[interpolation_mode])
    layer.sample_mode = getattr(trt.SampleMode, _BORDER[padding_mode])
    layer.align_corners = align_corners
    return net.add("grid_sample", layer)


def _static_grid(size) -> str | None:
    return None if all(isinstance(s, int) for s in size[2:]) else "a sampling grid of a dynamic size"


@converts(aten.affine_grid_generator.default, check=_static_grid)
def affine_grid(net: Net, theta: Value, size: Sequence[Size], align_corners: bool) -> Tensor:
    """Base grid (constant) times the transposed matrices (N, 2 or 3, columns)."""
    inner = list(size)[2:]
    identity = torch.eye(len(inner), len(inner) + 1).unsqueeze(0)
    base = F.affine_grid(identity, [1, 1, *inner], align_corners=align_corners).reshape(1, -1, len(inner))
    base = torch.cat([base, torch.ones(1, base.shape[1], 1)], dim=2).to(net.dtype(theta))
    return net.reshape(net.matmul(base, theta, transpose_b=True), [size[0], *inner, len(inner)])
