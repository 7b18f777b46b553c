"""wrap on methods of every kind, and what `self` is for them."""

from __future__ import annotations

import copy

import torch
from equality import same
from torch import nn
from wrapping import check, image

from fx_passes import trace, wrap

torch.set_num_threads(1)


class Decoder:
    """A plain object that a model holds."""

    def __init__(self, gain):
        self.gain = gain

    @wrap
    def decode(self, x):
        return [row * self.gain for row in x if row.sum() != 0]


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return self.conv(x)

    @wrap
    def summary(self, x):
        return float(x.detach().mean()) + self.conv.weight.sum()


class Base(nn.Module):
    @wrap
    def scores(self, x, k=2):
        return x.flatten().topk(k).values * self.conv.weight.mean()

    def inherited(self, x):
        return x * float(x.detach().sum())


wrap(Base.inherited)


class Methods(Base):
    limit = 4

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 3, 1), nn.ModuleList([Head()])
        self.decoder, self.holder = Decoder(2.0), Decoder(3.0)
        self.holder.inner = Decoder(5.0)

    @wrap
    @staticmethod
    def static(x):
        return x[x > 0]

    @staticmethod
    @wrap
    def static_inside(x):
        return x[x < 0]

    @classmethod
    @wrap
    def of_class(cls, x):
        return x.flatten()[: cls.limit].tolist()

    @wrap
    def scores(self, x, k=3):
        return super().scores(x, k) + k

    def forward(self, x):
        y = self.conv(x)
        return (
            self.scores(y, k=4),
            self.inherited(y),
            self.head[0].summary(self.head[0](y)),
            self.decoder.decode(y),
            self.holder.inner.decode(y),
            self.static(y),
            Methods.static_inside(y),
            self.of_class(y),
        )


def test_methods_of_every_kind():
    gm = check(
        Methods(),
        image(),
        calls=[
            ("call_method", "scores"),
            ("call_method", "inherited"),
            ("call_method", "summary"),
            ("call_method", "decode"),
            ("call_method", "decode"),
            ("call_function", Methods.static),
            ("call_function", Methods.static_inside),
            ("call_function", Methods.of_class),
        ],
    )
    receivers = [n.args[0].target for n in gm.graph.nodes if n.op == "call_method"]
    assert receivers == ["_self", "_self", "_self.head.0", "_self.decoder", "_self.holder.inner"]


def test_an_overridden_method_that_is_called_through_super_is_the_base_classes():
    class Derived(Base):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def scores(self, x, k=1):  # not wrapped: traced through
            return super().scores(self.conv(x), k) * 2

        def forward(self, x):
            return self.scores(x)

    check(Derived(), image(), calls=[("call_function", Base.scores)])


def test_a_wrapped_method_sees_the_original_float_modules_whatever_becomes_of_the_graph():
    from fx_passes.graph.module import copy_graph_module, set_buffer, set_submodule

    model = Methods().eval()
    gm = copy_graph_module(trace(model))
    set_submodule(gm, "conv", nn.Conv2d(3, 3, 1))
    set_buffer(gm, "head.0.conv.weight", torch.zeros(2, 3, 1, 1))
    y = gm.conv(image())
    same(gm(image())[0], model.scores(y, k=4))


def test_mode_reaches_the_self_of_a_wrapped_method():
    class Says(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Dropout()

        @wrap
        def mode(self, x):
            return self.training, self.inner.training

        def forward(self, x):
            return self.mode(x)

    gm = trace(Says())
    assert gm(image()) == (True, True)
    assert gm.eval()(image()) == (False, False)
    assert copy.deepcopy(gm).train()(image()) == (True, True)
    assert gm(image()) == (False, False)


def test_state_held_by_self_is_returned_and_kept():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.history, self.factor = [], 1.0

        @wrap
        def remember(self, x):
            self.history.append(float(x.sum()))
            return self.history, x * self.factor

        def forward(self, x):
            return self.remember(x + 1)

    model = Keeps()
    gm = trace(model)
    assert model.history == []
    gm(image())
    history, _ = gm(image())
    assert history is model.history and len(history) == 2
    gm.factor = 3.0
    assert torch.equal(gm(image())[1], (image() + 1) * 3.0)
