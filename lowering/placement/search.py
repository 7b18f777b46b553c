"""`placement="auto"`: which layers of a model gain by int8 on a GPU, found without one.

The target's rules say what can be int8. This search says what should be: it builds engines with some of the layers in
int8, reads their kernels from the builder's listing and compares their roofline floors on the named GPU (see
`lowering.roofline`). What is left in int8 is bounded by an accuracy limit on calibration data.

1. Layers that read one quantized value are a *unit*; units of the same form (operators, weights, strides) are a
   *group*. Weights have one scale where that costs the layer little; what int8 does to the outputs is estimated for
   each layer (`layer_errors`).
2. The engine without int8 and the one with all of it are built. Kernels belong to units by the names that the network
   gave them, so the two listings predict what each group gains. The groups that gain are the first placement.
3. Groups are toggled one after the other, the least certain first, and stay toggled where a build has a lower floor.
4. Groups that are too noisy by themselves are left out from the start. If the model is still too far from its float
   outputs, the units with the least gain per noise return to float, as few as the limit allows (found by bisection).
5. A placement that is no faster than the engine without int8 is dropped: the model stays float, with that reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fx_passes.errors import CalibrationError
from fx_passes.quantize.accuracy.layer_error import layer_errors
from fx_passes.quantize.accuracy.meter import measured_nodes, measured_values
from fx_passes.quantize.annotation import annotation_of
from fx_passes.quantize.calibrated import float_reference, rounded_to_nearest
from fx_passes.quantize.convert import convert_fx
from fx_passes.quantize.place.overrides import Decision, decide
from lowering.placement.units import (
    Choice,
    Engines,
    Listing,
    Unit,
    bearable,
    choice_of,
    groups_of,
    units_of,
    widened,
    with_gains,
)
from lowering.roofline import Floor, Gpu

if TYPE_CHECKING:
    from lowering.request.inputs import ShapeRange
    from lowering.request.request import Request
    from lowering.request.search import PlacementSearch
    from lowering.segment.program import AtenProgram

__all__ = ["Placement", "Unit", "search_placement", "searched", "widened"]

# The search for a lower floor ends after this many groups that were toggled in vain.
_PATIENCE = 4
# A group that gains fewer microseconds is not worth its noise.
_WORTH_US = 0.1


@dataclass(frozen=True)
class Placement:
    """What the search found.

    Attributes:
        gpu: the GPU.
        decisions: about every layer that could be int8, by node name.
        floor: of the engine as placed, in microseconds.
        float_floor: of the engine without int8.
        full_floor: of the engine with int8 wherever the target's rules allow it.
        sqnr_db: of the outputs as placed, against the float model; infinite without int8.
        limit_db: what it had to be.
        builds: engines that were built.
    """

    gpu: str
    decisions: dict[str, Decision]
    floor: Floor
    float_floor: Floor
    full_floor: Floor
    sqnr_db: float
    limit_db: float
    builds: int

    @property
    def int8_layers(self) -> int:
        """How many layers run in int8."""
        return sum(decision.int8 for decision in self.decisions.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as reports hold it."""
        return {
            **{key: getattr(self, key) for key in ("gpu", "builds", "int8_layers", "limit_db")},
            "sqnr_db": None if math.isinf(self.sqnr_db) else self.sqnr_db,
            "layers": len(self.decisions),
            "floors": {
                "placed": self.floor.as_dict(),
                "float": self.float_floor.as_dict(),
                "int8 wherever possible": self.full_floor.as_dict(),
            },
            "decisions": {name: asdict(decision) for name, decision in self.decisions.items()},
        }


def searched(prepared: GraphModule, sizes: ShapeRange, request: Request) -> GraphModule:
    """A calibrated graph converted as the search places it; a float graph where int8 gains nothing.

    Args:
        prepared: with everything in int8 that may be.
        sizes: one call of the model.
        request: its `search` says what to look for, its backend builds the engines.

    Returns:
        A graph with the placement, as plain data, in `meta["placement"]`.
    """
    from lowering.segment.segments import segmented

    assert request.search is not None
    backend = request.backend
    parts = segmented(convert_fx(rounded_to_nearest(prepared)), sizes, request.partial_settings, backend.unsupported)
    data = request.batches(sizes.opt)
    gpu = request.search.on(backend.capabilities)
    placement = search_placement(prepared, parts.programs, backend.listing, data, request.search, gpu)
    placed = decide(prepared, placement.decisions)
    if placement.int8_layers:
        graph = convert_fx(placed, data, progress=request.shows_progress)
    else:
        graph = float_reference(placed)
    graph.meta["placement"] = placement.as_dict()
    return graph


