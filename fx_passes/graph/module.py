"""`GraphModuleWithAttr`: a `GraphModule` that keeps the class, methods and attributes of the model it came from.

A traced module is two things at once: the graph that passes rewrite, and the user's own object, which wrapped methods
still need as their `self`. Both are kept apart:

* the **graph side** has its own container modules and shares leaf modules and tensors with the root, so that passes
  can add, replace and drop entries without touching the user's model;
* the **root** is held outside `_modules` (no child, not in the state dict) and is reached by `get_attr _self` nodes.
"""

from __future__ import annotations

import copy
import types
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from fx_passes.graph.copies import deep_copy
from fx_passes.graph.hooks import refuse_hooks, share_hooks

__all__ = ["GraphModuleWithAttr", "copy_graph_module", "delete_unused", "set_buffer", "set_submodule"]

_SELF = "_self"
_OWNED = "_owned_containers"
# Of an nn.Module's own bookkeeping, what a shallow copy must not share with the original.
_MODULE_TABLES = tuple(key for key, value in nn.Module().__dict__.items() if isinstance(value, (dict, set)))


class _InitBarrier(nn.Module):
    """Stands before the user's class in the method resolution order, so that its `__init__` is never run again."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class GraphModuleWithAttr(GraphModule):
    """A `GraphModule` of `graph` that is also an instance of `type(root)`.

    Parameters and buffers of `root` are shared under their own names, so the state dict has the keys of `root` and no
    more. Attributes and methods of `root` are available. `train()`, `eval()` and `to()` reach `root` too, which is
    what wrapped methods get as `self`.

    Args:
        root: the traced model (or a `GraphModuleWithAttr`, whose own root is then kept).
        graph: a graph over `root`, as `QuantizationTracer.trace` returns.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
        >>> from fx_passes import QuantizationTracer
        >>> graph_model = GraphModuleWithAttr(model, QuantizationTracer().trace(model))
        >>> isinstance(graph_model, nn.Sequential), sorted(graph_model.state_dict())
        (True, ['0.bias', '0.weight'])
    """

    def __new__(cls, root: nn.Module | None = None, graph: Graph | None = None, class_name: str | None = None) -> Any:
        if root is not None:
            # The class of a GraphModule is made per instance; its base is the user's.
            classes = type(_user_root(root)).__mro__
            user_class = next(c for c in classes if c.__qualname__.split(".")[-1] != "GraphModuleImpl")
            plain = user_class in (nn.Module, GraphModule)
            bases = (cls, _InitBarrier) if plain else (cls, _InitBarrier, user_class)
            namespace = {"__module__": user_class.__module__, "__doc__": user_class.__doc__}
            cls = types.new_class(user_class.__name__, bases, {}, lambda body: body.update(namespace))
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Not passed on: a user's registry of subclasses must not see the classes made here.
        pass

    def __init__(self, root: nn.Module, graph: Graph, class_name: str | None = None):
        user_root = _user_root(root)
        _bare_init(self, class_name or type(user_root).__name__)
        self.__dict__[_SELF] = user_root
        self.training = root.training
        _install(self, root, graph, new_graph=graph)
        self.meta = dict(root.meta) if isinstance(root, GraphModule) else {}
        self.meta.setdefault("stage", "traced")
        self.meta.setdefault("training", root.training)
        reasons = {n.target: n.meta["untraceable"] for n in graph.nodes if "untraceable" in n.meta}
        self.meta["leaf_reasons"] = {**self.meta.get("leaf_reasons", {}), **reasons}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not the user's `__call__`, nor the root's hooks: what they do is in the graph.
        return nn.Module.__call__(self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            root = self.__dict__.get(_SELF)
            if root is None or name.startswith("__"):
                raise
            return getattr(root, name)

    def __setattr__(self, name: str, value: Any) -> None:
        root = self.__dict__.get(_SELF)
        if (
            root is not None
            and name not in self.__dict__
            and name in root.__dict__
            and not hasattr(type(self), name)
            and not isinstance(value, (nn.Module, torch.Tensor))
        ):
            # A plain attribute of the model: wrapped methods read it from their self, which is the root.
            setattr(root, name, value)
        else:
            super().__setattr__(name, value)

    def train(self, mode: bool = True) -> Any:
        """Set train or eval mode on the graph's modules and on the root. Returns self."""
        super().train(mode)
        root = self.__dict__.get(_SELF)
        if root is not None:
            root.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast the root with the graph; buffers that both hold stay one tensor."""
        root = self.__dict__.get(_SELF)
        if root is None:
            return super()._apply(fn, recurse)
        pairs = list(_common_buffers(self, root))
        super()._apply(fn, recurse)
        root._apply(fn, recurse)
        for mine, theirs, name in pairs:
            mine._buffers[name] = theirs._buffers[name]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphModuleWithAttr:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        _bare_init(new, type(self).__name__)
        for key, value in self.__dict__.items():
            if key not in ("_graph", _OWNED):
                new.__dict__[key] = deep_copy(value, memo)
        new.graph = _copied_graph(self.graph)
        return new

    def __copy__(self) -> GraphModuleWithAttr:
        return share_hooks(_copied_module(self), self)  # type: ignore[return-value]


def copy_graph_module(gm: GraphModule) -> GraphModule:
    """A copy of the same type with its own graph and containers; leaf modules and tensors are shared.

    Node metas and `gm.meta` are copied one level deep. Adding, replacing or removing submodules or buffers of the
    copy with `set_submodule` and `set_buffer` leaves `gm` as it is.

    Raises:
        StageError: there are forward hooks on `gm`, which would be lost.
    """
    refuse_hooks(gm)
    return _copied_module(gm)


def _copied_module(gm: GraphModule) -> GraphModule:
    new = type(gm).__new__(type(gm))
    _bare_init(new, type(gm).__name__)
    for key, value in gm.__dict__.items():
        if key not in new.__dict__ and key != _OWNED:
            new.__dict__[key] = value
    new.training = gm.training
    _install(new, gm, gm.graph, new_graph=_copied_graph(gm.graph))
    new._tracer_cls, new._tracer_extras = gm._tracer_cls, gm._tracer_extras
    new.meta = dict(gm.meta)
    return new


def set_submodule(gm: GraphModule, path: str, module: nn.Module) -> None:
    """Put `module` at the dotted `path`; containers on the way are created, or copied if they are not gm's own."""
    parent, name = _own_parent(gm, path)
    _clear(parent, name, but=parent._modules)
    parent._modules[name] = module


