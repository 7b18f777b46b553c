"""Activation functions of `torch.nn`."""

from __future__ import annotations

import torch

from lowering.trt.define.converters.math import accurate_expm1, accurate_log1p
from lowering.trt.define.net import Net, Tensor, Value
from lowering.trt.define.registry import converts

aten = torch.ops.aten


@converts(aten.relu.default)
def relu(net: Net, x: Value) -> Tensor:
    return net.relu(x)


@converts(aten.relu6.default)
def relu6(net: Net, x: Value) -> Tensor:
    return net.clamp(x, 0, 6)


@converts(aten.hardtanh.default)
def hardtanh(net: Net, x: Value, min_val: float = -1, max_val: float = 1) -> Tensor:
    return net.clamp(x, min_val, max_val)


@converts(aten.sigmoid.default, aten.special_expit.default)
def sigmoid(net: Net, x: Value) -> Tensor:
    return net.sigmoid(net.cast(x, net.result.dtype))


@converts(aten.tanh.default)
def tanh(net: Net, x: Value) -> Tensor:
    return net.tanh(net.cast(x, net.result.dtype))


@converts(aten.silu.default)
def silu(net: Net, x: Value) -> Tensor:
    return net.mul(x, net.sigmoid(x))


@converts(aten.hardsigmoid.default)
def hardsigmoid(net: Net, x: Value) -> Tensor:
    return net.hard_sigmoid(x)


@converts(aten.hardswish.default)
def hardswish(net: Net, x: Value) -> Tensor:
    return net.mul(x, net.hard_sigmoid(x))


@converts(aten.gelu.default)
def gelu(net: Net, x: Value, approximate: str = "none") -> Tensor:
    return net.activation("GELU_TANH" if approximate == "tanh" else "GELU_ERF", x)


@converts(aten.leaky_relu.default)
def leaky_relu(net: Net, x: Value, negative_slope: float = 0.01) -> Tensor:
    return net.activation("LEAKY_RELU", x, negative_slope)


def _eval_only(training) -> str | None:
    return "random in training mode" if training else None


@converts(aten.rrelu.default, check=_eval_only)
def rrelu(net: Net, x: Value, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Tensor:
    return net.activation("LEAKY_RELU", x, (lower + upper) / 2)


@converts(aten.prelu.default)
def prelu(net: Net, x: Value, weight: Value) -> Tensor:
    rank, channels = net.rank(x), weight.shape[0]
    shape = [channels if i == min(1, rank - 1) and channels != 1 else 1 for i in range(rank)]
    slope = net.cast(net.reshape(weight, shape), net.dtype(x))
    return net.where(net.greater(x, 0.0), x, net.mul(x, slope))


@converts(aten.elu.default)
def elu(net: Net, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    negative = net.mul(accurate_expm1(net, x if input_scale == 1 else net.mul(x, input_scale)), alpha)
    y = net.where(net.greater(x, 0.0), x, negative)
    return y if scale == 1 else net.mul(y, scale)


@converts(aten.selu.default)
def selu(net: Net, x: Value) -> Tensor:
    # the constants of Klambauer et al., "Self-Normalizing Neural Networks"
    return elu(net, x, alpha=1.6732632423543772, scale=1.0507009873554805)


@converts(aten.celu.default)
def celu(net: Net, x: Value, alpha: float = 1.0) -> Tensor:
    return elu(net, x, alpha=alpha, input_scale=1 / alpha)


@converts(aten.softplus.default)
def softplus(net: Net, x: Value, beta: float = 1, threshold: float = 20) -> Tensor:
    scaled = x if beta == 1 else net.mul(x, beta)
    soft = accurate_log1p(net, net.unary("EXP", net.minimum(scaled, float(threshold))))
    return net.where(net.greater(scaled, threshold), x, soft if beta == 1 else net.div(soft, beta))


@converts(aten.log_sigmoid.default)
def log_sigmoid(net: Net, x: Value) -> Tensor:
    tail = accurate_log1p(net, net.unary("EXP", net.unary("NEG", net.unary("ABS", x))))
    return net.sub(net.minimum(x, 0.0), tail)


@converts(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(net: Net, x: Value) -> tuple[Tensor, None]:
    return log_sigmoid(net, x), None


@converts(aten.mish.default)
def mish(net: Net, x: Value) -> Tensor:
    return net.mul(x, net.tanh(softplus(net, x)))


@converts(aten.hardshrink.default)
def hardshrink(net: Net, x: Value, lambd: float = 0.5) -> Tensor:
    inside = net.logical("OR", net.less(net.unary("ABS", x), lambd), net.equal(net.unary("ABS", x), lambd))
    return net.where(inside, 0.0, x, net.dtype(x))


@converts(aten.softshrink.default)
def softshrink(net: Net, x: Value, lambd: float = 0.5) -> Tensor:
    return net.sub(x, net.clamp(x, -float(lambd), float(lambd)))


@converts(aten.threshold.default)
def threshold(net: Net, x: Value, threshold: float, value: float) -> Tensor:
    return net.where(net.greater(x, threshold), x, value, net.dtype(x))


@converts(aten.glu.default)
def glu(net: Net, x: Value, dim: int = -1) -> Tensor:
    half = net.size(x, dim) // 2
    return net.mul(net.narrow(x, dim, 0, half), net.sigmoid(net.narrow(x, dim, half, half)))


@converts(aten.softmax.int, aten._softmax.default)
def softmax(net: Net, x: Value, dim: int, half_to_float: bool = False) -> Tensor:
    x = net.cast(x, net.result.dtype)
    return net.softmax(x, dim) if net.rank(x) else net.div(x, x)


@converts(aten.log_softmax.int, aten._log_softmax.default)
def log_softmax(net: Net, x: Value, dim: int, half_to_float: bool = False) -> Tensor:
    x = net.cast(x, net.result.dtype)
    if not net.rank(x):
        return net.sub(x, x)
    shifted = net.sub(x, net.reduce("MAX", x, [dim], keepdim=True))
    return net.sub(shifted, net.unary("LOG", net.reduce("SUM", net.unary("EXP", shifted), [dim], keepdim=True)))
