"""What a placement search decides about: layers that go together, what int8 gains each, and engines to compare."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule, Node

from fx_passes.fuse.attention import write_out_attention
from fx_passes.ops import Role, op_of
from fx_passes.quantize.accuracy.layer_error import LayerError
from fx_passes.quantize.annotation import Granularity, annotation_of, quantized_values
from fx_passes.quantize.qconfig import QConfig
from fx_passes.quantize.weights.layer import layer_of
from lowering.roofline import LAUNCH_US, Floor, Gpu, engine_floor, kernel_floors

if TYPE_CHECKING:
    from lowering.segment.program import AtenProgram
    from lowering.trt.builder.layers import LayerReport

__all__ = [
    "Choice",
    "Engines",
    "Listing",
    "Unit",
    "bearable",
    "choice_of",
    "groups_of",
    "units_of",
    "widened",
    "with_gains",
]

Choice = Mapping[str, "Granularity | None"]
"""The layers in int8 by node name, each with the granularity of its weight scales (None: it has no weight)."""

Listing = Callable[[str, "AtenProgram"], "LayerReport"]

# Nodes between the two products of an attention: scaling, mask, softmax, casts, observers.
_SOFTMAX_STEPS = 8


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

    @property
    def group(self) -> tuple[Any, ...]:
        """Units of one group are tried together."""
        return (self.form, *self.layers.values())


@dataclass
class Engines:
    """Engines of one quantized program with some of its layers in int8, and their floors on a GPU."""

    programs: Mapping[str, AtenProgram]
    listing: Listing
    gpu: Gpu
    builds: int = 0
    _rows: dict[tuple[str, frozenset[Any]], list[dict[str, Any]]] = field(default_factory=dict)

    def rows(self, choice: Choice) -> list[dict[str, Any]]:
        """The kernels of all segments. A segment is built again only where a layer of its own changed."""
        from lowering.segment.twin import partial_twin

        found: list[dict[str, Any]] = []
        for name, program in self.programs.items():
            here = {str(node.meta.get("fx_node")) for node in program.call_nodes()}
            kept = {layer: form for layer, form in choice.items() if layer in here}
            key = (name, frozenset(kept.items()))
            if key not in self._rows:
                self._rows[key] = self.listing(name, partial_twin(program, kept)).rows
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
    more = {
        # The range that calibration saw: softmax's own, 0 to 1, leaves 127 steps for weights that are all small.
        name: {"dtype": "int8", "observer": configs[name].observer or "minmax"}
        for pair in products
        for name in pair
        if configs[name].dtype != "float"
    }
    return graph, QConfig({**{key: wanted[key] for key in wanted}, **more})


def choice_of(units: Iterable[Unit]) -> dict[str, Granularity | None]:
    return {name: form for unit in units for name, form in unit.layers.items()}


def units_of(prepared: GraphModule, errors: Mapping[str, LayerError]) -> list[Unit]:
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


def with_gains(units: Sequence[Unit], engines: Engines) -> list[Unit]:
    """The units with their gains, from the listings without int8 and with all of it."""
    labels = _labels(units, engines.programs)
    before = _costs(engines.rows({}), labels, engines.gpu, len(units))
    after = _costs(engines.rows(choice_of(units)), labels, engines.gpu, len(units))
    return [replace(unit, gain=a - b) for unit, a, b in zip(units, before, after, strict=True)]


def _labels(units: Sequence[Unit], programs: Mapping[str, AtenProgram]) -> dict[str, tuple[int, bool]]:
    """What the network calls the layers of each unit and the quantization of what they read -> (unit, is a layer)."""
    from lowering.segment.twin import layer_name, role_of
    from lowering.trt.define.nodes import label_of

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


def groups_of(units: Sequence[Unit]) -> dict[tuple[Any, ...], list[Unit]]:
    """The units by group, in graph order."""
    groups: dict[tuple[Any, ...], list[Unit]] = defaultdict(list)
    for unit in units:
        groups[unit.group].append(unit)
    return groups


def bearable(units: Sequence[Unit], limit: float) -> list[Unit]:
    """The units of groups that may be int8 by their own noise: what is built without the others is another placement
    than what is left of one with them. The noise is an estimate, so twice of what the limit allows is let through.
    """
    loud = {
        key
        for key, members in groups_of(units).items()
        if sum(u.noise for u in members) > 2.0 * 10.0 ** (-limit / 10.0)
    }
    return [unit for unit in units if unit.group not in loud]
