"""Normalization layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowering.trt.bindings import has
from lowering.trt.define.net import Net, Tensor, Value
from lowering.trt.define.registry import converts

aten = torch.ops.aten


def _per_channel(net: Net, value: Value, rank: int) -> Value:
    """A (C,) vector with the rank of an (N, C, ...) tensor."""
    shape = [1, -1] + [1] * (rank - 2)
    if isinstance(value, torch.Tensor):
        return value.reshape(shape)
    shape[1] = net.size(value, 0)
    return net.reshape(value, shape)


def _affine(net: Net, x: Value, weight: Value, bias: Value, mean: Value, var: Value, eps: float) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` as one product and one sum where all four are constants."""
    rank, dtype = net.rank(x), net.dtype(x)
    if all(v is None or isinstance(v, torch.Tensor) for v in (weight, bias, mean, var)):
        # in double on the host; what remains is x * scale + shift
        scale = (var.double() + eps).rsqrt() * (1 if weight is None else weight.double())
        shift = (0 if bias is None else bias.double()) - mean.double() * scale
        scale, shift = (net.host_cast(_per_channel(net, v, rank), dtype) for v in (scale, shift))
        return net.sum(net.mul(x, scale), shift)
    inverse = net.unary("RECIP", net.unary("SQRT", net.sum(var, eps)))
    scale = inverse if weight is None else net.mul(inverse, weight)
    y = net.mul(net.sub(x, _per_channel(net, mean, rank), dtype), _per_channel(net, scale, rank), dtype)
    return y if bias is None else net.sum(y, _per_channel(net, bias, rank), dtype)


def _batch_statistics(net: Net, x: Value, weight: Value, bias: Value, eps: float) -> Tensor:
    dims = [d for d in range(net.rank(x)) if d != 1]
    rank = net.rank(x)
    centred = net.sub(x, net.mean(x, dims, keepdim=True))
    var = net.mean(net.mul(centred, centred), dims, keepdim=True)
    y = net.div(centred, net.unary("SQRT", net.sum(var, eps)))
    y = y if weight is None else net.mul(y, _per_channel(net, weight, rank), net.dtype(x))
    return y if bias is None else net.sum(y, _per_channel(net, bias, rank), net.dtype(x))


@converts(aten.batch_norm.default)
def batch_norm(net: Net, x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled) -> Tensor:
    if training or running_mean is None:
        return _batch_statistics(net, x, weight, bias, eps)
    return _affine(net, x, weight, bias, running_mean, running_var, eps)


