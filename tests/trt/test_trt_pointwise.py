"""Converters of elementwise ops and activations: network executed and compared with eager, then built."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trt_checks import Case, check

torch.manual_seed(0)
X = torch.randn(2, 3, 4, 5)
Y = torch.randn(3, 1, 5)
P = torch.rand(2, 3, 4, 5) + 0.1
U = torch.rand(2, 3, 4, 5) * 1.8 - 0.9
INT = torch.randint(-9, 10, (2, 3, 4))
J = torch.randint(1, 6, (3, 4))
B = torch.randn(2, 3, 4) > 0
C = torch.randn(3, 1) > 0
S = torch.tensor(0.7)
H = torch.randn(2, 3, 4, dtype=torch.float16)

ARITHMETIC = [
    ("add", lambda x, y: x + y, (X, Y)),
    ("add_alpha", lambda x, y: torch.add(x, y, alpha=-2.5), (X, Y)),
    ("add_scalar", lambda x: x + 3, (X,)),
    ("add_int_float_scalar", lambda x: x + 0.5, (INT,)),
    ("add_int_float", lambda x, y: x + y, (INT, torch.randn(4))),
    ("add_zero_dim", lambda x, s: x + s, (X, S)),
    ("add_half_float_zero_dim", lambda x, s: x + s, (H, S)),
    ("add_half_float", lambda x, y: x + y, (H, torch.randn(4))),
    ("add_both_zero_dim", lambda x, y: x + y, (S, S)),
    ("add_bool", lambda x, y: x + y, (B, C)),
    ("add_bool_int", lambda x, y: x + y, (B, J)),
    ("sub", lambda x, y: x - y, (X, Y)),
    ("rsub", lambda x: 1 - x, (X,)),
    ("sub_alpha", lambda x, y: torch.sub(x, y, alpha=3), (INT, J)),
    ("mul", lambda x, y: x * y, (X, Y)),
    ("mul_int", lambda x, y: x * y, (INT, J)),
    ("mul_int32_scalar", lambda x: x * 3, (INT.int(),)),
    ("mul_bool", lambda x, y: x * y, (B, C)),
    ("div", lambda x, y: x / y, (X, P[0])),
    ("div_int", lambda x, y: x / y, (INT, J)),
    ("div_int_scalar", lambda x: x / 4, (INT,)),
    ("div_floor", lambda x, y: torch.div(x, y, rounding_mode="floor"), (X, P[0])),
    ("div_floor_int", lambda x, y: torch.div(x, y, rounding_mode="floor"), (INT, J)),
    ("div_trunc", lambda x, y: torch.div(x, y, rounding_mode="trunc"), (X, P[0])),
    ("div_trunc_int", lambda x, y: torch.div(x, y, rounding_mode="trunc"), (INT, J)),
    ("floor_divide_int", lambda x: x // 3, (INT,)),
    ("floor_divide", lambda x: x // 0.3, (X,)),
    ("remainder", lambda x: x % 0.7, (X,)),
    ("remainder_int", lambda x, y: torch.remainder(x, y), (INT, J)),
    ("remainder_negative", lambda x: torch.remainder(x, -4), (INT,)),
    ("fmod", lambda x: torch.fmod(x, 0.7), (X,)),
    ("fmod_int", lambda x, y: torch.fmod(x, y), (INT, J)),
    ("pow2", lambda x: x**2, (X,)),
    ("pow3", lambda x: x**3, (X,)),
    ("pow_half", lambda x: x**0.5, (P,)),
    ("pow_minus_one", lambda x: x**-1, (P,)),
    ("pow_general", lambda x: x**1.7, (P,)),
    ("pow_tensor", lambda x, y: x**y, (P, Y)),
    ("pow_of_scalar", lambda x: 2.0**x, (X,)),
    ("pow_int", lambda x: x**2, (INT,)),
    ("square", torch.square, (X,)),
    ("maximum", torch.maximum, (X, X.flip(0))),
    ("maximum_mixed", lambda x, y: torch.maximum(x, y), (INT, torch.randn(4))),
    ("minimum", torch.minimum, (X, X.flip(0))),
    ("clamp", lambda x: x.clamp(-0.5, 0.7), (X,)),
    ("clamp_min", lambda x: x.clamp(min=0.1), (X,)),
    ("clamp_max", lambda x: x.clamp_max(0.1), (X,)),
    ("clamp_int", lambda x: x.clamp(-2, 3), (INT,)),
    ("clamp_crossed", lambda x: x.clamp(1.0, -1.0), (X,)),
    ("clamp_tensor", lambda x, lo, hi: torch.clamp(x, lo, hi), (X, Y - 1, Y + 1)),
    ("lerp", lambda x, y: torch.lerp(x, y, 0.3), (X, X.flip(0))),
    ("lerp_tensor", torch.lerp, (X, X.flip(0), P)),
    ("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), (X, X, P)),
    ("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=2), (X, X, P)),
    ("hypot", torch.hypot, (X, P)),
]

ROUNDING = [
    ("floor", torch.floor, (X * 3,)),
    ("ceil", torch.ceil, (X * 3,)),
    ("round_half_even", torch.round, (torch.arange(-4.5, 5, 0.5),)),
    ("round_decimals", lambda x: torch.round(x, decimals=2), (X,)),
    ("round_tens", lambda x: torch.round(x, decimals=-1), (X * 40,)),
    ("trunc", torch.trunc, (X * 3,)),
    ("frac", torch.frac, (X * 3,)),
    ("floor_int", lambda x: torch.floor(x), (INT,)),
]

COMPARISON = [
    ("eq", lambda x, y: x == y, (INT, J)),
    ("ne", lambda x: x != 2, (INT,)),
    ("gt", lambda x, y: x > y, (X, Y)),
    ("lt_scalar", lambda x: x < 0.2, (X,)),
    ("ge", lambda x: x >= 2, (INT,)),
    ("le_nan", lambda x: x <= x, (torch.tensor([1.0, math.nan, math.inf]),)),
    ("gt_bool", lambda x, y: x > y, (B, C)),
    ("gt_int_float_scalar", lambda x: x > 0.5, (INT,)),
    ("logical_and", torch.logical_and, (B, C)),
    ("logical_or_float", torch.logical_or, (X.round(), Y.round())),
    ("logical_xor", torch.logical_xor, (B, C)),
    ("logical_not", torch.logical_not, (INT,)),
    ("bitwise_and", lambda x, y: x & y, (B, C)),
    ("bitwise_or", lambda x, y: x | y, (B, C)),
    ("bitwise_xor", lambda x, y: x ^ y, (B, C)),
    ("bitwise_not_bool", lambda x: ~x, (B,)),
    ("bitwise_not_int", lambda x: ~x, (INT,)),
    ("shift_left", lambda x: x << 3, (INT,)),
    ("shift_right", lambda x: x >> 2, (INT,)),
    ("isnan", torch.isnan, (torch.tensor([1.0, math.nan, math.inf]),)),
    ("isinf", torch.isinf, (torch.tensor([1.0, math.nan, -math.inf]),)),
    ("isfinite", torch.isfinite, (torch.tensor([1.0, math.nan, math.inf]),)),
    (
        "nan_to_num",
        lambda x: torch.nan_to_num(x, 0.5, 7.0, -7.0),
        (torch.tensor([1.0, math.nan, math.inf, -math.inf]),),
    ),
    ("where", torch.where, (B[..., None], X, Y)),
    ("where_scalar", lambda c, x: torch.where(c, x, 0.0), (B[..., None], X)),
    ("where_two_scalars", lambda c: torch.where(c, 1.0, 0.0), (B,)),
    ("masked_fill", lambda x, m: x.masked_fill(m, -math.inf), (X, B[..., None])),
    ("masked_fill_int", lambda x, m: x.masked_fill(m, 7), (INT, B)),
    ("heaviside", torch.heaviside, (X.round(), S)),
]

MATH = [
    (name, function, (inputs,))
    for name, function, inputs in (
        ("abs", torch.abs, X),
        ("abs_int", torch.abs, INT),
        ("neg", torch.neg, X),
        ("neg_int", torch.neg, INT),
        ("sign", torch.sign, X.round()),
        ("sign_int", torch.sign, INT),
        ("signbit", torch.signbit, torch.tensor([-0.0, 0.0, -1.0, 2.0])),
        ("exp", torch.exp, X),
        ("exp_int", torch.exp, J),
        ("exp2", torch.exp2, X),
        ("expm1", torch.expm1, torch.tensor([-3.0, -1e-6, 0.0, 1e-6, 0.3, 4.0])),
        ("log", torch.log, P),
        ("log2", torch.log2, P),
        ("log10", torch.log10, P),
        ("log1p", torch.log1p, torch.tensor([-0.5, -1e-7, 0.0, 1e-7, 5.0])),
        ("sqrt", torch.sqrt, P),
        ("sqrt_int", torch.sqrt, J),
        ("rsqrt", torch.rsqrt, P),
        ("reciprocal", torch.reciprocal, P),
        ("sin", torch.sin, X),
        ("cos", torch.cos, X),
        ("tan", torch.tan, U),
        ("asin", torch.asin, U),
        ("acos", torch.acos, U),
        ("atan", torch.atan, X),
        ("sinh", torch.sinh, X),
        ("cosh", torch.cosh, X),
        ("asinh", torch.asinh, X),
        ("acosh", torch.acosh, P + 1),
        ("atanh", torch.atanh, U),
        ("erf", torch.erf, X),
        ("erfc", torch.erfc, X),
        ("logit", lambda x: torch.logit(x, eps=0.2), torch.rand(3, 4)),
        ("sinc", torch.sinc, X.round()),
        ("deg2rad", torch.deg2rad, X),
        ("rad2deg", torch.rad2deg, X),
    )
] + [
    ("atan2", torch.atan2, (X, X.flip(0))),
    ("atan2_axis", torch.atan2, (torch.tensor([1.0, -1.0, 0.0, 2.0]), torch.tensor([0.0, 0.0, 1.0, -1.0]))),
    ("xlogy", torch.xlogy, (X.round(), P)),
    ("logaddexp", torch.logaddexp, (X, X.flip(0))),
]

LAYERS = [
    nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-0.5, 0.6), nn.Sigmoid(), nn.Tanh(), nn.SiLU(), nn.Hardsigmoid(), nn.Hardswish(),
    nn.GELU(), nn.GELU("tanh"), nn.LeakyReLU(0.2), nn.RReLU(), nn.ELU(0.7), nn.SELU(), nn.CELU(1.3), nn.Softplus(),
    nn.Softplus(2.0, 1.0), nn.LogSigmoid(), nn.Mish(), nn.Hardshrink(), nn.Softshrink(0.3), nn.Tanhshrink(),
    nn.Softsign(), nn.Threshold(0.1, -2.0), nn.GLU(2), nn.Softmax(1), nn.Softmin(-1), nn.LogSoftmax(1), nn.Softmax2d(),
    nn.PReLU(), nn.PReLU(3),
]  # fmt: skip

ACTIVATIONS = [(str(layer).replace(" ", "").replace("\n", ""), layer, (X * 3,)) for layer in LAYERS] + [
    ("softmax_1d", lambda x: F.softmax(x, 0), (X[0, 0, 0],)),
    ("softmax_float_of_half", lambda x: F.softmax(x, -1, dtype=torch.float32), (H,)),
    ("log_softmax_3d", lambda x: F.log_softmax(x * 100, -1), (X[0],)),
    ("prelu_2d", nn.PReLU(4), (X[0, :, :, 0],)),
    ("softplus_extremes", F.softplus, (torch.tensor([-100.0, -20.0, 0.0, 19.0, 21.0, 500.0]),)),
    ("logsigmoid_extremes", F.logsigmoid, (torch.tensor([-200.0, -1.0, 0.0, 200.0]),)),
    ("elu_extremes", F.elu, (torch.tensor([-200.0, -1e-6, 0.0, 200.0]),)),
    ("relu_zero_dim", F.relu, (-S,)),
    ("relu_half", F.relu, (H,)),
]

# torch computes half precision in float32 and rounds once; the network rounds after every layer
HALVES = [
    (f"half_{name}", layer, (X.half(),))
    for name, layer in [(row[0], row[1]) for row in ACTIVATIONS if isinstance(row[1], nn.Module)]
    if not isinstance(layer, nn.PReLU)  # its float parameters do not mix with Half, in torch either
] + [
    (f"half_{name}", program, (P.half(),))
    for name, program, inputs in ARITHMETIC + MATH
    if len(inputs) == 1 and inputs[0] is P
]

CASES = [Case(*row) for row in ARITHMETIC + ROUNDING + COMPARISON + MATH + ACTIVATIONS + HALVES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_elementwise(case: Case) -> None:
    check(case)
