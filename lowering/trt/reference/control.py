"""What the plan treats as one unit of execution: a layer, a whole loop, or one output of a conditional."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowering.trt.reference.kernel import Kernel
from lowering.trt.reference.records import LayerRecord, NetworkRecord

if TYPE_CHECKING:
    from lowering.trt.reference.plan import Plan

__all__ = ["Unit", "units"]


@dataclass(frozen=True, eq=False)
class Unit:
    """Something that takes named values and gives named values.

    Attributes:
        layer: the layer it stands for in errors.
        inputs: names of the tensors it reads; None where an optional input is absent.
        outputs: names of the tensors it produces.
        compile: makes the kernel of a compound unit out of plans of its parts; None for a plain layer.
    """

    layer: LayerRecord
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    compile: Callable[[type[Plan]], Kernel] | None = None


def units(network: NetworkRecord) -> Mapping[str, Unit]:
    """The unit that produces each tensor of a network."""
    found: dict[str, Unit] = {}
    for layer in network.layers:
        unit = Unit(layer, layer.inputs, layer.outputs)
        found.update(dict.fromkeys(layer.outputs, unit))
    return found
