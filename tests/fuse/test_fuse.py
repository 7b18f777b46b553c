"""fuse_fx: what folds, what must not, each with its reason; the numbers stay."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import fuse_fx, trace, wrap
from fx_passes.errors import StageError
from fx_passes.fuse.batch_norm import fold_batch_norm

torch.set_num_threads(1)


def seeded(model: nn.Module) -> nn.Module:
    """Weights seeded, BatchNorm statistics and weights away from their defaults."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                for tensor in (module.running_mean, module.bias):
                    if tensor is not None:
                        tensor.copy_(torch.randn(tensor.shape, generator=generator))
                for tensor in (module.running_var, module.weight):
                    if tensor is not None:
                        tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model


def image(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def calls(gm):
    return [str(getattr(n.target, "__name__", n.target)) for n in gm.graph.nodes if n.op.startswith("call")]


def check(model, *inputs, tolerance=1e-5):
    """fuse_fx(model) equals the eval model, and leaves the model alone. Returns the fused graph."""
    model.train()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    modules = {name: id(m) for name, m in model.named_modules()}
    gm = fuse_fx(model)
    assert model.training and {name: id(m) for name, m in model.named_modules()} == modules
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    gm.graph.lint()
    assert gm.meta["stage"] == "fused" and not gm.training
    with torch.no_grad():
        torch.testing.assert_close(gm(*inputs), model.eval()(*inputs), rtol=tolerance, atol=tolerance)
    return gm


FOLDABLE = {
    "conv1d": (lambda: [nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)], (2, 3, 9)),
    "conv2d": (lambda: [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)], (2, 3, 9, 9)),
    "conv2d-no-bias": (lambda: [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)], (2, 3, 9, 9)),
    "conv2d-groups": (lambda: [nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)], (2, 4, 9, 9)),
    "conv3d": (lambda: [nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4)], (2, 2, 4, 4, 4)),
    "deconv1d": (lambda: [nn.ConvTranspose1d(3, 4, 3), nn.BatchNorm1d(4)], (2, 3, 9)),
    "deconv2d": (lambda: [nn.ConvTranspose2d(3, 4, 3, stride=2), nn.BatchNorm2d(4)], (2, 3, 5, 5)),
    "deconv2d-groups": (lambda: [nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)], (2, 4, 5, 5)),
    "deconv2d-depthwise": (lambda: [nn.ConvTranspose2d(4, 4, 3, groups=4), nn.BatchNorm2d(4)], (2, 4, 5, 5)),
    "deconv3d": (lambda: [nn.ConvTranspose3d(2, 4, 2), nn.BatchNorm3d(4)], (2, 2, 3, 3, 3)),
    "linear": (lambda: [nn.Linear(5, 4), nn.BatchNorm1d(4)], (3, 5)),
    "linear-no-bias": (lambda: [nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4)], (3, 5)),
    "not-affine": (lambda: [nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False)], (2, 3, 3, 3)),
    "sync": (lambda: [nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4)], (2, 3, 3, 3)),
    "chain": (lambda: [nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)], (2, 3, 3, 3)),
    "dropout-between": (lambda: [nn.Conv2d(3, 4, 1), nn.Dropout(), nn.Identity(), nn.BatchNorm2d(4)], (2, 3, 3, 3)),
}


@pytest.mark.parametrize("name", FOLDABLE)
def test_folds(name):
    layers, shape = FOLDABLE[name]
    gm = check(seeded(nn.Sequential(*layers())), image(*shape))
    assert [c for c in calls(gm) if c not in ("dim", "eq", "_assert")] == ["0"]
    assert {why for _, why in gm.meta["fuse_report"] if not why.startswith("removed")} == {"folded into '_0'"}
    assert sorted(gm.state_dict()) == ["0.bias", "0.weight"]


def test_folds_in_float64():
    torch.manual_seed(0)
    weight, scale, shift = torch.randn(8, 4, 3, 3) * 100, torch.rand(8).double() + 1e3, torch.randn(8).double()
    folded, bias = fold_batch_norm(weight, None, scale, shift)
    assert torch.equal(folded, (weight.double() * scale.view(-1, 1, 1, 1)).float())
    assert torch.equal(bias, shift.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_dtype_is_kept(dtype):
    model = seeded(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))).to(dtype)
    gm = check(model, image(1, 3, 4, 4).to(dtype), tolerance=0.05 if dtype is torch.bfloat16 else 1e-12)
    assert {p.dtype for p in gm.parameters()} == {dtype}


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.conv, self.bn, self.bn2 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("var", torch.rand(4) + 0.5)
        self.weight = nn.Parameter(torch.rand(4) + 0.5)
        self.kernel, self.bias = nn.Parameter(torch.randn(4, 3, 1, 1)), nn.Parameter(torch.randn(4))
        self.fn = forward
        seeded(self)

    def forward(self, x):
        return self.fn(self, x)


