"""Table entries of the ops that compute: convolutions, products, elementwise ops, norms, pools, reductions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fx_passes.ops.flops import (
    addmm_flops,
    attention_flops,
    conv_flops,
    conv_transpose_flops,
    linear_flops,
    matmul_flops,
)
from fx_passes.ops.masks import attention_mask
from fx_passes.ops.op import Role
from fx_passes.ops.spelling import Table

__all__ = ["enter_compute"]


def enter_compute(table: Table) -> None:
    """Enter every op of this file into `table`."""
    _weighted(table)
    _matmul(table)
    _arithmetic(table)
    _activations(table)
    _elementwise(table)
    _norms(table)
    _pools(table)
    _reductions(table)


def _weighted(table: Table) -> None:
    add = table.add
    for n in (1, 2, 3):
        add(
            f"conv{n}d",
            Role.WEIGHTED,
            modules=[getattr(nn, f"Conv{n}d")],
            weight=1,
            bias=2,
            channel_axis=0,
            amp="lower",
            flops=conv_flops,
        )
        add(
            f"conv_transpose{n}d",
            Role.WEIGHTED,
            modules=[getattr(nn, f"ConvTranspose{n}d")],
            weight=1,
            bias=2,
            channel_axis=1,
            amp="lower",
            flops=conv_transpose_flops,
        )
    # The general form, either direction: its channel axis follows from its `transposed` argument.
    add("convolution", Role.WEIGHTED, weight=1, bias=2, channel_axis=0, amp="lower", flops=conv_flops)
    linears = [nn.Linear, NonDynamicallyQuantizableLinear]  # the latter is out_proj of nn.MultiheadAttention
    add("linear", Role.WEIGHTED, modules=linears, weight=1, bias=2, channel_axis=0, amp="lower", flops=linear_flops)


def _matmul(table: Table) -> None:
    add = table.add
    add("matmul", Role.MATMUL, operators="matmul imatmul", amp="lower", flops=matmul_flops)
    add("mm", Role.MATMUL, amp="lower", flops=matmul_flops)
    add("bmm", Role.MATMUL, amp="lower", flops=matmul_flops)
    add("addmm", Role.MATMUL, amp="lower", input=1, weight=2, bias=0, channel_axis=1, flops=addmm_flops)
    add("baddbmm", Role.MATMUL, amp="lower", input=1, flops=addmm_flops)
    add("einsum", Role.MATMUL, amp="lower")
    add("bilinear", Role.OTHER, modules=[nn.Bilinear], amp="promote")
    add(
        "scaled_dot_product_attention",
        Role.MATMUL,
        aten="_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_flash_attention",
        amp="lower",
        effects=True,
        flops=attention_flops,
    )
    add("attention_mask", Role.OTHER, "", functions=[attention_mask])
    add("embedding", Role.OTHER, modules=[nn.Embedding], effects=False)


def _arithmetic(table: Table) -> None:
    add = table.add
    add("add", Role.ELEMENTWISE_ADD, operators="add iadd", amp="promote")
    add("sub", Role.ELEMENTWISE_ADD, "sub subtract", operators="sub isub", amp="promote")
    add("rsub", Role.ELEMENTWISE_ADD, amp="promote")
    add("mul", Role.ELEMENTWISE_MUL, "mul multiply", operators="mul imul", amp="promote")
    add("div", Role.ELEMENTWISE_MUL, "div divide true_divide", operators="truediv itruediv", amp="promote")
    add("floor_divide", Role.OTHER, operators="floordiv ifloordiv", amp="promote")
    add("remainder", Role.OTHER, operators="mod imod", amp="promote")
    add("fmod", Role.OTHER, amp="promote")
    add("pow", Role.OTHER, operators="pow ipow", amp="fp32")
    add("neg", Role.OTHER, "neg negative", operators="neg")
    add("positive", Role.RESHAPE, operators="pos", result="view", inplace=False)
    for name in ("addcmul", "addcdiv", "lerp", "atan2", "hypot", "copysign", "xlogy"):
        add(name, Role.OTHER, amp="promote")
    for name in ("fmax", "fmin", "maximum", "minimum"):
        add(name, Role.OTHER, amp="promote")
    for name, spelled in (("and", "and_ iand"), ("or", "or_ ior"), ("xor", "xor ixor")):
        add(f"bitwise_{name}", Role.OTHER, operators=spelled, aten=f"__{name}__", amp="promote")
    add("bitwise_not", Role.OTHER, operators="invert")
    add("bitwise_left_shift", Role.OTHER, operators="lshift ilshift", aten="__lshift__")
    add("bitwise_right_shift", Role.OTHER, operators="rshift irshift", aten="__rshift__")
    for name in ("logical_and", "logical_or", "logical_xor", "logical_not"):
        add(name, Role.OTHER, inplace_casts=True, amp="promote")
    for name, words in {
        "eq": "eq",
        "ne": "ne not_equal",
        "lt": "lt less",
        "le": "le less_equal",
        "gt": "gt greater",
        "ge": "ge greater_equal",
    }.items():
        add(name, Role.OTHER, words, operators=name, inplace_casts=True, amp="promote")
    for name in ("isnan", "isinf", "isfinite", "isclose", "signbit"):
        add(name, Role.OTHER, amp="promote")


def _activations(table: Table) -> None:
    def add(name: str, words: str | None = None, module: type | None = None, **more) -> None:
        table.add(name, more.pop("role", Role.ACTIVATION), words, modules=[module] if module else (), **more)

    add("relu", module=nn.ReLU)
    add("relu6", module=nn.ReLU6)
    add("hardtanh", module=nn.Hardtanh)
    add("hardswish", module=nn.Hardswish)
    add("hardsigmoid", module=nn.Hardsigmoid)
    add("leaky_relu", module=nn.LeakyReLU)
    add("prelu", "prelu _prelu_kernel", nn.PReLU, weight=1, amp="lower")
    add("rrelu", module=nn.RReLU, effects=True)
    add("elu", module=nn.ELU)
    add("celu", module=nn.CELU)
    add("selu", module=nn.SELU)
    add("gelu", module=nn.GELU)
    add("silu", module=nn.SiLU)
    add("mish", module=nn.Mish)
    add("sigmoid", "sigmoid", nn.Sigmoid, functions=[torch.special.expit])
    add("tanh", module=nn.Tanh)
    add("softplus", module=nn.Softplus, amp="fp32")
    add("softsign", module=nn.Softsign)
    add("tanhshrink", module=nn.Tanhshrink)
    add("hardshrink", module=nn.Hardshrink)
    add("softshrink", module=nn.Softshrink)
    add("threshold", module=nn.Threshold)
    add("logsigmoid", module=nn.LogSigmoid, aten="log_sigmoid")
    add("clamp", "clamp clip")
    add("clamp_min")
    add("clamp_max")
    add("glu", module=nn.GLU, role=Role.OTHER)


def _elementwise(table: Table) -> None:
    add = table.add
    add("abs", Role.OTHER, "abs absolute", operators="abs")
    for name in ("sign", "sgn", "ceil", "floor", "round", "trunc", "frac", "square", "nan_to_num", "deg2rad"):
        add(name, Role.OTHER)
    for name in ("sin", "cos", "sinh", "cosh", "atan", "sqrt", "erf", "sinc", "asinh"):
        add(name, Role.OTHER)
    # Ranges that a half cannot hold, or a slope that it cannot resolve (torch.amp's float32 list).
    for name in ("acos", "asin", "tan", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "rsqrt", "reciprocal"):
        add(name, Role.OTHER, amp="fp32")
    for name in ("erfinv", "logit", "acosh", "atanh"):
        add(name, Role.OTHER, amp="fp32")
    add("where", Role.OTHER, amp="promote")
    add("masked_fill", Role.OTHER)
    # Methods with no out-of-place method of that name.
    add("copy", Role.OTHER, inplace=False, twins={"copy_": torch.ops.aten.copy.default})
    add("fill", Role.OTHER, inplace=False, twins={"fill_": torch.fill, torch.fill_: torch.fill})
    add("zero", Role.OTHER, inplace=False, twins={"zero_": torch.zeros_like, torch.zero_: torch.zeros_like})
    add("softmax", Role.SOFTMAX, modules=[nn.Softmax], functions=[torch.special.softmax], aten="_softmax", amp="fp32")
    add("softmax2d", Role.SOFTMAX, modules=[nn.Softmax2d], amp="fp32")
    add("softmin", Role.SOFTMAX, modules=[nn.Softmin], amp="fp32")
    add(
        "log_softmax",
        Role.SOFTMAX,
        modules=[nn.LogSoftmax],
        functions=[torch.special.log_softmax],
        aten="_log_softmax",
        amp="fp32",
    )
    for name in ("cumsum", "cumprod"):
        add(name, Role.OTHER, amp="fp32")


def _norms(table: Table) -> None:
    add = table.add
    # batch_norm has two argument orders: see `fx_passes.ops.arguments`.
    add(
        "batch_norm",
        Role.NORM,
        modules=[nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm],
        aten="_native_batch_norm_legit_no_training native_batch_norm _batch_norm_no_update",
        amp="fp32",
        effects=True,
    )
    add(
        "instance_norm",
        Role.NORM,
        modules=[nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d],
        amp="fp32",
        effects=True,
    )
    add("layer_norm", Role.NORM, modules=[nn.LayerNorm], aten="native_layer_norm", weight=2, bias=3, amp="fp32")
    add("group_norm", Role.NORM, modules=[nn.GroupNorm], aten="native_group_norm", weight=2, bias=3, amp="fp32")
    add("rms_norm", Role.NORM, modules=[nn.RMSNorm], weight=2, amp="fp32")
    add("local_response_norm", Role.NORM, modules=[nn.LocalResponseNorm, nn.CrossMapLRN2d], amp="fp32")
    add("normalize", Role.NORM, amp="fp32")
    add("cosine_similarity", Role.REDUCTION, modules=[nn.CosineSimilarity], amp="fp32")


def _pools(table: Table) -> None:
    add = table.add
    for n in (1, 2, 3):
        add(
            f"max_pool{n}d",
            Role.POOL_MAX,
            f"max_pool{n}d max_pool{n}d_with_indices",
            functions=[getattr(F, f"_max_pool{n}d")],
            modules=[getattr(nn, f"MaxPool{n}d")],
        )
        add(
            f"adaptive_max_pool{n}d",
            Role.POOL_MAX,
            f"adaptive_max_pool{n}d adaptive_max_pool{n}d_with_indices",
            functions=[getattr(F, f"_adaptive_max_pool{n}d")],
            modules=[getattr(nn, f"AdaptiveMaxPool{n}d")],
        )
        add(f"avg_pool{n}d", Role.POOL_AVG, modules=[getattr(nn, f"AvgPool{n}d")])
        add(
            f"adaptive_avg_pool{n}d",
            Role.POOL_AVG,
            modules=[getattr(nn, f"AdaptiveAvgPool{n}d")],
            aten=f"_adaptive_avg_pool{n}d" if n > 1 else "",
        )
        add(f"lp_pool{n}d", Role.OTHER, modules=[getattr(nn, f"LPPool{n}d")], amp="fp32")


def _reductions(table: Table) -> None:
    add = table.add
    add("mean", Role.REDUCTION)
    add("sum", Role.REDUCTION, amp="fp32")
    for name in ("prod", "std", "var", "std_mean", "var_mean", "logsumexp"):
        add(name, Role.REDUCTION, amp="fp32")
    norms = [torch.linalg.norm, torch.linalg.vector_norm]
    add("norm", Role.REDUCTION, functions=norms, aten="linalg_norm linalg_vector_norm", amp="fp32")
    for name in ("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "all", "any", "median"):
        add(name, Role.REDUCTION)
    for name in ("topk", "sort", "argsort", "kthvalue", "cummax", "cummin", "bincount", "count_nonzero", "msort"):
        add(name, Role.OTHER)
