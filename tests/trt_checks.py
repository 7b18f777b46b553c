"""What every converter test does: lower a small program to a TensorRT network, execute it, compare it with eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from lowering.segment.program import AtenProgram, TensorSpec
from lowering.segment.to_aten import to_aten
from lowering.trt.builder.build import build_engine
from lowering.trt.define.definition import Network
from lowering.trt.define.network import build_network
from lowering.trt.reference import read_network

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass
class Case:
    """One program: what to call, on what, and with which further inputs if it is dynamic."""

    name: str
    program: Callable | nn.Module
    inputs: tuple[Tensor, ...]
    dynamic: dict[int, tuple[int, int]] = field(default_factory=dict)  # dimension of every input -> (min, max)
    more: tuple[tuple[Tensor, ...], ...] = ()
    build: bool = True


def as_segment(program: Callable | nn.Module, arity: int) -> fx.GraphModule:
    """A traced program of `arity` tensors that returns a flat tuple of tensors."""
    if isinstance(program, FunctionType):
        graph_module = fx.symbolic_trace(program)
    else:  # one call, of a module or of a builtin that has no Python code to trace
        root, graph = nn.Module(), fx.Graph()
        inputs = tuple(graph.placeholder(f"x{i}") for i in range(arity))
        if isinstance(program, nn.Module):
            root.add_module("layer", program.eval())
            graph.output(graph.call_module("layer", inputs))
        else:
            graph.output(graph.call_function(program, inputs))
        graph_module = fx.GraphModule(root, graph)
    output = graph_module.graph.output_node()
    result = output.args[0]
    output.args = ((result,) if isinstance(result, fx.Node) else tuple(result),)
    graph_module.recompile()
    return graph_module


def aten_program(
    program: Callable | nn.Module, *inputs: Tensor, dynamic: dict[int, tuple[int, int]] | None = None
) -> AtenProgram:
    """`program` in aten normal form; `dynamic` frees these dimensions of every input that has them."""
    specs = []
    for index, x in enumerate(inputs):
        low, high = list(x.shape), list(x.shape)
        for dim, (smallest, largest) in (dynamic or {}).items():
            if dim < x.dim():
                low[dim], high[dim] = smallest, largest
        specs.append(TensorSpec(f"x{index}", x.dtype, tuple(low), tuple(x.shape), tuple(high)))
    return to_aten(as_segment(program, len(inputs)), specs, inputs)


def lower(program: Callable | nn.Module, *inputs: Tensor, dynamic: dict[int, tuple[int, int]] | None = None) -> Network:
    """The TensorRT network of `program`."""
    return build_network(aten_program(program, *inputs, dynamic=dynamic), name="test")


def assert_same(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float | None = None) -> None:
    """Shapes, dtypes and values agree; the message has the worst element and where it is."""
    assert len(found) == len(wanted)
    for index, (have, want) in enumerate(zip(found, wanted, strict=True)):
        assert have.dtype == want.dtype, f"output {index}: {have.dtype} instead of {want.dtype}"
        assert have.shape == want.shape, f"output {index}: {tuple(have.shape)} instead of {tuple(want.shape)}"
        if not want.dtype.is_floating_point:
            assert torch.equal(have, want), f"output {index}: {have} instead of {want}"
            continue
        limit = TOLERANCE[want.dtype] if tolerance is None else tolerance
        a, b = have.double(), want.double()
        same = (a == b) | (a.isnan() & b.isnan())
        error = torch.where(same, 0.0, (a - b).abs() / (limit + limit * b.abs()))
        error = error.nan_to_num(nan=float("inf"))
        if error.numel() and error.max() > 1:
            at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
            raise AssertionError(f"output {index} at {at}: {have[at]} instead of {want[at]} (tolerance {limit})")


def eager(program: Callable | nn.Module, *inputs: Tensor) -> tuple[Tensor, ...]:
    """What torch itself gives, as a flat tuple."""
    with torch.no_grad():
        result: Any = program(*inputs)
    return (result,) if isinstance(result, Tensor) else tuple(result)


def check(case: Case) -> Network:
    """Execute the case's network on all its inputs, compare with eager, and build an engine from it."""
    network = lower(case.program, *case.inputs, dynamic=case.dynamic)
    reference = read_network(network.definition)
    for inputs in (case.inputs, *case.more):
        assert_same(reference.run(*inputs), eager(case.program, *inputs))
    if case.build:
        assert build_engine(network, report=False).data
    return network
