"""torchvision's detectors: backbone and heads in segments, box decoding and NMS in Python, the same boxes as eager."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from lowering import load, lower_to_onnx, lower_to_trt

pytestmark = pytest.mark.zoo
detection = pytest.importorskip("torchvision.models.detection")
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator  # noqa: E402
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign  # noqa: E402


def images(count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(3, 48, 56, generator=generator) for _ in range(count)]


def stage(channels, out):
    return nn.Sequential(nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


class Backbone(nn.Module):
    """Two levels of a feature pyramid, as torchvision's own backbones return them."""

    def __init__(self, pyramid=True, out=16, width=16):
        super().__init__()
        self.out_channels = out
        torch.manual_seed(0)
        self.first, self.second, self.third = stage(3, width), stage(width, width), stage(width, width)
        self.pyramid = FeaturePyramidNetwork([width, width], out) if pyramid else None

    def forward(self, x):
        y = self.second(self.first(x))
        levels = OrderedDict([("0", y), ("1", self.third(y))])
        return levels if self.pyramid is None else self.pyramid(levels)


ANCHORS = {"sizes": ((16,), (32,)), "aspect_ratios": ((0.5, 1.0, 2.0),) * 2}
SIZE = {"min_size": 48, "max_size": 64}
REGIONS = {
    "rpn_anchor_generator": AnchorGenerator(**ANCHORS),
    "rpn_post_nms_top_n_test": 12,
    "box_detections_per_img": 6,
    "box_score_thresh": 0.0,
    **SIZE,
}


def pool(size):
    return MultiScaleRoIAlign(featmap_names=["0", "1"], output_size=size, sampling_ratio=2)


def regions(cls, **more):
    head = detection.faster_rcnn.TwoMLPHead(16 * 9, 24)
    predictor = detection.faster_rcnn.FastRCNNPredictor(24, 4)
    return cls(Backbone(), box_roi_pool=pool(3), box_head=head, box_predictor=predictor, **REGIONS, **more)


def faster_rcnn():
    return regions(detection.FasterRCNN)


def mask_rcnn():
    head, predictor = detection.mask_rcnn.MaskRCNNHeads(16, (8,), 1), detection.mask_rcnn.MaskRCNNPredictor(8, 8, 4)
    return regions(detection.MaskRCNN, mask_roi_pool=pool(6), mask_head=head, mask_predictor=predictor)


def keypoint_rcnn():
    head = detection.keypoint_rcnn.KeypointRCNNHeads(16, (8,))
    predictor = detection.keypoint_rcnn.KeypointRCNNPredictor(8, 5)
    return regions(detection.KeypointRCNN, keypoint_roi_pool=pool(6), keypoint_head=head, keypoint_predictor=predictor)


def retinanet():
    options = {"anchor_generator": AnchorGenerator(**ANCHORS), "score_thresh": 0.0, "detections_per_img": 6, **SIZE}
    return detection.RetinaNet(Backbone(), 4, **options)


def fcos():
    anchors = AnchorGenerator(sizes=((8,), (16,)), aspect_ratios=((1.0,),) * 2)
    options = {"anchor_generator": anchors, "score_thresh": 0.0, "detections_per_img": 6, **SIZE}
    return detection.FCOS(Backbone(out=32), 4, **options)


def ssd():
    anchors = DefaultBoxGenerator([[2], [2]])
    head = detection.ssd.SSDHead([32, 32], anchors.num_anchors_per_location(), 4)
    options = {"head": head, "score_thresh": 0.0, "detections_per_img": 6}
    return detection.ssd.SSD(Backbone(pyramid=False, width=32), anchors, (48, 48), 4, **options)


MODELS = {
    "faster_rcnn": (faster_rcnn, ["backbone", "rpn.head", "roi_heads.box_head", "roi_heads.box_predictor"]),
    "mask_rcnn": (mask_rcnn, ["roi_heads.mask_head", "roi_heads.mask_predictor"]),
    "keypoint_rcnn": (keypoint_rcnn, ["roi_heads.keypoint_head", "roi_heads.keypoint_predictor"]),
    "retinanet": (retinanet, ["backbone", "head"]),
    "fcos": (fcos, ["backbone", "head"]),
    "ssd": (ssd, ["backbone", "head"]),
}
MODELS = {name: (make, (MODELS["faster_rcnn"][1] if "_rcnn" in name and name != "faster_rcnn" else []) + segments)
          for name, (make, segments) in MODELS.items()}  # fmt: skip


