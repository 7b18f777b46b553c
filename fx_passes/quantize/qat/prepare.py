"""Quantization-aware training: the deployed graph with fake quantization, trainable, under the float model's names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fx_passes.capture.exclusive import in_turn
from fx_passes.entry.ambient import plain_state
from fx_passes.errors import InputError, QuantizationError, StageError
from fx_passes.graph.copies import deep_copy
from fx_passes.graph.functions import rebind_functions
from fx_passes.graph.module import set_submodule
from fx_passes.graph.node_meta import inherit_meta
from fx_passes.ops import bind, module_of, op_of
from fx_passes.quantize.annotation import QuantizedValue, annotation_of, quantized_values
from fx_passes.quantize.insertion import claim, insert_module, place_of, record_example
from fx_passes.quantize.place.annotate import annotate
from fx_passes.quantize.qat.layer import QatLayer
from fx_passes.quantize.qconfig import QConfig
from fx_passes.quantize.ranges.fake_quant import FakeQuantize, QatState
from fx_passes.quantize.ranges.names import observer_for
from fx_passes.quantize.scheme import target_scheme
from fx_passes.quantize.weights.layer import Layer, layer_of

__all__ = [
    "FAKES",
    "LAYERS",
    "float_state_dict",
    "freeze_batch_norm",
    "freeze_ranges",
    "prepare_qat_fx",
    "set_qat_state",
]

FAKES, LAYERS = "fake_quantizers", "qat_layers"
_STATES = ("calibrate", "train", "validate")
_DEFAULT_OBSERVER = "running"


@in_turn
@plain_state()
def prepare_qat_fx(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    target: str = "tensorrt-rtx",
    qconfig: QConfig | Mapping[Any, Any] | str | os.PathLike[str] | None = None,
    learned_step: bool = False,
) -> GraphModule:
    """A trainable copy of a model that computes, rounded, what its int8 conversion will compute.

    Convolution or linear layers and their BatchNorm are trained as the one layer they will be deployed as. Train it
    like the float model; `train()` and `eval()` work as usual (see also `set_qat_state`, `freeze_batch_norm`,
    `freeze_ranges`). Ranges start from what calibration, or the first batch, showed and follow the batches.
    `convert_fx` then gives the very numbers of the eval mode.

    Args:
        model: a float module (its parameters are copied), or a graph of one that was traced in eval mode. A fused one
            (by `equalize_fx`, say) trains without Dropout and BatchNorm, which fusing takes out.
        example_inputs: what a later lowering takes as its example, see `prepare_calibration_fx`.
        target: "tensorrt", "tensorrt-rtx" or "onnxruntime".
        qconfig: what to do otherwise, and where (see `QConfig`), or the file that says so.
        learned_step: the scales are parameters, too (LSQ, Esser et al., ICLR 2020).

    Returns:
        A GraphModule in the model's own train or eval mode. Its state dict has the model's keys, and the ranges under
        `fake_quantizers.` and `qat_layers.`. It loads checkpoints of the float model; `float_state_dict` gives one.

    Raises:
        StageError: the graph was traced in train mode, or the model computes something else in eval mode than while
            training, beyond what its layers do themselves (an `if self.training:` in a forward).
        InputError: unknown target, or a configuration that names what is not there or what only post-training
            quantization does.
        QuantizationError: the weight of a layer is computed by a parametrization.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        >>> qat = prepare_qat_fx(model)
        >>> qat(torch.rand(2, 3, 8, 8)).sum().backward()
        >>> qat.get_parameter("0.weight").grad is not None
        True
    """
    scheme = target_scheme(target)
    gm, training = _trainable_graph(model)
    from fx_passes.fuse.fuse import fuse_trainable

    fused, config = fuse_trainable(gm), QConfig.of(qconfig)
    _check_options(fused, config)
    deployed = annotate(fused, target, config)
    values = quantized_values(deployed.graph)
    for container in (FAKES, LAYERS):
        claim(gm, container)
    plan = _Plan(gm, deployed)
    fakes = {
        value.node.name: FakeQuantize(
            observer_for(value.node, value.readers, scheme.activation, _DEFAULT_OBSERVER), learned_step
        )
        for value in values
        if value.scale_of is value.node
    }
    for node, norm in plan.layers().items():
        _make_layer(gm, node, norm, scheme, learned_step)
    for value in values:
        if value.node.name in fakes:
            plan.insert(value, fakes[value.node.name])
    if scheme.bias is not None:
        _pass_input_scales(gm, deployed, values)
    gm.graph.lint()
    gm.recompile()
    gm.meta.update(stage="prepared_qat", target=target)
    record_example(gm, example_inputs)
    return gm.train(training)


def _check_options(fused: GraphModule, config: QConfig) -> None:
    """Refuse options that only post-training quantization knows."""
    for node, options in config.resolve(fused).items():
        asked = {"equalize": options.equalize, "smooth": options.smooth, "rounding": options.rounding == "learned"}
        if name := next((name for name, value in asked.items() if value), None):
            raise InputError(
                f"the configuration asks for '{name}' at '{node.name}' ({options.origin}), which training replaces",
                hint=f"leave '{name}' out; to train an equalized model, give prepare_qat_fx one whose weights are",
            )


def set_qat_state(model: nn.Module, state: QatState) -> None:
    """Say what a QAT module, or any module that holds one, is doing; sets train or eval mode accordingly.

    Args:
        model: from `prepare_qat_fx`.
        state: "calibrate": ranges are taken, nothing is rounded. "train": rounded, ranges follow. "validate": rounded
            as deployed, ranges stay.

    Raises:
        InputError: another state.
        StageError: no QAT module in `model`.
    """
    if state not in _STATES:
        raise InputError(f"unknown QAT state {state!r}", hint=f"use one of {', '.join(_STATES)}")
    for module in _parts(model, (FakeQuantize, QatLayer)):
        module.state = state
    model.train(state == "train")


def freeze_ranges(model: nn.Module, frozen: bool = True) -> None:
    """Keep the ranges of activations as they are, also while training (learned scales are parameters: not these)."""
    for module in _parts(model, (FakeQuantize,)):
        module.frozen = frozen


def freeze_batch_norm(model: nn.Module, frozen: bool = True) -> None:
    """Use the running statistics of folded BatchNorms while training, and leave them as they are."""
    for module in _parts(model, (QatLayer,)):
        module.norm_frozen = frozen


def float_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a QAT module without what quantization added: it loads into the float model."""
    meta: dict[str, Any] = getattr(model, "meta", {})
    added = tuple(f"{meta.get(container, container)}." for container in (FAKES, LAYERS))
    return {key: value for key, value in model.state_dict().items() if not key.startswith(added)}


