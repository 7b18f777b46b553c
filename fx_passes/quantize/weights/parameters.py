"""Other float parameters for one call of a layer, in a graph that shares its modules with others."""

from __future__ import annotations

import copy

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_passes.graph.module import set_buffer, set_submodule
from fx_passes.graph.node_meta import inherit_meta
from fx_passes.ops import bind, module_of

__all__ = ["set_parameters", "shared_parameters"]


def set_parameters(gm: GraphModule, node: Node, weight: Tensor, bias: Tensor | None) -> None:
    """Let `node`, a layer or a norm of `gm`, compute with these; what it computed with before is left as it is."""
    if node.op == "call_module":
        module: nn.Module = copy.copy(module_of(node, gm))  # type: ignore[assignment]
        module.__dict__["_parameters"] = dict(module._parameters)
        for name, tensor in (("weight", weight), ("bias", bias)):
            old = module._parameters.get(name)
            module._parameters[name] = (
                None if tensor is None else nn.Parameter(tensor, requires_grad=old is None or old.requires_grad)
            )
        set_submodule(gm, str(node.target), module)
        return
    new: dict[str, Node] = {}
    with gm.graph.inserting_before(node):
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None:
                path = f"{node.name}_scaled.{name}"
                set_buffer(gm, path, nn.Parameter(tensor))
                new[name] = inherit_meta(gm.graph.get_attr(path), node)
    names = list(bind(node))
    arguments = list(node.args)
    keywords = dict(node.kwargs)
    for name, value in new.items():
        index = names.index(name)
        if index < len(arguments):
            arguments[index] = value
        else:
            keywords[name] = value
    node.args, node.kwargs = tuple(arguments), keywords


def shared_parameters(gm: GraphModule) -> set[int]:
    """Data pointers of the parameters that more than one node computes with."""
    readers: dict[int, set[Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module" and (module := module_of(node, gm)) is not None:
            for parameter in module.parameters():
                readers.setdefault(parameter.data_ptr(), set()).add(node)
        elif node.op == "get_attr":
            value = gm
            for part in str(node.target).split("."):
                value = getattr(value, part, None)  # type: ignore[assignment]
            if isinstance(value, Tensor):
                readers.setdefault(value.data_ptr(), set()).update(node.users)
    return {pointer for pointer, nodes in readers.items() if len(nodes) > 1}
