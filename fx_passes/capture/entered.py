"""Submodules that symbolic tracing cannot enter, entered by `torch.export`: their programs go into the traced graph.

One run of the model on its example inputs says what each of them is called with. Each call is exported by itself, and
its nodes stand in the graph where the call stood: over the model's own parameters, layers of `torch.nn` as layers, so
that fusing, quantizing and training see them. The result has its own structure, with the numbers and the None that it
holds, so that code behind it which looks into it sees what it would see in eager mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.fx.proxy import TraceError

from fx_passes.capture.arguments import ArgumentPlan, check_fixed
from fx_passes.capture.assumptions import assumptions
from fx_passes.capture.conditions import UntranslatableError
from fx_passes.capture.example_values import check_branch
from fx_passes.capture.export import Guard, export_program, exporting
from fx_passes.capture.importer import ProgramImporter
from fx_passes.capture.patching import activate
from fx_passes.capture.sources import failure_reason
from fx_passes.capture.state import restored_state
from fx_passes.capture.structures import make_instance, mapped
from fx_passes.capture.tensor_indices import TensorIndices
from fx_passes.capture.wrap import records, wrapped_calls
from fx_passes.errors import CaptureError, LoweringError
from fx_passes.graph.copies import copied_inputs

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from fx_passes.capture.tracer import QuantizationTracer

__all__ = ["EnteredModules"]


@dataclass
class _Call:
    """One call of a submodule, as a run of the model made it.

    Attributes:
        arguments: (args, kwargs), before the module's own hooks saw them.
        result: what it gave, after its hooks.
        wrapped: whether something wrapped ran in it.
        varying: for each tensor among the arguments, the dimensions that differ between the runs.
        ends: the shapes of these tensors in the other runs.
        program: once it is exported.
    """

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    result: Any = None
    wrapped: bool = False
    varying: list[frozenset[int]] | None = None
    ends: list[list[tuple[int, ...]]] | None = None
    program: _Program | None = None


@dataclass
class _Program:
    exported: ExportedProgram
    guards: list[Guard]
    result: Any  # with a `_Slot` for each value that the program returns


class _Slot:
    """Stands for a value that a program returns."""


@dataclass
class EnteredModules:
    """The submodules of one model that `torch.export` has entered.

    Args:
        root: the model that is traced.
        plan: its example inputs.
        varying: two more examples: what differs in size between them stays free. None: all that the code leaves open.

    Attributes:
        calls: by path of a submodule, what it is called with, in order; those that are in it are entered.
        refused: by path, why `torch.export` could not enter one.
    """

    root: nn.Module
    plan: ArgumentPlan
    varying: tuple[Any, Any] | None = None
    calls: dict[str, list[_Call]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    results: dict[str, list[Any]] = field(default_factory=dict)

    def enter(self, paths: Sequence[str]) -> bool:
        """Export these submodules, in each of their calls. Returns whether another trace would see more of them."""
        new = [path for path in paths if path not in self.calls and path not in self.refused]
        if not new or not self.plan.examples:
            return False
        try:
            recorded = self._recorded(new)
        except Exception as error:  # the model itself fails on the example; the trace goes on and says where
            self.refused.update(dict.fromkeys(new, f"the model fails on the example inputs: {failure_reason(error)}"))
            return False
        for path in new:
            self.results[path] = [call.result for call in recorded[path]]
            try:
                for call in recorded[path]:
                    self._export(path, call)
                self.calls[path] = recorded[path]
            except CaptureError as refusal:
                self.refused[path] = refusal.what
        return any(path in self.calls or any(map(_holds_constants, self.results[path])) for path in new)

    # -- what they are called with -----------------------------------------------------------------------------

    def _recorded(self, paths: Sequence[str]) -> dict[str, list[_Call]]:
        call = self.plan.call()
        recorded = _run(self.root, paths, call.args, call.kwargs)
        if self.varying is None:
            return recorded
        calls = [ArgumentPlan(self.root, None, inputs).call() for inputs in self.varying]
        others = [_run(self.root, paths, other.args, other.kwargs) for other in calls]
        for path in paths:
            if any(len(other[path]) != len(recorded[path]) for other in others):
                raise CaptureError(f"'{path}' is called another number of times at other sizes")
            for one, *rest in zip(recorded[path], *(other[path] for other in others), strict=True):
                tensors = [_tensors(other.arguments) for other in rest]
                one.varying = _differing(*tensors)
                one.ends = [[tuple(t.shape) for t in end] for end in tensors]
        return recorded

    # -- their programs ----------------------------------------------------------------------------------------

    def _export(self, path: str, call: _Call) -> None:
        """Export a call of a submodule; with all sizes fixed where nobody asks for free ones and it takes none."""
        if call.wrapped:
            raise CaptureError("something wrapped runs in it, whose Python torch.export would lose")
        try:
            call.program = self._exported(path, call)
        except CaptureError:
            if call.varying is not None:
                raise
            call.varying = [frozenset() for _ in _tensors(call.arguments)]
            call.program = self._exported(path, call)

    def _exported(self, path: str, call: _Call) -> _Program:
        from torch.export import Dim

        module = self.root.get_submodule(path)
        tensors = _tensors(call.arguments)
        flat = _Flat(module, call.arguments)
        free = [frozenset(range(t.dim())) for t in tensors] if call.varying is None else call.varying
        dims = [
            {d: Dim.AUTO if d in open_ else Dim.STATIC for d in range(tensor.dim())}
            for tensor, open_ in zip(tensors, free, strict=True)
        ]
        with restored_state(module), torch.random.fork_rng(devices=[]), exporting(stack_traces=True):
            try:
                exported = export_program(flat, tuple(tensors), dynamic_shapes={"tensors": tuple(dims)})
            except Exception as error:
                raise CaptureError(f"torch.export: {failure_reason(error)}"[:400]) from error
            result = flat.call()[1][-1]
            try:
                guards = assumptions(exported, flat, tensors, call.ends)
            except UntranslatableError as what:
                raise CaptureError(f"torch.export takes '{what}' for granted, which a graph cannot check") from None
        return _Program(exported, guards, result)

    # -- in the graph ------------------------------------------------------------------------------------------

    def inline(self, tracer: QuantizationTracer, path: str, index: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Add the program of the `index`-th call of a submodule to the graph that is being traced.

        Returns:
            The result in its own structure, with traced values in it.

        Raises:
            TraceError: the submodule is called otherwise than it was in the run that was recorded.
        """
        if index >= len(self.calls[path]):
            raise TraceError(f"'{path}' is called more often than for the example inputs")
        call = self.calls[path][index]
        assert call.program is not None
        given = list(_paired(tracer, (args, kwargs), call.arguments, path))
        proxies = [v if isinstance(v, Proxy) else Proxy(tracer.create_arg(v), tracer) for v in given]
        try:
            program = ProgramImporter(
                tracer.graph,
                self.root,
                call.program.exported,
                proxies,
                call.program.guards,
                call.varying,
                path_of=lambda name: _below(path, name),
                constant=lambda value: tracer.create_arg(value),
            )
        except LoweringError as error:
            raise TraceError(f"torch.export: {error}") from error
        leaves = program.results()
        program.erase_unread(leaves)
        for node in program.new:
            node.meta.setdefault("module_path", path)
        remaining = iter(leaves)

        def value(_: Any) -> Any:
            leaf = next(remaining)
            return tracer.proxy(leaf) if isinstance(leaf, torch.fx.Node) else leaf

        return mapped(call.program.result, lambda v: isinstance(v, _Slot), value)

    def opened(self, proxy: Proxy, path: str, index: int) -> Any:
        """What a call of a submodule that stays Python gives, opened where it holds None, a flag or a name.

        Code that asks for one of these would get a traced value, which is never None. Each is checked at every call.
        """
        results = self.results.get(path, [])
        if index >= len(results) or not _holds_constants(results[index]):
            return proxy
        return _opened(proxy, results[index], path)


