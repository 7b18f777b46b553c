"""Which uses of TensorRT layers are confirmed from outside, and which only by our own reading of the documentation.

A *use* is (layer type, attribute, kind of value). One that occurs in a network which NVIDIA's parser made and whose
recorded outputs the executor gives (see `conformance`) is confirmed: it may be wrong in other values, but not in what
it means. A use that our converters emit and that no such network has is listed as unconfirmed.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from lowering.trt.reference.records import Attribute, LayerRecord, NetworkRecord

__all__ = ["Use", "confirmed_uses", "markdown", "save_confirmed", "unconfirmed", "uses"]

#: Layer type, attribute, kind of value.
Use = tuple[str, str, str]

#: Attributes that name something or hold free text: no kinds.
_NAMES = frozenset({"loop", "conditional", "name", "message", "mask", "equation"})
_TRANSPOSES = ("first_transpose", "second_transpose")
#: Attributes without effect unless another one has a value.
_ONLY_IF: dict[tuple[str, str], tuple[str, frozenset[str]]] = {
    ("RESIZE", "cubic_coeff"): ("resize_mode", frozenset({"CUBIC"})),
    ("RESIZE", "exclude_outside"): ("resize_mode", frozenset({"CUBIC", "LINEAR"})),
    ("RESIZE", "nearest_rounding"): ("resize_mode", frozenset({"NEAREST"})),
    ("POOLING", "average_count_excludes_padding"): ("type", frozenset({"AVERAGE", "MAX_AVERAGE_BLEND"})),
    ("POOLING", "blend_factor"): ("type", frozenset({"MAX_AVERAGE_BLEND"})),
    ("ACTIVATION", "alpha"): (
        "type",
        frozenset(
            {
                "LEAKY_RELU",
                "ELU",
                "SELU",
                "SOFTPLUS",
                "CLIP",
                "HARD_SIGMOID",
                "SCALED_TANH",
                "THRESHOLDED_RELU",
            }
        ),
    ),
    ("ACTIVATION", "beta"): ("type", frozenset({"SELU", "SOFTPLUS", "CLIP", "HARD_SIGMOID", "SCALED_TANH"})),
    ("SCATTER", "axis"): ("mode", frozenset({"ELEMENT"})),
    ("GATHER", "axis"): ("mode", frozenset({"DEFAULT", "ELEMENT"})),
}


def uses(network: NetworkRecord) -> set[Use]:
    """The uses in one network."""
    found: set[Use] = set()
    for layer in network.layers:
        found |= _layer_uses(layer, network)
    return found


def _layer_uses(layer: LayerRecord, network: NetworkRecord) -> set[Use]:
    present = [name for name in layer.inputs if name is not None]
    found: set[Use] = {(layer.type, "inputs", _pattern(layer.inputs))}
    if present:
        tensor = network.tensors[present[0]]
        found.add((layer.type, "type", tensor.dtype))
        found.add((layer.type, "sizes", "dynamic" if -1 in tensor.shape else "static"))
        if 0 in tensor.shape:
            found.add((layer.type, "sizes", "empty"))
    operation = layer.attributes.get("op", layer.attributes.get("type"))
    for attribute, value in layer.attributes.items():
        needed, allowed = _ONLY_IF.get((layer.type, attribute), (None, frozenset()))
        if attribute in _NAMES or (needed is not None and layer.attributes[needed] not in allowed):
            continue
        if attribute == "axis" and layer.type in ("QUANTIZE", "DEQUANTIZE") and _is_per_tensor(layer, network):
            continue
        kind = _kind(attribute, value, layer, network)
        if layer.type == "ACTIVATION" and attribute in ("alpha", "beta"):
            attribute = f"{attribute} of {operation}"
        found.add((layer.type, attribute, kind))
    if layer.type in ("ELEMENTWISE", "UNARY", "REDUCE") and present:
        found.add((layer.type, f"type of {operation}", network.tensors[present[0]].dtype))
    for role in layer.weights:
        found.add((layer.type, "weights", role))
    return found


def _is_per_tensor(layer: LayerRecord, network: NetworkRecord) -> bool:
    return math.prod(network.tensors[str(layer.inputs[1])].shape) == 1


def _pattern(inputs: tuple[str | None, ...]) -> str:
    if len(inputs) > 3 and None not in inputs:
        return "many"
    return ", ".join(str(i) for i, name in enumerate(inputs) if name is not None) or "none"


def _kind(attribute: str, value: Attribute, layer: LayerRecord, network: NetworkRecord) -> str:
    if value is None:
        return "absent"
    if isinstance(value, (bool, str)):
        return str(value)
    if attribute in ("axes",) and isinstance(value, int):
        count = bin(value).count("1")
        return "no axis" if count == 0 else "one axis" if count == 1 else "several axes"
    if attribute in _TRANSPOSES and isinstance(value, tuple):
        record = network.tensors[str(layer.inputs[0]) if attribute == _TRANSPOSES[0] else layer.outputs[0]]
        rank = len(record.shape)
        return "identity" if value[:rank] == tuple(range(rank)) else "permutation"
    if isinstance(value, tuple):
        return _tuple_kind(value)
    return _number_kind(value)


def _tuple_kind(value: tuple[int, ...] | tuple[float, ...]) -> str:
    if not value:
        return "empty"
    kinds = sorted({_number_kind(item) for item in value})
    return f"{'equal' if len(set(value)) == 1 and len(value) > 1 else 'any'}: {', '.join(kinds)}"


def _number_kind(value: float) -> str:
    if value in (0, 1, -1):
        return f"{value:g}"
    if value != value or value in (float("inf"), float("-inf")):
        return "not finite"
    return "positive" if value > 0 else "negative"


def unconfirmed(emitted: Iterable[Use], confirmed: Iterable[Use]) -> list[Use]:
    """The uses that only our own networks have."""
    return sorted(set(emitted) - set(confirmed))


def markdown(emitted: Iterable[Use], confirmed: Iterable[Use]) -> str:
    """The table of all emitted uses: a row per layer type and attribute, unconfirmed kinds in bold."""
    known, rows = set(confirmed), defaultdict(list)
    for use in sorted(set(emitted)):
        rows[use[:2]].append(use[2] if use in known else f"**{use[2]}**")
    lines = ["| layer | attribute | kinds of values |", "| --- | --- | --- |"]
    lines += [f"| {layer} | {attribute} | {'; '.join(kinds)} |" for (layer, attribute), kinds in rows.items()]
    return "\n".join(lines) + "\n"


def save_confirmed(path: str | Path, found: Iterable[Use]) -> None:
    """Writes confirmed uses as JSON: {layer type: {attribute: [kinds]}}."""
    nested: dict[str, dict[str, list[str]]] = {}
    for layer, attribute, kind in sorted(set(found)):
        nested.setdefault(layer, {}).setdefault(attribute, []).append(kind)
    Path(path).write_text(json.dumps(nested, indent=1) + "\n", encoding="utf-8")


def confirmed_uses(path: str | Path) -> set[Use]:
    """Reads what `save_confirmed` wrote."""
    nested: Mapping[str, Mapping[str, list[str]]] = json.loads(Path(path).read_text(encoding="utf-8"))
    return {
        (layer, attribute, kind)
        for layer, attributes in nested.items()
        for attribute, kinds in attributes.items()
        for kind in kinds
    }