def search_placement(
    prepared: GraphModule,
    programs: Mapping[str, AtenProgram],
    listing: Listing,
    data: Iterable[Any],
    wish: PlacementSearch,
    gpu: Gpu,
) -> Placement:
    """Find which of the quantized layers should stay so.

    Args:
        prepared: calibrated, with everything in int8 that the target allows; it stays as it is.
        programs: its segments by name, exported from `convert_fx(prepared)`.
        listing: builds the engine of a named program and gives its report at the opt shapes.
        data: batches to measure accuracy on.
        wish: the limits.
        gpu: whose floor counts.

    Raises:
        CalibrationError: there is no data.
    """
    batches = _enough(data, wish.samples)
    if not batches:
        raise CalibrationError("there is no calibration data to search a placement on", hint="pass calibration=")
    engines = Engines(programs, listing, gpu)
    units = with_gains(units_of(prepared, layer_errors(prepared, batches[0])), engines)
    quiet = bearable(units, wish.sqnr_db)
    fastest = _lowest_floor(quiet, engines, wish.builds)
    accuracy = _Accuracy(prepared, batches)
    allowed = _within_limit(fastest, accuracy, wish.sqnr_db)
    # Fewer units than the fastest placement has need not gain together what they gain in it.
    kept = min((allowed, [unit for unit in allowed if unit.gain > 0.0], []), key=lambda some: _total(engines, some))
    noisy = f"with it the outputs are less than {wish.sqnr_db:g} dB above the noise"
    no_gain, gains = (f"int8 {does} the roofline floor on {gpu.name}" for does in ("does not lower", "lowers"))
    decisions = {}
    for unit in units:
        loud = unit not in quiet or (unit in fastest and unit not in allowed)
        reason = gains if unit in kept else noisy if loud else no_gain
        for name, form in unit.layers.items():
            decisions[name] = Decision(unit in kept, reason, form if unit in kept else None)
    return Placement(
        gpu.name,
        decisions,
        floor=engines.floor(choice_of(kept)),
        float_floor=engines.floor({}),
        full_floor=engines.floor(choice_of(units)),
        sqnr_db=accuracy.of(choice_of(kept)) if kept else math.inf,
        limit_db=wish.sqnr_db,
        builds=engines.builds,
    )


def _total(engines: Engines, units: Sequence[Unit]) -> float:
    return engines.floor(choice_of(units)).total_us


def _enough(data: Iterable[Any], samples: int) -> list[Any]:
    """The first batches, until they hold that many rows."""
    batches: list[Any] = []
    rows = 0
    for batch in data:
        batches.append(batch)
        first = next((leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)), None)
        rows += first.shape[0] if first is not None and first.dim() else 1
        if rows >= samples:
            break
    return batches


def _lowest_floor(units: Sequence[Unit], engines: Engines, builds: int) -> list[Unit]:
    """The units of the placement with the lowest floor that the builds allow to find."""
    groups = groups_of(units)
    expected = {key: sum(unit.gain for unit in members) for key, members in groups.items()}

    def members(keys: frozenset[Any]) -> list[Unit]:
        return [unit for unit in units if unit.group in keys]

    def floor(keys: frozenset[Any]) -> float:
        return engines.floor(choice_of(members(keys))).total_us + _WORTH_US * len(keys)

    best = min((frozenset(k for k in groups if expected[k] > 0.0), frozenset(groups), frozenset()), key=floor)
    in_vain = 0
    for key in sorted(groups, key=lambda k: abs(expected[k])):
        if engines.builds >= builds or in_vain == _PATIENCE:
            break
        lower = floor(best ^ {key}) < floor(best)
        best, in_vain = (best ^ {key}, 0) if lower else (best, in_vain + 1)
    return members(best)


def _within_limit(chosen: Sequence[Unit], accuracy: _Accuracy, limit: float) -> list[Unit]:
    """As many of the chosen units as the limit allows, those with the most gain for their noise first.

    More units are taken to mean more noise, so that their number is found by bisection.
    """
    ranked = sorted(chosen, key=lambda unit: unit.gain / max(unit.noise, 1e-30), reverse=True)
    low = 0
    middle = high = len(ranked)
    while low < high:
        if accuracy.of(choice_of(ranked[:middle])) >= limit:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return ranked[:low]


class _Accuracy:
    """Signal to quantization noise of a placement's outputs against the float model's, in dB."""

    def __init__(self, prepared: GraphModule, batches: Sequence[Any]):
        self.prepared, self.batches = prepared, batches
        reference = float_reference(prepared)
        self.nodes = measured_nodes(reference.graph)
        self._found: dict[frozenset[Any], float] = {}
        self.expected = torch.cat([measured_values(reference, batch, self.nodes) for batch in batches])

    def of(self, choice: Choice) -> float:
        from lowering.compare import sqnr

        key = frozenset(choice.items())
        if key not in self._found:
            placed = convert_fx(rounded_to_nearest(decide(self.prepared, _decisions(self.prepared, choice))))
            found = [measured_values(placed, batch, self.nodes) for batch in self.batches]
            self._found[key] = sqnr(self.expected, torch.cat(found))
        return self._found[key]


def _decisions(prepared: GraphModule, choice: Choice) -> dict[str, Decision]:
    """About every quantized layer: int8 if chosen."""
    quantized = (n.name for n in prepared.graph.nodes if (a := annotation_of(n)) is not None and a.quantized_inputs)
    return {name: Decision(name in choice, "searched", choice.get(name)) for name in quantized}
