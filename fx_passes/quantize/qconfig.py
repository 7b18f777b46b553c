"""What the user wants otherwise: a mapping from places in the model to options."""

from __future__ import annotations

import difflib
import fnmatch
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
        observer: of its quantized value: "minmax", "moving_average", "histogram", "percentile" (or "percentile:99.9"),
            "entropy" or "mse"; None for the default.
        weight: "per_channel" or "per_tensor", None for what the target wants.
        weight_observer: "minmax" or "mse".
        bias_correction: let the bias take back what rounding the weight does to the layer's mean output, as seen in
            calibration. Not in quantization-aware training, which learns to.
        origin: the key that decided, for messages.
    """

    dtype: str | None = None
    observer: str | None = None
    weight: Granularity | None = None
    weight_observer: str = "minmax"
    bias_correction: bool = True
    origin: str = ""


_OPTIONS = tuple(f.name for f in fields(LayerConfig) if f.name != "origin")
_VALUES: Mapping[str, tuple[Any, ...]] = {
    "dtype": (None, "int8", "float"),
    "weight": (None, "per_channel", "per_tensor"),
    "weight_observer": ("minmax", "mse"),
    "bias_correction": (True, False),
}


class QConfig(Mapping[Any, "dict[str, Any] | None"]):
    """Quantization options by place, the more exact place winning: global, module type, name pattern, name, attribute.

    Args:
        entries: keys are `""` for the whole model, a module class, or the name of a module or graph node, possibly
            with `*`, `?` and `[...]`. A name stands for everything in that module. Values are dicts of the fields of
            `LayerConfig`, or None to keep the place in float. Options that an entry does not mention come from the
            next wider place. Functions have the configuration of the module whose forward calls them.
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
    def of(cls, config: Mapping[Any, Any] | None) -> QConfig:
        return config if isinstance(config, QConfig) else cls(config)

    def __getitem__(self, key: Any) -> dict[str, Any] | None:
        return self._entries[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def resolve(self, gm: GraphModule) -> dict[Node, LayerConfig]:
        """The options of every node.

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
        if unused:
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
                if isinstance(key, type) and type(module) is key:
                    yield key, entry
        names = [*_prefixes(path), node.name]
        patterns = [k for k in self._entries if isinstance(k, str) and any(c in k for c in "*?[")]
        for key in patterns:
            if any(fnmatch.fnmatchcase(name, key) for name in names):
                yield key, self._entries[key]
        for name in dict.fromkeys(names):
            if name in self._entries and name not in patterns:
                yield name, self._entries[name]
        for module in modules:
            if "qconfig" in vars(module):
                yield "the attribute 'qconfig'", _checked("qconfig", vars(module)["qconfig"])


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
        elif setting not in _VALUES[option]:
            allowed = ", ".join(map(repr, _VALUES[option]))
            raise InputError(f"{option}={setting!r} for {key!r}", hint=f"use one of {allowed}")
    return dict(value)


def _check_observer(key: Any, wish: Any) -> None:
    from fx_passes.quantize.observer_names import OBSERVERS

    name, colon, number = str(wish).partition(":")
    known = wish is None or (name in OBSERVERS and (not colon or (name == "percentile" and _is_number(number))))
    if not known:
        raise InputError(
            f"observer={wish!r} for {key!r}",
            hint=f"use one of {', '.join(map(repr, OBSERVERS))}, or 'percentile:99.9'",
        )


def _is_number(text: str) -> bool:
    try:
        return 50.0 < float(text) <= 100.0
    except ValueError:
        return False


def _merged(config: LayerConfig, key: Any, entry: dict[str, Any] | None) -> LayerConfig:
    origin = key.__name__ if isinstance(key, type) else (repr(key) if key else "for the whole model")
    changes = {"dtype": "float"} if entry is None else {"dtype": None, **entry} if config.dtype == "float" else entry
    return replace(config, origin=origin, **changes)


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
    if isinstance(key, type):
        return InputError(f"the model has no {key.__name__}, which the quantization configuration names")
    names = {node.name for node in gm.graph.nodes}
    for node in gm.graph.nodes:
        names.update(_prefixes(str(node.target) if node.op == "call_module" else node.meta.get("module_path", "")))
    near = difflib.get_close_matches(key, sorted(names), 3)
    return InputError(
        f"the quantization configuration names {key!r}, which matches no module and no node of the model",
        hint=f"did you mean {' or '.join(map(repr, near))}?" if near else None,
    )
