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
4. If the model is then too far from its float outputs, the units with the least gain per noise return to float, as few
   as the limit allows (found by bisection).
5. A placement that is no faster than the engine without int8 is dropped: the model stays float, with that reason.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fx_passes.attention_parts import write_out_attention
from fx_passes.errors import CalibrationError, InputError
from fx_passes.ops import Role, op_of
from fx_passes.quantize.annotation import Granularity, annotation_of, quantized_values
from fx_passes.quantize.convert import convert_fx, float_reference
from fx_passes.quantize.decisions import Decision, decide
from fx_passes.quantize.layer import layer_of
from fx_passes.quantize.layer_error import LayerError, layer_errors
from fx_passes.quantize.measured import measured_nodes, measured_values
from fx_passes.quantize.qconfig import QConfig
from lowering.roofline import LAUNCH_US, Floor, Gpu, engine_floor, gpu_named, kernel_floors, representative_gpu

if TYPE_CHECKING:
    from lowering.aten import AtenProgram
    from lowering.inputs import ShapeRange
    from lowering.request import Request

__all__ = ["Placement", "PlacementSearch", "Unit", "placement_text", "search_placement", "searched", "widened"]

Choice = Mapping[str, "Granularity | None"]
"""The layers in int8 by node name, each with the granularity of its weight scales (None: it has no weight)."""

# Nodes between the two products of an attention: scaling, mask, softmax, casts, observers.
_SOFTMAX_STEPS = 8
# The search for a lower floor ends after this many groups that were toggled in vain.
_PATIENCE = 4
# A group that gains fewer microseconds is not worth its noise.
_WORTH_US = 0.1


@dataclass(frozen=True)
class PlacementSearch:
    """What `placement="auto"` looks for.

    Args:
        gpu: name of the GPU whose floor is to be low, such as "RTX 4090". None: one that represents the compute
            capabilities asked for.
        sqnr_db: signal to quantization noise that the outputs must keep against the float model, in dB.
        builds: engines that may be built on the way.
        samples: batches of calibration data are taken for the accuracy until there are this many rows.
    """

    gpu: str | None = None
    sqnr_db: float = 20.0
    builds: int = 12
    samples: int = 8

    def __post_init__(self) -> None:
        if self.gpu is not None:
            gpu_named(self.gpu)
        if self.builds < 3:
            raise InputError(f"a placement search with {self.builds} builds", hint="it takes 3 at least")
        if self.samples < 1:
            raise InputError(f"a placement search on {self.samples} samples", hint="it takes 1 at least")

    def on(self, compute_capabilities: Sequence[str] | None) -> Gpu:
        """The GPU to search for."""
        return gpu_named(self.gpu) if self.gpu is not None else representative_gpu(compute_capabilities)


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
        builds: engines that were built.
    """

    gpu: str
    decisions: dict[str, Decision]
    floor: Floor
    float_floor: Floor
    full_floor: Floor
    sqnr_db: float
    builds: int

    @property
    def int8_layers(self) -> int:
        """How many layers run in int8."""
        return sum(decision.int8 for decision in self.decisions.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as reports hold it."""
        return {
            **{key: getattr(self, key) for key in ("gpu", "builds", "int8_layers")},
            "sqnr_db": None if math.isinf(self.sqnr_db) else self.sqnr_db,
            "layers": len(self.decisions),
            "floors": {
                "placed": self.floor.as_dict(),
                "float": self.float_floor.as_dict(),
                "int8 wherever possible": self.full_floor.as_dict(),
            },
            "decisions": {name: asdict(decision) for name, decision in self.decisions.items()},
        }


@dataclass(frozen=True)
class Unit:
    """Layers that are decided together, since they read one quantized value.

    Attributes:
        layers: node name -> granularity of the weight's scales in int8, None without a weight.
        form: what it shares with the other units of its group.
        noise: energy of the error that it adds to the model's outputs, relative to theirs, estimated.
        gain: microseconds that it takes less in int8, as predicted from two listings.
    """

    layers: dict[str, Granularity | None]
    form: tuple[Any, ...]
    noise: float
    gain: float = 0.0


