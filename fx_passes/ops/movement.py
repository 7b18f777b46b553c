"""Table entries of the ops that move, make or describe data: views, copies, padding, casts, factories, sizes."""

from __future__ import annotations

import math
import operator

import torch
import torch.nn.functional as F
from torch import nn

from fx_passes.ops.op import Role
from fx_passes.ops.spelling import Table
from fx_passes.ops.writes import setitem, write_view

__all__ = ["enter_movement"]


def enter_movement(table: Table) -> None:
    """Enter every op of this file into `table`."""
    _views(table)
    _maybe_views(table)
    _gathers(table)
    _resampling(table)
    _identities(table)
    _casts(table)
    _factories(table)
    _sizes(table)
    _quantization(table)


def _views(table: Table) -> None:
    """The result always is the argument's memory. Their in-place spellings change the tensor object, not its memory."""
    for name, words in {
        "view": "view _unsafe_view",
        "view_as": "view_as",
        "transpose": "transpose swapaxes swapdims",
        "t": "t",
        "permute": "permute",
        "movedim": "movedim moveaxis",
        "squeeze": "squeeze",
        "unsqueeze": "unsqueeze",
        "expand": "expand broadcast_to",
        "expand_as": "expand_as",
        "select": "select",
        "slice": "slice",
        "narrow": "narrow",
        "chunk": "chunk tensor_split hsplit vsplit dsplit",
        "split": "split split_with_sizes",
        "unbind": "unbind",
        "diagonal": "diagonal",
        "as_strided": "as_strided",
        "alias": "alias",
        "view_as_real": "view_as_real view_as_complex real imag",
    }.items():
        table.add(name, Role.RESHAPE, words, result="view")
    table.add("unfold_view", Role.RESHAPE, "", methods="unfold", aten="unfold", result="view")  # F.unfold copies
    table.add("unflatten", Role.RESHAPE, modules=[nn.Unflatten], result="view")
    # Values that a view of another kind hands on: the tensor itself.
    table.add("detach", Role.RESHAPE, result="view")
    table.add("requires_grad_", Role.RESHAPE, result="view", inplace=False, effects=True)
    table.add("attribute_view", Role.RESHAPE, "", result="view")  # x.T, x.mT, x.data: see lookup
    table.add("broadcast_tensors", Role.RESHAPE, result="alias")


def _maybe_views(table: Table) -> None:
    table.add("reshape", Role.RESHAPE, "reshape reshape_as", result="alias")
    table.add("flatten", Role.RESHAPE, "flatten ravel", modules=[nn.Flatten], result="alias")
    table.add("contiguous", Role.RESHAPE, result="alias")
    # A basic index is a view, an index tensor a copy; of a list or tuple it is an element.
    table.add("getitem", Role.RESHAPE, "", operators="getitem", result="alias")
    for name in ("atleast_1d", "atleast_2d", "atleast_3d", "meshgrid", "resolve_conj", "resolve_neg"):
        table.add(name, Role.RESHAPE, result="alias")


def _gathers(table: Table) -> None:
    add = table.add
    add("cat", Role.CONCAT, "cat concat concatenate", amp="promote")
    add("stack", Role.CONCAT, "stack hstack vstack dstack column_stack row_stack", amp="promote")
    for name, words in {
        "repeat": "repeat tile",
        "repeat_interleave": "repeat_interleave",
        "flip": "flip fliplr flipud",
        "roll": "roll",
        "rot90": "rot90",
        "index_select": "index_select",
        "gather": "gather take take_along_dim",
        "index": "index",
        "masked_select": "masked_select",
    }.items():
        add(name, Role.RESHAPE, words)
    add("clone", Role.RESHAPE, aten="lift_fresh_copy", inplace=False)
    add("pixel_shuffle", Role.RESHAPE, modules=[nn.PixelShuffle])
    add("pixel_unshuffle", Role.RESHAPE, modules=[nn.PixelUnshuffle])
    add("channel_shuffle", Role.RESHAPE, modules=[nn.ChannelShuffle], result="alias")
    add("unfold", Role.RESHAPE, "", functions=[F.unfold], modules=[nn.Unfold], aten="im2col")
    table.add("fold", Role.OTHER, modules=[nn.Fold], aten="col2im")
    for name in ("tril", "triu"):
        add(name, Role.OTHER)
    for name in ("index_put", "index_add", "index_copy", "index_fill", "scatter", "scatter_add", "scatter_reduce"):
        add(name, Role.OTHER)
    for name in ("masked_scatter", "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter", "put"):
        add(name, Role.OTHER)
    add("setitem", Role.OTHER, "", inplace=False, functions=[setitem], twins={operator.setitem: setitem})
    add("write_view", Role.OTHER, "", functions=[write_view])
    table.add("one_hot", Role.OTHER)
    add("nonzero", Role.OTHER, "nonzero argwhere")
    add("unique", Role.OTHER, "unique unique_consecutive")