@wrap
def python_relu(x):
    return F.relu(x)


KEPT = {}


def kept(reason, change=None):
    def register(function):
        KEPT[function.__name__] = (function, reason, change)
        return function

    return register


@kept("is also used by 'relu'")
def second_user(m, x):
    y = m.conv(x)
    return m.bn(y) + F.relu(y)


@kept("called again by 'conv_1'")
def shared_layer(m, x):
    return m.bn(m.conv(x)), m.conv(x * 2)


@kept("called again by 'conv_1'")
def two_norms_on_one_layer(m, x):
    return m.bn(m.conv(x)), m.bn2(m.conv(x))


@kept("no running statistics", lambda m: setattr(m, "bn", nn.BatchNorm2d(4, track_running_stats=False)))
def no_statistics(m, x):
    return m.bn(m.conv(x))


@kept("read by 'conv_weight'")
def parameters_read_elsewhere(m, x):
    return m.bn(m.conv(x)) + m.conv.weight.sum()


class OwnConv(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) ** 2


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) * 2


class FrozenNorm(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(True)


@kept("BatchNorm", lambda m: setattr(m, "bn", seeded(OwnNorm(4))))
def subclass_of_norm(m, x):
    return m.bn(m.conv(x))


@kept("no convolution or linear", lambda m: setattr(m, "conv", OwnConv(3, 4, 1)))
def subclass_of_conv(m, x):
    return m.bn(m.conv(x))


@kept("has hooks", lambda m: m.conv.register_forward_hook(lambda mod, args, out: out * 2))
def hook_on_conv(m, x):
    return m.bn(m.conv(x))


@kept("has hooks", lambda m: m.bn.register_forward_pre_hook(lambda mod, args: (args[0] * 2,)))
def hook_on_norm(m, x):
    return m.bn(m.conv(x))


@kept("no convolution or linear")
def activation_between(m, x):
    return m.bn(F.relu(m.conv(x)))


@kept("no convolution or linear")
def wrapped_between(m, x):
    return m.bn(python_relu(m.conv(x)))


@kept("no layer before it", lambda m: setattr(m, "bn", seeded(nn.BatchNorm2d(3))))
def first(m, x):
    return m.conv(m.bn(x))


@kept("training=True")
def functional_training(m, x):
    return F.batch_norm(m.conv(x), None, None, training=True)


@kept("computed in the graph")
def functional_computed(m, x):
    return F.batch_norm(m.conv(x), m.mean, m.var * 2)


@kept("changed by 'bn_running_mean'")
def statistics_written(m, x):
    m.bn.running_mean.add_(1)
    return m.bn(m.conv(x))


@kept("may write to it or keep it")
def written_by_a_wrapped_call(m, x):
    y = m.conv(x)
    z = python_relu(y)
    return m.bn(y) + z


def linear_and_norm_over_sequence(m):
    m.conv, m.bn = nn.Linear(3, 4), seeded(nn.BatchNorm1d(9))


@kept("another axis", linear_and_norm_over_sequence)
def other_axis(m, x):
    return m.bn(m.conv(x.flatten(2).transpose(1, 2)))


@pytest.mark.parametrize("name", KEPT)
def test_must_not_fold(name):
    function, reason, change = KEPT[name]
    torch.manual_seed(0)
    model = Net(function)
    if change:
        change(model)
    x = image(2, 3, 3, 3)
    gm = fuse_fx(model.eval())
    eager = copy.deepcopy(model)
    with torch.no_grad():
        torch.testing.assert_close(gm(x), eager(x))
        torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert not any(why.startswith("folded") for _, why in gm.meta["fuse_report"]), gm.meta["fuse_report"]
    reasons = [why for _, why in gm.meta["fuse_report"]]
    if not name.startswith("subclass_of"):  # entered by the tracer: the norm inside is seen, if there is one
        assert any(reason in why for why in reasons), reasons


def test_norm_in_train_mode_stays():
    model = seeded(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))).eval()
    gm = trace(model)
    gm.meta["training"] = False
    norm = gm.get_submodule("1")
    norm.train = lambda mode=True: nn.Module.train(norm, True)
    norm.training = True
    fused = fuse_fx(gm)
    assert fused.meta["fuse_report"] == [("_1", "kept: it is in train mode")]


