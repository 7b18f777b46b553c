"""The arguments of a traced forward: placeholders under the model's own names, and what is fixed about them.

What can be a tensor stays a placeholder. A default of None or a flag decides which code runs, so it is fixed to its
value unless the example inputs give another one, and the graph checks it at each call. Nested arguments of the
example inputs (lists, dicts, `*args`) are opened: the model may loop over them.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Graph, Proxy
from torch.fx._symbolic_trace import PHBase, _patch_function
from torch.fx.proxy import TraceError

from fx_passes.entry.call import arguments_of, call_signature
from fx_passes.errors import InputError

if TYPE_CHECKING:
    from fx_passes.capture.tracer import QuantizationTracer

__all__ = ["ArgumentPlan", "check_fixed", "erase_unused"]

_MISSING = inspect.Parameter.empty


def check_fixed(value: Any, fixed: Any, name: str) -> None:
    """Raise unless an argument has the value that the graph was traced for. Runs at each call of the graph.

    Raises:
        InputError: another value.
    """
    if value is fixed or (type(value) is type(fixed) and not isinstance(value, torch.Tensor) and value == fixed):
        return
    shown = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
    raise InputError(
        f"the argument '{name}' is {shown}, but the graph was traced for {fixed!r}",
        hint=f"trace again with concrete_args={{'{name}': ...}} or with example inputs that give '{name}'",
    )


torch.fx.node.has_side_effect(check_fixed)


class ArgumentPlan:
    """Which arguments are traced and which are fixed.

    Args:
        root: the module (its forward is taken) or function.
        concrete_args: by name, or as a tuple in order: fixed values; `torch.fx.PH` inside them stays traced.
        example_inputs: None, a tensor, a tuple of positional or a dict of keyword arguments.

    Raises:
        InputError: the examples do not fit the signature, or a concrete argument is unknown.
    """

    def __init__(self, root: nn.Module | Callable[..., Any], concrete_args: Any, example_inputs: Any):
        args, kwargs = arguments_of(example_inputs) if example_inputs is not None else ((), {})
        signature = call_signature(root, args, kwargs) if isinstance(root, nn.Module) else inspect.signature(root)
        self.parameters = list(signature.parameters.values())
        if isinstance(concrete_args, (tuple, list)):
            concrete_args = {p.name: v for p, v in zip(self.parameters, concrete_args, strict=False)}
        self.concrete: dict[str, Any] = dict(concrete_args or {})
        unknown = set(self.concrete) - {p.name for p in self.parameters}
        if unknown:
            raise InputError(f"concrete_args names no argument of forward: {sorted(unknown)}")
        self.examples = self._bind(args, kwargs)
        self._named = set(kwargs)  # the example gives these arguments by keyword
        self._fix_numbers = False
        self.freezes_sizes = False

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        signature = inspect.Signature(self.parameters)
        try:
            return dict(signature.bind(*args, **kwargs).arguments) if args or kwargs else {}
        except TypeError as error:
            raise InputError(
                f"the example inputs do not fit forward{signature}: {error}",
                hint="pass a tensor, a tuple of positional or a dict of keyword arguments",
            ) from None

    def specialise_more(self) -> bool:
        """Fix numeric arguments with known values as well, then sizes. False if there is nothing more to fix."""
        if not self._fix_numbers:
            self._fix_numbers = True
            if any(isinstance(self._known(p), (int, float, tuple)) for p in self.parameters):
                return True
        if self.freezes_sizes or not self.examples:
            return False
        self.freezes_sizes = True
        return True

    def _known(self, parameter: inspect.Parameter) -> Any:
        return self.examples.get(parameter.name, parameter.default)

    def _is_fixed(self, value: Any) -> bool:
        if value is None or isinstance(value, (bool, str)):
            return True
        return self._fix_numbers and isinstance(value, (int, float)) and value is not _MISSING

    def arguments(self, tracer: QuantizationTracer, function: Any, first: list[Any]) -> tuple[Any, list[Any]]:
        """Create the placeholders, in the order of the signature. Returns a callable and its positional arguments."""
        values = self.opened(tracer, self._is_fixed)
        if self._unopened(values):
            # Make *args and **kwargs plain variables of the function, as torch.fx does.
            code = inspect.unwrap(function).__code__
            named = [v for v in code.co_varnames[len(first) :] if v in values]
            return _patch_function(inspect.unwrap(function), len(first) + len(named)), first + [
                values[v] for v in named
            ]
        args, kwargs = self._spread(values, self.parameters, ())
        return (lambda *args: function(*args, **kwargs)), first + args

    def as_called(self, tracer: QuantizationTracer, model: nn.Module) -> tuple[Any, list[Any]]:
        """The same for `model(...)`: its hooks get the arguments that the example gives, and in the way it gives them.

        Raises:
            TraceError: there is `*args` or `**kwargs`, and no example says what it holds.
        """
        values = self.opened(tracer, self._is_fixed)
        if open_ended := self._unopened(values):
            raise TraceError(
                f"the call of {type(model).__name__} takes '{open_ended[0]}', and only example inputs tell what that is"
            )
        given = [p for p in self.parameters if p.name in self.examples or p.default is _MISSING]
        args, kwargs = self._spread(values, given, self._named)
        return (lambda *args: model(*args, **kwargs)), args

    def _unopened(self, values: dict[str, Any]) -> list[str]:
        """The starred arguments of which nothing more is known than that they are there."""
        starred = [p for p in self.parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        return [str(p) for p in starred if isinstance(values[p.name], Proxy)]

    def _spread(
        self, values: dict[str, Any], parameters: list[inspect.Parameter], named: Collection[str]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of one call that passes `parameters`, those in `named` by keyword."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for p in parameters:
            if p.kind is p.VAR_POSITIONAL:
                args += values[p.name]
            elif p.kind is p.VAR_KEYWORD:
                kwargs |= values[p.name]
            elif p.kind is p.KEYWORD_ONLY or p.name in named:
                kwargs[p.name] = values[p.name]
            else:
                args.append(values[p.name])
        return args, kwargs

    def opened(self, tracer: Any, is_fixed: Callable[[Any], bool]) -> dict[str, Any]:
        """Create the placeholders, in the order of the signature; by name, what stands for each argument.

        Nested arguments of the examples are opened, and what `is_fixed` is checked at each call of the graph.
        """
        placeholders = {p.name: self._placeholder(tracer, p) for p in self.parameters}
        for p in self.parameters:
            if self._needs_default(p):
                given = tracer.create_proxy("call_function", operator.is_not, (placeholders[p.name], None), {})
                tracer.create_proxy(
                    "call_function", torch._assert, (given, f"forward needs the argument '{p.name}'"), {}
                )
        return {p.name: self._value(tracer, p, placeholders[p.name], is_fixed) for p in self.parameters}

    def _needs_default(self, parameter: inspect.Parameter) -> bool:
        """Whether it is a keyword-only argument without a default after one with a default: torch.fx writes no `*`."""
        before = itertools.takewhile(lambda p: p is not parameter, self.parameters)
        required = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is _MISSING
        return required and any(p.default is not _MISSING for p in before)

    def call(self) -> inspect.BoundArguments:
        """The example as one call of the forward."""
        return inspect.BoundArguments(inspect.Signature(self.parameters), dict(self.examples))  # type: ignore[arg-type]

    def leaves(self, values: dict[str, Any]) -> list[Any]:
        """What `values` holds for the arguments of that call, flat, in the order in which the call passes it."""
        given = {name: values[name] for name in self.examples}
        call = inspect.BoundArguments(inspect.Signature(self.parameters), given)  # type: ignore[arg-type]
        return torch.utils._pytree.tree_leaves((call.args, call.kwargs))

    def _placeholder(self, tracer: Any, p: inspect.Parameter) -> Any:
        stars = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        default = () if p.default is _MISSING else (p.default,)
        if self._needs_default(p):
            default = (None,)
        return tracer.create_proxy("placeholder", stars + p.name, default, {})

    def _value(self, tracer: Any, p: inspect.Parameter, placeholder: Any, is_fixed: Callable[[Any], bool]) -> Any:
        if p.name in self.concrete:
            return _opened(tracer, placeholder, self.concrete[p.name], p.name, lambda v: not isinstance(v, PHBase))
        known = self._known(p)
        if p.kind is p.VAR_POSITIONAL:
            known = tuple(known) if p.name in self.examples else (_MISSING if not self.examples else ())
        elif p.kind is p.VAR_KEYWORD:
            known = dict(known) if p.name in self.examples else (_MISSING if not self.examples else {})
        if known is _MISSING:
            return placeholder
        return _opened(tracer, placeholder, known, p.name, is_fixed)


def _opened(tracer: Any, value: Any, example: Any, name: str, is_fixed: Callable[[Any], bool]) -> Any:
    """Traced values in the structure of `example`, each read from the traced `value`; fixed ones as themselves."""
    if isinstance(example, dict):
        return type(example)({k: _opened(tracer, value[k], v, f"{name}[{k!r}]", is_fixed) for k, v in example.items()})
    if isinstance(example, (list, tuple)) and not isinstance(example, torch.Size):
        items = [_opened(tracer, value[i], v, f"{name}[{i}]", is_fixed) for i, v in enumerate(example)]
        return type(example)(*items) if hasattr(example, "_fields") else type(example)(items)
    if is_fixed(example):
        tracer.create_proxy("call_function", check_fixed, (value, example, name), {})
        return example
    return value


def erase_unused(graph: Graph) -> None:
    """Erase the reads of nested arguments that the model never looked at."""
    for node in reversed(list(graph.nodes)):
        reads = node.target is operator.getitem and not node.users and not node.meta.get("module_path")
        if reads and "source" not in node.meta and node.args[0].op in ("placeholder", "call_function"):
            graph.erase_node(node)
