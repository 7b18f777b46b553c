"""`fuse_fx`: BatchNorm folded into the convolution or linear layer before it; dropout and identity removed."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from fx_passes.capture.exclusive import in_turn
from fx_passes.capture.trace import trace
from fx_passes.entry.ambient import plain_state
from fx_passes.errors import StageError
from fx_passes.functional.functional import functionalize, remove_dead_code
from fx_passes.fuse.batch_norm import fold_batch_norms
from fx_passes.fuse.computed import fold_computed_weights
from fx_passes.fuse.parametrized import resolve_parametrizations, resolved_root
from fx_passes.graph.copies import eval_copy
from fx_passes.graph.module import delete_unused
from fx_passes.ops import op_of
from fx_passes.ops.effects import has_effects

__all__ = ["fuse_fx", "fuse_trainable"]


@in_turn
@plain_state()
def fuse_fx(model: nn.Module, example_inputs: Any = None, *, varying: tuple[Any, Any] | None = None) -> GraphModule:
    """Fold BatchNorm into Conv, ConvTranspose and Linear; remove Dropout and Identity; resolve computed weights.

    Args:
        model: a module, of which an eval copy is traced, or a graph traced in eval mode. It is not changed, and the
            result shares the tensors that folding does not change.
        example_inputs, varying: as for `trace`, for a module whose forward looks at sizes. They are not run.

    Returns:
        A `GraphModule` in eval mode. A folded layer keeps its path. `meta["fuse_report"]` is a list of (node name,
        what was done with it and why).

    Raises:
        StageError: the graph was traced in train mode, or is prepared or converted already.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        >>> [str(n.target) for n in fuse_fx(model).graph.nodes if n.op == "call_module"]
        ['0', '2']
    """
    return _fused(model, example_inputs, varying, computed=True)


def fuse_trainable(gm: GraphModule) -> GraphModule:
    """`fuse_fx` for a graph that is trained further: a weight that is computed from parameters stays computed."""
    return _fused(gm, None, None, computed=False)


def _fused(model: nn.Module, example_inputs: Any, varying: tuple[Any, Any] | None, *, computed: bool) -> GraphModule:
    report: list[tuple[str, str]] = []
    gm = _functional_eval_graph(model, example_inputs, varying, report)
    _remove_inert(gm, report)
    if computed:
        fold_computed_weights(gm, report)
    fold_batch_norms(gm, report)
    remove_dead_code(gm)
    delete_unused(gm)
    gm.graph.lint()
    gm.recompile()
    gm.meta["stage"], gm.meta["fuse_report"] = "fused", report
    return gm


def _functional_eval_graph(
    model: nn.Module, example_inputs: Any, varying: tuple[Any, Any] | None, report: list[tuple[str, str]]
) -> GraphModule:
    if not isinstance(model, GraphModule):
        gm: GraphModule = trace(resolved_root(eval_copy(model)), example_inputs, varying=varying)
    else:
        _check_stage(model)
        gm = eval_copy(model)
    resolve_parametrizations(gm, report)  # first: a layer with a hook is a call that functionalize does not understand
    return functionalize(gm) if gm.meta.get("stage", "traced") == "traced" else gm


def _check_stage(gm: GraphModule) -> None:
    if gm.meta.get("training", gm.training):
        raise StageError(
            f"this graph of {type(gm).__name__} was traced in train mode and holds the train branches",
            hint="call model.eval() before trace(model), or give fuse_fx the module itself",
        )
    stage = gm.meta.get("stage", "traced")
    if stage not in ("traced", "functionalized", "fused"):
        raise StageError(f"a graph that is '{stage}' cannot be fused", hint="fuse before prepare and convert")


def _remove_inert(gm: GraphModule, report: list[tuple[str, str]]) -> None:
    for node in list(gm.graph.nodes):
        op = op_of(node, gm)
        if op is None or op.name not in ("dropout", "stochastic_depth", "identity"):
            continue
        if has_effects(node, gm) or "aliased" in node.meta or not node.args or not isinstance(node.args[0], Node):
            report.append((node.name, f"kept: {node.meta.get('aliased', 'it is active in eval mode too')}"))
            continue
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
        report.append((node.name, f"removed: {op.name} does nothing in eval mode"))
