"""Putting modules into a graph, and keeping an example of its inputs."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fx_passes.graph.module import set_submodule
from fx_passes.graph.node_meta import inherit_meta

__all__ = ["claim", "insert_module", "insertion_point", "place_of", "placed_for", "record_example"]

# Of a container: a child of such a name would be out of reach, or stand in the way of what torch calls.
_TAKEN = frozenset(dir(nn.Module()))
_SUFFIX = "_value"


def claim(gm: GraphModule, container: str) -> None:
    """Let the modules of `container` be kept under this name, or under the next one that the model does not have."""
    names = itertools.chain([container], (f"{container}_{i}" for i in itertools.count(1)))
    taken = {*dir(type(gm)), *gm._modules, *gm._parameters, *gm._buffers}
    gm.meta[container] = next(name for name in names if name not in taken)


def place_of(gm: GraphModule, container: str, name: str) -> str:
    """The path in `container` of the module for the node of this name: "observers.conv".

    It ends in the node's own name, so that checkpoints say what they are about, unless that is one like "to".
    """
    return f"{gm.meta.get(container, container)}.{name}{_SUFFIX if _is_taken(name) else ''}"


def placed_for(gm: GraphModule, container: str, node: Node) -> str | None:
    """The name of the node that the module called by `node` is for; None if it is none of `container`."""
    prefix = f"{gm.meta.get(container, container)}."
    if node.op != "call_module" or not str(node.target).startswith(prefix):
        return None
    name = str(node.target).removeprefix(prefix)
    return name.removesuffix(_SUFFIX) if _is_taken(name) else name


def _is_taken(name: str) -> bool:
    """Whether a node of this name is stored under another, or is one that another would be stored under."""
    while name not in _TAKEN and name.endswith(_SUFFIX):
        name = name.removesuffix(_SUFFIX)
    return name in _TAKEN


def record_example(gm: GraphModule, example_inputs: Any) -> None:
    """Keep `example_inputs` in `gm.meta`, or arrange for the first inputs that `gm` is called with to be kept."""
    if example_inputs is not None:
        gm.meta["example_inputs"] = (
            example_inputs
            if isinstance(example_inputs, (tuple, dict))
            else tuple(example_inputs)
            if isinstance(example_inputs, list)
            else (example_inputs,)
        )
    elif "example_inputs" not in gm.meta:
        gm.register_forward_pre_hook(_record_first, with_kwargs=True)


def _record_first(gm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    meta: dict[str, Any] = gm.meta  # type: ignore[assignment]
    if "example_inputs" in meta:
        return
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs))
    if args and kwargs:
        kwargs = dict(inspect.signature(gm.forward).bind(*args, **kwargs).arguments)
    meta["example_inputs"] = kwargs or args


def insertion_point(node: Node) -> Node:
    """Where something computed from `node` may stand: after it, and after all placeholders."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node


def insert_module(gm: GraphModule, node: Node, readers: Iterable[Node], path: str, module: nn.Module) -> Node:
    """Put `module`, stored at `path`, between `node` and `readers`. Returns the new call."""
    set_submodule(gm, path, module)
    with gm.graph.inserting_after(insertion_point(node)):
        new = gm.graph.call_module(path, (node,))
    inherit_meta(new, node)
    for reader in readers:
        if reader is not new:
            reader.replace_input_with(node, new)
    return new