Listing = Callable[[str, "AtenProgram"], list[dict[str, Any]]]


@dataclass
class _Engines:
    """Engines of one quantized program with some of its layers in int8, and their floors on a GPU."""

    programs: Mapping[str, AtenProgram]
    listing: Listing
    gpu: Gpu
    builds: int = 0
    _rows: dict[tuple[str, frozenset[Any]], list[dict[str, Any]]] = field(default_factory=dict)

    def rows(self, choice: Choice) -> list[dict[str, Any]]:
        """The kernels of all segments. A segment is built again only where a layer of its own changed."""
        from lowering.twin import partial_twin

        found: list[dict[str, Any]] = []
        for name, program in self.programs.items():
            here = {str(node.meta.get("fx_node")) for node in program.call_nodes()}
            kept = {layer: form for layer, form in choice.items() if layer in here}
            key = (name, frozenset(kept.items()))
            if key not in self._rows:
                self._rows[key] = self.listing(name, partial_twin(program, kept))
                self.builds += 1
            found += self._rows[key]
        return found

    def floor(self, choice: Choice) -> Floor:
        return engine_floor(self.rows(choice), self.gpu)


def widened(fused: GraphModule, qconfig: QConfig | Mapping[Any, Any] | None) -> tuple[GraphModule, QConfig]:
    """A graph and a configuration with more in int8 than the target's rules place: what the search starts from.

    Attention is written out, and its products are quantized with the weights that the softmax gives, unless the
    configuration keeps them float.

    Args:
        fused: a fused float graph; it stays as it is.
        qconfig: the user's.
    """
    graph, products = write_out_attention(fused)
    wanted = QConfig.of(qconfig)
    configs = {node.name: config for node, config in wanted.resolve(graph).items()}
    more = {name: {"dtype": "int8"} for pair in products for name in pair if configs[name].dtype != "float"}
    return graph, QConfig({**{key: wanted[key] for key in wanted}, **more})


def searched(prepared: GraphModule, sizes: ShapeRange, request: Request) -> GraphModule:
    """A calibrated graph converted as the search places it; a float graph where int8 gains nothing.

    Args:
        prepared: with everything in int8 that may be.
        sizes: one call of the model.
        request: its `search` says what to look for, its backend builds the engines.

    Returns:
        A graph with the placement, as plain data, in `meta["placement"]`.
    """
    from lowering.segments import segmented

    assert request.search is not None
    backend = request.backend
    parts = segmented(convert_fx(prepared), sizes, request.partial_settings, backend.unsupported)
    data = request.data if request.data else [sizes.opt.inputs()]
    gpu = request.search.on(backend.capabilities)
    placement = search_placement(prepared, parts.programs, backend.listing, data, request.search, gpu)
    placed = decide(prepared, placement.decisions)
    graph = convert_fx(placed) if placement.int8_layers else float_reference(placed)
    graph.meta["placement"] = placement.as_dict()
    return graph


