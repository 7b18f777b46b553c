"""What is captured is a call of the model: hooks on it, a forward put on it, a `__call__` of its class."""

from __future__ import annotations

import copy
import functools
import math
import types

import pytest
import torch
import torch.nn.functional as F
from routes import LOWERINGS, ROUTES, agrees, same_on
from torch import nn
from torch.nn.modules import module as torch_module
from tracing import image

from fx_passes import convert_fx, fuse_fx, prepare_calibration_fx, trace
from fx_passes.errors import CaptureError, InputError, StageError
from lowering import load, lower_to_onnx

pytestmark = pytest.mark.filterwarnings("ignore:int8 is calibrated on the example")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def features(self, x):
        return F.relu(self.norm(self.conv(x)))

    def forward(self, x):
        return self.head(self.features(x))


class Doubling(Net):
    """A `__call__` of its own."""

    def __call__(self, x):
        return super().__call__(x) * 2


class Exported(Net):
    """Symbolic tracing refuses its forward; `torch.export` does not."""

    def forward(self, x):
        y = self.features(x)
        return self.head(y) * int(math.sqrt(y.shape[2] * y.shape[3]) + 0.5)


class Python(Net):
    """Its forward stays Python: the children are lowered one by one."""

    def forward(self, x):
        y = self.conv(x)
        return self.head(F.relu(self.norm(torch.from_numpy(y.detach().numpy().copy()))))


def made(cls=Net, *args, **kwargs):
    torch.manual_seed(0)
    return cls(*args, **kwargs).eval()


def forward_hook(model, **options):
    model.register_forward_hook(lambda module, args, output: output * 2 + 1, **options)
    return model


def forward_hook_with_kwargs(model):
    model.register_forward_hook(lambda module, args, kwargs, output: output * 2 + 1, with_kwargs=True)
    return model


def pre_hook(model):
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return model


def pre_hook_of_one_value(model):
    model.register_forward_pre_hook(lambda module, args: args[0] * 2)
    return model


def pre_hook_with_kwargs(model):
    model.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
    return model


def several_hooks(model):
    return forward_hook(pre_hook(forward_hook(model)))


HOOKS = {
    "forward hook": forward_hook,
    "forward hook with kwargs": forward_hook_with_kwargs,
    "forward hook that is always called": functools.partial(forward_hook, always_call=True),
    "pre-hook": pre_hook,
    "pre-hook that returns one value": pre_hook_of_one_value,
    "pre-hook with kwargs": pre_hook_with_kwargs,
    "several hooks": several_hooks,
}
ROOTS = {
    "class": Net,
    "Conv2d": functools.partial(nn.Conv2d, 3, 4, 3),
    "Sequential": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()),
    "exported": Exported,
}


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_the_root_run(hook, root):
    agrees("fuse", HOOKS[hook](made(ROOTS[root])), image())


@pytest.mark.parametrize("route", ROUTES)
def test_hooks_run_on_every_route(route):
    agrees(route, several_hooks(made()), image())


@pytest.mark.parametrize("route", LOWERINGS)
@pytest.mark.parametrize("change", [forward_hook, pre_hook], ids=lambda f: f.__name__)
def test_hooks_run_once_around_a_forward_that_stays_python(change, route):
    model = change(made(Python))
    change(model.conv)
    change(model.head)
    agrees(route, model, image(), segments=2, fallbacks=1)


def test_hooks_run_once_in_a_child_that_is_entered():
    model = nn.Sequential(several_hooks(made()), several_hooks(made(nn.Conv2d, 4, 4, 1)))
    agrees("onnx fp32", model, image())


def test_the_hooks_of_attention_are_no_reason_to_leave_it_in_python():
    model = forward_hook(made(nn.TransformerEncoderLayer, 8, 2, 16))
    agrees("onnx fp32", model, torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0)))


# -- a forward of the instance


def bound_method(model):
    model.forward = model.features
    return model


def partial(model):
    model.forward = functools.partial(model.features)
    return model


