"""What a glue graph in a file must look like before a node of it is made.

A graph module compiles Python source that is made of its nodes: names of arguments and attributes enter it as they
are. So each of them has to be a plain identifier here, or the file could write code.

The model that the caller hands in for its wrapped methods stands in the graph as an attribute called `HELD`. Only those
methods and the caller's own functions may take it: an operator of torch that passed it on, as getting an item of a list
does, would open its other methods to the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fx_passes.errors import ArtifactError
from lowering.artifact.plain import checked

__all__ = ["HELD", "check_nodes"]

HELD = "_self"
_KINDS = ("placeholder", "get_attr", "call_function", "call_method", "call_module", "output")
_DEEPEST = 50


def check_nodes(nodes: Any) -> None:
    """Hold the plain nodes of a glue graph to their form.

    Raises:
        ArtifactError: a node lacks a part, a part has another type, or a name is no identifier.
    """
    held: set[str] = set()
    seen: set[str] = set()
    for plain in checked(nodes, list, "the glue graph"):
        checked(plain, dict, "a node of the glue graph")
        name = checked(plain.get("name"), str, "the name of a node")
        if name in seen:
            raise ArtifactError(f"two nodes of the glue graph are called {name!r}")
        seen.add(name)
        kind = checked(plain.get("op"), str, f"the kind of node '{name}'")
        if kind not in _KINDS:
            raise ArtifactError(f"node '{name}' has the unknown kind {kind!r}", hint="update fx-trt-lowering")
        _check_target(name, kind, plain.get("target"))
        for value in checked(plain.get("args"), list, f"the arguments of '{name}'"):
            _check_value(name, value)
        for key, value in checked(plain.get("kwargs"), dict, f"the keyword arguments of '{name}'").items():
            _identifier(key, f"a keyword argument of '{name}'")
            _check_value(name, value)
        if kind == "get_attr" and plain["target"].split(".")[0] == HELD:
            held.add(name)
        elif not _may_take_the_model(plain, held) and held & set(
            _references([*plain["args"], *plain["kwargs"].values()])
        ):
            raise ArtifactError(f"node '{name}' passes on the caller's model, which only its wrapped methods may take")
    if [plain["op"] for plain in nodes].count("output") != 1 or nodes[-1]["op"] != "output":
        raise ArtifactError("the glue graph does not end in one output")


def _may_take_the_model(plain: dict[str, Any], held: set[str]) -> bool:
    receiver = plain["args"][0] if plain["args"] else None
    on_the_model = isinstance(receiver, dict) and receiver.get("node") in held
    return (plain["op"] == "call_method" and on_the_model) or isinstance(plain["target"], dict)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("node"), str):
            yield value["node"]
        for item in value.values():
            yield from _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


def _check_target(name: str, kind: str, target: Any) -> None:
    if kind == "call_function":
        checked(target, str | dict, f"the target of '{name}'")
        if isinstance(target, dict):
            checked(target.get("fallback"), str, f"the function of '{name}'")
            checked(target.get("signature"), str, f"the signature of '{name}'")
            checked(target.get("class"), str | None, f"the class of '{name}'")
        return
    checked(target, str, f"the target of '{name}'")
    if kind == "placeholder":
        _identifier(target.lstrip("*"), f"the input '{name}'")  # *args and **kwargs of the model's own signature
    elif kind == "call_method":
        _identifier(target, f"the method of '{name}'")
    elif kind in ("get_attr", "call_module"):
        for part in target.split("."):
            # a submodule of a container is called by its number
            if not part.isdecimal():
                _identifier(part, f"the path of '{name}'")


def _identifier(text: str, what: str) -> None:
    if not text.isidentifier() or not text.isascii() or (text.startswith("__") and text.endswith("__")):
        raise ArtifactError(f"{what} is {text!r}, which is no name that a graph may use")


def _check_value(name: str, value: Any, depth: int = 0) -> None:
    if depth > _DEEPEST:
        raise ArtifactError(f"an argument of '{name}' is nested too deeply")
    if isinstance(value, dict):
        if not value:
            raise ArtifactError(f"an argument of '{name}' is an empty object, which says nothing")
        for key, item in value.items():
            checked(key, str, f"a key in '{name}'")
            _check_value(name, item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_value(name, item, depth + 1)