def _holds_constants(value: Any) -> bool:
    found: list[Any] = []
    mapped(value, lambda v: v is None or isinstance(v, (bool, str)), found.append)
    return bool(found)


def _opened(proxy: Any, value: Any, path: str) -> Any:
    if value is None or isinstance(value, (bool, str)):
        proxy.tracer.create_proxy("call_function", check_fixed, (proxy, value, f"what '{path}' gives"), {})
        return value
    if isinstance(value, dict):
        parts = iter([_opened(proxy[key], item, path) for key, item in value.items()])
    elif isinstance(value, (tuple, list)):
        parts = iter([_opened(proxy[i], item, path) for i, item in enumerate(value)])
    elif hasattr(value, "__dataclass_fields__"):
        return make_instance(
            type(value), {name: _opened(getattr(proxy, name), item, path) for name, item in vars(value).items()}
        )
    else:
        return proxy
    items = list(value.values()) if isinstance(value, dict) else list(value)
    return mapped(value, lambda v: any(v is item for item in items), lambda _: next(parts))


class _Flat(nn.Module):
    """Calls a module with the tensors of one recorded call, the rest of its arguments as they were."""

    def __init__(self, inner: nn.Module, arguments: Any):
        super().__init__()
        self.inner = inner
        self.training = inner.training
        found: list[Any] = []
        # A tensor in an attribute would be one of the module's, and torch.export puts attributes back.
        self.call = lambda: (arguments, found)

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        remaining = iter(tensors)
        arguments, found = self.call()
        args, kwargs = mapped(arguments, _is_tensor, lambda _: next(remaining))
        with TensorIndices():
            result = self.inner(*args, **kwargs)
        leaves: list[Any] = []

        def slot(value: Any) -> _Slot:
            leaves.append(value)
            return _Slot()

        found.append(mapped(result, _is_value, slot))
        return tuple(leaves)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_value(value: Any) -> bool:
    return isinstance(value, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))


