"""What the user wants otherwise: a mapping from places in the model to options."""

from __future__ import annotations

import difflib
import fnmatch
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from fx_passes.errors import InputError
from fx_passes.quantize.annotation import Granularity

__all__ = ["LayerConfig", "QConfig"]


@dataclass(frozen=True)
class LayerConfig:
    """Options of one node.

    Attributes:
        dtype: "float" keeps it float, "int8" quantizes it though the target's placement would not (a depthwise
            convolution for TensorRT), None leaves it to the placement.
        observer: of its quantized value: "minmax", "moving_average", "running" (the extrema, which follow the
            batches while training), "histogram", "percentile" (or "percentile:99.9"), "entropy" or "mse"; None for the
            default: "minmax", and "running" in quantization-aware training.
        weight: "per_channel" or "per_tensor", None for what the target wants.
        weight_observer: "minmax" or "mse".
        bias_correction: let the bias take back what rounding the weight does to the layer's mean output, as seen in
            calibration. Not in quantization-aware training, which learns to.
        equalize: even out the channels' ranges between this layer and its neighbours that ask for it too (see
            `fx_passes.quantize.channels.equalize`).
        smooth: of a linear layer, how much of the difference between its input's channels moves into the weight, 0 to
            1 (see `fx_passes.quantize.channels.smooth`); None for nothing.
        rounding: of the weight: "nearest", or "learned" from calibration batches (see
            `fx_passes.quantize.weights.rounding`), which `convert_fx` then needs.
        origin: the key that decided, for messages.
    """

    dtype: str | None = None
    observer: str | None = None
    weight: Granularity | None = None
    weight_observer: str = "minmax"
    bias_correction: bool = True
    equalize: bool = False
    smooth: float | None = None
    rounding: str = "nearest"
    origin: str = ""


_OPTIONS = tuple(f.name for f in fields(LayerConfig) if f.name != "origin")
_VALUES: Mapping[str, tuple[Any, ...]] = {
    "dtype": (None, "int8", "float"),
    "weight": (None, "per_channel", "per_tensor"),
    "weight_observer": ("minmax", "mse"),
    "bias_correction": (True, False),
    "equalize": (True, False),
    "rounding": ("nearest", "learned"),
}
TYPE_PREFIX = "type:"
_ATTRIBUTE = "qconfig"