def set_buffer(gm: GraphModule, path: str, tensor: torch.Tensor | nn.Parameter, *, persistent: bool = True) -> None:
    """Put a tensor at the dotted `path`, as a parameter if it is one, else as a buffer.

    Containers on the way are created, or copied if they are not gm's own. A shared leaf module on the way (the
    Conv2d of a path "conv.weight") is replaced in `gm` alone: by a plain container holding the same tensors, or, while
    a node still calls it, by a shallow copy of its class.
    """
    parent, name = _own_parent(gm, path)
    _clear(parent, name, but=parent._parameters if isinstance(tensor, nn.Parameter) else parent._buffers)
    # Not register_buffer: on gm itself it would find the root's attribute of that name in the way.
    if isinstance(tensor, nn.Parameter):
        parent._parameters[name] = tensor
        return
    parent._buffers[name] = tensor
    if not persistent:
        parent._non_persistent_buffers_set.add(name)


def delete_unused(gm: GraphModule) -> list[str]:
    """Drop, from gm's own containers, the modules and tensors that no node refers to. Returns the dropped paths."""
    targets = {n.target for n in gm.graph.nodes if n.op in ("call_module", "get_attr")}
    prefixes = _prefixes(targets)
    dropped: list[str] = []

    def visit(module: nn.Module, path: str) -> None:
        for table in (module._parameters, module._buffers, module._modules):
            for name in list(table):
                full = f"{path}.{name}" if path else name
                if full in targets:
                    continue
                if table is module._modules and full in prefixes:
                    child = _own_child(gm, module, name, full)
                    visit(child, full)
                else:
                    if type(module) is nn.Module or table is module._modules:
                        del table[name]
                    else:  # a user's class may read it, in its `extra_repr` for example
                        table[name] = None
                    module._non_persistent_buffers_set.discard(name)
                    dropped.append(full)

    visit(gm, "")
    return dropped


def _user_root(root: nn.Module) -> nn.Module:
    """The user's model behind `root`, which may itself be a `GraphModuleWithAttr`."""
    return root.__dict__.get(_SELF, root) if isinstance(root, GraphModuleWithAttr) else root


def _bare_init(gm: GraphModule, class_name: str) -> None:
    # An empty dict and graph: GraphModule's own copying of attributes would make a child of every module that it meets.
    GraphModule.__init__(gm, {}, Graph(), class_name=class_name)


def _copied_graph(graph: Graph) -> Graph:
    new = copy.deepcopy(graph)
    if hasattr(graph, "_co_fields"):
        new._co_fields = graph._co_fields
    return new


def _prefixes(targets: Any) -> set[str]:
    found: set[str] = set()
    for target in targets:
        parts = target.split(".")
        found.update(".".join(parts[:i]) for i in range(1, len(parts)))
    return found


