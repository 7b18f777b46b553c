"""partition: few, large segments, Python in its order between them, and the graph's own results."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
import typing

import pytest
import torch
import torch.nn.functional as F
from equality import same
from reported_cases import CASES, decode_boxes
from torch import nn
from torch.fx import GraphModule

from fx_passes import functionalize, trace, wrap
from fx_passes.errors import InputError
from fx_passes.partition.partition import partition
from fx_passes.partition.recording import record

torch.set_num_threads(1)
wrap(decode_boxes)


def image(n=2, c=3, h=4, w=4, seed=0):
    return torch.randn(n, c, h, w, generator=torch.Generator().manual_seed(seed))


def clones(value):
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, value)


def as_program(gm):
    """The glue with every segment run as an engine runs it: on copies, what it wrote to copied back, results fresh."""
    glue = copy.deepcopy(gm)
    for name, module in list(glue.named_children()):
        if name.startswith("segment_"):
            setattr(glue, name, _Program(module))
    return glue


class _Program(nn.Module):
    def __init__(self, segment):
        super().__init__()
        self.segment = segment

    def forward(self, *inputs):
        taken = [i.clone() for i in inputs]
        outputs = tuple(o.clone() for o in self.segment(*taken))
        for before, after in zip(inputs, taken, strict=True):
            before.copy_(after)
        return outputs


def segments(glue):
    return [glue.get_submodule(n.target) for n in glue.graph.nodes if str(n.target).startswith("segment_")]


def python(glue):
    return {n.name: n.meta["python"] for n in glue.graph.nodes if n.meta.get("python")}


def order(glue):
    """Segments and Python calls, as they run."""
    named = [n for n in glue.graph.nodes if n.meta.get("python") or str(n.target).startswith("segment_")]
    return [n.target if n.op == "call_module" else n.name for n in named]


def check(model, *inputs, kwargs=None, more=(), functional=(False, True), **options):
    """Both the traced and the functional graph, partitioned, give what eager gives. Returns the last glue."""
    for functionalized in functional:
        gm = trace(model, dict(kwargs) if kwargs else None)
        gm = functionalize(gm) if functionalized else gm
        before = str(gm.graph), list(gm.state_dict())
        glue = partition(gm, clones(inputs), kwargs, **options)
        assert (str(gm.graph), list(gm.state_dict())) == before
        for args in (inputs, *more):
            for form in (glue, as_program(glue)):
                eager = copy.deepcopy(model)
                mine, theirs = clones(args), clones(args)
                with torch.no_grad():
                    same(form(*mine, **(kwargs or {})), eager(*theirs, **(kwargs or {})))
                same(mine, theirs, "inputs")
        check_contract(gm, glue)
    return glue


def check_contract(gm, glue):
    """What every segment promises: flat tuples of distinct tensors, shared state under its own path."""
    state = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
    for segment in segments(glue):
        assert type(segment).__mro__[1] is GraphModule
        for name, tensor in [*segment.named_parameters(), *segment.named_buffers()]:
            assert tensor is state[name], name
        (output,) = segment.graph.find_nodes(op="output")
        assert isinstance(output.args[0], tuple) and len(set(output.args[0])) == len(output.args[0])
        assert not any(n.op == "placeholder" for n in output.args[0])
        assert not any(n.meta.get("python") for n in segment.graph.nodes)


# -- the reported cases ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_reported_cases(case):
    model = case.model()
    glue = check(model, *case.inputs(), more=case.dynamic() if case.dynamic else ())
    expected = {"decode_boxes": "wrapped by the user"} if case.expect == "python" else {}
    assert python(glue) == expected
    assert len(segments(glue)) == 1


# -- where Python stands -----------------------------------------------------------------------------------------------


@wrap
def positive(x):
    return x[x > 0]


@wrap
def doubled(x):
    return x * 2 if float(x.sum()) < 1e9 else x


@wrap
def count(x):
    return int((x > 0).sum())


@wrap
def pieces(x):
    return [row for row in x if row.sum() < 1e9]


@wrap
def both(x):
    return x + 1, {"rest": x - 1, "n": 2}


class Sandwich(nn.Module):
    """conv -> Python -> conv, beside a branch that needs no Python."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(3, 3, 1) for _ in range(3))

    def forward(self, x):
        y = self.a(x)
        z = self.b(doubled(y))
        return z + self.c(x), F.relu(self.c(y))


