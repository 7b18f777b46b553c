"""Attention in int8 where it is asked for: the same numbers in PyTorch, ONNX Runtime and the TensorRT network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_passes import convert_fx, prepare_calibration_fx, search_mixed_precision
from fx_passes.quantize.accuracy.structure import strip_quantization
from fx_passes.quantize.annotation import annotation_of
from fx_passes.quantize.calibrate import calibrate
from fx_passes.quantize.calibrated import float_reference
from lowering import lower_to_onnx, lower_to_trt
from lowering.compare import sqnr

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("error")
TARGETS = ("tensorrt", "tensorrt-rtx", "onnxruntime")
SIZE, HEADS = 32, 4


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.attention = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x, mask=None):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, SIZE, 4, 4)
        self.layers = nn.Sequential(Layer(), Layer())
        self.norm, self.head = nn.LayerNorm(SIZE), nn.Linear(SIZE, 10)

    def forward(self, image):
        x = self.patches(image).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.layers(x)).mean(1))


class Direct(nn.Module):
    """Products that the model writes itself, as matmul and bmm."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (torch.bmm(q, k.transpose(1, 2)) * SIZE**-0.5).softmax(-1)
        return self.out(weights @ v)


class WithWeights(nn.Module):
    """nn.MultiheadAttention that returns its weights: no `scaled_dot_product_attention` is in it."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def images(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 3, 16, 16, generator=generator) for _ in range(count)]


def tokens(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 9, SIZE, generator=generator) for _ in range(count)]


MODELS: dict[str, tuple[Any, Any, dict[Any, Any], int]] = {
    # model, batches, configuration, products in int8
    "vit": (TinyViT, images, {nn.MultiheadAttention: {"dtype": "int8"}}, 4),
    "one_layer_of_vit": (TinyViT, images, {"layers.1.attention": {"dtype": "int8"}}, 2),
    "with_weights": (WithWeights, tokens, {nn.MultiheadAttention: {"dtype": "int8"}}, 2),
    "direct": (Direct, tokens, {"": {"dtype": "int8"}}, 2),
}


def build(name: str) -> tuple[nn.Module, list[Tensor], dict[Any, Any]]:
    torch.manual_seed(0)
    model, batches, config, _ = MODELS[name]
    return model().eval(), batches(), config


def converted_for(model: nn.Module, target: str, batches: list[Any], config: dict[Any, Any]):
    prepared = prepare_calibration_fx(model, batches[0], target=target, qconfig=config)
    calibrate(prepared, batches)
    return convert_fx(prepared)


def products(gm) -> list[Any]:
    return [a for n in gm.graph.nodes if (a := annotation_of(n)) and a.op in ("matmul", "bmm") and a.quantized_inputs]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MODELS)
def test_converted_graph(name, target):
    model, batches, config = build(name)
    converted = converted_for(model, target, batches, config)
    assert [a.quantized_inputs for a in products(converted)] == [(0, 1)] * MODELS[name][3]
    assert sqnr(model(batches[0]), converted(batches[0])) > 25
    fused = prepare_calibration_fx(model, batches[0], target=target, qconfig=config)
    assert (fused(batches[0]) - model(batches[0])).abs().max() <= 1e-5


@pytest.mark.parametrize("target", TARGETS)
def test_products_stay_float_unless_asked_for(target):
    model, batches, _ = build("vit")
    converted = converted_for(model, target, batches, {})
    assert not products(converted)
    assert any("scaled_dot_product_attention" in str(node.target) for node in converted.graph.nodes)


@pytest.mark.parametrize(("target", "scale"), [("tensorrt", 1 / 127), ("onnxruntime", 1 / 255)])
def test_weights_of_attention_have_the_scale_of_zero_to_one(target, scale):
    model, batches, config = build("vit")
    converted = converted_for(model, target, batches, config)
    found = [n for n in converted.graph.nodes if n.name.endswith("weights_quantize")]
    assert [(n.args[1], n.args[2]) for n in found] == [(pytest.approx(scale, rel=1e-6), 0)] * 2


def test_another_observer_may_narrow_it():
    model, batches, config = build("vit")
    config = {"": {"observer": "minmax"}, **config}
    converted = converted_for(model, "tensorrt", batches, config)
    found = next(n for n in converted.graph.nodes if n.name.endswith("weights_quantize"))
    assert found.args[1] < 0.9 / 127


@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_multiplies_integers(name):
    model, batches, config = build(name)
    lowered = lower_to_onnx(model, batches[0], calibration=batches, qconfig=config)
    report = lowered.report()
    (engine,) = report["segments"][0]["engines"]
    kernels = engine["ops"].get("QLinearMatMul", 0) + engine["ops"].get("MatMulIntegerToFloat", 0)
    assert report["flops_share"] >= 0.99 and not lowered.fallbacks
    assert kernels == MODELS[name][3] and engine["ops"].get("FusedMatMul", 0) + engine["ops"].get("MatMul", 0) == (
        2 if name == "one_layer_of_vit" else 0
    )
    assert sqnr(converted_for(model, "onnxruntime", batches, config)(batches[0]), lowered(batches[0])) >= 40


@pytest.mark.parametrize("name", ["vit", "direct"])
def test_executed_tensorrt_network_gives_the_numbers_of_the_converted_graph(name):
    model, batches, config = build(name)
    lowered = lower_to_trt(model, batches[0], calibration=batches, qconfig=config, settings={"float_type": "fp32"})
    report = lowered.report()
    (engine,) = report["segments"][0]["engines"]
    assert report["flops_share"] >= 0.99 and not lowered.fallbacks
    assert engine["float_compute"] == 0
    assert sqnr(converted_for(model, "tensorrt-rtx", batches, config)(batches[0]), lowered.simulate(batches[0])) >= 40


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x, mask):
        return self.layer(x, mask)


def test_a_mask_is_added_to_the_scores():
    torch.manual_seed(0)
    model, x = Masked().eval(), tokens(1)[0]
    mask = torch.ones(9, 9, dtype=torch.bool).triu(1)
    config = {nn.MultiheadAttention: {"dtype": "int8"}}
    converted = converted_for(model, "onnxruntime", [(x, mask)], config)
    assert len(products(converted)) == 2
    assert sqnr(model(x, mask), converted(x, mask)) > 25


class Causal(nn.Module):
    """A call that is not written out."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(SIZE, 3 * SIZE)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("target", TARGETS)