def method_type(model):
    model.forward = types.MethodType(lambda self, x: self.features(x) + 1, model)
    return model


def closure(model):
    model.forward = lambda x: model.features(x) + 1
    return model


def decorated(model):
    old = model.forward

    @functools.wraps(old)
    def forward(*args, **kwargs):
        return old(*args, **kwargs) * 3

    model.forward = forward
    return model


def decorated_without_wraps(model):
    old = model.forward
    model.forward = lambda *args, **kwargs: old(*args, **kwargs) * 3
    return model


def partial_of_a_wrapper(model):
    """As accelerate puts its hooks on a module."""
    old = model.forward

    def forward(module, *args, **kwargs):
        return old(*args, **kwargs) * 3

    model.forward = functools.update_wrapper(functools.partial(forward, model), old)
    return model


GLOBAL = made()


def named_by_a_global(model):
    """As in a script or a notebook."""
    GLOBAL.forward = lambda x: GLOBAL.features(x) * 2
    return GLOBAL


FORWARDS = [
    *(bound_method, partial, method_type, closure, decorated, decorated_without_wraps, partial_of_a_wrapper),
    named_by_a_global,
]


@pytest.mark.parametrize("change", FORWARDS, ids=lambda f: f.__name__)
def test_a_forward_of_the_instance_is_what_is_lowered(change):
    agrees("ptq", change(made()), image())


@pytest.mark.parametrize("route", ROUTES)
def test_a_forward_of_the_instance_counts_on_every_route(route):
    agrees(route, decorated_without_wraps(made()), image())


@pytest.mark.parametrize("cls", [Exported, Python])
def test_a_forward_of_the_instance_counts_where_it_is_exported_or_stays_python(cls):
    stays = cls is Python
    agrees("onnx fp32", decorated_without_wraps(made(cls)), image(), segments=2 if stays else 1, fallbacks=int(stays))


def test_a_forward_of_a_child_that_knows_the_model_is_entered():
    model = made()
    old = model.conv.forward
    model.conv.forward = lambda x: old(x) + model.norm.bias[:, None, None]
    model.norm.register_forward_hook(lambda module, args, output: model.head.weight.sum() * output)
    agrees("onnx int8", model, image())


def test_example_inputs_are_bound_to_the_forward_of_the_instance():
    model = made()
    model.forward = lambda picture, gain: model.features(picture) * gain
    lowered = agrees("onnx fp32", model, {"picture": image(), "gain": torch.full((1,), 3.0)})
    with pytest.raises(InputError, match="'gain'"):
        lower_to_onnx(model, image(), precision="fp32")
    assert lowered(gain=torch.ones(1), picture=image()).shape == (2, 8, 4, 5)


def test_a_decorated_forward_keeps_the_names_of_the_arguments():
    lowered = agrees("onnx fp32", decorated_without_wraps(made()), {"x": image()})
    assert lowered(x=image()).shape == lowered(image()).shape


def test_a_forward_of_any_arguments_takes_more_than_the_classs():
    model = made()
    old = model.forward
    model.forward = lambda *args: old(args[0] + args[1])
    agrees("onnx fp32", model, (image(), image(seed=1)))


def test_a_hook_with_kwargs_gets_them_as_the_example_gives_them():
    def double(module, args, kwargs):
        assert not args
        return args, {"x": kwargs["x"] * 2}

    model = made()
    model.register_forward_pre_hook(double, with_kwargs=True)
    agrees("onnx fp32", model, {"x": image()})


def test_hooks_get_what_is_given_and_no_defaults():
    class WithDefaults(Net):
        def forward(self, x, gain=1.0, *, offset=None):
            y = self.head(self.features(x)) * gain
            return y if offset is None else y + offset

    agrees("onnx fp32", pre_hook_of_one_value(made(WithDefaults)), image())
    model = made(WithDefaults)
    model.register_forward_hook(lambda module, args, output: output * len(args))
    agrees("onnx fp32", model, image())


# -- a `__call__` of the class


@pytest.mark.parametrize("route", ROUTES)
def test_a_call_of_the_class_is_lowered(route):
    agrees(route, forward_hook(made(Doubling)), image())