def _tensors(arguments: Any) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(arguments, _is_tensor, found.append)
    return found


def _differing(some: Sequence[Tensor], others: Sequence[Tensor]) -> list[frozenset[int]]:
    return [
        frozenset(d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n)
        for a, b in zip(some, others, strict=True)
    ]


def _below(path: str, name: str) -> str:
    """The name in the model of what an exported `_Flat` calls "inner" or "inner.conv.weight"."""
    rest = name.removeprefix("inner").removeprefix(".")
    return f"{path}.{rest}" if rest else path


def _paired(tracer: Any, given: Any, recorded: Any, path: str) -> Iterator[Any]:
    """The values that stand for the tensors of a recorded call; the rest is checked to be as it was."""
    if isinstance(recorded, Tensor):
        yield given
    elif isinstance(given, Proxy):
        traced: Any = given
        if isinstance(recorded, (bool, int, float, str)):
            tracer.create_proxy("call_function", check_branch, (given, recorded, f"an argument of '{path}'"), {})
        elif isinstance(recorded, (tuple, list)):
            for index, item in enumerate(recorded):
                yield from _paired(tracer, traced[index], item, path)
        elif isinstance(recorded, dict):
            for key, item in recorded.items():
                yield from _paired(tracer, traced[key], item, path)
        elif recorded is not None:
            raise TraceError(f"'{path}' gets a traced {type(recorded).__name__}")
    elif isinstance(recorded, (tuple, list)) and isinstance(given, (tuple, list)) and len(given) == len(recorded):
        for one, item in zip(given, recorded, strict=True):
            yield from _paired(tracer, one, item, path)
    elif isinstance(recorded, dict) and isinstance(given, dict) and list(given) == list(recorded):
        for key, item in recorded.items():
            yield from _paired(tracer, given[key], item, path)
    elif hasattr(recorded, "__dataclass_fields__") and type(given) is type(recorded):
        for name, item in vars(recorded).items():
            yield from _paired(tracer, getattr(given, name), item, path)
    elif type(given) is not type(recorded) or (isinstance(recorded, (bool, int, float, str)) and given != recorded):
        raise TraceError(f"'{path}' is called with {given!r} here, and with {recorded!r} for the example inputs")


# -- one run of the model ----------------------------------------------------------------------------------------------


class _Watch:
    """Stands in for a tracer in one run of the model: notes in which submodules something wrapped gets tensors."""

    def __init__(self) -> None:
        self.running: list[_Call] = []

    def sees(self, arguments: Any) -> bool:
        return bool(_tensors(arguments))

    def call_wrapped(self, target: Any, original: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if records(target, args) and self.sees((args, kwargs)):
            for call in self.running:
                call.wrapped = True
        with activate(None):
            return original(*args, **kwargs)


def _run(root: nn.Module, paths: Sequence[str], args: tuple, kwargs: dict[str, Any]) -> dict[str, list[_Call]]:
    """The calls that submodules get in one run of the model, which stays as it is."""
    watch, calls = _Watch(), {path: list[_Call]() for path in paths}
    with ExitStack() as stack:
        stack.enter_context(restored_state(root))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.no_grad())
        stack.enter_context(wrapped_calls(root))
        for path in paths:
            stack.enter_context(_noted(root.get_submodule(path), calls[path], watch))
        args, kwargs = copied_inputs((args, kwargs))
        with activate(watch):  # type: ignore[arg-type]
            root(*args, **kwargs)
    return calls


@contextmanager
def _noted(module: nn.Module, calls: list[_Call], watch: _Watch) -> Iterator[None]:
    def begins(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        calls.append(_Call(mapped((args, kwargs), _is_tensor, lambda t: t.detach().clone())))
        watch.running.append(calls[-1])

    def ends(_: nn.Module, args: tuple, result: Any) -> None:
        watch.running.pop().result = mapped(result, _is_tensor, Tensor.detach)

    handles = [
        module.register_forward_pre_hook(begins, prepend=True, with_kwargs=True),
        module.register_forward_hook(ends),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