def placement_text(placement: Mapping[str, Any], float_type: str) -> list[str]:
    """What a summary says of a placement, given as plain data."""
    floors = {name: f"{floor['total_us']:.1f}" for name, floor in placement["floors"].items()}
    others = f"{floors['float']} us in {float_type}, {floors['int8 wherever possible']} us with int8 wherever possible"
    start = f"Placement searched for {placement['gpu']}, {placement['builds']} engines built: "
    if not placement["int8_layers"]:
        return [f"{start}int8 does not lower the roofline floor (a floor, no measurement): {others}"]
    return [
        f"{start}{placement['int8_layers']} of {placement['layers']} layers in int8, outputs at "
        f"{placement['sqnr_db']:.1f} dB; roofline floor (no measurement) {floors['placed']} us; {others}"
    ]


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
        listing: builds the engine of a named program and gives the rows of its kernels at the opt shapes.
        data: batches to measure accuracy on.
        wish: the limits.
        gpu: whose floor counts.

    Raises:
        CalibrationError: there is no data.
    """
    batches = _enough(data, wish.samples)
    if not batches:
        raise CalibrationError("there is no calibration data to search a placement on", hint="pass calibration=")
    engines = _Engines(programs, listing, gpu)
    units = _with_gains(_units(prepared, layer_errors(prepared, batches[0])), engines)
    fastest = _lowest_floor(units, engines, wish.builds)
    kept, sqnr = _within_limit(fastest, _Accuracy(prepared, batches), wish.sqnr_db)
    nothing, everything, floor = engines.floor({}), engines.floor(_choice(units)), engines.floor(_choice(kept))
    if floor.total_us >= nothing.total_us:
        kept, sqnr, floor = [], math.inf, nothing
    decisions = {}
    for unit in units:
        if unit in kept:
            reason = f"int8 lowers the roofline floor on {gpu.name}"
        elif unit in fastest and kept:
            reason = f"with it the outputs are less than {wish.sqnr_db:g} dB above the noise"
        else:
            reason = f"int8 does not lower the roofline floor on {gpu.name}"
        for name, form in unit.layers.items():
            decisions[name] = Decision(unit in kept, reason, form if unit in kept else None)
    return Placement(gpu.name, decisions, floor, nothing, everything, sqnr, engines.builds)


def _choice(units: Iterable[Unit]) -> dict[str, Granularity | None]:
    return {name: form for unit in units for name, form in unit.layers.items()}


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


def _units(prepared: GraphModule, errors: Mapping[str, LayerError]) -> list[Unit]:
    """The quantized layers, those that read one value together, in graph order."""
    owner: dict[Node, set[Node]] = {}
    for value in quantized_values(prepared.graph):
        together = {reader for reader in value.readers if reader.name in errors}
        for reader in list(together):
            together |= owner.get(reader, set())
        for reader in list(together):
            together |= {product for product in _products_before(reader) if product.name in errors}
        for reader in together:
            owner[reader] = together
    units = []
    seen: set[Node] = set()
    for node in prepared.graph.nodes:
        if node not in owner or node in seen:
            continue
        members = [n for n in prepared.graph.nodes if n in owner[node]]
        seen.update(members)
        layers = {n.name: errors[n.name].weight for n in members}
        noise = sum(errors[n.name].noise for n in members)
        units.append(Unit(layers, tuple(_form(prepared, n) for n in members), noise))
    return units


def _products_before(node: Node) -> Iterator[Node]:
    """The products whose softmax `node` multiplies: there is a kernel for an attention that is int8 throughout."""
    if not _is_product(node):
        return
    for value in node.all_input_nodes:
        passed: list[str] = []
        while value.all_input_nodes and not _is_product(value) and len(passed) < _SOFTMAX_STEPS:
            op = op_of(value)
            passed.append(op.name if op is not None else "")
            value = value.all_input_nodes[0]
        if "softmax" in passed and _is_product(value):
            yield value


def _is_product(node: Node) -> bool:
    op = op_of(node)
    return op is not None and op.role is Role.MATMUL


def _form(prepared: GraphModule, node: Node) -> tuple[Any, ...]:
    annotation, layer = annotation_of(node), layer_of(prepared, node)
    assert annotation is not None
    if isinstance(layer, str):
        return (annotation.op,)
    return (layer.op, tuple(layer.weight.shape), str(layer.options))


def _with_gains(units: Sequence[Unit], engines: _Engines) -> list[Unit]:
    """The units with their gains, from the listings without int8 and with all of it."""
    labels = _labels(units, engines.programs)
    before = _costs(engines.rows({}), labels, engines.gpu, len(units))
    after = _costs(engines.rows(_choice(units)), labels, engines.gpu, len(units))
    return [replace(unit, gain=a - b) for unit, a, b in zip(units, before, after, strict=True)]


def _labels(units: Sequence[Unit], programs: Mapping[str, AtenProgram]) -> dict[str, tuple[int, bool]]:
    """What the network calls the layers of each unit and the quantization of what they read -> (unit, is a layer)."""
    from lowering.trt.nodes import label_of
    from lowering.twin import layer_name, role_of

    number = {name: index for index, unit in enumerate(units) for name in unit.layers}
    labels: dict[str, tuple[int, bool]] = {}
    for program in programs.values():
        for node in program.call_nodes():
            role = role_of(node)
            if layer_name(node) in number and role is not Role.DEQUANTIZE:
                labels[label_of(program, node)] = number[layer_name(node)], True
            elif role is Role.QUANTIZE:
                readers = (reader for pair in node.users for reader in pair.users)
                for reader in readers:
                    if layer_name(reader) in number:
                        labels[label_of(program, node)] = number[layer_name(reader)], False
    return labels


def _costs(rows: Sequence[dict[str, Any]], labels: Mapping[str, tuple[int, bool]], gpu: Gpu, count: int) -> list[float]:
    """The floor of every unit's kernels. One that serves several layers is shared by them; a layer goes before the
    quantization of the next.
    """
    costs = [0.0] * count
    for row, terms in zip(rows, kernel_floors(rows, gpu), strict=True):
        found = [labels[label] for label in row["modules"] if label in labels]
        owners = {unit for unit, is_layer in found if is_layer} or {unit for unit, _ in found}
        for unit in owners:
            costs[unit] += (max(terms) + LAUNCH_US) / len(owners)
    return costs


def _lowest_floor(units: Sequence[Unit], engines: _Engines, builds: int) -> list[Unit]:
    """The units of the placement with the lowest floor that the builds allow to find."""
    groups: dict[tuple[Any, ...], list[Unit]] = defaultdict(list)
    for unit in units:
        groups[(unit.form, *unit.layers.values())].append(unit)
    expected = {key: sum(unit.gain for unit in members) for key, members in groups.items()}

    def members(keys: frozenset[Any]) -> list[Unit]:
        return [unit for unit in units if (unit.form, *unit.layers.values()) in keys]

    def floor(keys: frozenset[Any]) -> float:
        return engines.floor(_choice(members(keys))).total_us + _WORTH_US * len(keys)

    best = min((frozenset(k for k in groups if expected[k] > 0.0), frozenset(groups), frozenset()), key=floor)
    in_vain = 0
    for key in sorted(groups, key=lambda k: abs(expected[k])):
        if engines.builds >= builds or in_vain == _PATIENCE:
            break
        lower = floor(best ^ {key}) < floor(best)
        best, in_vain = (best ^ {key}, 0) if lower else (best, in_vain + 1)
    return members(best)


def _within_limit(chosen: Sequence[Unit], accuracy: _Accuracy, limit: float) -> tuple[list[Unit], float]:
    """As many of the chosen units as the limit allows, those with the most gain for their noise first; and their SQNR.

    More units are taken to mean more noise, so that their number is found by bisection.
    """
    ranked = sorted(chosen, key=lambda unit: unit.gain / max(unit.noise, 1e-30), reverse=True)
    low, high, best = 0, len(ranked), math.inf
    middle = high
    while low < high:
        sqnr = accuracy.of(_choice(ranked[:middle]))
        if sqnr >= limit:
            low, best = middle, sqnr
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return ranked[:low], best


class _Accuracy:
    """Signal to quantization noise of a placement's outputs against the float model's, in dB."""

    def __init__(self, prepared: GraphModule, batches: Sequence[Any]):
        self.prepared, self.batches = prepared, batches
        reference = float_reference(prepared)
        self.nodes = measured_nodes(reference.graph)
        self.expected = torch.cat([measured_values(reference, batch, self.nodes) for batch in batches])

    def of(self, choice: Choice) -> float:
        from lowering.compare import sqnr

        placed = convert_fx(decide(self.prepared, _decisions(self.prepared, choice)))
        found = [measured_values(placed, batch, self.nodes) for batch in self.batches]
        return sqnr(self.expected, torch.cat(found))


def _decisions(prepared: GraphModule, choice: Choice) -> dict[str, Decision]:
    """About every quantized layer: int8 if chosen."""
    quantized = (n.name for n in prepared.graph.nodes if (a := annotation_of(n)) is not None and a.quantized_inputs)
    return {name: Decision(name in choice, "searched", choice.get(name)) for name in quantized}