def _parts(model: nn.Module, kinds: tuple[type, ...]) -> list[Any]:
    found = [module for module in model.modules() if isinstance(module, kinds)]
    if not any(isinstance(module, (FakeQuantize, QatLayer)) for module in model.modules()):
        raise StageError(f"{type(model).__name__} holds no fake quantization", hint="call prepare_qat_fx first")
    return found


def _trainable_graph(model: nn.Module) -> tuple[GraphModule, bool]:
    """A functional graph of an own copy of `model`, and whether that is in train mode."""
    from fx_passes.capture.trace import trace
    from fx_passes.functional.functional import functionalize

    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}", hint="pass a torch.nn.Module or a torch.fx.GraphModule")
    if isinstance(model, GraphModule):
        stage = model.meta.get("stage", "traced")
        if stage not in ("traced", "functionalized", "fused"):
            raise StageError(f"a graph that is {stage} cannot be trained", hint="start from the float model")
        if model.meta.get("training", model.training):
            raise StageError("this graph was traced in train mode", hint="call model.eval() before trace(model)")
        graph = deep_copy(model)
        return (functionalize(graph) if stage == "traced" else graph), model.training
    own = deep_copy(model)
    rebind_functions(own, model)
    _check_same_path(trace(own.train()).graph, (graph := trace(own.eval())).graph, model)
    return functionalize(graph), model.training


def _check_same_path(training: Graph, evaluating: Graph, model: nn.Module) -> None:
    """Refuse a model whose forward branches on `self.training`: what is trained would not be what is deployed."""
    pairs = zip(training.nodes, evaluating.nodes, strict=False)
    other = next((pair for pair in pairs if _signature(pair[0]) != _signature(pair[1])), None)
    if other is None and len(training.nodes) == len(evaluating.nodes):
        return
    node = other[1] if other else list(evaluating.nodes)[-1]
    raise StageError(
        f"the forward of {type(model).__name__} computes something else in eval mode than in train mode",
        node=node,
        hint="move the difference into a module (nn.Dropout instead of F.dropout), or wrap() the function it is in",
    )


def _signature(node: Node) -> tuple[Any, ...]:
    return node.op, str(node.target), str(node.args), str(node.kwargs)


class _Plan:
    """The trainable graph beside the deployed one, whose nodes have the same names where they are in both."""

    def __init__(self, gm: GraphModule, deployed: GraphModule):
        self.gm = gm
        self.nodes = {node.name: node for node in gm.graph.nodes}
        there = {node.name: node for node in deployed.graph.nodes}
        self.gone: dict[Node, Node] = {}  # dropout, identity and folded BatchNorm -> what is before it
        for node in gm.graph.nodes:
            if node.name in there:
                if (annotation := annotation_of(there[node.name])) is not None:
                    node.meta["quantization"] = annotation
            elif _is_inert(node) or _is_norm(node):
                self.gone[node] = node.args[0]  # type: ignore[assignment]
                node.meta["inert"] = not _is_norm(node)

    def layers(self) -> dict[Node, Node | None]:
        """Layers to replace, each with the BatchNorm that is folded into it when deployed."""
        found: dict[Node, Node | None] = {
            node: None
            for node in self.nodes.values()
            if (a := annotation_of(node)) is not None and a.weight is not None
        }
        found.update({before: node for node, before in self.gone.items() if _is_norm(node)})
        return found

    def insert(self, value: QuantizedValue, fake: FakeQuantize) -> None:
        """Fake-quantize `value` for its readers, where a dropout is between them behind it."""
        readers = [self.nodes[reader.name] for reader in value.readers]
        sources: dict[Node, list[Node]] = {}
        for reader in readers:
            for source in reader.all_input_nodes:
                if self._before(source).name == value.node.name:
                    sources.setdefault(source, []).append(reader)
        for source, its_readers in sources.items():
            insert_module(self.gm, source, its_readers, place_of(self.gm, FAKES, value.node.name), fake)

    def _before(self, node: Node) -> Node:
        while node in self.gone:
            node = self.gone[node]
        return node