def test_independent_work_joins_the_first_segment():
    glue = check(Sandwich(), image(), more=[(image(3),)])
    assert order(glue) == ["segment_0", "doubled", "segment_1"]
    assert len([n for n in segments(glue)[0].graph.nodes if n.op == "call_module"]) == 3


class PythonFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.a(doubled(x)) + self.a(x)


def test_preprocessing_stands_before_one_segment():
    assert order(check(PythonFirst(), image())) == ["doubled", "segment_0"]


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        y = doubled(self.a(x))
        y = doubled(self.a(y) + y)
        return self.a(y), positive(y), x.shape[0]


def test_a_chain_of_python_calls_is_a_chain_of_segments():
    glue = check(Chain(), image(), more=[(image(5),)])
    assert order(glue) == ["segment_0", "doubled", "segment_1", "doubled_1", "positive", "segment_2"]


@pytest.mark.parametrize("when", [0, 1], ids=["independent", "dependent"])
def test_python_calls_keep_their_order(when):
    log = []

    @wrap
    def first(x):
        log.append("first")
        return x

    @wrap
    def second(x):
        log.append("second")
        return x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            deep = first(self.a(first(self.a(x))))
            second(x)
            return deep, second(x if when == 0 else deep)

    glue = partition(trace(Model()), (image(),))
    log.clear()
    glue(image())
    assert log == ["first", "first", "second", "second"]


