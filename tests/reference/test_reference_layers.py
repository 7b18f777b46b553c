"""Layers of the reference executor that the ONNX route reaches seldom or not at all, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference_net import Net, values

trt = pytest.importorskip("tensorrt_rtx")


def run(build, *inputs):
    """The first output of a network of one layer: `build` gets the network and its inputs."""
    net = Net()
    tensors = [net.input(f"x{i}", *x.shape, dtype=x.dtype) for i, x in enumerate(inputs)]
    layer = build(net, *tensors)
    return net.finish(layer.get_output(0)).run(*inputs)[0]


POOLS = {
    "max_padded": ("MAX", (3, 3), (2, 2), (1, 1), (1, 1), "EXPLICIT_ROUND_DOWN", True),
    "max_wide_padding": ("MAX", (2, 2), (2, 2), (1, 0), (2, 1), "EXPLICIT_ROUND_DOWN", True),
    "average_counting_padding": ("AVERAGE", (3, 3), (2, 2), (1, 1), (1, 1), "EXPLICIT_ROUND_DOWN", False),
    "average_without_padding": ("AVERAGE", (3, 3), (2, 2), (1, 1), (1, 1), "EXPLICIT_ROUND_DOWN", True),
    "average_asymmetric": ("AVERAGE", (3, 2), (2, 1), (1, 0), (0, 1), "EXPLICIT_ROUND_DOWN", False),
    "average_asymmetric_without": ("AVERAGE", (3, 2), (2, 1), (1, 0), (0, 1), "EXPLICIT_ROUND_DOWN", True),
    "average_round_up": ("AVERAGE", (3, 3), (2, 2), (0, 0), (0, 0), "EXPLICIT_ROUND_UP", True),
    "max_round_up": ("MAX", (3, 3), (2, 2), (0, 0), (0, 0), "EXPLICIT_ROUND_UP", True),
    "average_same_upper": ("AVERAGE", (3, 3), (2, 2), (0, 0), (0, 0), "SAME_UPPER", True),
    "average_same_lower": ("AVERAGE", (3, 3), (2, 2), (0, 0), (0, 0), "SAME_LOWER", True),
}


@pytest.mark.parametrize("case", POOLS.values(), ids=POOLS)
def test_pooling_follows_its_definition(case):
    """Each window by hand: maximum or mean of the elements it covers, the divisor as documented."""
    kind, size, stride, before, after, mode, exclusive = case
    x = values(1, 2, 8, 10)

    def build(net, tensor):
        layer = net.add_pooling_nd(tensor, getattr(trt.PoolingType, kind), size)
        layer.stride_nd, layer.pre_padding, layer.post_padding = stride, before, after
        layer.padding_mode = getattr(trt.PaddingMode, mode)
        layer.average_count_excludes_padding = exclusive
        return layer

    got = run(build, x)
    before, after = same_padding(mode, x.shape[2:], size, stride, before, after)
    for i in range(got.shape[2]):
        for j in range(got.shape[3]):
            top, left = i * stride[0] - before[0], j * stride[1] - before[1]
            window = x[0, :, max(top, 0) : top + size[0], max(left, 0) : left + size[1]]
            if kind == "MAX":
                want = window.amax((1, 2))
            else:
                rows = min(top + size[0], 8 + after[0]) - top
                columns = min(left + size[1], 10 + after[1]) - left
                want = window.sum((1, 2)) / (window[0].numel() if exclusive else rows * columns)
            torch.testing.assert_close(got[0, :, i, j], want)


def same_padding(mode, spatial, size, stride, before, after):
    if mode.startswith("EXPLICIT"):
        return before, after
    totals = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(spatial, size, stride, strict=True)]
    small = tuple(t // 2 for t in totals)
    large = tuple(t - t // 2 for t in totals)
    return (small, large) if mode == "SAME_UPPER" else (large, small)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True], ids=["convolution", "deconvolution"])
def test_grouped_convolutions(groups, transposed):
    x = values(2, 4, 7, 9)
    kernel = values(4, 8 // groups, 3, 3, seed=1) if transposed else values(8, 4 // groups, 3, 3, seed=1)
    bias = values(8, seed=2)

    def build(net, tensor):
        net.kept += [kernel.numpy(), bias.numpy()]
        add = net.add_deconvolution_nd if transposed else net.add_convolution_nd
        layer = add(tensor, 8, (3, 3), net.kept[-2], net.kept[-1])
        layer.stride_nd, layer.pre_padding, layer.post_padding, layer.num_groups = (2, 1), (1, 0), (1, 0), groups
        return layer

    torch_function = F.conv_transpose2d if transposed else F.conv2d
    torch.testing.assert_close(run(build, x), torch_function(x, kernel, bias, (2, 1), (1, 0), groups=groups))


def test_transposed_convolution_crops_asymmetrically():
    """Output padding in torch is less padding after, in TensorRT."""
    x, kernel = values(1, 3, 5, 5), values(3, 2, 3, 3, seed=1)

    def build(net, tensor):
        net.kept.append(kernel.numpy())
        layer = net.add_deconvolution_nd(tensor, 2, (3, 3), net.kept[-1])
        layer.stride_nd, layer.pre_padding, layer.post_padding = (2, 2), (1, 1), (0, 0)
        return layer

    torch.testing.assert_close(run(build, x), F.conv_transpose2d(x, kernel, None, 2, 1, output_padding=1))


RESIZES = {
    "nearest": ("NEAREST", "ASYMMETRIC", "FLOOR", {"mode": "nearest"}),
    "nearest_exact": ("NEAREST", "HALF_PIXEL", "HALF_UP", {"mode": "nearest-exact"}),
    "bilinear": ("LINEAR", "HALF_PIXEL", "FLOOR", {"mode": "bilinear", "align_corners": False}),
    "bilinear_corners": ("LINEAR", "ALIGN_CORNERS", "FLOOR", {"mode": "bilinear", "align_corners": True}),
    "bicubic": ("CUBIC", "HALF_PIXEL", "FLOOR", {"mode": "bicubic", "align_corners": False}),
    "bicubic_corners": ("CUBIC", "ALIGN_CORNERS", "FLOOR", {"mode": "bicubic", "align_corners": True}),
}


@pytest.mark.parametrize("size", [(14, 9), (5, 4), (1, 1), (7, 6)], ids=str)
@pytest.mark.parametrize("case", RESIZES.values(), ids=RESIZES)
def test_resize_is_interpolate(case, size):
    mode, transformation, rounding, arguments = case
    x = values(2, 3, 7, 6)

    def build(net, tensor):
        layer = net.add_resize(tensor)
        layer.shape = (2, 3, *size)
        layer.resize_mode = getattr(trt.InterpolationMode, mode)
        layer.coordinate_transformation = getattr(trt.ResizeCoordinateTransformation, transformation)
        layer.nearest_rounding = getattr(trt.ResizeRoundMode, rounding)
        layer.cubic_coeff = -0.75
        return layer

    torch.testing.assert_close(run(build, x), F.interpolate(x, size=size, **arguments), rtol=1e-5, atol=1e-5)


SLICES = {  # values seen in NVIDIA's own constant folding of [1, 2, 3], start -2, size 7
    "WRAP": [2, 3, 1, 2, 3, 1, 2],
    "CLAMP": [1, 1, 1, 2, 3, 3, 3],
    "FILL": [0, 0, 1, 2, 3, 0, 0],
    "REFLECT": [3, 2, 1, 2, 3, 2, 1],
}


@pytest.mark.parametrize(("mode", "want"), SLICES.items(), ids=SLICES)
def test_slice_outside(mode, want):
    def build(net, tensor):
        layer = net.add_slice(tensor, (-2,), (7,), (1,))
        layer.mode = getattr(trt.SampleMode, mode)
        return layer

    assert run(build, torch.tensor([1.0, 2.0, 3.0])).tolist() == want


def test_slice_backwards_and_in_place():
    x = values(3, 4)
    flipped = run(lambda net, t: net.add_slice(t, (2, 3), (3, 4), (-1, -1)), x)
    assert torch.equal(flipped, x.flip(0, 1))
    expanded = run(lambda net, t: net.add_slice(t, (0, 0), (5, 4), (0, 1)), x[:1])
    assert torch.equal(expanded, x[:1].expand(5, 4))


def test_integer_arithmetic_truncates_and_floors():
    a, b = torch.tensor([-7, 7, -8]), torch.tensor([2, -2, 3])
    op = trt.ElementWiseOperation
    assert run(lambda net, x, y: net.add_elementwise(x, y, op.DIV), a, b).tolist() == [-3, -3, -2]
    assert run(lambda net, x, y: net.add_elementwise(x, y, op.FLOOR_DIV), a, b).tolist() == [-4, -4, -3]
    assert run(lambda net, x: net.add_reduce(x, trt.ReduceOperation.AVG, 1, False), a).tolist() == -2


def test_normalization_by_group_both_ways():
    x = values(2, 6, 4, 5)
    scale, bias = values(1, 6, 1, 1, seed=1), values(1, 6, 1, 1, seed=2)

    def v2(net, tensor):
        layer = net.add_normalization_v2(tensor, net.constant(scale), net.constant(bias), 0b1100)
        layer.num_groups, layer.epsilon = 3, 1e-3
        return layer

    want = F.group_norm(x, 3, scale.flatten(), bias.flatten(), eps=1e-3)
    torch.testing.assert_close(run(v2, x), want)

    def v1(net, tensor):
        layer = net.add_normalization(tensor, net.constant(scale[:, ::2]), net.constant(bias[:, ::2]), 0b1100)
        layer.num_groups, layer.epsilon = 3, 1e-3
        return layer

    per_group = [value.flatten()[::2].repeat_interleave(2) for value in (scale, bias)]
    torch.testing.assert_close(run(v1, x), F.group_norm(x, 3, *per_group, eps=1e-3))


@pytest.mark.parametrize("kind", ["NONE", "UPPER_LEFT", "LOWER_RIGHT"])
def test_attention_scales_nothing(kind):
    q, k, v = values(2, 4, 3, 8), values(2, 2, 5, 8, seed=1), values(2, 2, 5, 8, seed=2)

    def build(net, *tensors):
        softmax = trt.AttentionNormalizationOp.SOFTMAX
        layer = net.add_attention_v2(*tensors, softmax, getattr(trt.CausalMaskKind, kind))
        layer.decomposable = True
        return layer

    mask = {
        "NONE": torch.ones(3, 5, dtype=torch.bool),
        "UPPER_LEFT": torch.ones(3, 5, dtype=torch.bool).tril(),
        "LOWER_RIGHT": torch.ones(3, 5, dtype=torch.bool).tril(2),
    }[kind]
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0, enable_gqa=True)
    torch.testing.assert_close(run(build, q, k, v), want, rtol=1e-5, atol=1e-5)


def test_scale_layer_by_channel():
    x = values(2, 3, 4, 4).abs()
    shift, scale, power = (np.array(v, np.float32) for v in ([1, 2, 3], [0.5, 1, 2], [1, 2, 3]))
    got = run(lambda net, t: net.add_scale(t, trt.ScaleMode.CHANNEL, shift, scale, power), x)
    parts = [torch.from_numpy(v).reshape(3, 1, 1) for v in (scale, shift, power)]
    torch.testing.assert_close(got, (x * parts[0] + parts[1]) ** parts[2])


def test_gather_with_a_batch_dimension():
    data, index = values(2, 5, 3), torch.tensor([[4, 0], [1, 1]], dtype=torch.int32)

    def build(net, d, i):
        layer = net.add_gather_v2(d, i, trt.GatherMode.DEFAULT)
        layer.axis, layer.num_elementwise_dims = 1, 1
        return layer

    assert torch.equal(run(build, data, index), torch.stack([data[0, [4, 0]], data[1, [1, 1]]]))


def test_topk_prefers_the_first_of_equals():
    got = run(lambda net, t: net.add_topk(t, trt.TopKOperation.MAX, 3, 2), torch.tensor([[1.0, 5.0, 5.0, 5.0, 0.0]]))
    assert got.tolist() == [[5.0, 5.0, 5.0]]
    net = Net()
    layer = net.add_topk(net.input("x", 1, 5), trt.TopKOperation.MIN, 2, 2)
    values_, indices = net.finish(layer.get_output(0), layer.get_output(1)).run(
        torch.tensor([[2.0, 1.0, 1.0, 0.5, 9.0]])
    )
    assert values_.tolist() == [[0.5, 1.0]]
    assert indices.tolist() == [[3, 1]]


def test_weights_that_are_owned_are_taken_over_and_others_copied():
    import tensorrt_rtx as trt

    from lowering.trt.bindings import logger
    from lowering.trt.reference import read_network

    kept = [torch.ones(4), torch.ones(4)]
    definition = trt.Builder(logger()).create_network(0)
    x = definition.add_input("x", trt.float32, (4,))
    for value in kept:
        weights = trt.Weights(trt.float32, value.data_ptr(), value.numel())
        x = definition.add_elementwise(
            x, definition.add_constant((4,), weights).get_output(0), trt.ElementWiseOperation.SUM
        ).get_output(0)
    definition.mark_output(x)
    network = read_network(definition, kept[:1])
    pointers = [value.data_ptr() for value in network.record.weights.values()]
    assert pointers[0] == kept[0].data_ptr()
    assert pointers[1] != kept[1].data_ptr()
    kept[1].zero_()  # the caller's own: the record does not follow
    assert torch.equal(network.run(torch.zeros(4))[0], torch.full((4,), 2.0))