def made(name):
    """The model with statistics of real activations: with those of a fresh BatchNorm every score would be the same."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    for norm in [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]:
        norm.momentum = None
    with torch.no_grad():
        model.backbone.train()(torch.stack([torch.randn(3, 48, 64, generator=torch.Generator().manual_seed(5))] * 2))
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # heads are initialised so small that boxes tie
                nn.init.kaiming_uniform_(parameter, a=1)
                if "bbox" in parameter_name or "regression" in parameter_name:  # their results go through exp()
                    parameter.mul_(0.3)
    return model.eval()


def same_detections(actual, expected, tolerance=1e-4):
    assert len(actual) == len(expected) and any(len(found["boxes"]) for found in expected)
    for mine, theirs in zip(actual, expected, strict=True):
        assert list(mine) == list(theirs) and torch.equal(mine["labels"], theirs["labels"])
        for key in theirs:
            torch.testing.assert_close(mine[key], theirs[key], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["mask_rcnn", "keypoint_rcnn", "fcos", "ssd"])
def test_same_boxes_as_eager(name):
    model = made(name)
    lowered = lower_to_trt(model, (images(),), precision="fp32")
    assert [s.name for s in lowered.segments] == MODELS[name][1]
    assert lowered.report()["flops_share"] >= 0.99
    assert [f.node for f in lowered.fallbacks] == [type(model).__name__]
    for seed in range(3):
        same_detections(lowered.simulate(images(seed=seed)), model(images(seed=seed)))


def test_same_boxes_in_onnx_runtime_also_after_loading(tmp_path):
    model = made("faster_rcnn")
    lowered = lower_to_onnx(model, (images(),), precision="fp32")
    assert [s.name for s in lowered.segments] == MODELS["faster_rcnn"][1]
    lowered.save(tmp_path / "artifact")
    loaded = load(tmp_path / "artifact", model=faster_rcnn())
    for seed in range(2):
        expected = model(images(seed=seed))
        same_detections(lowered(images(seed=seed)), expected)
        same_detections(loaded(images(seed=seed)), expected)


def test_a_batch_of_any_size():
    model = made("retinanet")
    lowered = lower_to_trt(model, torch.stack(images()), precision="fp32", dynamic_batch=(1, 2, 3))
    assert [s.name for s in lowered.segments] == MODELS["retinanet"][1]
    for count in (1, 3):
        batch = torch.stack(images(count, seed=count))
        same_detections(lowered.simulate(batch), model(batch))
    assert lowered.report()["outside"] == {}


def test_images_of_the_sizes_that_calibration_showed():
    model, generator = made("retinanet"), torch.Generator().manual_seed(3)
    wide, tall, square = ([torch.rand(3, *size, generator=generator)] for size in ((32, 96), (96, 32), (64, 64)))
    lowered = lower_to_trt(model, (wide,), precision="fp32", calibration=[(wide,), (tall,), (square,)])
    assert [s.name for s in lowered.segments] == MODELS["retinanet"][1]
    for image in (wide, tall, square):
        same_detections(lowered.simulate(image), model(image))
    assert lowered.report()["outside"] == {}


def test_int8_engines_of_a_head_that_takes_lists():
    model = made("retinanet")
    lowered = lower_to_trt(model, calibration=[(images(seed=seed),) for seed in range(3)])
    for segment in lowered.segments:
        assert segment.engines[0]["int8_compute"] > 0.9 * segment.engines[0]["float_compute"]
    rows = [row for segment in lowered.segments for row in segment.ops if row.op == "conv2d"]
    assert rows and all(row.int8 for row in rows)
    for found in lowered.simulate(images()):
        assert len(found["boxes"]) and all(value.isfinite().all() for value in found.values())
    assert lowered.report()["outside"] == {}
