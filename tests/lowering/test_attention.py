"""Straight-line attention: equal to eager in every configuration, traceable, same parameter names."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from fx_passes import fuse_fx, trace
from fx_passes.capture.attention import replace_attention, straight_forward
from fx_passes.errors import InputError
from fx_passes.graph.copies import shared_copy
from fx_passes.ops import op_of

torch.set_num_threads(1)


def randn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check(model, *args, **kwargs):
    """The replaced model and the trace of the original give what the model gives, whatever path eager takes."""
    model.eval()
    new = replace_attention(model)
    assert list(new.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(new.parameters(), model.parameters(), strict=True))

    names = [k for k, v in kwargs.items() if isinstance(v, torch.Tensor)]
    constants = {k: v for k, v in kwargs.items() if k not in names}

    class Flat(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, a, b, c, m1, m2):
            tensors = [a, b, c][: len(args)]
            if len(args) == 3 and args[0] is args[1] is args[2]:
                tensors = [a, a, a]
            return self.inner(*tensors, **dict(zip(names, (m1, m2), strict=False)), **constants)

    padded = [*args, *[torch.zeros(1)] * (3 - len(args)), *[kwargs[n] for n in names]]
    padded += [torch.zeros(1)] * (5 - len(padded))
    gm = trace(Flat(model))
    with torch.no_grad():
        expected = model(*args, **kwargs)
        torch.testing.assert_close(new(*args, **kwargs), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gm(*padded), expected, rtol=1e-5, atol=1e-5)
    unknown = [n for n in gm.graph.nodes if n.op.startswith("call") and op_of(n, gm) is None]
    assert not unknown
    return gm


CONFIGURATIONS = [
    dict(zip(("batch_first", "bias", "add_bias_kv", "add_zero_attn"), flags, strict=True))
    for flags in itertools.product([True, False], repeat=4)
]


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=lambda c: "-".join(k for k, v in c.items() if v) or "plain")
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
def test_configurations(config, batched):
    torch.manual_seed(0)
    m = nn.MultiheadAttention(8, 2, **config)
    x = randn(3, 5, 8) if batched else randn(5, 8)
    check(m, x, x, x)
    check(m, x, randn(*x.shape, seed=2), randn(*x.shape, seed=3), need_weights=False)


@pytest.mark.parametrize("batch_first", [True, False])
def test_other_key_and_value_sizes(batch_first):
    torch.manual_seed(0)
    m = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=batch_first)
    lengths = (lambda n, e, s: randn(2, n, e, seed=s)) if batch_first else (lambda n, e, s: randn(n, 2, e, seed=s))
    check(m, lengths(5, 8, 1), lengths(7, 6, 2), lengths(7, 4, 3))


MASKS = {
    "2d-bool": lambda: {"attn_mask": torch.ones(5, 5).triu(1).bool()},
    "2d-float": lambda: {"attn_mask": randn(5, 5, seed=4)},
    "3d-float": lambda: {"attn_mask": randn(6, 5, 5, seed=4)},
    "3d-bool": lambda: {"attn_mask": randn(6, 5, 5, seed=4) > 1},
    "padding-bool": lambda: {"key_padding_mask": torch.tensor([[0, 0, 0, 1, 1]] * 3).bool()},
    "padding-float": lambda: {"key_padding_mask": randn(3, 5, seed=5)},
    "both": lambda: {"attn_mask": randn(5, 5, seed=4), "key_padding_mask": randn(3, 5, seed=5)},
    "causal": lambda: {"attn_mask": nn.Transformer.generate_square_subsequent_mask(5), "is_causal": True},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("weights", ["none", "averaged", "per-head"])
@pytest.mark.parametrize("appended", [False, True], ids=["", "bias_kv-zero_attn"])
def test_masks(mask, weights, appended):
    torch.manual_seed(0)
    m = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=appended, add_zero_attn=appended)
    options = {"need_weights": weights != "none", "average_attn_weights": weights == "averaged"}
    x = randn(3, 5, 8)
    check(m, x, x, x, **MASKS[mask](), **options)


def test_unbatched_masks():
    m = nn.MultiheadAttention(8, 2)
    x = randn(5, 8)
    check(m, x, x, x, key_padding_mask=torch.tensor([0, 0, 1, 0, 1]).bool(), attn_mask=randn(2, 5, 5) > 1)


def test_self_attention_projects_once():
    gm = check(nn.MultiheadAttention(8, 2, batch_first=True), *[randn(3, 5, 8)] * 3, need_weights=False)
    ops = [op_of(n, gm).name for n in gm.graph.nodes if n.op.startswith("call")]
    assert ops.count("linear") == 2 and ops.count("scaled_dot_product_attention") == 1


def test_causal_without_mask_is_refused():
    m = replace_attention(nn.MultiheadAttention(8, 2))
    with pytest.raises(InputError, match="is_causal=True is given without attn_mask"):
        m(*[randn(5, 8)] * 3, is_causal=True)


def test_dropout_of_weights_in_train_mode():
    m = replace_attention(nn.MultiheadAttention(8, 2, dropout=0.5).train())
    x = randn(5, 8)
    assert not torch.equal(m(x, x, x)[0], m(x, x, x)[0])
    assert not torch.equal(m(x, x, x, need_weights=False)[0], m(x, x, x, need_weights=False)[0])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", nn.GELU()], ids=["relu", "gelu"])
def test_transformer_layers(norm_first, activation):
    torch.manual_seed(0)
    options = {"batch_first": True, "norm_first": norm_first, "activation": activation}
    layer = nn.TransformerEncoderLayer(8, 2, 16, **options)
    x, y = randn(3, 5, 8), randn(3, 4, 8, seed=2)
    check(layer, x)
    check(layer, x, src_mask=torch.ones(5, 5).triu(1).bool())
    check(nn.TransformerEncoder(layer, 2, nn.LayerNorm(8)), x)
    check(nn.TransformerDecoderLayer(8, 2, 16, **options), x, y)
    check(nn.Transformer(8, 2, 1, 1, 16, **options), x, y)


def test_what_is_left_alone():
    hooked = nn.MultiheadAttention(8, 2)
    hooked.register_forward_hook(lambda *_: None)

    class Own(nn.MultiheadAttention):
        def forward(self, x):
            return x

    class Inherited(nn.MultiheadAttention):
        pass

    assert straight_forward(hooked) is None and straight_forward(Own(8, 2)) is None
    assert straight_forward(nn.Linear(2, 2)) is None
    assert straight_forward(Inherited(8, 2)) is not None
    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    replace_attention(model)
    assert type(model[0]) is nn.MultiheadAttention


def test_copy_of_a_decoder_layer_keeps_its_activation():
    layer = nn.TransformerDecoderLayer(8, 2, 16, activation=nn.GELU())
    assert shared_copy(layer).activation is not torch.nn.functional.relu
    assert isinstance(shared_copy(layer).activation, nn.GELU)


@pytest.mark.zoo
def test_vision_transformer():
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5).eval()
    nn.init.normal_(model.heads.head.weight)
    gm = fuse_fx(model)
    x = randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(gm(x), model(x), rtol=1e-4, atol=1e-4)
    assert not any(isinstance(m, nn.MultiheadAttention) for n in gm.graph.nodes if n.op == "call_module"
                   for m in [gm.get_submodule(n.target)])  # fmt: skip
    assert set(gm.state_dict()) == set(model.state_dict())
