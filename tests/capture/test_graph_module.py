"""GraphModuleWithAttr: the user's class and state, kept apart from the graph that passes rewrite."""

from __future__ import annotations

import abc
import copy
import typing

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from fx_passes import GraphModuleWithAttr, QuantizationTracer, functionalize, trace, wrap
from fx_passes.graph.module import copy_graph_module, delete_unused, set_buffer, set_submodule

torch.set_num_threads(1)


def image(seed=0):
    return torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x):
        return self.bn(self.conv(x)) + self.conv.bias.view(1, -1, 1, 1)


class Model(nn.Module):
    made = 0
    unit = "px"

    def __init__(self, gain):
        super().__init__()
        type(self).made += 1
        self.gain, self.names = gain, ["a", "b"]
        self.stem = Block()
        self.layers = nn.Sequential(Block(), nn.ReLU(), Block())
        self.unused = nn.Linear(2, 2)
        self.register_buffer("offset", torch.ones(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.finish(self.layers(self.stem(x)) * self.scale + self.offset)

    @wrap
    def finish(self, x):
        return x * self.gain, self.training

    def features(self, x):
        return self.layers[0](self.stem(x))

    @property
    def double_gain(self):
        return self.gain * 2


def test_it_is_an_instance_of_the_users_class_and_does_not_construct_another():
    model = Model(2.0)
    made = Model.made
    gm = trace(model)
    assert isinstance(gm, Model) and isinstance(gm, GraphModuleWithAttr) and isinstance(gm, GraphModule)
    assert Model.made == made
    assert type(gm).__name__ == "Model" and "Model(" in repr(gm)


def test_methods_and_attributes_of_the_root_are_there():
    model = Model(2.0).eval()
    gm = trace(model)
    assert (gm.gain, gm.unit, gm.names, gm.double_gain) == (2.0, "px", ["a", "b"], 4.0)
    assert gm.names is model.names
    assert torch.equal(gm.features(image()), model.features(image()))
    with pytest.raises(AttributeError, match="no_such"):
        gm.no_such  # noqa: B018


def test_setting_a_plain_attribute_reaches_the_wrapped_methods_self():
    model = Model(2.0).eval()
    gm = trace(model)
    gm.gain = 5.0
    assert torch.equal(gm(image())[0], model(image())[0]) and model.gain == 5.0
    gm.note = "mine"
    assert not hasattr(model, "note")


def test_the_state_dict_is_the_models_own_in_order_and_shared():
    model = Model(2.0)
    gm = trace(model)
    assert list(gm.state_dict()) == list(model.state_dict())
    assert [n for n, _ in gm.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(gm.parameters(), model.parameters(), strict=True))
    gm.load_state_dict({k: torch.full_like(v, 3) for k, v in model.state_dict().items()})
    assert model.stem.conv.weight.unique().tolist() == [3.0]
    assert not any(m is model for m in gm.modules())


def test_it_has_the_users_containers_but_not_the_users_tables():
    model = Model(2.0)
    gm = trace(model)
    assert isinstance(gm.layers, nn.Sequential) and gm.layers[0].conv is model.layers[0].conv
    set_submodule(gm, "layers.1", nn.Sigmoid())
    assert isinstance(model.layers[1], nn.ReLU) and isinstance(gm.layers[1], nn.Sigmoid)


def test_mode_reaches_graph_and_root():
    model = Model(2.0)
    gm = trace(model)
    gm.eval()
    assert not model.training and not gm.stem.bn.training and gm(image())[1] is False
    gm.train()
    assert model.training and gm.stem.bn.training and gm(image())[1] is True


def test_casting_reaches_graph_and_root_and_keeps_buffers_one():
    model = Model(2.0).eval()
    gm = trace(model).double()
    assert gm(image().double())[0].dtype == torch.float64
    assert model.offset.dtype == torch.float64 and gm.offset is model.offset
    assert model.scale.dtype == torch.float64


class Registered(nn.Module):
    known: typing.ClassVar[list[type]] = []

    def __init_subclass__(cls, *, tag, **kwargs):
        super().__init_subclass__(**kwargs)
        Registered.known.append(cls)


class Strict(Registered, abc.ABC, tag="x"):
    def __init__(self):
        super().__init__()
        self.graph_name = "g"

    @abc.abstractmethod
    def part(self, x): ...

    def forward(self, x):
        return self.part(x)

    def __getattr__(self, name):
        return "found" if name == "dynamic" else super().__getattr__(name)


class Concrete(Strict, tag="y"):
    def part(self, x):
        return x + 1


def test_metaclasses_subclass_hooks_and_getattr_of_the_user():
    known = list(Registered.known)
    gm = trace(Concrete())
    assert isinstance(gm, Strict) and gm.dynamic == "found" and Registered.known == known
    assert torch.equal(gm(image()), image() + 1)


# -- copies ------------------------------------------------------------------------------------------------------------


def test_deepcopy_owns_everything_and_keeps_what_was_shared_shared():
    model = Model(2.0).eval()
    gm = trace(model)
    new = copy.deepcopy(gm)
    assert type(new).__mro__[1:] == type(gm).__mro__[1:] and new.graph.owning_module is new
    assert new._self is not model and new._self.stem.conv is new.stem.conv and new.stem.conv is not model.stem.conv
    new.stem.conv.weight.data.zero_()
    assert model.stem.conv.weight.abs().sum() > 0
    assert not torch.equal(new(image())[0], gm(image())[0])
    new.train()
    assert not model.training


@pytest.mark.parametrize("copier", [copy_graph_module, copy.copy], ids=["copy_graph_module", "copy.copy"])
def test_a_shallow_copy_shares_tensors_and_leaves_but_not_the_graph(copier):
    gm = trace(Model(2.0).eval())
    gm.meta["extra"] = 1
    next(iter(gm.graph.nodes)).meta["mark"] = 1
    new = copier(gm)
    assert type(new).__mro__[1:] == type(gm).__mro__[1:]
    assert new.meta == gm.meta and new.meta is not gm.meta
    assert str(new.graph) == str(gm.graph) and new.graph is not gm.graph
    assert [n.meta for n in new.graph.nodes] == [n.meta for n in gm.graph.nodes]
    next(iter(new.graph.nodes)).meta["mark"] = 2
    assert next(iter(gm.graph.nodes)).meta["mark"] == 1
    assert new.stem.conv is gm.stem.conv and new.stem is not gm.stem and new._self is gm._self
    assert list(new.state_dict()) == list(gm.state_dict())
    before = str(gm.graph), list(gm.state_dict())
    for node in list(new.graph.nodes):
        if node.target == "layers.1":
            node.replace_all_uses_with(node.args[0])
            new.graph.erase_node(node)
    new.recompile()
    set_submodule(new, "stem.conv", nn.Conv2d(3, 3, 1))
    set_buffer(new, "layers.0.conv.weight", torch.zeros(1))
    set_buffer(new, "deep.er.value", torch.zeros(1))
    assert (str(gm.graph), list(gm.state_dict())) == before
    assert isinstance(gm.layers[0].conv.weight, nn.Parameter)


def test_a_plain_graph_module_is_copied_as_one():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())).eval()
    gm = symbolic_trace(model)
    new = copy_graph_module(gm)
    assert isinstance(new, GraphModule) and not isinstance(new, GraphModuleWithAttr)
    set_submodule(new, "1.0", nn.Identity())
    assert isinstance(gm.get_submodule("1.0"), nn.BatchNorm2d)
    assert torch.equal(gm(image()), model(image()))


