"""Converters of convolution, pooling, resize, padding and sampling."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trt_checks import Case, check

torch.manual_seed(0)
X1 = torch.randn(2, 4, 11)
X2 = torch.randn(2, 4, 9, 11)
X3 = torch.randn(2, 4, 5, 6, 7)


def conv(dims: int, *args, **kwargs) -> tuple[str, nn.Module, tuple[Tensor, ...]]:
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](*args, **kwargs)
    return (f"conv{dims}d{args[1:]}{kwargs}".replace(" ", ""), layer, ((X1, X2, X3)[dims - 1],))


def deconv(dims: int, *args, **kwargs) -> tuple[str, nn.Module, tuple[Tensor, ...]]:
    layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1](*args, **kwargs)
    return (f"deconv{dims}d{args[1:]}{kwargs}".replace(" ", ""), layer, ((X1, X2, X3)[dims - 1],))


CONVOLUTIONS = [
    conv(1, 4, 6, 3),
    conv(1, 4, 6, 3, stride=2, padding=2, dilation=2, groups=2, bias=False),
    conv(1, 4, 6, 4, padding="same"),
    conv(2, 4, 6, 3),
    conv(2, 4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
    conv(2, 4, 8, 3, groups=4),
    conv(2, 4, 6, 3, groups=2, bias=False),
    conv(2, 4, 6, (2, 4), padding="same", dilation=(1, 2)),
    conv(2, 4, 6, 3, padding="valid"),
    conv(2, 4, 6, 3, padding=1, padding_mode="reflect"),
    conv(2, 4, 6, 3, padding=1, padding_mode="circular"),
    conv(3, 4, 6, 3, padding=1),
    conv(3, 4, 4, (2, 1, 3), stride=(1, 2, 1), dilation=(2, 1, 1), groups=4),
    deconv(1, 4, 6, 3, stride=2),
    deconv(1, 4, 6, 3, stride=2, padding=1, output_padding=1, dilation=2),
    deconv(2, 4, 6, 2, stride=2),
    deconv(2, 4, 6, 3, stride=2, padding=1, output_padding=1),
    deconv(2, 4, 6, 3, stride=(2, 3), padding=(0, 1), output_padding=(1, 0), bias=False),
    deconv(2, 4, 6, 3, stride=3, output_padding=2),
    deconv(2, 4, 6, 3, stride=2, dilation=2, padding=1),
    deconv(2, 4, 6, 3, dilation=(1, 2)),
    deconv(2, 4, 6, 3, stride=2, groups=2),
    deconv(2, 4, 4, 3, groups=4),
    deconv(3, 4, 2, 2, stride=2),
    deconv(3, 4, 2, 3, stride=(1, 2, 1), padding=1, output_padding=(0, 1, 0)),
    ("conv2d_unbatched", nn.Conv2d(4, 6, 3), (X2[0],)),
    ("conv1d_unbatched", nn.Conv1d(4, 6, 3), (X1[0],)),
    ("deconv2d_unbatched", nn.ConvTranspose2d(4, 6, 3), (X2[0],)),
    ("conv2d_runtime_weight", F.conv2d, (X2, torch.randn(6, 4, 3, 3), torch.randn(6))),
    ("deconv_runtime_weight_dilated", lambda x, w: F.conv_transpose2d(x, w, stride=2, dilation=(2, 3)),
     (X2, torch.randn(4, 6, 3, 2))),
]  # fmt: skip


def pool(name: str, layer: nn.Module, x: Tensor) -> tuple[str, nn.Module, tuple[Tensor, ...]]:
    return (name, layer, (x,))


class MaxPoolIndicesIgnored(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 2, return_indices=True)[0]


BF16 = [
    ("bfloat16_conv", nn.Conv2d(4, 6, 3).bfloat16(), (X2.bfloat16(),)),
    ("bfloat16_deconv", nn.ConvTranspose2d(4, 6, 3, stride=2).bfloat16(), (X2.bfloat16(),)),
    ("bfloat16_deconv1d", nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1).bfloat16(), (X1.bfloat16(),)),
    ("bfloat16_deconv_runtime_weight", F.conv_transpose2d, (X2.bfloat16(), torch.randn(4, 6, 3, 3).bfloat16())),
]


POOLING = [
    pool("max1d", nn.MaxPool1d(3, 2, 1), X1),
    pool("max2d", nn.MaxPool2d(3, 2, 1), X2),
    pool("max2d_ceil", nn.MaxPool2d(3, 2, 1, ceil_mode=True), X2),
    pool("max2d_ceil_window_in_padding", nn.MaxPool2d(2, 3, 1, ceil_mode=True), X2),
    pool("max2d_rectangular", nn.MaxPool2d((2, 3), (1, 2), (1, 0)), X2),
    pool("max2d_dilated", nn.MaxPool2d(3, 2, 1, dilation=2), X2),
    pool("max2d_dilated_ceil", nn.MaxPool2d(2, 2, 1, dilation=(2, 3), ceil_mode=True), X2),
    pool("max1d_dilated", nn.MaxPool1d(3, 1, 1, dilation=2), X1),
    pool("max3d", nn.MaxPool3d(2, 2, 1), X3),
    pool("max3d_ceil", nn.MaxPool3d(2, 2, ceil_mode=True), X3),
    pool("max2d_unbatched", nn.MaxPool2d(2), X2[0]),
    pool("max2d_values_of_pair", MaxPoolIndicesIgnored(), X2),
    pool("avg1d", nn.AvgPool1d(3, 2, 1), X1),
    pool("avg1d_excluding", nn.AvgPool1d(3, 2, 1, count_include_pad=False), X1),
    pool("avg2d", nn.AvgPool2d(3, 2, 1), X2),
    pool("avg2d_excluding", nn.AvgPool2d(3, 2, 1, count_include_pad=False), X2),
    pool("avg2d_ceil", nn.AvgPool2d(3, 2, 1, ceil_mode=True), X2[..., :8, :8]),
    pool("avg2d_ceil_excluding", nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), X2[..., :8, :8]),
    pool("avg2d_ceil_no_padding", nn.AvgPool2d(2, 2, ceil_mode=True), X2),
    pool("avg2d_divisor", nn.AvgPool2d((2, 3), divisor_override=5), X2),
    pool("avg2d_divisor_ceil", nn.AvgPool2d(3, 2, 1, ceil_mode=True, divisor_override=4), X2[..., :8, :8]),
    pool("avg3d", nn.AvgPool3d(2, padding=1), X3),
    pool("avg3d_ceil", nn.AvgPool3d((2, 3, 2), 2, (1, 1, 0), ceil_mode=True), X3),
    pool("lp2d", nn.LPPool2d(2, 3, 2), X2),
    pool("lp1d_ceil", nn.LPPool1d(3, 3, 2, ceil_mode=True), X1.abs()),
    pool("adaptive_avg_one", nn.AdaptiveAvgPool2d(1), X2),
    pool("adaptive_avg_divides", nn.AdaptiveAvgPool2d((3, 1)), X2),
    pool("adaptive_avg_uneven", nn.AdaptiveAvgPool2d((4, 7)), X2),
    pool("adaptive_avg_larger", nn.AdaptiveAvgPool2d((12, 11)), X2),
    pool("adaptive_avg_none", nn.AdaptiveAvgPool2d((None, 5)), X2),
    pool("adaptive_avg1d", nn.AdaptiveAvgPool1d(4), X1),
    pool("adaptive_avg3d", nn.AdaptiveAvgPool3d((2, 3, 1)), X3),
    pool("adaptive_max_one", nn.AdaptiveMaxPool2d(1), X2),
    pool("adaptive_max_divides", nn.AdaptiveMaxPool2d((3, 11)), X2),
    pool("adaptive_max_uneven", nn.AdaptiveMaxPool2d((4, 7)), X2),
    pool("adaptive_max1d", nn.AdaptiveMaxPool1d(4), X1),
    pool("adaptive_max3d", nn.AdaptiveMaxPool3d(2), X3),
    pool("adaptive_avg_unbatched", nn.AdaptiveAvgPool2d(2), X2[0]),
]


def resize(name: str, x: Tensor, **options) -> tuple[str, nn.Module, tuple[Tensor, ...]]:
    class Resize(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.interpolate(x, **options)

    return (f"{name}_{options}".replace(" ", "").replace("'", ""), Resize(), (x,))


RESIZE = [
    resize("2d", X2, size=(18, 22)),
    resize("2d", X2, size=(5, 20)),
    resize("2d", X2, scale_factor=2),
    resize("2d", X2, scale_factor=1.7),
    resize("2d", X2, scale_factor=1.7, recompute_scale_factor=True),
    resize("1d", X1, scale_factor=2),
    resize("1d", X1, scale_factor=1.3),
    resize("3d", X3, size=(7, 6, 10)),
    resize("2d", X2, size=(13, 7), mode="nearest-exact"),
    resize("2d", X2, scale_factor=1.3, mode="nearest-exact"),
    resize("1d", X1, size=7, mode="nearest-exact"),
    resize("1d", X1, size=17, mode="linear"),
    resize("1d", X1, size=17, mode="linear", align_corners=True),
    resize("2d", X2, size=(17, 5), mode="bilinear"),
    resize("2d", X2, size=(17, 5), mode="bilinear", align_corners=True),
    resize("2d", X2, size=(1, 5), mode="bilinear", align_corners=True),
    resize("2d", X2, scale_factor=2, mode="bilinear"),
    resize("2d", X2, scale_factor=1.7, mode="bilinear"),
    resize("2d", X2, scale_factor=(2.0, 0.6), mode="bilinear", align_corners=True),
    resize("2d", X2, size=(5, 6), mode="bilinear", antialias=True),
    resize("2d", X2, size=(17, 5), mode="bicubic"),
    resize("2d", X2, size=(17, 5), mode="bicubic", align_corners=True),
    resize("2d", X2, scale_factor=1.7, mode="bicubic"),
    resize("2d", X2, size=(5, 6), mode="bicubic", antialias=True),
    resize("3d", X3, size=(7, 6, 10), mode="trilinear"),
    resize("3d", X3, scale_factor=2, mode="trilinear", align_corners=True),
]

PADDING = [
    ("constant", lambda x: F.pad(x, (1, 2, 3, 0), value=0.5), (X2,)),
    ("constant_negative", lambda x: F.pad(x, (-1, 2, -2, -1)), (X2,)),
    ("constant_int", lambda x: F.pad(x, (1, 2), value=7), (torch.arange(6).view(2, 3),)),
    ("constant_bool", lambda x: F.pad(x, (1, 2), value=True), (torch.tensor([[True, False]]),)),
    ("constant_batch", lambda x: F.pad(x, (0, 0, 0, 0, 1, 1, 2, 0)), (X2,)),
    ("reflect", lambda x: F.pad(x, (3, 2, 1, 4), mode="reflect"), (X2,)),
    ("reflect_1d", lambda x: F.pad(x, (3, 2), mode="reflect"), (X1,)),
    ("reflect_3d", lambda x: F.pad(x, (3, 2, 1, 1, 2, 0), mode="reflect"), (X3,)),
    ("replicate", lambda x: F.pad(x, (3, 2, 1, 4), mode="replicate"), (X2,)),
    ("replicate_3d", lambda x: F.pad(x, (3, 2, 1, 1, 2, 0), mode="replicate"), (X3,)),
    ("circular", lambda x: F.pad(x, (3, 2, 1, 4), mode="circular"), (X2,)),
    ("zero_pad_layer", nn.ZeroPad2d((1, 0, 2, 1)), (X2,)),
    ("constant_1d_layer", nn.ConstantPad1d(2, -1.5), (X1,)),
]

GRID = torch.rand(2, 5, 6, 2) * 2.6 - 1.3
SAMPLING = [
    (f"grid_{mode}_{border}_{corners}",
     lambda x, g, mode=mode, border=border, corners=corners: F.grid_sample(x, g, mode, border, corners), (X2, GRID))
    for mode in ("bilinear", "nearest", "bicubic")
    for border in ("zeros", "border", "reflection")
    for corners in (False, True)
] + [
    ("grid_3d", lambda x, g: F.grid_sample(x, g, align_corners=True), (X3, torch.rand(2, 3, 4, 5, 3) * 2 - 1)),
    ("affine_grid", lambda t: F.affine_grid(t, [2, 4, 5, 6], align_corners=False), (torch.randn(2, 2, 3),)),
    ("affine_grid_3d", lambda t: F.affine_grid(t, [2, 4, 3, 5, 6], align_corners=True), (torch.randn(2, 3, 4),)),
]  # fmt: skip

DYNAMIC = [
    Case("conv_batch_and_size", nn.Conv2d(4, 6, 3, stride=2, padding=1), (X2,), {0: (1, 8), 2: (4, 32), 3: (4, 32)},
         ((torch.randn(1, 4, 4, 7),), (torch.randn(8, 4, 32, 5),))),
    Case("deconv_batch", nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, padding=1), (X2,), {0: (1, 8)},
         ((X2[:1],),)),
    Case("conv1d_batch", nn.Conv1d(4, 6, 3), (X1,), {0: (1, 4), 2: (3, 20)}, ((torch.randn(1, 4, 3),),)),
    Case("avg_ceil_batch", nn.AvgPool2d(3, 2, 1, ceil_mode=True), (X2,), {0: (1, 4)}, ((X2[:1],),)),
    Case("max_dilated_size", nn.MaxPool2d(3, 2, 1, dilation=2), (X2,), {2: (5, 20), 3: (5, 20)},
         ((torch.randn(2, 4, 5, 12),),)),
    Case("adaptive_one_size", nn.AdaptiveAvgPool2d(1), (X2,), {0: (1, 4), 2: (1, 20), 3: (1, 20)},
         ((torch.randn(1, 4, 3, 20),),)),
    Case("adaptive_max_uneven_batch", nn.AdaptiveMaxPool2d((4, 7)), (X2,), {0: (1, 4)}, ((X2[:1],),)),
    Case("nearest_twice_size", lambda x: F.interpolate(x, scale_factor=2), (X2,), {0: (1, 4), 2: (2, 20), 3: (2, 20)},
         ((torch.randn(1, 4, 3, 20),),)),
    Case("bilinear_fixed_target", lambda x: F.interpolate(x, size=(7, 8), mode="bilinear"), (X2,),
         {0: (1, 4), 2: (2, 20), 3: (2, 20)}, ((torch.randn(1, 4, 3, 20),),)),
    Case("bilinear_like_other", lambda x, y: F.interpolate(x, size=y.shape[2:], mode="bilinear", align_corners=True),
         (X2, torch.randn(2, 1, 20, 13)), {0: (1, 4)}, ((X2[:1], torch.randn(1, 1, 20, 13)),)),
    Case("pad_size", lambda x: F.pad(x, (1, 2, 0, 3), mode="reflect"), (X2,), {0: (1, 4), 2: (4, 20), 3: (4, 20)},
         ((torch.randn(1, 4, 4, 20),),)),
    Case("grid_batch", lambda x, g: F.grid_sample(x, g, align_corners=False), (X2, GRID), {0: (1, 4)},
         ((X2[:1], GRID[:1]),)),
]  # fmt: skip

CASES = [Case(*row) for row in CONVOLUTIONS + BF16 + POOLING + RESIZE + PADDING + SAMPLING] + DYNAMIC


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_windows(case: Case) -> None:
    check(case)