@converts(aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(net: Net, x, weight, bias, running_mean, running_var, momentum, eps) -> tuple:
    return _affine(net, x, weight, bias, running_mean, running_var, eps), None, None


@converts(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(net: Net, x, weight, bias, training, momentum, eps) -> tuple:
    return _batch_statistics(net, x, weight, bias, eps), None, None


@converts(aten.layer_norm.default)
def layer_norm(
    net: Net, x, normalized_shape: Sequence[int], weight=None, bias=None, eps=1e-5, cudnn_enable=True
) -> Tensor:
    return _layer_norm(net, x, normalized_shape, weight, bias, eps)


@converts(aten.native_layer_norm.default)
def native_layer_norm(net: Net, x, normalized_shape: Sequence[int], weight, bias, eps: float) -> tuple:
    return _layer_norm(net, x, normalized_shape, weight, bias, eps), None, None


def _layer_norm(net: Net, x: Value, shape: Sequence[int], weight: Value, bias: Value, eps: float) -> Tensor:
    dims = list(range(-len(shape), 0))
    if net.rank(x) == len(shape):  # the layer wants a dimension that it does not normalize
        return net.squeeze(_layer_norm(net, net.unsqueeze(x, [0]), shape, weight, bias, eps), [0])
    scale = torch.ones(tuple(shape)) if weight is None else weight
    shift = torch.zeros(tuple(shape)) if bias is None else bias
    return net.normalization(x, scale, shift, dims, eps)


def _known_channels(x, result) -> str | None:
    fake = result[0] if isinstance(result, tuple | list) else result
    return None if isinstance(fake.shape[1], int) else "the number of channels is dynamic"


@converts(aten.group_norm.default, check=_known_channels)
def group_norm(net: Net, x, num_groups: int, weight=None, bias=None, eps: float = 1e-5, cudnn_enabled=True) -> Tensor:
    return _group_norm(net, x, num_groups, weight, bias, eps)


@converts(aten.native_group_norm.default, check=_known_channels)
def native_group_norm(net: Net, x, weight, bias, N, C, HxW, group: int, eps: float) -> tuple:
    return _group_norm(net, x, group, weight, bias, eps), None, None


def _group_norm(net: Net, x: Value, groups: int, weight: Value, bias: Value, eps: float) -> Tensor:
    rank, channels = net.rank(x), net.size(x, 1)
    dims = net.dims(x)
    # rank 4 for the layer: (N, C, 1, 1) for plain features, (N, C, 1, L) for sequences, volumes flattened
    y = net.reshape(x, [*dims[:2], *([1, 1] if rank == 2 else [1, dims[2]])]) if rank < 4 else net.tensor(x)
    y = net.flatten(y, 3) if rank > 4 else y
    shape = [1, channels, 1, 1]
    scale = torch.ones(shape) if weight is None else net.reshape(weight, shape)
    shift = torch.zeros(shape) if bias is None else net.reshape(bias, shape)
    y = _grouped_layer(net, y, groups, scale, shift, eps)
    return y if rank == 4 else net.reshape(y, dims)


def _grouped_layer(net: Net, x: Tensor, groups: int, scale: Value, shift: Value, eps: float) -> Tensor:
    dtype = net.dtype(x)
    if groups == 1:  # the layer takes one group for none: over channels and positions it is a plain normalization
        return net.normalization(x, scale, shift, [1, 2, 3], eps)
    if has("INetworkDefinition.add_normalization_v2"):
        layer = net.definition.add_normalization_v2(x, net.tensor(scale, dtype), net.tensor(shift, dtype), 0b1100)
    else:  # the first form scales per group, torch per channel
        ones = torch.ones(1, groups, 1, 1, dtype=dtype)
        layer = net.definition.add_normalization(x, net.tensor(ones), net.tensor(ones * 0), 0b1100)
    net.check("normalization", refused=layer is None)
    layer.num_groups = groups
    layer.epsilon = eps
    y = net.add("normalization", layer)
    if has("INetworkDefinition.add_normalization_v2"):
        return y
    return net.sum(net.mul(y, scale, dtype), shift, dtype)


@converts(aten.instance_norm.default)
def instance_norm(
    net: Net, x, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled
) -> Tensor:
    if not use_input_stats:
        return _affine(net, x, weight, bias, running_mean, running_var, eps)
    dims = list(range(2, net.rank(x)))
    centred = net.sub(x, net.mean(x, dims, keepdim=True))
    var = net.mean(net.mul(centred, centred), dims, keepdim=True)
    y = net.div(centred, net.unary("SQRT", net.sum(var, eps)))
    y = y if weight is None else net.mul(y, _per_channel(net, weight, net.rank(x)), net.dtype(x))
    return y if bias is None else net.sum(y, _per_channel(net, bias, net.rank(x)), net.dtype(x))


@converts(aten.rms_norm.default, aten._fused_rms_norm.default)
def rms_norm(net: Net, x: Value, normalized_shape: Sequence[int], weight: Value = None, eps: float | None = None):
    dims = list(range(-len(normalized_shape), 0))
    dtype = net.dtype(x)
    eps = torch.finfo(dtype).eps if eps is None else eps

    def normalize(y: Tensor) -> Tensor:
        # in float32, as torch does for half precision: squares overflow there
        square = net.mean(net.mul(y, y), dims, keepdim=True)
        z = net.div(y, net.unary("SQRT", net.sum(square, eps)))
        return z if weight is None else net.mul(z, weight, net.dtype(z))

    y = net.in_dtype(torch.float32, x, normalize)
    return y if isinstance(net.result, torch.Tensor) else (y, None)
