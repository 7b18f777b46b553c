"""A model as one aten program, stopped before it is built: what the benchmarks look into."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_passes import convert_fx, fuse_fx, prepare_calibration_fx
from fx_passes.quantize.calibrate import calibrate
from lowering.segment.program import AtenProgram, TensorSpec
from lowering.segment.to_aten import to_aten

__all__ = ["as_program", "aten_program", "converted_graph"]


def converted_graph(model: nn.Module, example: Tensor, data: Iterable[Tensor], target: str) -> GraphModule:
    """`model` calibrated on `data` and converted for `target`."""
    prepared = prepare_calibration_fx(model, example, target=target)
    calibrate(prepared, data)
    return convert_fx(prepared)


def aten_program(model: nn.Module, example: Tensor, data: Iterable[Tensor], target: str | None) -> AtenProgram:
    """The whole model as one program, for `target` in int8 or (None) in float.

    Only for models that are one tensor program from input to output.
    """
    graph = fuse_fx(model) if target is None else converted_graph(model, example, data, target)
    return as_program(graph, example)


def as_program(graph: GraphModule, example: Tensor) -> AtenProgram:
    """A graph without Python calls, as a program with one static input."""
    plain = torch.fx.GraphModule(graph, graph.graph)
    return to_aten(plain, [TensorSpec.static("image", example)], (example,))
