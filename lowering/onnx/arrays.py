"""An ONNX artifact run on NumPy arrays, without torch: small, quick to start, for servers and scripts.

`lowering.load` gives the whole artifact, whatever is in it. This takes those whose graph only calls ONNX files, and
picks and packs their results; what needs torch or Python of the caller is refused by name.
"""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fx_passes.errors import ArtifactError, BackendUnavailableError, InputError, LoweringError
from lowering.artifact.files import STATE, check_files, read_manifest
from lowering.artifact.plain import checked, shape_from_plain

__all__ = ["ArrayModel", "ArraySpec", "load_arrays"]

_TYPES = {
    "float32": np.float32, "float64": np.float64, "float16": np.float16, "int64": np.int64, "int32": np.int32,
    "int16": np.int16, "int8": np.int8, "uint8": np.uint8, "bool": np.bool_,
}  # fmt: skip


@dataclass(frozen=True)
class ArraySpec:
    """One input of a segment.

    Attributes:
        name: of the input in the ONNX file.
        dtype: what it takes; nothing is cast.
        min, max: the smallest and the largest sizes.
    """

    name: str
    dtype: np.dtype[Any]
    min: tuple[int, ...]
    max: tuple[int, ...]


class ArrayModel:
    """A lowered model on NumPy arrays; made by `load_arrays`. Calls from several threads may overlap.

    Attributes:
        inputs: names of the model's arguments, in order.
    """

    def __init__(self, nodes: list[dict[str, Any]], segments: Mapping[str, _Session], state: dict[str, np.ndarray]):
        self._nodes, self._segments, self._state = nodes, segments, state
        self.inputs = [node["target"] for node in nodes if node["op"] == "placeholder"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Args:
            args, kwargs: arrays, named as the model's arguments.

        Returns:
            Arrays in the structure of the model's results; a NamedTuple of the model as one of the same fields.

        Raises:
            InputError: arguments are missing or too many, or an array has the wrong type, rank or size.
            LoweringError: ONNX Runtime fails on these inputs.
        """
        made = self._arguments(args, kwargs)
        for node in self._nodes:
            op, name = node["op"], node["name"]
            if op == "placeholder":
                made[name] = made.pop(f"argument {node['target']}")
            elif op == "get_attr":
                made[name] = self._state[node["target"]]
            elif op == "call_module":
                made[name] = self._segments[node["target"]](*(_value(a, made) for a in node["args"]))
            elif op == "call_function":
                container, index = (_value(a, made) for a in node["args"])
                made[name] = container[index]
            else:
                return _value(node["args"][0], made)
        raise ArtifactError("the graph of the artifact has no output", hint="save the lowered module again")

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        given = dict(zip(self.inputs, args, strict=False))
        if len(args) > len(self.inputs) or given.keys() & kwargs or {*given, *kwargs} != set(self.inputs):
            raise InputError(
                f"the model takes {', '.join(self.inputs)}; {len(args)} positional and {sorted(kwargs)} were given"
            )
        return {f"argument {name}": value for name, value in {**given, **kwargs}.items()}


class _Session:
    """One ONNX file in ONNX Runtime."""

    def __init__(self, path: Path, specs: list[ArraySpec], outputs: list[str], threads: int, exact: bool):
        ort = _runtime()
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 4
        options.enable_cpu_mem_arena = False  # one call at a time has no use for blocks that are kept for the next
        options.add_session_config_entry("session.x64quantprecision", "1" if exact else "0")
        self.name, self.specs, self.outputs = path.stem, specs, outputs
        try:
            self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise LoweringError(f"ONNX Runtime refuses {path.name}: {str(error).splitlines()[0]}") from error

    def __call__(self, *values: Any) -> list[np.ndarray]:
        if len(values) != len(self.specs):
            raise InputError(f"{self.name} takes {len(self.specs)} inputs, {len(values)} were given")
        feed = {spec.name: _checked_array(value, spec) for value, spec in zip(values, self.specs, strict=True)}
        try:
            return self._session.run(self.outputs, feed)  # type: ignore[no-any-return]
        except Exception as error:
            raise LoweringError(f"ONNX Runtime fails in {self.name}: {str(error).splitlines()[0]}") from error


def load_arrays(folder: str | Path, threads: int | None = None) -> ArrayModel:
    """Read a saved ONNX artifact to run it on NumPy arrays in ONNX Runtime. Does not import torch.

    Args:
        folder: what `LoweredModule.save` wrote, of a `lower_to_onnx`.
        threads: of one call; None: as many as there are cores.

    Raises:
        ArtifactError: a file is missing or altered, or the artifact needs more than its ONNX files: engines, wrapped
            Python, sizes computed between segments, buffers that a call changes, checks of sizes.
        BackendUnavailableError: ONNX Runtime is not installed.

    Example:
        >>> import numpy as np, torch
        >>> from lowering import lower_to_onnx
        >>> from lowering.onnx.arrays import load_arrays
        >>> images = torch.randn(1, 3, 8, 8)
        >>> folder = lower_to_onnx(torch.nn.Conv2d(3, 4, 3), images, precision="fp32").save("artifact")
        >>> load_arrays(folder)(images.numpy()).shape
        (1, 4, 6, 6)
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    check_files(folder, manifest["files"])
    nodes = _supported_nodes(manifest)
    count = threads or os.cpu_count() or 1
    plain = checked(manifest.get("segments"), list, "the list of segments")
    segments = dict(_segment(folder, manifest["files"], segment, count) for segment in plain)
    for node in nodes:
        if node["op"] == "call_module" and node["target"] not in segments:
            raise _more_than_files(f"the module '{node['target']}' stays in Python")
    return ArrayModel(nodes, segments, _state(folder, nodes))


def _supported_nodes(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The glue graph, if it only calls segments and picks and packs their results."""
    if manifest.get("children") is not None:
        raise _more_than_files("the model itself stays in Python")
    nodes = checked(manifest.get("glue"), list, "the graph")
    for node in nodes:
        checked(node, dict, "a node of the graph")
        op, target = node.get("op"), node.get("target")
        if isinstance(target, dict):
            raise _more_than_files(f"'{target.get('fallback')}' is Python of the caller")
        if op == "call_function" and target != "_operator.getitem":
            raise _more_than_files(f"'{node.get('name')}' computes {target}")
        if op not in ("placeholder", "get_attr", "call_module", "call_function", "output"):
            raise _more_than_files(f"'{node.get('name')}' is a {op}")
    return nodes


def _segment(folder: Path, files: dict[str, Any], plain: Any, threads: int) -> tuple[str, _Session]:
    checked(plain, dict, "a segment")
    record = checked(plain.get("backend"), dict, "the backend of a segment")
    name = checked(checked(plain.get("info"), dict, "a segment").get("name"), str, "the name of a segment")
    if record.get("kind") != "onnx":
        raise _more_than_files(f"{name} is an engine")
    if plain.get("buffers") or plain.get("writebacks"):
        raise _more_than_files(f"{name} changes buffers or inputs")
    if plain.get("checks"):
        raise _more_than_files(f"{name} checks the sizes of its inputs")
    if f"{name}.onnx" not in files:  # the files that are listed, and only these, have been checked
        raise ArtifactError(f"the manifest of {folder.name} does not list {name}.onnx", hint="save again")
    specs = [_spec(entry) for entry in checked(record.get("inputs"), list, f"the inputs of {name}")]
    outputs = [checked(o, str, f"an output of {name}") for o in checked(record.get("outputs"), list, "the outputs")]
    exact = checked(record.get("exact", False), bool, f"'exact' of {name}")
    return name, _Session(folder / f"{name}.onnx", specs, outputs, threads, exact)


def _spec(plain: Any) -> ArraySpec:
    checked(plain, dict, "an input")
    name = checked(plain.get("name"), str, "the name of an input")
    dtype = checked(plain.get("dtype"), str, f"the type of input '{name}'")
    if dtype not in _TYPES:
        raise _more_than_files(f"input '{name}' is {dtype}, which NumPy has not")
    least, most = (shape_from_plain(plain.get(key), name) for key in ("min", "max"))
    return ArraySpec(name, np.dtype(_TYPES[dtype]), least, most)


def _state(folder: Path, nodes: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The tensors that the graph hands on as they are."""
    wanted = {node["target"] for node in nodes if node["op"] == "get_attr"}
    if not wanted:
        return {}
    from safetensors.numpy import load_file

    state = load_file(folder / STATE)
    if missing := wanted - state.keys():
        raise _more_than_files(f"'{min(missing)}' is of the caller's model")
    return state


def _value(plain: Any, made: Mapping[str, Any]) -> Any:
    """An argument of a node; see `lowering.artifact.glue_values`."""
    if isinstance(plain, list):
        return [_value(item, made) for item in plain]
    if not isinstance(plain, dict):
        return plain
    (kind, content), *_ = plain.items()
    if kind not in _KINDS:
        raise _more_than_files(f"a result holds a {kind}")
    return _KINDS[kind](content, plain, made)


def _named(content: str, plain: dict[str, Any], made: Mapping[str, Any]) -> Any:
    fields = {name: _value(item, made) for name, item in plain["fields"].items()}
    return namedtuple(content, list(fields))(**fields)  # type: ignore[misc]


_KINDS: dict[str, Callable[[Any, dict[str, Any], Mapping[str, Any]], Any]] = {
    "node": lambda content, plain, made: made[content],
    "float": lambda content, plain, made: float(content),
    "tuple": lambda content, plain, made: tuple(_value(item, made) for item in content),
    "dict": lambda content, plain, made: {key: _value(item, made) for key, item in content.items()},
    "slice": lambda content, plain, made: slice(*(_value(item, made) for item in content)),
    "ellipsis": lambda content, plain, made: Ellipsis,
    "named": _named,
}


def _checked_array(value: Any, spec: ArraySpec) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        raise InputError(f"input '{spec.name}' is a {type(value).__name__}, not a NumPy array")
    if value.dtype != spec.dtype:
        raise InputError(f"input '{spec.name}' is {value.dtype}, this takes {spec.dtype}", hint="use astype")
    fits = len(value.shape) == len(spec.min) and all(
        least <= size <= most for least, size, most in zip(spec.min, value.shape, spec.max, strict=True)
    )
    if not fits:
        raise InputError(f"input '{spec.name}' has shape {value.shape}, this takes from {spec.min} to {spec.max}")
    return value


def _more_than_files(what: str) -> ArtifactError:
    return ArtifactError(f"{what}, which takes torch", hint="load it with lowering.load")


def _runtime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendUnavailableError(
            f"ONNX Runtime cannot be imported: {error}", hint="pip install onnxruntime"
        ) from error
    return onnxruntime