def _is_inert(node: Node) -> bool:
    op = op_of(node)
    return op is not None and op.name in ("dropout", "stochastic_depth", "identity")


def _is_norm(node: Node) -> bool:
    op = op_of(node)
    return op is not None and op.name == "batch_norm"


def _make_layer(gm: GraphModule, node: Node, norm: Node | None, scheme: Any, learned: bool) -> None:
    """Turn `node`, in place, into the call of a `QatLayer` that takes the place of `norm` too."""
    layer = layer_of(gm, node)
    if isinstance(layer, str):
        raise QuantizationError(f"this layer cannot be trained for int8: {layer}", node=node)
    if node.op == "call_module" and nn.utils.parametrize.is_parametrized(module_of(node, gm)):  # type: ignore[arg-type]
        raise QuantizationError(
            "its weight is computed by a parametrization",
            node=node,
            hint="call torch.nn.utils.parametrize.remove_parametrizations on it before training for int8",
        )
    annotation = annotation_of(node)
    granularity = annotation.weight if annotation is not None else None
    method = annotation.weight_method if annotation is not None else "minmax"
    options = _norm_options(norm) if norm is not None else {}
    original = module_of(node, gm) if node.op == "call_module" else None
    module = QatLayer(layer, scheme, granularity, method, learned=learned, module=original, **options)
    node.meta["deployed"] = node.op, node.target
    with gm.graph.inserting_before(node):
        weight, bias = _parameters(node, layer)
        statistics = None if norm is None else _norm_tensors(norm)
    path = place_of(gm, LAYERS, node.name)
    twin = _first_call(node) if norm is None else node
    if twin is not node:
        path = place_of(gm, LAYERS, twin.name)  # one weight has one scale
    else:
        set_submodule(gm, path, module)
    node.op, node.target = "call_module", path
    node.args, node.kwargs = (layer.input, weight, bias, statistics, None), {}
    if norm is not None:
        norm.replace_all_uses_with(node)
        gm.graph.erase_node(norm)


def _first_call(node: Node) -> Node:
    """The first call of the module that `node` calls, which is a `QatLayer` by now if it is not `node`."""
    return next((n for n in node.graph.nodes if n.meta.get("deployed") == (node.op, node.target) and n < node), node)


def _parameters(node: Node, layer: Layer) -> tuple[Node, Node | None]:
    """get_attr nodes of the layer's own weight and bias."""
    if node.op == "call_module":
        weight = _attribute(node, f"{node.target}.weight")
        return weight, None if layer.bias is None else _attribute(node, f"{node.target}.bias")
    given = list(bind(node).values())
    return given[1], given[2]


def _norm_tensors(norm: Node) -> tuple[Any, ...]:
    """get_attr nodes of weight, bias, running mean, running variance and number of batches of a BatchNorm."""
    if norm.op != "call_module":
        given = bind(norm)
        return given["weight"], given["bias"], given["running_mean"], given["running_var"], None
    module: Any = module_of(norm)
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    return tuple(_attribute(norm, f"{norm.target}.{n}") if getattr(module, n) is not None else None for n in names)


def _norm_options(norm: Node) -> dict[str, Any]:
    source: Any = module_of(norm) if norm.op == "call_module" else None
    if source is not None:
        return {"eps": source.eps, "momentum": source.momentum}
    given = bind(norm)
    return {"eps": given["eps"], "momentum": given["momentum"]}


def _attribute(like: Node, target: str) -> Node:
    return inherit_meta(like.graph.get_attr(target), like)


def _pass_input_scales(gm: GraphModule, deployed: GraphModule, values: list[QuantizedValue]) -> None:
    """Hand every layer with an integer bias the scale of its input, which the bias is rounded with."""
    scale_of = {(value.node.name, reader.name): value.scale_of.name for value in values for reader in value.readers}
    by_name = {node.name: node for node in gm.graph.nodes}
    for there in deployed.graph.nodes:
        annotation, layer = annotation_of(there), layer_of(deployed, there)
        if annotation is None or annotation.weight is None or isinstance(layer, str) or layer.transposed:
            continue
        padded = annotation_of(layer.input)
        reader, source = there, layer.input
        if padded is not None and padded.op == "pad" and padded.quantized:
            reader, source = layer.input, layer.input.all_input_nodes[0]
        name = scale_of.get((source.name, reader.name))
        if name is not None:
            node = by_name[there.name]
            with gm.graph.inserting_before(node):
                node.args = (*node.args[:4], _attribute(node, f"{place_of(gm, FAKES, name)}.scale"))
