"""`trace`: a model as a graph over its leaf modules, by symbolic tracing or, where that is refused, `torch.export`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch import nn

from fx_passes.capture.arguments import ArgumentPlan
from fx_passes.capture.exclusive import in_turn
from fx_passes.capture.tracer import QuantizationTracer
from fx_passes.entry.ambient import plain_state
from fx_passes.errors import CaptureError, InputError
from fx_passes.graph.module import GraphModuleWithAttr

__all__ = ["trace"]


@in_turn
@plain_state()
def trace(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    leaves: Iterable[str | type | nn.Module] = (),
    concrete_args: dict[str, Any] | None = None,
    varying: tuple[Any, Any] | None = None,
) -> GraphModuleWithAttr:
    """Capture `model` as a graph; the model is untouched.

    Its forward is followed symbolically. Where that is refused, and example inputs are there, `torch.export` captures
    the model instead, unless something wrapped runs in it.

    Args:
        model: any module; in train mode the train branches are captured.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments. They are not run;
            they say which optional arguments are given and how many tensors nested arguments hold.
        leaves: modules not to enter, as qualified names, classes or module objects.
        concrete_args: values of arguments to specialise on. The graph keeps the argument and checks it.
        varying: for `torch.export`: two examples; what differs in size between them may differ from call to call.
            None: all sizes that the model's code leaves open. (A size of 0 or 1 in `example_inputs` is never open.)

    Returns:
        A `GraphModuleWithAttr` with the signature of `model.forward`. `meta["leaf_reasons"]` says, for each submodule
        that tracing could not enter, why; `meta["exported"]`, where `torch.export` captured the model, what symbolic
        tracing refused.

    Raises:
        CaptureError: the model's own forward does what neither can record, such as branching on a tensor's values.

    Example:
        >>> trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()))(torch.rand(1, 3, 8, 8)).shape
        torch.Size([1, 4, 8, 8])
    """
    leaves = list(leaves)
    paths = {id(m): name for name, m in model.named_modules()}
    names: list[str] = [leaf for leaf in leaves if isinstance(leaf, str)]
    names += [paths[id(m)] for m in leaves if isinstance(m, nn.Module) and id(m) in paths]
    classes: list[type] = [leaf for leaf in leaves if isinstance(leaf, type)]
    bad: list[Any] = [name for name in names if name not in paths.values()]
    bad += [leaf for leaf in leaves if not isinstance(leaf, (str, type)) and id(leaf) not in paths]
    if bad:
        raise InputError(f"leaves names what is no submodule of {type(model).__name__}: {bad}")
    tracer = QuantizationTracer(names, classes)
    # torch.export knows no leaves, and takes for arguments that are no tensors the values that the example gives.
    exportable = example_inputs is not None and not leaves and _as_in_example(model, example_inputs, concrete_args)
    try:
        graph = tracer.trace(model, concrete_args, example_inputs=example_inputs, varying=varying)
        gm = GraphModuleWithAttr(model, graph)
    except CaptureError as refusal:
        if not exportable:
            raise
        return _exported(model, example_inputs, varying, refusal)
    if tracer.froze_sizes and exportable and varying is not None:
        with suppress(CaptureError):  # the graph that was traced is right for some of these sizes, if not for all
            reason = CaptureError("symbolic tracing would take a size of the example inputs for a constant")
            return _exported(model, example_inputs, varying, reason)
    return gm


def _as_in_example(model: nn.Module, example_inputs: Any, concrete_args: dict[str, Any] | None) -> bool:
    """Whether the example gives the concrete arguments these very values."""
    given = ArgumentPlan(model, None, example_inputs).examples if concrete_args else {}
    return all(name in given and given[name] == value for name, value in (concrete_args or {}).items())


def _exported(
    model: nn.Module, example_inputs: Any, varying: tuple[Any, Any] | None, refusal: CaptureError
) -> GraphModuleWithAttr:
    """The model captured by `torch.export`, after symbolic tracing gave `refusal`."""
    from fx_passes.capture.exported import exported_graph

    try:
        graph = exported_graph(model, example_inputs, varying)
    except CaptureError as second:
        raise CaptureError(f"{refusal.what}; {second.what}", hint=refusal.hint, source=refusal.source) from second
    gm = GraphModuleWithAttr(model, graph)
    gm.meta["exported"] = refusal.what
    return gm
