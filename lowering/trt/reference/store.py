"""A network record on disk: `network.json` for the structure, `network.safetensors` for the weights.

No code is stored, and nothing is pickled.
Values that JSON lacks (infinities, NaN) are written as {"float": "inf"}.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fx_passes.errors import ArtifactError
from lowering.trt.reference.records import Attribute, LayerRecord, NetworkRecord, TensorRecord

__all__ = ["FORMAT", "STRUCTURE", "WEIGHTS", "load", "parts", "read", "save"]

FORMAT = 1
STRUCTURE = "network.json"
WEIGHTS = "network.safetensors"


def save(record: NetworkRecord, folder: str | Path) -> None:
    """Writes a record as `network.json` and `network.safetensors` into a folder, which is made if it does not exist.

    Raises:
        ArtifactError: the folder can't be written.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name, write in parts(record).items():
            _replace(path / name, write)
    except OSError as error:
        raise ArtifactError(f"the network can't be written to {path}: {error}", hint="choose another folder") from error


def parts(record: NetworkRecord) -> dict[str, Callable[[Path], object]]:
    """The two files of a record, each with the function that writes it; weights with equal content are stored once."""
    deduplicated = cache(lambda: _deduplicated(record.weights))

    def structure(path: Path) -> None:
        text = json.dumps(_to_json(record, deduplicated()[1]), indent=1, allow_nan=False)
        path.write_text(text, encoding="utf-8")

    def weights(path: Path) -> None:
        from safetensors.torch import save_file

        save_file(deduplicated()[0], path)

    return {STRUCTURE: structure, WEIGHTS: weights}


def load(folder: str | Path) -> NetworkRecord:
    """Reads a record that `save` wrote.

    Raises:
        ArtifactError: a file is missing, truncated, or not a network of this format.
    """
    return read(Path(folder) / STRUCTURE, Path(folder) / WEIGHTS)


def read(structure: Path, weights: Path) -> NetworkRecord:
    """Reads a record from its two files, whatever they are called.

    Raises:
        ArtifactError: as `load`.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        data = json.loads(structure.read_text(encoding="utf-8"))
        tensors = load_file(weights)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ArtifactError(
            f"no readable network in {structure.name} and {weights.name}: {error}", hint="save the network again"
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ArtifactError(f"{structure.name} is not a network of format {FORMAT}")
    try:
        return _from_json(data, tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{structure.name} is damaged: {error!r}", hint="save the network again") from error


def _replace(target: Path, write: Callable[[Path], object]) -> None:
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _deduplicated(weights: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The distinct weights, and the key under which each of the original keys is kept."""
    kept: dict[str, torch.Tensor] = {}
    renamed: dict[str, str] = {}
    first: dict[tuple[str, int, bytes], str] = {}
    for key, value in weights.items():
        flat = value.contiguous().reshape(-1)
        digest = hashlib.sha256(flat.view(torch.uint8).numpy().data).digest()
        renamed[key] = first.setdefault((str(value.dtype), value.numel(), digest), key)
        if renamed[key] == key:
            kept[key] = flat
    return kept, renamed


def _to_json(record: NetworkRecord, renamed: dict[str, str]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "name": record.name,
        "inputs": record.inputs,
        "outputs": record.outputs,
        "tensors": [
            {"name": t.name, "shape": t.shape, "dtype": t.dtype, "is_shape_tensor": t.is_shape_tensor}
            for t in record.tensors.values()
        ],
        "layers": [
            {
                "name": layer.name,
                "type": layer.type,
                "inputs": layer.inputs,
                "outputs": layer.outputs,
                "attributes": {name: _encode(value) for name, value in layer.attributes.items()},
                "weights": {role: renamed[key] for role, key in layer.weights.items()},
                "metadata": layer.metadata,
            }
            for layer in record.layers
        ],
    }


def _from_json(data: dict[str, Any], weights: dict[str, torch.Tensor]) -> NetworkRecord:
    tensors = {
        t["name"]: TensorRecord(
            str(t["name"]), tuple(map(int, t["shape"])), str(t["dtype"]), bool(t["is_shape_tensor"])
        )
        for t in data["tensors"]
    }
    layers = tuple(
        LayerRecord(
            str(layer["name"]),
            str(layer["type"]),
            tuple(layer["inputs"]),
            tuple(layer["outputs"]),
            {name: _decode(value) for name, value in layer["attributes"].items()},
            dict(layer["weights"]),
            str(layer["metadata"]),
        )
        for layer in data["layers"]
    )
    record = NetworkRecord(str(data["name"]), tuple(data["inputs"]), tuple(data["outputs"]), layers, tensors, weights)
    _check_references(record)
    return record


def _check_references(record: NetworkRecord) -> None:
    mentioned = {*record.inputs, *record.outputs}
    for layer in record.layers:
        mentioned.update(name for name in (*layer.inputs, *layer.outputs) if name is not None)
        for key in layer.weights.values():
            if key not in record.weights:
                raise KeyError(f"layer {layer.name!r} needs weights {key!r}, which are missing")
    if unknown := mentioned - record.tensors.keys():
        raise KeyError(f"tensors {sorted(unknown)} are not described")


def _encode(value: Attribute) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return [_encode(item) for item in value] if isinstance(value, tuple) else value


def _decode(value: Any) -> Attribute:
    if isinstance(value, dict):
        return float(value["float"])
    return tuple(_decode(item) for item in value) if isinstance(value, list) else value  # type: ignore[return-value]