class Structures(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        y = self.a(x)
        plus, more = both(y)
        return {"sum": plus + more["rest"], "n": more["n"], "x": x, "y": [y, y], "shape": y.shape, "none": None}


def test_structures_out_of_python_are_taken_apart_in_the_glue():
    glue = check(Structures(), image(), more=[(image(1, h=6),)])
    assert order(glue) == ["segment_0", "both", "segment_1"]


class NumberFromPython(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        y = self.a(x)
        return self.a(y) * count(y), y.flatten().topk(count(y)).values


def test_a_number_that_python_computes_is_no_constant_of_a_segment():
    glue = check(NumberFromPython(), image(), more=[(image(seed=5),), (image(3, seed=7),)])
    reasons = python(glue)
    assert "computed in Python" in reasons["mul"] and "computed in Python" in reasons["topk"]
    assert len(segments(glue)) == 1


class DataDependentSize(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x):
        return self.a(x[: x.abs().sum().long().item() % 3 + 1])


def test_a_number_read_from_a_tensor_is_no_constant_of_a_segment():
    glue = check(DataDependentSize(), torch.randn(5, 4), more=[(torch.full((5, 4), 0.1),), (torch.ones(5, 4),)])
    assert any("tensor's data" in reason for reason in python(glue).values())


class ListOutOfPython(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return F.relu(torch.cat(pieces(self.a(x)), 0)) + 1


def test_a_list_of_varying_length_is_joined_in_python():
    glue = check(ListOutOfPython(), image(), more=[(image(4),)])
    assert python(glue)["cat"].startswith("takes a list of tensors from 'pieces'")
    assert order(glue) == ["segment_0", "pieces", "cat", "segment_1"]


class SizesAcross(nn.Module):
    """A size of the input used after a Python call, and arithmetic on it."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        n, c, h, w = x.shape
        y = doubled(self.a(x))
        ramp = torch.arange(h * 2, dtype=x.dtype, device=y.device)[:h].view(-1, 1)
        return (y + ramp / w).reshape(n, c * h, w), h // 2 + y.size(0), x.dtype


def test_sizes_are_computed_in_the_segment_that_needs_them():
    glue = check(SizesAcross(), image(), more=[(image(1),), (image(3, h=6, w=2),)])
    assert order(glue) == ["segment_0", "doubled", "segment_1"]
    for n in segments(glue)[1].graph.nodes:
        assert n.op != "placeholder" or n.name in ("x", "doubled")


# -- structure of inputs and outputs -----------------------------------------------------------------------------------


class NothingToLower(nn.Module):
    def forward(self, x):
        return pieces(x), x, x.shape[0]


def test_a_model_without_tensor_operations_has_no_segments():
    assert order(check(NothingToLower(), image())) == ["pieces"]


class Nothing(nn.Module):
    def forward(self, x):
        return x


def test_an_identity_has_no_segments():
    glue = check(Nothing(), image())
    assert segments(glue) == []


class Passes(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.a = nn.Dropout(), nn.Conv2d(3, 3, 1)

    def forward(self, x):
        y = self.a(x)
        return self.drop(x), self.drop(y), y, x.contiguous(), y.to(y.dtype), x[0]


def test_what_is_the_input_or_another_output_is_returned_once():
    glue = check(Passes().eval(), image())
    assert [len(next(iter(s.graph.find_nodes(op="output"))).args[0]) for s in segments(glue)] == [2]


class Named(typing.NamedTuple):
    values: torch.Tensor
    extra: typing.Any


@dataclasses.dataclass
class Result:
    a: typing.Any
    b: typing.Any = 3


class Outputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 2, batch_first=True)

    def forward(self, x):
        rows = x.flatten(1, 2)
        out, state = self.lstm(rows)
        top = x.flatten(1).max(1)
        return Named(out, state), Result(top, [x.sum()]), x.split(1, 1), torch.sort(x, 1), self.lstm(rows)


def test_tuples_of_an_operation_keep_their_type():
    glue = check(Outputs(), image(), more=[(image(3),)])
    assert python(glue) == {}


def test_a_tuple_with_more_parts_than_were_seen_is_refused():
    class Rows(nn.Module):
        def forward(self, x):
            return (x * 2).split(1, 0)

    glue = check(Rows(), image())
    with pytest.raises(InputError, match="'split' gives 2 parts"):
        glue(image(3))


class DictInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 3, 1)

    def forward(self, batch, gain=2.0, *, bias=None):
        y = self.a(batch["image"]) * gain
        return {"y": y if bias is None else y + bias, "id": batch["id"]}


def test_nested_and_keyword_inputs():
    batch = {"image": image(), "id": 7}
    glue = check(DictInput(), kwargs={"batch": batch, "gain": 2.0, "bias": image(seed=3)}, functional=(False,))
    assert "takes the argument 'gain', which is no tensor" in python(glue).values()
    assert glue.forward.__code__.co_varnames[1:4] == ("batch", "gain", "bias")


def test_inputs_that_do_not_fit_are_refused_by_name():
    gm = trace(Sandwich())
    with pytest.raises(InputError, match="no 'x'"):
        partition(gm, ())
    with pytest.raises(InputError, match="too many"):
        partition(gm, (image(), image()))
    with pytest.raises(InputError, match="node 'a'"):
        partition(gm, (image(c=5),))


# -- memory ------------------------------------------------------------------------------------------------------------


@wrap
def halves_in_place(x):
    x.mul_(0.5)
    return x.sum()


class PythonWrites(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        y = self.a(x)
        before = F.relu(y)
        view = y[:, 0]
        s = halves_in_place(y)
        return before, self.a(y), s, view + 1, y


def test_what_python_writes_to_is_seen_as_in_eager():
    glue = check(PythonWrites(), image())
    assert order(glue) == ["segment_0", "getitem", "halves_in_place", "segment_1"]
    assert "written to in place" in python(glue)["getitem"]


class PythonWritesInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        y = self.a(x)
        halves_in_place(x)
        return y + x


def test_an_input_that_python_writes_to_is_read_before_and_after():
    assert order(check(PythonWritesInput(), image())) == ["segment_0", "halves_in_place", "segment_1"]


class WritesInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        x[:, 0] = 1
        x += 1
        return self.a(x), x


def test_writes_to_an_input_stay_in_one_segment():
    assert order(check(WritesInput(), image())) == ["segment_0"]


class WriteAcross(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        y = self.a(x)
        v = y.view(-1)
        z = doubled(y)
        y.add_(1.0)
        return z, v * 2, self.a(y)


def test_a_write_after_a_python_call_that_read_the_value():
    check(WriteAcross(), image())


class Counters(nn.Module):
    def __init__(self, split):
        super().__init__()
        self.split = split
        self.a = nn.Conv2d(3, 3, 1)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        y = self.a(x) + self.calls
        if self.split:
            y = doubled(y)
        self.calls += 1
        return y * self.calls


@pytest.mark.parametrize("split", [False, True], ids=["one segment", "across a Python call"])
def test_a_buffer_that_forward_changes(split):
    model = Counters(split)
    glue = partition(trace(copy.deepcopy(model)), (image(),))
    assert glue.calls.item() == 0 if split else True
    form = glue if not split else as_program(glue)
    with torch.no_grad():
        for _ in range(3):
            same(form(image()), model(image()))
    if split:  # the buffer is an input of both segments, and so one tensor
        assert [n.name for s in segments(glue) for n in s.graph.nodes if n.op == "get_attr"] == []


class MethodCounts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 3, 1)
        self.register_buffer("calls", torch.zeros(1))

    @wrap
    def tick(self, x):
        self.calls += 1
        return x

    def forward(self, x):
        y = self.tick(self.a(x) + self.calls)
        return y * self.calls


def test_a_buffer_that_a_wrapped_method_changes():
    model = MethodCounts()
    glue = partition(trace(copy.deepcopy(model)), (image(),))
    with torch.no_grad():
        for _ in range(3):
            same(glue(image()), model(image()))


def test_recording_leaves_state_and_random_numbers_as_they_were():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Dropout())
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(0)
    rng = torch.random.get_rng_state()
    x = image()
    kept = x.clone()
    partition(trace(model), (x,))
    assert torch.equal(torch.random.get_rng_state(), rng)
    same(dict(model.state_dict()), dict(before))
    assert torch.equal(x, kept)


class Late(nn.Module):
    """`y + g` comes before `watch(y)` in the program, and after it in the plan."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        y = self.a(x)
        g = doubled(y)
        z = y + g
        s = maybe_writes(y)
        return z, s


@wrap
def maybe_writes(x):
    if maybe_writes.armed:
        x.zero_()
    return x.sum()


maybe_writes.armed = False


def test_an_argument_read_late_by_another_is_cloned_for_python():
    glue = check(Late(), image())
    assert order(glue) == ["segment_0", "doubled", "maybe_writes", "segment_1"]
    maybe_writes.armed = True
    try:
        with torch.no_grad():
            model = trace(Late())
            glue = partition_disarmed(model)
            same(glue(image()), model(image()))
    finally:
        maybe_writes.armed = False


def partition_disarmed(gm):
    maybe_writes.armed = False
    glue = partition(gm, (image(),))
    maybe_writes.armed = True
    return glue


def test_nothing_is_cloned_without_need():
    glue = check(Sandwich(), image())
    assert [n for n in glue.graph.nodes if n.target == "clone"] == []


# -- size of segments --------------------------------------------------------------------------------------------------


def test_a_small_segment_stays_in_python():
    glue = check(Chain(), image(), min_segment_nodes=2)
    assert len(segments(glue)) == 1
    assert all("min_segment_nodes is 2" in r for n, r in python(glue).items() if n.startswith(("a", "add")))
    glue = check(Chain(), image(), min_segment_nodes=99)
    assert segments(glue) == []


def test_marked_nodes_stay_python_with_their_reason():
    gm = trace(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 1)))
    next(n for n in gm.graph.nodes if n.target == "1").meta["python"] = "the backend has no such thing"
    glue = partition(gm, (image(),))
    assert order(glue) == ["segment_0", "1", "segment_1"]
    assert list(python(glue).values()) == ["the backend has no such thing"]
    assert set(glue.state_dict()) == {
        f"segment_{i}.{n}" for i, n in ((0, "0.weight"), (0, "0.bias"), (1, "2.weight"), (1, "2.bias"))
    }


def test_metas_reach_segments_and_glue():
    glue = partition(trace(Sandwich()), (image(),))
    for segment in segments(glue):
        assert all("source" in n.meta for n in segment.graph.nodes if n.op in ("call_module", "call_function"))
    call = next(n for n in glue.graph.nodes if n.name == "doubled")
    assert call.meta["source"][0] == __file__
    assert glue.meta["stage"] == segments(glue)[0].meta["stage"] == "traced"


def test_glue_keeps_the_root_for_wrapped_methods():
    model = MethodCounts()
    glue = partition(trace(model), (image(),))
    assert glue._self is model
    assert operator.iadd not in [n.target for n in glue.graph.nodes]


@pytest.mark.zoo
def test_resnet18_is_one_segment():
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = models.resnet18(weights=None).eval()
    glue = check(model, torch.randn(1, 3, 32, 32), more=[(torch.randn(2, 3, 64, 64),)])
    assert order(glue) == ["segment_0"] and python(glue) == {}


def test_one_tensor_given_for_two_arguments():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv2d(3, 3, 1)

        def forward(self, x, y):
            x += 1
            return self.a(y)

    model = Model()
    x = image()
    glue = as_program(partition(trace(model), (x, x)))
    mine, theirs = image(), image()
    with torch.no_grad():
        same(glue(mine, mine), model(theirs, theirs))


class SizeCheck(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 3, 2)

    def forward(self, x):
        assert x.shape[1] == 3
        y = self.a(x)
        if y.shape[-1] % 2:
            y = F.pad(y, (0, 1))
        return self.a(y)


def test_a_check_of_a_size_inside_a_segment_stays_there():
    model = SizeCheck()
    glue = partition(trace(model, image()), (image(),))
    (segment,) = segments(glue)
    (output,) = segment.graph.find_nodes(op="output")
    assert len(output.args[0]) == 1
    assert sum(getattr(n.target, "__name__", "") == "check_branch" for n in segment.graph.nodes) == 1
    same(glue(image()), model(image()))
    with pytest.raises(InputError, match="traced with inputs"):
        glue(image(w=5))


class ListInTuple(nn.Module):
    """A leaf, for it branches on data, whose result holds a list."""

    def forward(self, x):
        parts = [x + 1, x * 2]
        return (parts, {"sum": x.sum()}) if x.sum() > -1e9 else (parts[:1], {})


def test_a_list_inside_the_result_of_a_leaf_stays_a_list():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.leaf = ListInTuple()

        def forward(self, x):
            parts, sums = self.leaf(x.relu())
            return parts, sums["sum"] * 2

    model = Model()
    glue = partition(trace(model), (image(),))
    same(glue(image()), model(image()))


def test_a_recording_is_not_made_twice():
    runs = itertools.count()  # a list would be as before after every run

    @wrap
    def seen(x):
        next(runs)
        return x + 1

    class Model(nn.Module):
        def forward(self, x):
            return seen(x.relu()).sigmoid()

    gm = trace(Model())
    recording = record(gm, (image(),), {})
    for _ in range(3):
        partition(gm, (image(),), check=False, recording=recording)
    assert next(runs) == 1