def test_functional_batch_norm_and_functional_conv_fold():
    def forward(m, x):
        y = F.batch_norm(m.conv(x), m.mean, m.var, m.weight, None, False, 0.1, 1e-3)
        z = torch.batch_norm(F.conv2d(x, m.kernel, m.bias), m.weight, None, m.mean, m.var, False, 0.1, 1e-3, False)
        return y, z, F.batch_norm(F.conv2d(x, weight=m.kernel), m.mean, m.var)

    torch.manual_seed(0)
    gm = check(Net(forward), image(2, 3, 5, 5))
    assert calls(gm) == ["conv", "conv2d", "conv2d"]


def test_a_user_of_the_shape_alone_does_not_prevent_folding():
    """As in timm's BatchNormAct2d, which asserts the rank of its input."""

    def forward(m, x):
        y = m.conv(x)
        torch._assert(y.ndim == 4, f"expected four dimensions, got {y.ndim}")
        return m.bn(y).view(y.shape[0], y.size(1), -1)

    gm = check(Net(forward), image(2, 3, 5, 5))
    assert gm.meta["fuse_report"] == [("bn", "folded into 'conv'")]


def test_parameters_of_a_folded_layer_are_new_and_the_rest_is_shared():
    model = seeded(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)))
    gm = fuse_fx(model)
    own = dict(model.named_parameters())
    assert gm.get_parameter("0.weight") is not own["0.weight"]
    assert gm.get_parameter("2.weight") is own["2.weight"]
    assert type(gm.get_submodule("0")) is nn.Conv2d


PARAMETRIZED = {
    "weight_norm": lambda: torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 1)),
    "spectral_norm": lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 1)),
    "orthogonal": lambda: torch.nn.utils.parametrizations.orthogonal(nn.Conv2d(3, 4, 1)),
    "weight_norm-hook": lambda: torch.nn.utils.weight_norm(nn.Conv2d(3, 4, 1)),
    "spectral_norm-hook": lambda: torch.nn.utils.spectral_norm(nn.Conv2d(3, 4, 1)),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrizations_are_resolved_and_folded(name):
    torch.manual_seed(0)
    model = seeded(nn.Sequential(PARAMETRIZED[name](), nn.BatchNorm2d(4), PARAMETRIZED[name]().requires_grad_(False)))
    model[2] = nn.Sequential(nn.Conv2d(4, 3, 1), model[2])
    gm = check(model, image(2, 3, 5, 5))
    assert calls(gm) == ["0", "2.0", "2.1"]
    assert sorted(gm.state_dict()) == [f"{p}.{t}" for p in ("0", "2.0", "2.1") for t in ("bias", "weight")]
    assert not any(hasattr(m, "parametrizations") or m._forward_pre_hooks for m in gm.modules())


def test_parametrization_of_the_user_is_refused():
    class Double(nn.Module):
        def forward(self, weight):
            return weight * 2

    conv = nn.Conv2d(3, 4, 1)
    torch.nn.utils.parametrize.register_parametrization(conv, "weight", Double())
    gm = check(seeded(nn.Sequential(conv, nn.BatchNorm2d(4))), image(2, 3, 5, 5))
    assert calls(gm) == ["0", "1"]
    assert [why for _, why in gm.meta["fuse_report"]] == [
        "its weight stays computed: Double is not a parametrization of torch",
        "kept: the weight of '_0' is computed from other parameters",
    ]


