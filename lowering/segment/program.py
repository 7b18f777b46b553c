"""What a segment is to a backend: an aten program, what goes in, what comes out, what the caller writes back.

What a backend can rely on, for every node of a program that `to_aten` gives:

- `meta["val"]` is there; `meta["source"]`, `meta["module_path"]`, `meta["fx_node"]` are where the segment had them.
- The graph is functional, has no assertions, no casts to the same dtype, no `detach`/`alias`/`contiguous`/dropout.
- A cast is `aten._to_copy.default(x, dtype=...)`, a change of shape `aten.reshape.default`, a change of axis order
  `aten.permute.default`; `aten.clone.default` stands only where an output would else be an input, a constant or
  another output. Composite view ops (chunk, narrow, movedim ...) are gone; other composites (linear, layer_norm,
  hardswish, scaled_dot_product_attention, ...) are whole.
- Sizes are ints where they are known, and -1 in `reshape`/`expand` where one free dimension says enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor
from torch.fx import Node

from fx_passes.capture.conditions import Condition

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["AtenProgram", "SizeCheck", "TensorSpec", "WriteBack", "output_values"]


@dataclass(frozen=True)
class TensorSpec:
    """One input of a segment.

    Attributes:
        name: a Python identifier; the name of the input in the engine or the ONNX file.
        dtype: what the caller will pass.
        min: the smallest sizes that will be passed, one entry per dimension.
        opt: the sizes to optimise for.
        max: the largest sizes. A dimension is static where `min == max`.
        symbols: optional names of the dynamic dimensions, None where static. Dimensions of one name have one size.
            Without names, dimensions with equal min, opt and max share a size if they belong to different inputs or
            if the export finds that they must.
    """

    name: str
    dtype: torch.dtype
    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]
    symbols: tuple[str | None, ...] | None = None
    profiles: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...] = ()

    def is_dynamic(self, dim: int) -> bool:
        """Whether dimension `dim` may differ from call to call."""
        return self.min[dim] != self.max[dim]

    @property
    def dynamic(self) -> bool:
        """Whether any dimension may differ from call to call."""
        return self.min != self.max

    @staticmethod
    def static(name: str, tensor: Tensor) -> TensorSpec:
        """The spec of an input that always looks like `tensor`."""
        shape = tuple(tensor.shape)
        return TensorSpec(name, tensor.dtype, shape, shape, shape)


@dataclass(frozen=True)
class WriteBack:
    """A mutation that the caller performs after the program has run: copy output `output` into the target.

    Attributes:
        output: index into `AtenProgram.outputs`.
        kind: "input" (`target` is an index into `AtenProgram.inputs`) or "buffer" (`target` is a buffer's FQN).
        target: what to copy into.
    """

    output: int
    kind: Literal["input", "buffer"]
    target: int | str


@dataclass(frozen=True)
class SizeCheck:
    """What the sizes of the inputs must be, beside their ranges: another branch of the model's code was not lowered.

    Attributes:
        condition: over the inputs by their index (see `fx_passes.capture.conditions`).
        text: the same as Python code over their names: ``x.shape[3] % 4 == 0``.
        line: the user's line that asked, "model.py:12: if x.shape[3] % 4:", or None if that is not known.
    """

    condition: Condition
    text: str
    line: str | None = None

    def __str__(self) -> str:
        return self.text if self.line is None else f"{self.text} ({self.line})"


@dataclass
class AtenProgram:
    """A lifted, functional aten program with its interface.

    Attributes:
        exported: placeholders are parameters, buffers and constants first, then the inputs.
        inputs: the inputs in order; the last `len(buffer_inputs)` are buffers that the program mutates.
        outputs: names in order; write-backs at the end.
        writebacks: mutations that the caller performs.
        buffer_inputs: FQN (in the segment) of the buffer that feeds each of the last inputs.
        constants: placeholder name -> (FQN, value) for everything lifted.
        checks: what the program takes for granted about the sizes of its inputs, beside their ranges.
        assumed: the conditions that torch had noted when these checks were made.
        example: inputs that it was exported with, but for the buffers.
    """

    exported: ExportedProgram
    inputs: list[TensorSpec]
    outputs: list[str]
    writebacks: list[WriteBack] = field(default_factory=list)
    buffer_inputs: list[str] = field(default_factory=list)
    constants: dict[str, tuple[str, Tensor]] = field(default_factory=dict)
    checks: list[SizeCheck] = field(default_factory=list)
    assumed: frozenset[Condition] = frozenset()
    example: tuple[Tensor, ...] = ()

    @property
    def graph(self) -> torch.fx.Graph:
        return self.exported.graph_module.graph

    def constant(self, node: Node) -> Tensor | None:
        """The value of a placeholder that stands for a parameter, buffer or constant; None for anything else."""
        found = self.constants.get(node.name) if node.op == "placeholder" else None
        return None if found is None else found[1].detach()

    def constant_name(self, node: Node) -> str | None:
        """The FQN of a lifted parameter, buffer or constant (`layer1.0.conv1.weight`); None for anything else."""
        found = self.constants.get(node.name) if node.op == "placeholder" else None
        return None if found is None else found[0]

    def input_nodes(self) -> list[Node]:
        """The placeholders of the inputs, in the order of `inputs`."""
        return [n for n in self.graph.nodes if n.op == "placeholder" and n.name not in self.constants]

    def call_nodes(self) -> Iterator[Node]:
        """Everything that computes, in order."""
        return (n for n in self.graph.nodes if n.op == "call_function")

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the program in torch, for tests and tools. `inputs` end with the current values of `buffer_inputs`."""
        lifted = [value for _, value in self.constants.values()]
        with torch.no_grad():
            return tuple(
                torch.fx.Interpreter(self.exported.graph_module).run(*lifted, *inputs, enable_io_processing=False)
            )


def output_values(graph: torch.fx.Graph) -> list[Node]:
    """The nodes that an exported graph returns."""
    return list(cast("tuple[Node, ...]", graph.output_node().args[0]))
