"""A segment as a normalised aten program: one normal form, shapes known, state lifted.

`to_aten` is the door between the module-level world (`fx_passes`) and the backends (`lowering.trt`, `lowering.onnx`).
It runs `torch.export` (`normal_form.export`), brings the graph into normal form (`normal_form.normalize`) and gives an
`AtenProgram`, whose `exported` is a valid `torch.export.ExportedProgram`: it runs, it can be saved by torch, and
`torch.onnx.export` takes it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import GraphModule

from fx_passes.capture.exclusive import in_turn
from lowering.segment.program import AtenProgram, TensorSpec

__all__ = ["cast_float_part", "to_aten"]


@in_turn
def to_aten(segment: GraphModule, inputs: list[TensorSpec], example: tuple[Tensor, ...]) -> AtenProgram:
    """Bring a segment into aten normal form.

    Args:
        segment: takes tensors positionally, returns a tuple of tensors. It is not changed; its state is shared.
        inputs: one spec per placeholder, in order.
        example: one tensor per spec, of a size within the spec; at least 2 in every dynamic dimension, because
            torch.export takes a size of 1 for a constant.

    Returns:
        The program. Its `checks` are what it takes for granted about sizes beside the ranges of the specs.

    Raises:
        ExportError: torch.export refuses the segment, or would freeze a dimension that the spec calls dynamic, or a
            size that follows from it.

    Example:
        >>> gm = torch.fx.symbolic_trace(lambda x: (x.flatten(1) * 2,))
        >>> x = torch.ones(2, 3, 4)
        >>> program = to_aten(gm, [TensorSpec("x", x.dtype, (1, 3, 4), (2, 3, 4), (8, 3, 4))], (x,))
        >>> [str(n.target) for n in program.call_nodes()]
        ['aten.reshape.default', 'aten.mul.Tensor']
    """
    from fx_passes.capture.export import open_sizes
    from lowering.segment.checks import set_checks
    from lowering.segment.normal_form.export import check_dynamic, export_segment
    from lowering.segment.normal_form.normalize import normalize

    exported, log = export_segment(segment, inputs, example)
    check_dynamic(exported, inputs, segment, example)
    with open_sizes():
        program = normalize(exported, inputs, segment)
        set_checks(program, segment, example, log)
    return program


def cast_float_part(program: AtenProgram, dtype: torch.dtype, keep: Iterable[str] = ()) -> AtenProgram:
    """Give the float part of a program another precision by explicit casts (see `fx_passes.amp`).

    Args:
        program: a float32 program, with or without Q/DQ.
        dtype: torch.float16 or torch.bfloat16.
        keep: FX nodes or module paths that stay in float32, as in `autocast_fx`.

    Returns:
        A new program whose inputs and outputs keep their dtypes; weights are cast now, not at run time.
    """
    from lowering.segment.normal_form.cast import cast_program

    return cast_program(program, dtype, keep)