class RowsNorm(nn.Module):
    """timm's LinearNorm (LeViT): BatchNorm1d over the rows of a linear layer."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4)

    def forward(self, x):
        x = self.linear(x)
        return self.norm(x.flatten(0, 1)).reshape_as(x)


def test_a_norm_over_the_rows_of_a_linear_layer_folds():
    gm = check(seeded(RowsNorm()), image(2, 3, 5))
    assert "norm" not in calls(gm)
    with pytest.raises(AssertionError, match="3 dimensions"):  # with four, axis 1 would not be the channels
        gm(image(2, 3, 4, 5))


def test_linear_on_three_dimensions_is_never_wrong():
    """(N, L, C) with L == C: BatchNorm1d works on axis 1, the linear layer on axis 2."""
    model = seeded(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    gm = fuse_fx(model)
    assert torch.isfinite(gm(image(2, 4))).all()
    with pytest.raises(AssertionError, match="'_1' was folded into '_0' for inputs of 2 dimensions"):
        gm(image(2, 4, 4))


def test_no_check_where_the_rank_is_known():
    layers = [nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4), nn.BatchNorm1d(4)]
    assert calls(check(seeded(nn.Sequential(*layers)), image(2, 3, 5, 5))) == ["0", "1", "2", "3"]


def test_dropout_and_identity():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.drop2d, self.identity = nn.Dropout(), nn.Dropout2d(inplace=True), nn.Identity()
            self.alpha, self.hooked = nn.AlphaDropout(), nn.Identity()
            self.hooked.register_forward_hook(lambda m, args, out: out + 1)

        def forward(self, x):
            x = self.identity(self.alpha(self.drop2d(self.drop(x * 2))))
            x = self.hooked(F.dropout(x, 0.5, self.training))
            return F.dropout(x, 0.0, True)

    gm = check(Drops(), image(2, 3, 4, 4))
    assert calls(gm) == ["mul", "hooked", "dropout"]
    assert ("dropout_1", "kept: it is active in eval mode too") in gm.meta["fuse_report"]


def test_residual_block_with_in_place_relu():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.c1, self.b1, self.c2, self.b2 = (
                nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
            )  # fmt: skip
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            y = self.relu(self.b1(self.c1(x)))
            out = self.b2(self.c2(y))
            out += y
            return self.relu(out)

    gm = check(seeded(Block()), image(2, 4, 6, 6))
    assert calls(gm) == ["c1", "relu", "c2", "add", "relu"]


def test_stages():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    with pytest.raises(StageError, match="traced in train mode"):
        fuse_fx(trace(model.train()))
    gm = trace(model.eval())
    fused = fuse_fx(gm)
    assert calls(fused) == calls(fuse_fx(fused)) == ["0"] and calls(gm) == ["0", "1"]
    fused.meta["stage"] = "converted"
    with pytest.raises(StageError, match="'converted' cannot be fused"):
        fuse_fx(fused)


def test_graph_in_train_mode_again_is_fused_in_eval_mode_and_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout()).eval()
    gm = trace(model)
    gm.train()
    fused = fuse_fx(gm)
    assert calls(fused) == ["0"] and not fused.training and gm.training and model.training


def test_source_lines_are_kept():
    gm = check(Net(lambda m, x: m.bn(m.conv(x))), image(1, 3, 2, 2))
    conv = next(n for n in gm.graph.nodes if n.op == "call_module")
    assert conv.meta["source"][0] == __file__


@pytest.mark.zoo
def test_resnet18():
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model = seeded(torchvision.models.resnet18()).eval()
    gm = check(model, image(1, 3, 64, 64), tolerance=2e-4)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in gm.modules())
    assert [why[:6] for _, why in gm.meta["fuse_report"]] == ["folded"] * 20


def test_exported_graph():
    """The aten spellings, in place as torch.export keeps them before decomposition."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)

        def forward(self, x):
            out = self.relu(self.bn(self.conv(x)))
            out += x
            return self.relu(out)

    model = seeded(Block()).eval()
    x = image(1, 3, 4, 4)
    gm = torch.export.export(model, (x,)).module()
    gm.meta["training"] = False
    fused = fuse_fx(gm)
    names = [c for c in calls(fused) if c != "_guards_fn"]
    assert names == ["conv2d.default", "relu.default", "add.Tensor", "relu.default"]
    assert not any("aliased" in n.meta for n in fused.graph.nodes)
    torch.testing.assert_close(fused(x), model(x))


@pytest.mark.zoo
def test_frozen_batch_norms_of_torchvision_fold():
    ops = pytest.importorskip("torchvision.ops")

    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), ops.FrozenBatchNorm2d(4)
            self.alone = ops.FrozenBatchNorm2d(4)

        def forward(self, x):
            return self.alone(F.relu(self.norm(self.conv(x))))

    model = Frozen().eval()
    for norm in (model.norm, model.alone):
        norm.running_mean.copy_(image(4))
        norm.running_var.copy_(image(4, seed=2).abs() + 0.5)
    fused = fuse_fx(model)
    assert [n.target for n in fused.graph.nodes if n.op == "call_module"] == ["conv", "alone"]
    torch.testing.assert_close(fused(image(2, 3, 8, 8)), model(image(2, 3, 8, 8)), rtol=1e-5, atol=1e-5)
    in_training = trace(Frozen().train())  # a layer to train as the ops that it consists of
    assert [n.target for n in in_training.graph.nodes if n.op == "call_module"] == ["conv"]
