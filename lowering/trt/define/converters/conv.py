"""Convolution and transposed convolution in one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lowering.trt.define.net import Net, Tensor, Value
from lowering.trt.define.registry import converts

aten = torch.ops.aten


def spread(value: int | Sequence[int], spatial: int) -> list[int]:
    """One number for all spatial dimensions, or one each."""
    values = [value] if isinstance(value, int) else list(value)
    return values * spatial if len(values) == 1 else values


def as_images(net: Net, x: Value, spatial: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Run `function` on (N, C, 2 or 3 spatial dimensions): TensorRT has no 1-D windows and no unbatched form.

    Args:
        net: the network.
        x: (N, C, spatial...) or, without a batch, (C, spatial...).
        spatial: 1, 2 or 3. For 1, a dimension of size 1 is put in front of it.
        function: gets and returns tensors of that form.
    """
    batched = net.rank(x) == spatial + 2
    new = ([] if batched else [0]) + ([2] if spatial == 1 else [])
    y = function(net.unsqueeze(x, new) if new else net.tensor(x))
    return net.squeeze(y, new) if new else y


def _static_weight(weight) -> str | None:
    if any(not isinstance(d, int) for d in weight.shape):
        return "the kernel has a dynamic size"
    return None


@converts(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, check=_static_weight)
def conv(
    net: Net,
    x: Value,
    weight: Value,
    bias: Value = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Tensor:
    spatial = net.rank(weight) - 2
    pads = [(p, p) for p in spread(padding, spatial)]
    return _conv(net, x, weight, bias, spread(stride, spatial), pads, spread(dilation, spatial), groups)


@converts(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding, check=_static_weight)
def conv_padding(
    net: Net,
    x: Value,
    weight: Value,
    bias: Value = None,
    stride: Sequence[int] = (1,),
    padding: str = "valid",
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Tensor:
    kernel = list(weight.shape)[2:]
    steps = spread(dilation, len(kernel))
    pads = [(0, 0)] * len(kernel)
    if padding == "same":  # the odd one goes to the end
        total = [d * (k - 1) for d, k in zip(steps, kernel, strict=True)]
        pads = [(t // 2, t - t // 2) for t in total]
    return _conv(net, x, weight, bias, spread(stride, len(kernel)), pads, steps, groups)


def _conv(net, x, weight, bias, stride, pads, dilation, groups) -> Tensor:
    spatial = len(stride)
    if spatial == 1:
        weight = _lift(net, weight)
        stride, pads, dilation = [1, *stride], [(0, 0), *pads], [1, *dilation]
    return as_images(net, x, spatial, lambda y: net.convolution(y, weight, bias, stride, pads, dilation, groups))


def _lift(net: Net, weight: Value) -> Value:
    """A 1-D kernel as a 2-D one of height 1."""
    return weight.unsqueeze(2) if isinstance(weight, torch.Tensor) else net.unsqueeze(weight, [2])


@converts(aten.convolution.default, check=_static_weight)
def convolution(net: Net, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups) -> Tensor:
    if transposed:
        return deconv(net, x, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(net, x, weight, bias, stride, padding, dilation, groups)


@converts(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input, check=_static_weight)
def deconv(
    net: Net,
    x: Value,
    weight: Value,
    bias: Value = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> Tensor:
    spatial = net.rank(weight) - 2
    stride, padding = spread(stride, spatial), spread(padding, spatial)
    extra, dilation = spread(output_padding, spatial), spread(dilation, spatial)
    weight = _dilate(net, weight, dilation)
    if spatial == 1:
        weight = _lift(net, weight)
        stride, padding, extra = [1, *stride], [0, *padding], [0, *extra]
    # output_padding undoes part of the cut at the end; what goes beyond the full result is bias only
    beyond = [max(0, e - p) for e, p in zip(extra, padding, strict=True)]
    pads = [(p, max(0, p - e)) for e, p in zip(extra, padding, strict=True)]

    def run(y: Tensor) -> Tensor:
        if not any(beyond):
            return net.deconvolution(y, weight, bias, stride, pads, groups)
        z = net.deconvolution(y, weight, None, stride, pads, groups)
        z = net.pad(z, [0] * net.rank(z), [0, 0, *beyond])
        return z if bias is None else net.sum(z, net.reshape(bias, [-1] + [1] * len(stride)))

    return as_images(net, x, spatial, run)


def _dilate(net: Net, weight: Value, dilation: Sequence[int]) -> Value:
    """Zeros between the kernel's elements: TensorRT refuses stride and dilation together."""
    if isinstance(weight, torch.Tensor):
        sizes = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if list(weight.shape[2:]) == sizes:
            return weight
        spaced = weight.new_zeros(*weight.shape[:2], *sizes)
        spaced[(slice(None), slice(None), *(slice(None, None, d) for d in dilation))] = weight
        return spaced
    for axis, step in enumerate(dilation, start=2):
        dims = list(weight.shape)
        if step == 1 or dims[axis] == 1:
            continue
        split = net.unsqueeze(weight, [axis + 1])
        after = [0] * len(dims) + [0]
        after[axis + 1] = step - 1
        padded = net.pad(split, [0] * len(after), after)
        merged = net.reshape(padded, [*dims[:axis], dims[axis] * step, *dims[axis + 1 :]])
        weight = net.narrow(merged, axis, 0, (dims[axis] - 1) * step + 1)
    return weight