def test_a_call_of_the_class_is_in_the_artifact(tmp_path):
    model = made(Doubling)
    loaded = load(lower_to_onnx(model, image(), precision="fp32").save(tmp_path / "net"))
    same_on(loaded, model, image(), exact=True)


def test_a_call_of_a_childs_class_is_lowered_or_runs_around_it():
    agrees("onnx fp32", nn.Sequential(made(Doubling), nn.Conv2d(4, 4, 1)).eval(), image())

    class Outer(Python):
        def __init__(self):
            super().__init__()
            self.head = Doubling()
            self.conv = nn.Conv2d(3, 3, 1)
            self.norm = nn.BatchNorm2d(3)

    agrees("onnx fp32", made(Outer), image(), segments=3, fallbacks=1)


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_a_root_with_a_computed_weight_runs_in_int8(norm):
    agrees("onnx int8", forward_hook(norm(made(nn.Conv2d, 3, 4, 3)).eval()), image())


# -- what is refused, and what stays


def test_hooks_are_not_recorded_twice():
    model = several_hooks(made())
    gm = trace(model)
    torch.testing.assert_close(gm(image()), model(image()))
    torch.testing.assert_close(fuse_fx(trace(gm))(image()), model(image()))
    torch.testing.assert_close(copy.deepcopy(gm)(image()), model(image()))


@pytest.mark.parametrize("kind", ["forward pre-hook", "forward hook"])
def test_a_hook_on_a_graph_is_refused_by_its_name(kind):
    def log_shapes(*_):
        pass

    gm = fuse_fx(made())
    handle = {"forward pre-hook": gm.register_forward_pre_hook, "forward hook": gm.register_forward_hook}[kind](
        log_shapes
    )
    with pytest.raises(StageError, match=f"the {kind} 'log_shapes'"):
        prepare_calibration_fx(gm, image())
    with pytest.raises(StageError, match=f"the {kind} 'log_shapes'"):
        lower_to_onnx(gm, image(), precision="fp32")
    with pytest.raises(StageError, match=f"the {kind} 'log_shapes'"):
        trace(gm)
    assert copy.copy(gm)._forward_hooks == gm._forward_hooks  # a plain copy keeps it
    handle.remove()
    lower_to_onnx(gm, image(), precision="fp32")


def test_the_hook_that_records_the_first_inputs_is_none():
    prepared = prepare_calibration_fx(made(), target="onnxruntime")
    prepared(image())
    agrees("onnx int8", made(), image())
    assert lower_to_onnx(convert_fx(prepared))(image()).shape == (2, 4, 4, 5)


@pytest.mark.parametrize(
    "register", [torch_module.register_module_forward_hook, torch_module.register_module_forward_pre_hook]
)
@pytest.mark.parametrize("run", [trace, fuse_fx, prepare_calibration_fx, lower_to_onnx], ids=lambda f: f.__name__)
def test_global_hooks_are_refused_by_name(run, register):
    def everywhere(*_):
        return None

    handle = register(everywhere)
    try:
        with pytest.raises(InputError, match="everywhere"):
            run(made(), image())
    finally:
        handle.remove()
    run(made(), image())


def test_a_hook_around_starred_arguments_wants_example_inputs():
    class Starred(Net):
        def forward(self, *images):
            return super().forward(sum(images))

    model = forward_hook(made(Starred))
    with pytest.raises(CaptureError, match=r"'\*images', and only example inputs tell"):
        trace(model)
    agrees("onnx fp32", model, (image(), image(seed=1)))


def test_the_model_keeps_its_hooks_and_its_forward():
    model = decorated_without_wraps(several_hooks(made()))
    hooks, forward, expected = list(model._forward_hooks.values()), model.forward, model(image())
    agrees("onnx fp32", model, image())
    assert list(model._forward_hooks.values()) == hooks
    assert model.forward is forward
    torch.testing.assert_close(model(image()), expected)
    assert model.forward.__closure__[0].cell_contents.__self__ is model