def _install(gm: GraphModule, source: nn.Module, graph: Graph, *, new_graph: Graph) -> None:
    """Give `gm` the entries of `source`: own containers where `graph` looks into them, else shared, in their order."""
    nodes = [n for n in graph.nodes if n.op in ("call_module", "get_attr")]
    targets = {n.target for n in nodes if n.target.split(".")[0] != _SELF}
    called = {n.target for n in nodes if n.op == "call_module"}
    # What a node calls is shared whole, and so is all below it, unless another node looks into it.
    prefixes = _prefixes(targets) - called
    owned: WeakSet[nn.Module] = WeakSet()
    copies: dict[int, nn.Module] = {}

    def fill(target: nn.Module, module: nn.Module, path: str) -> None:
        for name, child in module._modules.items():
            full = f"{path}.{name}" if path else name
            if child is None or (full not in prefixes and id(child) not in copies):
                target._modules[name] = child
                continue
            if id(child) not in copies:
                copies[id(child)] = _container(child, called=full in called)
                owned.add(copies[id(child)])
                fill(copies[id(child)], child, full)
            target._modules[name] = copies[id(child)]

    gm._parameters.update(source._parameters)
    gm._buffers.update(source._buffers)
    gm._non_persistent_buffers_set.update(source._non_persistent_buffers_set)
    fill(gm, source, "")
    gm.__dict__[_OWNED] = owned
    gm.graph = new_graph
    gm._tracer_cls = new_graph._tracer_cls if "<locals>" not in str(new_graph._tracer_cls) else None
    _install_constants(gm, source, nodes)


def _install_constants(gm: GraphModule, source: nn.Module, nodes: list[Any]) -> None:
    """Tensors read by the graph that are no parameter or buffer become non-persistent buffers, so `to()` moves them."""
    for node in nodes:
        if node.op != "get_attr" or node.target.split(".")[0] == _SELF:
            continue
        parent, name = _resolve(gm, node.target)
        if parent is not None and (name in parent._parameters or name in parent._buffers or name in parent._modules):
            continue
        value = node.meta["constant"] if "constant" in node.meta else _resolve_value(source, node.target)
        if isinstance(value, torch.Tensor):
            set_buffer(gm, node.target, value, persistent=False)
        else:
            owner, name = _own_parent(gm, node.target)
            owner.__dict__[name] = value


def _resolve(gm: nn.Module, path: str) -> tuple[nn.Module | None, str]:
    *containers, name = path.split(".")
    module: nn.Module | None = gm
    for part in containers:
        module = module._modules.get(part) if module is not None else None
    return module, name


def _resolve_value(source: Any, path: str) -> Any:
    for part in path.split("."):
        source = getattr(source, part)
    return source


def _own_parent(gm: GraphModule, path: str) -> tuple[nn.Module, str]:
    *containers, name = path.split(".")
    module: nn.Module = gm
    for i, part in enumerate(containers):
        module = _own_child(gm, module, part, ".".join(containers[: i + 1]))
    return module, name


def _own_child(gm: GraphModule, parent: nn.Module, name: str, path: str) -> nn.Module:
    """The child container, made gm's own first if it is missing or shared with another module."""
    owned = gm.__dict__.setdefault(_OWNED, WeakSet())
    child = parent._modules.get(name)
    if child is not None and child in owned:
        return child
    if child is None:
        new = nn.Module()
        new.training = gm.training
    else:
        new = _container(child, called=any(n.op == "call_module" and n.target == path for n in gm.graph.nodes))
    owned.add(new)
    parent._modules[name] = new
    return new


def _container(module: nn.Module, called: bool) -> nn.Module:
    """What stands for `module` in another graph module: a copy of its class, or, for a torch leaf that no node calls
    any more, a plain module with its tensors (a Conv2d whose weight is int8 is none)."""
    if called or not _is_torch_leaf(module):
        return _shallow_copy(module)
    new = nn.Module()
    new.training = module.training
    for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        getattr(new, table).update(getattr(module, table))
    return new


def _is_torch_leaf(module: nn.Module) -> bool:
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return type(module).__module__.startswith("torch.nn") and not isinstance(module, containers)


def _shallow_copy(module: nn.Module) -> nn.Module:
    """Same class and attributes, same tensors and children, but its own tables of them."""
    if isinstance(module, GraphModule):
        return share_hooks(_copied_module(module), module)
    new = object.__new__(type(module))
    new.__dict__.update(module.__dict__)
    for key in _MODULE_TABLES:
        new.__dict__[key] = copy.copy(module.__dict__[key])
    return new


def _clear(parent: nn.Module, name: str, but: Any) -> None:
    """Drop the entry from all tables but the one it is put into, where it keeps its place in the order."""
    for table in (parent._parameters, parent._buffers, parent._modules, parent.__dict__):
        if table is not but:
            table.pop(name, None)  # type: ignore[attr-defined]
    parent._non_persistent_buffers_set.discard(name)


def _common_buffers(gm: nn.Module, root: nn.Module) -> Any:
    modules = dict(root.named_modules(remove_duplicate=False))
    for path, mine in gm.named_modules(remove_duplicate=False):
        theirs = modules.get(path)
        if theirs is None or theirs is mine:
            continue
        for name, buffer in mine._buffers.items():
            if buffer is not None and theirs._buffers.get(name) is buffer:
                yield mine, theirs, name
