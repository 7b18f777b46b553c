"""The glue graph as JSON. A file can name torch's own operators and what the caller supplies, nothing else.

Reading a graph back resolves three kinds of names: functions and tensor methods of the op table, segments of the
artifact, and Python parts that the caller hands in (`model`, `fallbacks`). There is no import by name and no pickle.
"""

from __future__ import annotations

import math
import operator
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fx_passes.capture.arguments import check_fixed
from fx_passes.capture.example_values import check_branch
from fx_passes.capture.structures import make_instance
from fx_passes.errors import ArtifactError
from fx_passes.ops import OPS
from lowering.artifact.glue_checks import HELD
from lowering.artifact.glue_values import is_structure, value_from_plain, value_to_plain
from lowering.artifact.supplied import class_of, expression_for, find_on_model, may_be_called
from lowering.request.arguments import signature_of
from lowering.segment.segment import Segment

__all__ = ["glue_from_plain", "glue_to_plain"]

# What plumbing between segments may call besides the op table: container access, sizes, integer arithmetic, checks.
_PLUMBING: tuple[Any, ...] = (
    *(getattr(operator, name) for name in ("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "neg")),
    *(getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_", "is_", "is_not")),
    *(getattr, len, int, float, max, min, slice, math.pow, torch.Size),
    *(torch._assert, check_branch, check_fixed),
    *(OrderedDict, make_instance, *(t for t in vars(torch.return_types).values() if isinstance(t, type))),
)
_SELF = HELD  # the model that wrapped methods belong to: held beside the glue graph, never a child of it
_GETATTR = "builtins.getattr"
_TENSOR_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad", "T", "mT", "layout")
_METHODS = ("size", "dim", "numel", "items", "keys", "values", "get", "clone", "ndimension", "nelement")


def glue_to_plain(glue: GraphModule) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The graph as a list of plain nodes, and the tensors that its `get_attr` nodes read.

    Raises:
        ArtifactError: a node holds a value that JSON cannot carry; names the node. Two functions have one name.
    """
    nodes, state = [], {}
    functions: dict[str, Callable[..., Any]] = {}
    for node in glue.graph.nodes:
        plain: dict[str, Any] = {"name": node.name, "op": node.op, "target": _target_to_plain(glue, node)}
        plain["args"] = [value_to_plain(node, a) for a in node.args]
        plain["kwargs"] = {key: value_to_plain(node, a) for key, a in node.kwargs.items()}
        if (signature := _python_signature(glue, node)) is not None:
            plain["signature"] = signature
        if isinstance(plain["target"], dict):
            name = plain["target"]["fallback"]
            # compared by value: every access to a class method makes another object
            if functions.setdefault(name, node.target) != node.target:  # type: ignore[arg-type]
                raise ArtifactError(
                    f"two Python functions are called '{name}', and an artifact tells them by their names",
                    node=node,
                    hint="rename one of them",
                )
        if node.op == "get_attr" and str(node.target).split(".")[0] != _SELF:
            value = _attribute(glue, str(node.target))
            if isinstance(value, Tensor):
                state[str(node.target)] = value
            elif is_structure(value):
                plain["named"] = value.__name__
            else:
                raise ArtifactError(
                    f"a {type(value).__name__} that the model's code made cannot be saved",
                    node=node,
                    hint="make it in a wrapped function, or hold it on the model",
                )
        nodes.append(plain)
    return nodes, state


def glue_from_plain(
    nodes: list[dict[str, Any]],
    segments: dict[str, Segment],
    state: dict[str, Tensor],
    model: nn.Module | None,
    fallbacks: dict[str, Callable[..., Any]],
) -> GraphModule:
    """The graph module that `glue_to_plain` wrote.

    Raises:
        ArtifactError: the file names something that is not allowed, or a Python part that the caller did not supply.
    """
    reader = _Reader(segments, state, model, fallbacks)
    graph = Graph()
    made: dict[str, Node] = {}
    for plain in nodes:
        target = reader.target(plain)
        args = tuple(value_from_plain(a, made, reader.structure) for a in plain["args"])
        kwargs = {key: value_from_plain(a, made, reader.structure) for key, a in plain["kwargs"].items()}
        made[plain["name"]] = graph.create_node(plain["op"], target, args, kwargs, name=plain["name"])
    glue = reader.glue
    glue.graph = graph
    graph.lint()
    return glue


def _target_to_plain(glue: GraphModule, node: Node) -> Any:
    if node.op != "call_function":
        return str(node.target)
    name = _names().get(node.target)  # type: ignore[arg-type]
    if name is not None:
        return name
    function: Any = node.target
    if isinstance(function, torch._ops.OpOverload) and function._schema.name in _packets():
        return f"{function._schema.name}.{function._overloadname}"
    plain = {"fallback": function.__name__, "signature": signature_of(function)}
    owner = class_of(function)
    return plain if owner is None else {**plain, "class": owner}


def _python_signature(glue: GraphModule, node: Node) -> str | None:
    """The signature of a method of the model or of a module that stays in Python, to compare when it is supplied."""
    if node.op == "call_module":
        module = glue.get_submodule(str(node.target))
        return None if isinstance(module, Segment) else signature_of(module.forward)
    receiver = node.args[0] if node.op == "call_method" and node.args else None
    if isinstance(receiver, Node) and receiver.op == "get_attr" and str(receiver.target).split(".")[0] == _SELF:
        return signature_of(getattr(_attribute(glue, str(receiver.target)), str(node.target)))
    return None


def _check_signature(what: str, function: Callable[..., Any], wanted: Any) -> None:
    if wanted is not None and signature_of(function) != wanted:
        raise ArtifactError(
            f"{what} has the signature {signature_of(function)}; the lowered one had {wanted}",
            hint="pass what was there when the model was lowered",
        )


class _Reader:
    """Resolves the targets of a file against the op table and what the caller supplied."""

    def __init__(
        self,
        segments: dict[str, Segment],
        state: dict[str, Tensor],
        model: nn.Module | None,
        fallbacks: dict[str, Callable[..., Any]],
    ):
        self.segments, self.state, self.model, self.fallbacks = segments, state, model, fallbacks
        self.glue = GraphModule({}, Graph())
        self._attributes: dict[str, str] = {}

    def target(self, plain: dict[str, Any]) -> Any:
        op, target = plain["op"], plain["target"]
        if op in ("placeholder", "output"):
            return target
        if op == "get_attr":
            if target.split(".")[0] == _SELF:
                self._attributes[plain["name"]] = target
            return self._attribute(target, plain.get("named"))
        if op == "call_module":
            return self._module(target, plain.get("signature"))
        if op == "call_method":
            return self._method(plain)
        if op == "call_function":
            return self._function(plain)
        raise ArtifactError(f"node '{plain['name']}' has the unknown kind {op!r}", hint="save the lowered module again")

    def _attribute(self, target: str, named: str | None) -> str:
        if named is not None:
            setattr(self.glue, target, self.structure(named))
        elif target in self.state:
            *containers, name = target.split(".")
            _container(self.glue, containers).register_buffer(name, self.state[target])
        elif target.split(".")[0] == _SELF:
            self.glue.__dict__[_SELF] = self._need_model(f"a wrapped call reads '{target}'")
        else:
            raise ArtifactError(f"the artifact lacks the tensor '{target}'", hint="save the lowered module again")
        return target

    def _module(self, target: str, signature: str | None) -> str:
        if target in self.segments:
            self.glue.add_module(target, self.segments[target])
            return target
        model = self._need_model(f"the module '{target}' stays in Python")
        *containers, name = target.split(".")
        try:
            module = model.get_submodule(target)
        except AttributeError as error:
            raise ArtifactError(
                f"the model that was passed has no submodule '{target}'", hint="pass the model that was lowered"
            ) from error
        _check_signature(f"the forward of '{target}'", module.forward, signature)
        _container(self.glue, containers).add_module(name, module)
        return target

    def _method(self, plain: dict[str, Any]) -> str:
        name = plain["target"]
        receiver = plain["args"][0] if plain["args"] else None
        owner = self._attributes.get(receiver.get("node", "")) if isinstance(receiver, dict) else None
        if owner is not None:
            # The caller handed this object in; of its methods, those that were wrapped can be called.
            held = _attribute(self.glue, owner)
            if not may_be_called(held, name):
                raise ArtifactError(
                    f"the artifact calls the method '{name}' of the model, which is not wrapped",
                    hint="pass the model that was lowered, with the same wrap() calls made",
                )
            _check_signature(f"the method '{name}'", getattr(held, name), plain.get("signature"))
        elif name not in _methods():
            raise ArtifactError(f"the artifact calls the method '{name}', which is no tensor operation")
        return name

    def _function(self, plain: dict[str, Any]) -> Callable[..., Any]:
        target = plain["target"]
        if isinstance(target, str):
            if target == _GETATTR and plain["args"][1] not in _TENSOR_ATTRIBUTES:
                raise ArtifactError(f"the artifact reads the attribute {plain['args'][1]!r}, which is no tensor's")
            function = _functions().get(target) or _overload(target)
            if function is None:
                raise ArtifactError(f"the artifact calls '{target}', which is no operator of torch that is known here")
            return function
        name, owner = target["fallback"], target.get("class")
        function = self.fallbacks.get(name) or find_on_model(self.model, name, owner)
        if function is None:
            raise ArtifactError(
                f"the Python function '{name}' stays outside the artifact",
                hint=f"load(folder, fallbacks={{'{name}': {expression_for(name, owner)}}})",
            )
        _check_signature(f"'{name}'", function, target["signature"])
        return function

    def structure(self, name: str) -> type:
        """The caller's NamedTuple or dataclass of that name."""
        found: Any = self.fallbacks.get(name) or find_on_model(self.model, name)
        if not is_structure(found):
            raise ArtifactError(
                f"the class '{name}' of the model's results stays outside the artifact",
                hint=f"load(folder, fallbacks={{'{name}': {name}}}), or load(folder, model=the_model)",
            )
        return found

    def _need_model(self, why: str) -> nn.Module:
        if self.model is None:
            raise ArtifactError(f"{why}, and no model is passed", hint="load(folder, model=the_model)")
        return self.model


def _container(root: nn.Module, path: list[str]) -> nn.Module:
    """The module at `path` below `root`, made of plain containers where it is missing."""
    for name in path:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    return root


def _attribute(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name)
    return root


@cache
def _functions() -> dict[str, Callable[..., Any]]:
    known = {f"{f.__module__}.{f.__name__}": f for f in _PLUMBING}
    for op in OPS.values():
        for function in op.functions:
            known.setdefault(f"{getattr(function, '__module__', None) or 'torch'}.{function.__name__}", function)
    return known


@cache
def _packets() -> frozenset[str]:
    """Qualified names of torch's operators in the op table, and of their in-place forms."""
    names = {name for op in OPS.values() for name in op.aten}
    return frozenset({*names, *(f"{name}_" for name in names)})


def _overload(name: str) -> Callable[..., Any] | None:
    """The overload that is called "aten::add.Tensor", if the op table has such an operator."""
    qualified, _, overload = name.rpartition(".")
    if qualified not in _packets():
        return None
    namespace, name = qualified.split("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return getattr(packet, overload) if packet is not None and overload in packet.overloads() else None


@cache
def _names() -> dict[Callable[..., Any], str]:
    return {function: name for name, function in _functions().items()}


@cache
def _methods() -> frozenset[str]:
    return frozenset({*_METHODS, *(method for op in OPS.values() for method in op.methods)})