class QConfig(Mapping[Any, "dict[str, Any] | None"]):
    """Quantization options by place, the more exact place winning: global, module type, name pattern, name, attribute.

    Args:
        entries: keys are `""` for the whole model, a module class (or its name, "type:Linear" or
            "type:torch.nn.Linear"), or the name of a module or graph node, possibly with `*`, `?` and `[...]`. A name
            stands for everything in that module. Values are dicts of the fields of `LayerConfig`, or None to keep the
            place in float. Options that an entry does not mention come from the next wider place. Functions have the
            configuration of the module whose forward calls them.
            An attribute `qconfig` on a module, a dict or None, wins over all entries.

    Raises:
        InputError: an unknown option or value, or a key that is no name and no class.

    Example:
        >>> config = QConfig({"": {"observer": "moving_average"}, nn.Linear: {"weight": "per_tensor"}, "stem.*": None})
        >>> len(config)
        3
    """

    def __init__(self, entries: Mapping[Any, Any] | None = None):
        self._entries = {key: _checked(key, value) for key, value in dict(entries or {}).items()}

    @classmethod
    def of(cls, config: QConfig | Mapping[Any, Any] | str | os.PathLike[str] | None) -> QConfig:
        """From a mapping, a configuration, the path of a file, or None."""
        if isinstance(config, (str, os.PathLike)):
            return cls.from_file(config)
        return config if isinstance(config, QConfig) else cls(config)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> QConfig:
        """Read a `.toml` or `.json` file: one table for each key, the keys as in Python.

        Raises:
            InputError: no such file, another type of file, or contents that are no configuration.
        """
        from fx_passes.quantize.qconfig_file import read_entries

        return cls(read_entries(path))

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Write a `.toml` or `.json` file that `from_file` reads.

        Raises:
            InputError: another type of file.
            ArtifactError: the file cannot be written.
        """
        from fx_passes.quantize.qconfig_file import write_entries

        write_entries(path, self.as_dict())

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain data: classes by their names, None as `{"dtype": "float"}`."""
        return {
            _type_name(key) if isinstance(key, type) else key: {"dtype": "float"} if entry is None else dict(entry)
            for key, entry in self._entries.items()
        }

    def merged(self, entries: Mapping[Any, Any]) -> QConfig:
        """A configuration with `entries` too; where a key is in both, its options are united and those given win."""
        result: dict[Any, Any] = dict(self._entries)
        for key, entry in entries.items():
            before = result.get(key)
            result[key] = {**before, **entry} if before is not None and entry is not None else entry
        return QConfig(result)

    def __getitem__(self, key: Any) -> dict[str, Any] | None:
        return self._entries[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def resolve(self, gm: GraphModule, strict: bool = True) -> dict[Node, LayerConfig]:
        """The options of every node.

        Args:
            gm: a graph.
            strict: check that every key matches something. A pass that comes before nodes are rewritten does not.

        Raises:
            InputError: a name or class that matches nothing in the graph, with the nearest name that exists.
        """
        root = gm.__dict__.get("_self", gm)
        unused = {key for key in self._entries if key != ""}
        resolved = {}
        for node in gm.graph.nodes:
            config = LayerConfig()
            for key, entry in self._matching(gm, root, node):
                unused.discard(key)
                config = _merged(config, key, entry)
            resolved[node] = config
        if unused and strict:
            raise _no_match(sorted(unused, key=str)[0], gm)
        return resolved

    def _matching(self, gm: GraphModule, root: nn.Module, node: Node) -> Iterator[tuple[Any, Any]]:
        """Keys and entries for `node`, the widest first."""
        if "" in self._entries:
            yield "", self._entries[""]
        path = str(node.target) if node.op == "call_module" else str(node.meta.get("module_path", ""))
        modules = _modules_on(path, gm, root)
        for module in modules:
            for key, entry in self._entries.items():
                if _is_type(key, module):
                    yield key, entry
        names = [*_prefixes(path), node.name]
        patterns = [k for k in self._entries if _is_name(k) and any(c in k for c in "*?[")]
        for key in patterns:
            if any(fnmatch.fnmatchcase(name, key) for name in names):
                yield key, self._entries[key]
        for name in dict.fromkeys(names):
            if name in self._entries and name not in patterns:
                yield name, self._entries[name]
        for module in modules:
            if _ATTRIBUTE in vars(module):
                yield f"the attribute '{_ATTRIBUTE}'", _checked(_ATTRIBUTE, vars(module)[_ATTRIBUTE])


def _checked(key: Any, value: Any) -> dict[str, Any] | None:
    if not (isinstance(key, str) or (isinstance(key, type) and issubclass(key, nn.Module))):
        raise InputError(
            f"{key!r} is no place of a quantization configuration", hint='use "", a module class, or a module name'
        )
    if value is None:
        return None
    if isinstance(value, LayerConfig):
        value = {
            name: getattr(value, name) for name in _OPTIONS if getattr(value, name) != getattr(LayerConfig(), name)
        }
    if not isinstance(value, Mapping):
        raise InputError(f"the options of {key!r} are a {type(value).__name__}", hint="use a dict, or None for float")
    for option, setting in value.items():
        if option not in _OPTIONS:
            near = difflib.get_close_matches(str(option), _OPTIONS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(_OPTIONS)}"
            raise InputError(f"unknown quantization option {option!r} for {key!r}", hint=hint)
        if option == "observer":
            _check_observer(key, setting)
        elif option == "smooth":
            _check_strength(key, setting)
        elif not isinstance(setting, (str, bool, type(None))) or setting not in _VALUES[option]:
            allowed = ", ".join(map(repr, _VALUES[option]))
            raise InputError(f"{option}={setting!r} for {key!r}", hint=f"use one of {allowed}")
    return dict(value)


def _check_observer(key: Any, wish: Any) -> None:
    from fx_passes.quantize.ranges.names import OBSERVERS

    name, colon, number = str(wish).partition(":")
    known = wish is None or (name in OBSERVERS and (not colon or (name == "percentile" and _is_number(number))))
    if not known:
        raise InputError(
            f"observer={wish!r} for {key!r}",
            hint=f"use one of {', '.join(map(repr, OBSERVERS))}, or 'percentile:99.9'",
        )


def _check_strength(key: Any, wish: Any) -> None:
    number = isinstance(wish, (int, float)) and not isinstance(wish, bool)
    if wish is not None and not (number and 0.0 <= wish <= 1.0):
        raise InputError(f"smooth={wish!r} for {key!r}", hint="use a number from 0 to 1, such as 0.5, or None")


def _is_number(text: str) -> bool:
    try:
        return 50.0 < float(text) <= 100.0
    except ValueError:
        return False


def _merged(config: LayerConfig, key: Any, entry: dict[str, Any] | None) -> LayerConfig:
    origin = key.__name__ if isinstance(key, type) else (repr(key) if key else "for the whole model")
    changes = {"dtype": "float"} if entry is None else {"dtype": None, **entry} if config.dtype == "float" else entry
    return replace(config, origin=origin, **changes)


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and not key.startswith(TYPE_PREFIX)


def _is_type(key: Any, module: nn.Module) -> bool:
    """Whether `key` is the class of `module`, or its name."""
    cls = type(module)
    if isinstance(key, type):
        return cls is key
    if _is_name(key):
        return False
    return key in (_type_name(cls), f"{TYPE_PREFIX}{cls.__name__}", f"{TYPE_PREFIX}{cls.__module__}.{cls.__qualname__}")


def _type_name(cls: type) -> str:
    home = "torch.nn" if getattr(nn, cls.__name__, None) is cls else cls.__module__
    return f"{TYPE_PREFIX}{home}.{cls.__qualname__}"


def _prefixes(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _modules_on(path: str, gm: nn.Module, root: nn.Module) -> list[nn.Module]:
    """The modules from the root down to `path`: the user's own where they still exist, else the graph's."""
    found = [root]
    theirs: Any = root
    mine: Any = gm
    for part in path.split(".") if path else ():
        theirs, mine = getattr(theirs, part, None), getattr(mine, part, None)
        module = theirs if isinstance(theirs, nn.Module) else mine
        if isinstance(module, nn.Module):
            found.append(module)
    return found


def _no_match(key: Any, gm: GraphModule) -> InputError:
    if not _is_name(key):
        called = key.__name__ if isinstance(key, type) else key.removeprefix(TYPE_PREFIX)
        return InputError(f"the model has no {called}, which the quantization configuration names")
    names = {node.name for node in gm.graph.nodes}
    for node in gm.graph.nodes:
        names.update(_prefixes(str(node.target) if node.op == "call_module" else node.meta.get("module_path", "")))
    near = difflib.get_close_matches(key, sorted(names), 3)
    return InputError(
        f"the quantization configuration names {key!r}, which matches no module and no node of the model",
        hint=f"did you mean {' or '.join(map(repr, near))}?" if near else None,
    )