def test_attention_that_cannot_be_written_out_stays_float(target):
    torch.manual_seed(0)
    model, batches = Causal().eval(), tokens()
    converted = converted_for(model, target, batches, {"": {"dtype": "int8"}})
    (node,) = [n for n in converted.graph.nodes if "scaled_dot_product_attention" in str(n.target)]
    assert not annotation_of(node).quantized and "is_causal" in annotation_of(node).reason
    assert sqnr(model(batches[0]), converted(batches[0])) > 25


def test_one_product_may_stay_float():
    """Its name is that of a node which is there only once the attention is written out."""
    model, batches, config = build("vit")
    config = {**config, "scaled_dot_product_attention_scores": None}
    assert len(products(converted_for(model, "onnxruntime", batches, config))) == 3


def test_mixed_precision_turns_products_back():
    model, batches, config = build("vit")
    found = search_mixed_precision(model, batches, target="tensorrt", qconfig=config, min_sqnr=500.0)
    assert sum(name.endswith(("_scores", "_values")) for name in found.floats) == 4


def test_structure():
    model, batches, config = build("with_weights")
    prepared = prepare_calibration_fx(model, batches[0], target="tensorrt", qconfig=config)
    calibrate(prepared, batches)
    stripped = strip_quantization(convert_fx(prepared), float_reference(prepared))
    assert (stripped(batches[0]) - model(batches[0])).abs().max() <= 1e-5
