"""The tracer: a model's forward followed down to the modules of `torch.nn`, with every call's source line."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import TraceError

from fx_passes.capture import arguments as trace_args
from fx_passes.capture.attention import straight_forward
from fx_passes.capture.attributes import AttributeChanges
from fx_passes.capture.entered import EnteredModules
from fx_passes.capture.example_values import ExampleValues
from fx_passes.capture.exclusive import exclusive
from fx_passes.capture.objects import holds_traced, object_paths
from fx_passes.capture.patching import (
    activate,
    current_tracer,
    entered_library_functions,
    replaced_factories,
    replaced_isinstance,
)
from fx_passes.capture.proxy import TensorAttribute, TracedAttribute, TracedValue, contains_traced
from fx_passes.capture.rollback import Checkpoint
from fx_passes.capture.sizes import AnsweringTracer
from fx_passes.capture.sources import failure_line, failure_reason, user_frame
from fx_passes.capture.state import recorded_buffer_assignment, restored_state
from fx_passes.capture.structures import make_instance
from fx_passes.capture.stubs import is_stub
from fx_passes.capture.wrap import is_wrapped_module, records, wrapped_calls
from fx_passes.entry.ambient import plain_state, refuse_global_hooks
from fx_passes.entry.call import runs_more_than_forward
from fx_passes.errors import CaptureError
from fx_passes.graph.hooks import refuse_hooks
from fx_passes.graph.module import GraphModuleWithAttr

__all__ = ["QuantizationTracer"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_FROZEN_NORM = "torchvision.ops.misc.FrozenBatchNorm2d"
WRAPPED = "wrapped by the user"


class _Untraceable(BaseException):
    """Unwinds out of user code, past its own handlers, to follow the model once more."""

    def __init__(self, path: str, reason: str):
        self.path, self.reason = path, reason
        super().__init__(path, reason)


class QuantizationTracer(AnsweringTracer):
    """Traces a model down to the modules that are defined in `torch.nn`.

    Leaves are the modules of `torch.nn` (containers and attention aside), those skipped here, those of wrapped
    classes, and those that cannot be entered; the latter carry the reason in `node.meta["untraceable"]`. Quant stubs
    are transparent.

    Attributes:
        leaf_reasons: for each submodule that the last trace could not enter, why.
        froze_sizes: whether that trace had to take sizes of its example inputs for constants.

    Args:
        skipped_module_names: qualified names of modules not to enter.
        skipped_module_classes: classes whose instances are not entered.
    """

    def __init__(
        self, skipped_module_names: Sequence[str] = (), skipped_module_classes: Sequence[type] = (), **fx_options: Any
    ):
        super().__init__(**fx_options)
        self.skipped_module_names = set(skipped_module_names)
        self.skipped_module_classes = tuple(skipped_module_classes)
        self.trace_asserts = True
        self.leaf_reasons: dict[str, str] = {}
        self.froze_sizes = False
        self.entered: EnteredModules | None = None
        self._failed: dict[str, str] = {}
        self._reset(None)

    def _reset(self, root: nn.Module | None) -> None:
        self._user_root = root.__dict__.get("_self", root) if root is not None else None
        self._tensor_paths: dict[int, str] = {}
        self._object_paths: dict[int, str] = {}
        self._constants: dict[int, tuple[str, Any]] = {}
        self._attributes: dict[str, TensorAttribute] = {}
        self._rebinds = 0
        self._calls: Counter[str] = Counter()
        self.changes = AttributeChanges(root)
        self._values: ExampleValues | None = None
        self.lazy_attributes: list[TracedAttribute] = []
        self._autocast = _autocast_state()
        if root is None:
            return
        for table in (root.named_parameters(), root.named_buffers()):
            for path, tensor in table:
                self._tensor_paths.setdefault(id(tensor), path)

    # -- the trace ---------------------------------------------------------------------------------------------

    def trace(
        self,
        root: nn.Module | Callable[..., Any],
        concrete_args: dict[str, Any] | tuple | None = None,
        *,
        example_inputs: Any = None,
        varying: tuple[Any, Any] | None = None,
    ) -> Graph:
        """The graph of `root`'s forward, which is followed once more where an argument has to be fixed for it.

        Args:
            root: a module, or a function. A `GraphModuleWithAttr` is not followed again: its graph is copied.
            concrete_args, example_inputs, varying: as in `trace`. With example inputs a submodule that cannot be
                followed is entered by `torch.export`, and stands in the graph as its operations and layers.

        Raises:
            CaptureError: the root's own forward cannot be recorded.
        """
        self.leaf_reasons, self.froze_sizes = {}, False
        if isinstance(root, GraphModuleWithAttr) and not concrete_args:
            refuse_hooks(root)
            return copy.deepcopy(root.graph)  # captured already; running its code again would lose what is known of it
        refuse_global_hooks()
        with exclusive(), plain_state(), torch.random.fork_rng(devices=[]):
            plan = trace_args.ArgumentPlan(root, concrete_args, example_inputs)
            self.entered = EnteredModules(root, plan, varying) if isinstance(root, nn.Module) else None
            while True:
                self._failed = {}
                try:
                    graph = self._trace_once(root, plan)
                except _Untraceable as failure:
                    if self._enter_failed():
                        continue
                    if failure.path:
                        self.leaf_reasons[failure.path] = failure.reason
                    elif not plan.specialise_more():
                        raise self._capture_error(root, failure) from failure.__cause__
                    continue
                if self._enter_failed():
                    continue
                self.froze_sizes = plan.freezes_sizes
                self.changes.warn(self.leaf_reasons)
                return graph

    def _enter_failed(self) -> bool:
        """Enter by `torch.export` what the last trace could not, innermost first. True: another trace sees more."""
        if self.entered is None:
            return False
        tried = {*self.entered.refused, *self.entered.calls}
        while left := [path for path in self._failed if path not in tried]:
            innermost = [p for p in left if not any(q.startswith(f"{p}.") for q in left)]
            if self.entered.enter(innermost):
                self.leaf_reasons = {}
                return True
            tried.update(innermost)
        return False

    def _trace_once(self, root: Any, plan: trace_args.ArgumentPlan) -> Graph:
        module = root if isinstance(root, nn.Module) else None
        self._reset(module)
        self._plan = plan
        self.num_calls, self.node_name_to_scope = {}, {}
        self.module_stack.clear()
        self.graph = Graph()  # torch.fx makes the one that is recorded
        with ExitStack() as stack:
            if module is not None:
                stack.enter_context(restored_state(module))
            stack.enter_context(wrapped_calls(root))
            stack.enter_context(replaced_factories())
            stack.enter_context(entered_library_functions())
            classes = [type(m) for m in module.modules()] if module is not None else []
            stack.enter_context(replaced_isinstance(base for cls in classes for base in cls.__mro__))
            stack.enter_context(recorded_buffer_assignment())
            stack.enter_context(activate(self))
            try:
                graph = super().trace(root)
            except Exception as error:
                raise _Untraceable("", failure_reason(error)) from error
        trace_args.erase_unused(graph)
        graph.lint()
        return graph

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        if is_module and runs_more_than_forward(self.root):
            return self._plan.as_called(self, self.root)
        straight = straight_forward(self.root) if is_module else None
        if straight is not None:
            return self._plan.arguments(self, lambda _, *args, **kwargs: straight(*args, **kwargs), [self.root])
        return self._plan.arguments(self, root_fn, [self.root] if is_module else [])

    def _capture_error(self, root: Any, failure: _Untraceable) -> CaptureError:
        name = type(root).__name__ if isinstance(root, nn.Module) else getattr(root, "__name__", "the function")
        return CaptureError(
            f"the forward of {name} cannot be traced: {failure.reason}",
            hint="move this code into a function or method and wrap() it: the call then stays Python; "
            "or move it into a submodule, which becomes a leaf; or fix the argument with concrete_args",
            source=None if failure.__cause__ is None else failure_line(failure.__cause__),
        )

    # -- modules -----------------------------------------------------------------------------------------------

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether `m` is one node of the graph."""
        if module_qualified_name in self.skipped_module_names or module_qualified_name in self.leaf_reasons:
            return True
        if isinstance(m, (*self.skipped_module_classes, torch.jit.ScriptModule)) or is_wrapped_module(m):
            return True
        if f"{type(m).__module__}.{type(m).__qualname__}" == _FROZEN_NORM and not m.training:
            return True  # so that it can be folded
        defined_in_torch = type(m).__module__.startswith(("torch.nn.", "torch.ao.nn."))
        return defined_in_torch and not isinstance(m, _CONTAINERS) and straight_forward(m) is None

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """One node for a leaf, the stub's own argument for a stub, else the nodes of `m`'s forward."""
        if current_tracer() is not self or m is self.root:
            return forward(*args, **kwargs)
        if is_stub(m):
            return args[0] if args else next(iter(kwargs.values()))
        try:
            path = self.path_of_module(m)
        except NameError:
            raise TraceError(f"a {type(m).__name__} is called that is no registered submodule of the model") from None
        if not contains_traced((args, kwargs)) and is_wrapped_module(m):
            with activate(None):
                return forward(*args, **kwargs)
        index = self._calls[path]
        self._calls[path] += 1
        if self.entered is not None and path in self.entered.calls:
            return self._inlined(m, forward, path, index, args, kwargs)
        if self.is_leaf_module(m, path):
            proxy = super().call_module(m, forward, args, kwargs)
            if is_wrapped_module(m):
                proxy.node.meta["python"] = WRAPPED
            if path in self.leaf_reasons:
                proxy.node.meta["untraceable"] = self.leaf_reasons[path]
                return proxy if self.entered is None else self.entered.opened(proxy, path, index)
            return proxy
        before = Checkpoint(self, args, kwargs)
        try:
            return super().call_module(m, straight_forward(m) or forward, args, kwargs)
        except Exception as error:
            self._failed[path] = failure_reason(error)
            inner = f"{path}."
            self.leaf_reasons = {p: r for p, r in self.leaf_reasons.items() if not p.startswith(inner)}
            self.leaf_reasons[path] = failure_reason(error)
            if self._rebinds != before.rebinds:  # nodes before the module were changed
                raise _Untraceable(path, self.leaf_reasons[path]) from error
            before.restore()
            self._calls[path] = index
            return self.call_module(m, forward, args, kwargs)

    def _inlined(
        self, m: nn.Module, forward: Callable[..., Any], path: str, index: int, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """The program of a submodule that `torch.export` has entered; where it does not fit this call, a leaf."""
        assert self.entered is not None
        before = Checkpoint(self, args, kwargs)
        try:
            return self.entered.inline(self, path, index, args, kwargs)
        except TraceError as error:
            before.restore()
            del self.entered.calls[path]
            self.entered.refused[path] = self.leaf_reasons[path] = failure_reason(error)
            self._calls[path] = index
            return self.call_module(m, forward, args, kwargs)

    def path_of_module(self, mod: nn.Module) -> str:
        if isinstance(self._user_root, nn.Module) and mod is self._user_root and mod is not self.root:
            raise NameError("module is not installed as a submodule")
        return super().path_of_module(mod)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Proxy]) -> Any:
        """Parameters and buffers become `get_attr` nodes, so that nothing is computed from today's values."""
        if not isinstance(attr_val, torch.Tensor) or current_tracer() is not self:
            return attr_val
        path = self._tensor_paths.get(id(attr_val))
        if path is None:
            return attr_val
        if path not in self._attributes:
            self._attributes[path] = TensorAttribute(self.create_node("get_attr", path, (), {}), self, attr_val)
        return self._attributes[path]

    def rebind_buffer(self, path: str, value: Proxy) -> None:
        """Record `self.buffer = value` as a copy into the buffer; what was read of it before keeps the old value."""
        self._rebinds += 1
        read = self._attributes.pop(path, None)
        if read is not None:
            node = read.node
            with self.graph.inserting_after(node):
                before = self.graph.call_method("clone", (node,))
            before.meta.update(node.meta)
            node.replace_all_uses_with(before, delete_user_cb=lambda user: user is not before)
            read.node = before
        target = self.create_node("get_attr", path, (), {})
        self.create_node("call_method", "copy_", (target, value.node), {})

    # -- nodes -------------------------------------------------------------------------------------------------

    def sees(self, arguments: Any) -> bool:
        """Whether anything in the arguments of a call is traced."""
        return contains_traced(arguments)

    def proxy(self, node: Node) -> TracedValue:
        return TracedValue(node, self)

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None
    ) -> Node:
        """A node with its source line and module path."""
        if kind not in ("placeholder", "output") and _autocast_state() != self._autocast:
            raise TraceError("the forward changes torch.autocast, which a graph does not record")
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        source = user_frame(self.outermost)
        if source is not None and kind not in ("placeholder", "output"):
            node.meta["source"] = source
        path = self.scope.module_path
        if kind == "call_module" and path == target:
            path = path.rpartition(".")[0]
        node.meta["module_path"] = path
        return node

    def create_arg(self, a: Any) -> Any:
        """Tensors and objects of the model become `get_attr` nodes, other objects constants of the graph."""
        if isinstance(a, Proxy):
            if a.node._erased:
                raise TraceError("uses a value that a submodule, which could not be traced, has left behind")
            return a.node
        if isinstance(a, torch.Tensor):
            path = self._tensor_paths.get(id(a)) or self._attribute_path(a)
            return self.create_node("get_attr", path, (), {}) if path else self._constant("_tensor_constant", a)
        if isinstance(a, nn.Module):
            path = self.object_path(a)
            if path is None:
                raise TraceError(f"a {type(a).__name__} is passed on that is no submodule of the model")
            return self.create_node("get_attr", path, (), {})
        if isinstance(a, tuple) and hasattr(a, "_fields") and contains_traced(a):  # torch.fx loses it inside a dict
            return self.create_node("call_function", type(a), tuple(self.create_arg(item) for item in a), {})
        if isinstance(a, dict) and type(a) is not dict and hasattr(a, "keys"):
            return self._dict_subclass(a)
        if hasattr(a, "__dataclass_fields__") and (isinstance(a, type) or not contains_traced(a)):
            return self._constant("_object_constant", a)
        fields = getattr(a, "__dataclass_fields__", {})
        if not all(field.init for field in fields.values()):
            held = (
                vars(a) if hasattr(a, "__dict__") else {name: getattr(a, name) for name in fields if hasattr(a, name)}
            )
            values = {name: self.create_arg(value) for name, value in held.items()}
            return self.create_node("call_function", make_instance, (self._constant("_class", type(a)), values), {})
        try:
            return super().create_arg(a)
        except NotImplementedError:
            path = self.object_path(a)
            if path is not None:
                return self.create_node("get_attr", path, (), {})
            if holds_traced(a):
                raise TraceError(f"a {type(a).__name__} that holds traced values is passed on or returned") from None
            return self._constant("_object_constant", a)

    def _attribute_path(self, tensor: torch.Tensor) -> str | None:
        """Where the root keeps a tensor in a plain attribute; None if its class has a default of that name.

        The graph module has that class too, and would find the default.
        """
        path = self.tensor_attrs.get(tensor)
        owner, _, name = (path or "").rpartition(".")
        return None if path and hasattr(type(self.root.get_submodule(owner)), name) else path

    def _dict_subclass(self, a: Any) -> Any:
        items = {k: a[k] for k in a}
        if isinstance(a, torch.fx.immutable_collections.immutable_dict):
            return super().create_arg(items)
        if hasattr(a, "__dataclass_fields__"):
            return self.create_node("call_function", type(a), (), self.create_arg(items))
        return self.create_node("call_function", type(a), (self.create_arg(items),), {})

    def _constant(self, prefix: str, value: Any) -> Node:
        """A node for a value that is not the model's own. It travels in the node's meta: the model stays untouched."""
        if id(value) not in self._constants:
            index = 0
            taken = {name for name, _ in self._constants.values()}
            while f"{prefix}{index}" in taken or hasattr(self.root, f"{prefix}{index}"):
                index += 1
            self._constants[id(value)] = (f"{prefix}{index}", value)
        node = self.create_node("get_attr", self._constants[id(value)][0], (), {})
        # A leaf of autograd: what computed it is not part of the graph, and it must be possible to copy it.
        node.meta["constant"] = value.detach() if isinstance(value, torch.Tensor) and not value.is_leaf else value
        return node

    # -- wrapped calls -----------------------------------------------------------------------------------------

    def call_wrapped(self, target: Any, original: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Record a call of something wrapped; run it as plain Python if no argument is traced."""
        if not records(target, args):
            return original(*args, **kwargs)
        if not contains_traced((args, kwargs)):
            with activate(None):
                return original(*args, **kwargs)
        method = _method_name(target, args)
        if method is None:
            proxy = self.create_proxy("call_function", target, args, kwargs)
        elif isinstance(args[0], type):
            proxy = self.create_proxy("call_function", getattr(args[0], method), args[1:], kwargs)
        else:
            proxy = self.create_proxy("call_method", method, args, kwargs)
        proxy.node.meta["python"] = WRAPPED
        return proxy

    def call_marked(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Follow a function that a library marked with `torch.fx.wrap`; where that fails it is one node."""
        if self._plan.examples:
            before, calls = Checkpoint(self, args, kwargs), self._calls.copy()
            try:
                return function(*args, **kwargs)
            except Exception:  # what is wrong with it, its segment's export says
                before.restore()
                self._calls = calls
        return self.create_proxy("call_function", function, args, kwargs)

    def object_path(self, value: Any) -> str | None:
        """The dotted path below `_self` at which the original model holds this object, or None."""
        if self._user_root is None:
            return None
        if value is self._user_root or value is self.root:
            return "_self"
        if not self._object_paths:
            self._object_paths = object_paths(self._user_root)
        return self._object_paths.get(id(value))


QuantizationTracer.outermost = QuantizationTracer._trace_once.__code__


def _method_name(target: Any, args: tuple) -> str | None:
    """The name under which `args[0]` (an object or a class) offers the function as its method, if it does."""
    if not args or isinstance(args[0], Proxy) or not inspect.isfunction(target):
        return None
    owner = args[0] if isinstance(args[0], type) else type(args[0])
    name = target.__name__
    found = inspect.getattr_static(owner, name, None)
    if isinstance(args[0], type):
        return name if isinstance(found, classmethod) and found.__func__ is target else None
    return name if found is target else None


def _autocast_state() -> tuple:
    return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