def _resampling(table: Table) -> None:
    add = table.add
    add(
        "interpolate",
        Role.OTHER,
        "interpolate upsample upsample_nearest upsample_bilinear upsample_nearest1d upsample_nearest2d "
        "upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
        "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
        modules=[nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d],
        inplace=False,
    )
    add("grid_sample", Role.OTHER, "grid_sample grid_sampler grid_sampler_2d grid_sampler_3d", amp="promote")
    add("affine_grid", Role.OTHER, "affine_grid affine_grid_generator", amp="promote")
    kinds = ("Constant", "Zero", "Reflection", "Replication", "Circular")
    pads = [getattr(nn, f"{kind}Pad{n}d") for kind in kinds for n in (1, 2, 3)]
    add(
        "pad",
        Role.OTHER,
        modules=pads,
        functions=[torch.constant_pad_nd],
        aten="constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
        "replication_pad3d",
    )


def _identities(table: Table) -> None:
    table.add("identity", Role.RESHAPE, "", modules=[nn.Identity], result="view")
    # In eval mode they return their argument.
    dropouts = [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout]
    table.add(
        "dropout",
        Role.RESHAPE,
        "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout",
        modules=dropouts,
        aten="native_dropout",
        result="alias",
        effects=True,
    )
    # Named by their path, so that torchvision is not imported: they are fx leaves there, and timm has its own.
    table.add("stochastic_depth", Role.RESHAPE, "", result="alias", effects=True)


def _casts(table: Table) -> None:
    table.add("to", Role.CAST, "to type type_as", aten="_to_copy", inplace=False, result="alias")
    casts = "float half bfloat16 double int long short char byte bool"
    table.add("cast", Role.CAST, "", methods=casts + " cpu cuda", aten="prims::convert_element_type", result="alias")


def _factories(table: Table) -> None:
    def add(name: str, words: str | None = None, **more) -> None:
        table.add(name, Role.FACTORY, words, inplace=False, **more)

    add("zeros", "zeros zeros_like new_zeros")
    add("ones", "ones ones_like new_ones")
    add("full", "full full_like new_full")
    add("empty", "empty empty_like new_empty empty_strided empty_permuted")
    add("arange", aten="arange")
    for name in ("linspace", "logspace", "eye", "tril_indices", "triu_indices"):
        add(name)
    add("tensor", "tensor scalar_tensor new_tensor")
    add("as_tensor", "as_tensor from_numpy", result="alias")
    random = "rand rand_like randn randn_like randint randint_like randperm normal bernoulli multinomial"
    add("rand", random, effects=True)


def _sizes(table: Table) -> None:
    def add(name: str, words: str | None = None, **more) -> None:
        table.add(name, Role.SHAPE, words, inplace=False, **more)

    add("is", "", functions=[operator.is_, operator.is_not])
    add("size", "size", aten="sym_size")
    add("attribute", "")  # x.shape, x.ndim, x.dtype, x.device: see lookup
    add("dim", "dim ndimension")
    add("numel", "numel nelement", aten="sym_numel")
    add("len", "", functions=[len], methods="__len__")
    add("stride", "stride storage_offset", aten="sym_stride sym_storage_offset")
    add("is_floating_point", "is_floating_point is_complex is_signed element_size get_device")
    add("is_contiguous", "is_contiguous is_same_size")
    # Integer arithmetic and comparisons on sizes; `op_of` gives this op where every operand is such a value.
    add(
        "shape_arithmetic",
        "",
        functions=[
            int, float, bool, min, max, abs, round, sum, divmod,
            math.ceil, math.floor, math.sqrt, math.trunc, math.prod, math.log2,
            torch.sym_int, torch.sym_float, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_ite, torch.sym_sqrt,
        ],
    )  # fmt: skip
    add("assertion", "_assert", aten="_assert_tensor_metadata _assert_scalar _assert_async", effects=True)
    add("item", "item", aten="_local_scalar_dense", methods="tolist")


def _quantization(table: Table) -> None:
    """Of `torch.ops.quantized_decomposed`, by name: the table does not import what registers them."""
    for name, role in (("quantize", Role.QUANTIZE), ("dequantize", Role.DEQUANTIZE)):
        for kind in ("per_tensor", "per_channel"):
            table.add(f"{name}_{kind}", role, "", aten=f"quantized_decomposed::{name}_{kind}")
    table.add("fake_quantize", Role.OTHER, "fake_quantize_per_tensor_affine fake_quantize_per_channel_affine")