def test_a_graph_module_can_be_a_root():
    gm = symbolic_trace(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()))
    new = trace(gm)
    assert isinstance(new, GraphModuleWithAttr) and torch.equal(new(image()), gm(image()))
    again = GraphModuleWithAttr(new, QuantizationTracer().trace(new))
    assert again._self is gm and torch.equal(again(image()), gm(image()))


# -- entries -----------------------------------------------------------------------------------------------------------


def test_set_buffer_replaces_a_shared_leaf_by_a_container_with_the_same_tensors():
    model = Model(2.0)
    gm = copy_graph_module(trace(model))
    node = next(n for n in gm.graph.nodes if n.target == "stem.conv")
    set_buffer(gm, "stem.conv.weight_scale", torch.ones(3))  # still called: stays a Conv2d
    assert isinstance(gm.stem.conv, nn.Conv2d) and gm.stem.conv is not model.stem.conv
    gm(image())
    node.replace_all_uses_with(node.args[0])
    gm.graph.erase_node(node)
    gm = copy_graph_module(gm)
    set_buffer(gm, "stem.conv.weight", torch.zeros(3, 3, 1, 1, dtype=torch.int8))
    assert type(gm.stem.conv) is nn.Module and gm.stem.conv.bias is model.stem.conv.bias
    assert [k for k in gm.state_dict() if k.startswith("stem.conv")] == [
        "stem.conv.bias",
        "stem.conv.weight_scale",
        "stem.conv.weight",
    ]
    assert isinstance(model.stem.conv.weight, nn.Parameter) and not hasattr(model.stem.conv, "weight_scale")


def test_set_buffer_takes_parameters_and_non_persistent_buffers():
    gm = trace(Model(2.0))
    set_buffer(gm, "folded.weight", nn.Parameter(torch.ones(1)))
    set_buffer(gm, "folded.scratch", torch.ones(1), persistent=False)
    set_buffer(gm, "offset", torch.zeros(1), persistent=False)
    assert "folded.weight" in dict(gm.named_parameters())
    assert "folded.scratch" not in gm.state_dict() and "folded.scratch" in dict(gm.named_buffers())
    assert "offset" not in gm.state_dict() and gm.offset.item() == 0 and gm._self.offset.item() == 1


def test_delete_unused_keeps_what_nodes_refer_to():
    model = Model(2.0)
    gm = copy_graph_module(trace(model))
    node = next(n for n in gm.graph.nodes if n.target == "layers.2.bn")
    node.replace_all_uses_with(node.args[0])
    gm.graph.erase_node(node)
    gm.recompile()
    assert delete_unused(gm) == ["scratch", "layers.2.bn", "unused"]
    assert [k for k in model.state_dict() if k not in gm.state_dict()] == [
        k for k in model.state_dict() if k.startswith(("layers.2.bn", "unused"))
    ]
    gm(image())
    assert isinstance(model.layers[2].bn, nn.BatchNorm2d) and gm.unused is model.unused


def test_a_constant_of_the_trace_moves_with_the_module_and_is_no_state():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.anchors = torch.ones(3, 1, 1)

        def forward(self, x):
            return x + self.anchors * torch.tensor(2.0)

    model = Constant()
    gm = trace(model)
    assert list(gm.state_dict()) == [] and "_tensor_constant0" not in vars(model)
    assert gm.double()(image().double()).dtype == torch.float64
    assert all(b.dtype == torch.float64 for b in gm.buffers())


def test_passes_keep_the_root_and_its_class():
    model = Model(2.0).eval()
    gm = functionalize(trace(model))
    assert isinstance(gm, Model) and gm._self is model and gm.meta["stage"] == "functionalized"
    assert torch.equal(gm(image())[0], model(image())[0])
