"""A model whose own forward stays Python: each of its largest capturable children is lowered on its own.

This is the route for torchvision's detectors, and for any model of which neither symbolic tracing nor `torch.export`
makes a graph. The children are replaced in a copy that shares its tensors with the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_passes import convert_fx, prepare_calibration_fx
from fx_passes.capture.state import restored_state
from fx_passes.entry.call import call_signature
from fx_passes.errors import CalibrationError, CaptureError, InputError, LoweringError, QuantizationError
from fx_passes.graph.copies import copied_inputs
from fx_passes.graph.module import set_submodule
from fx_passes.quantize.annotation import annotation_of
from fx_passes.quantize.calibrate import call_with_batch, checked, shown, synchronize
from fx_passes.quantize.qconfig import QConfig
from lowering.backend import built_segments
from lowering.capture import warn_of_few
from lowering.children.calls import replaced_forwards
from lowering.children.choice import Child, Choice, choose, computes
from lowering.children.lowered import LoweredChild, WithChildren, own_copy
from lowering.module import LoweredModule
from lowering.records import Fallback, SegmentInfo
from lowering.request.arguments import bound_arguments, leaves_of
from lowering.request.inputs import ShapeRange
from lowering.request.request import Request
from lowering.segment.segments import Segmented, refuse_fallbacks, segmented
from lowering.summary import details_of

__all__ = ["lower_children", "lower_leaves"]


def lower_children(model: nn.Module, sizes: ShapeRange, request: Request, refusal: CaptureError) -> LoweredModule:
    """Lower what can be of a model whose own forward cannot be captured.

    Args:
        model: it stays as it is.
        sizes: calls of it at the smallest, usual and largest sizes.
        request: what is asked for.
        refusal: why the model as a whole is no graph.

    Raises:
        CaptureError: none of its children can be lowered either.
        InputError: a search for placement is asked for.
        UnsupportedOpError: `settings.require_full_lowering`.
    """
    if request.search is not None:
        raise InputError(
            f"a search for placement works on one graph, and {refusal.what}", hint='use placement="default"'
        )
    whole = Fallback(type(model).__name__, refusal.source, refusal.what)
    refuse_fallbacks([whole], request.settings)
    if request.quantizes and not request.data:
        warn_of_few(stacklevel=5)
    root = own_copy(model)
    choice = choose(root, sizes, request.data)
    lowered = LoweredChildren(root, choice, sizes, request)
    if not lowered.children:
        lines = "".join(f"\n  - {fallback.node}: {fallback.reason}" for fallback in lowered.fallbacks)
        raise CaptureError(f"{refusal.what}; and no submodule of it can be lowered either{lines}", hint=refusal.hint)
    share = lowered.flops / choice.flops if choice.flops else 1.0
    details = details_of(request, choice.flops, share, {"route": "children", "reason": refusal.what})
    return LoweredModule(WithChildren(root, lowered.children), lowered.infos, [whole, *lowered.fallbacks], details)


def lower_leaves(model: nn.Module, parts: Segmented, sizes: ShapeRange, request: Request) -> LoweredChildren | None:
    """Lower what can be of the submodules that tracing could not enter and that stay Python in a partitioned graph.

    Args:
        model: what the graph was captured from; it stays as it is.
        parts: its glue gets copies of these submodules, whose children are lowered.
        sizes, request: as in `lower_children`.

    Returns:
        What was lowered, or None if there is nothing.
    """
    nodes = [
        n for n in parts.glue.graph.find_nodes(op="call_module") if n.meta.get("untraceable") and n.meta.get("python")
    ]
    leaves = [str(n.target) for n in nodes if computes(parts.glue.get_submodule(str(n.target)))]
    if not leaves:
        return None
    root = own_copy(model)
    choice = choose(root, sizes, request.data, below=leaves)
    lowered = LoweredChildren(root, choice, sizes, request)
    if not lowered.children:
        return None
    for leaf in leaves:
        set_submodule(parts.glue, leaf, root.get_submodule(leaf))
    return lowered


# --- int8


def _quantize(root: nn.Module, choice: Choice, sizes: ShapeRange, request: Request) -> None:
    """Calibrate all children in one pass of the data through `root`, and replace their graphs by converted ones.

    Every child's observers see what it is called with, batch by batch; no batch is kept. A child that the data does
    not reach, or in which nothing can be int8, stays float, and its `note` says why.

    Raises:
        InputError: the quantization configuration names what no child holds, or asks for learned rounding.
        CalibrationError: NaN or infinity in a value.
    """
    configs = _configs(choice, request.qconfig)
    prepared = {
        child.path: prepare_calibration_fx(child.graph, target=request.backend.target, qconfig=configs[child.path])
        for child in choice.children
    }
    for graph in prepared.values():
        _refuse_learning(graph)
    reached: set[str] = set()

    def observed(path: str, forward: Callable[..., Any]) -> Callable[..., Any] | None:
        if path not in prepared:
            return None
        child = next(c for c in choice.children if c.path == path)
        signature = inspect.signature(forward)

        def observe(*args: Any, **kwargs: Any) -> Any:
            if not child.takes(bound_arguments(signature, args, kwargs)):
                return forward(*args, **kwargs)
            try:
                result = prepared[path](*args, **kwargs)
            except InputError:  # the graph is for other sizes: such a call is not lowered either
                return forward(*args, **kwargs)
            reached.add(path)
            return result

        return observe

    batches, takes = request.batches(sizes.opt), call_signature(root, sizes.opt.args, sizes.opt.kwargs)
    with restored_state(root), torch.no_grad(), replaced_forwards(root, observed):
        for batch in checked(shown(batches) if request.shows_progress else batches, takes, sizes.opt.inputs()):
            call_with_batch(root, batch)
    for child in choice.children:
        if child.path not in reached:
            child.note = "float: no calibration batch reaches it"
            continue
        synchronize(prepared[child.path])
        try:
            child.graph = convert_fx(prepared[child.path])
        except CalibrationError:
            raise
        except QuantizationError as error:
            child.note = f"float: {error.what}"


def _refuse_learning(prepared: GraphModule) -> None:
    for node in prepared.graph.nodes:
        if (annotation := annotation_of(node)) is not None and annotation.learn_rounding:
            raise InputError(
                f"the rounding of '{node.name}' is to be learned, and the model is lowered child by child, which keeps "
                "none of the batches that a child is called with",
                hint='leave rounding="learned" out of the configuration, or quantize the children themselves',
            )


def _configs(choice: Choice, qconfig: Any) -> dict[str, QConfig]:
    """For each child, what the configuration of the whole model says of it, under names of its own."""
    config = QConfig.of(qconfig)
    unused = {key for key in config if key != ""}
    found = {}
    for child in choice.children:
        entries: dict[Any, Any] = {"": config[""]} if "" in config else {}
        for key, entry in config.items():
            own = _own_key(key, child.path)
            if own == "":
                entries = dict(QConfig(entries).merged({"": entry}))
            elif own is not None and _matches(own, entry, child.graph):
                entries[own] = entry
            else:
                continue
            unused.discard(key)
        found[child.path] = QConfig(entries)
    if unused:
        raise InputError(
            f"the quantization configuration names {sorted(map(str, unused))[0]!r}, which no lowered child holds",
            hint=f"the children are {', '.join(child.path for child in choice.children)}",
        )
    return found


def _own_key(key: Any, path: str) -> Any:
    """A key of the whole model's configuration as one of the child at `path`; None if it is about something else."""
    if key == "" or not isinstance(key, str) or key.startswith("type:"):
        return None if key == "" else key
    if path == key or path.startswith(f"{key}."):
        return ""
    return key.removeprefix(f"{path}.") if key.startswith((f"{path}.", "*")) else None


def _matches(key: Any, entry: Any, graph: GraphModule) -> bool:
    try:
        QConfig({key: entry}).resolve(graph)
    except InputError:
        return False
    return True


# --- segments


class LoweredChildren:
    """The children of a root, lowered one after the other.

    Attributes:
        root: the copy of the model.
        children: in place in it.
        infos: of their segments, which are named like the child.
        fallbacks: what stays Python in them, and those that stay Python as a whole.
        flops: FLOPs inside segments in one call of the root at the opt sizes.
    """

    def __init__(self, root: nn.Module, choice: Choice, sizes: ShapeRange, request: Request):
        self.request = request
        self.children: list[LoweredChild] = []
        self.infos: list[SegmentInfo] = []
        self.fallbacks = [Fallback(path, None, reason) for path, reason in _outermost(choice)]
        self.flops = 0.0
        if request.quantizes and choice.children:
            _quantize(root, choice, sizes, request)
        inputs = _inputs(root, choice.children, sizes)
        for child in choice.children:
            self._lower(child, inputs[child.path])
        for lowered in self.children:
            lowered.attach(root)
        self.root = root

    def _lower(self, child: Child, tensors: list[Tensor]) -> None:
        settings, unsupported = self.request.partial_settings, self.request.backend.unsupported
        ranges = child.sizes(tensors)
        dynamic = ranges.dynamic
        try:
            parts = segmented(child.graph, ranges, settings, unsupported)
        except LoweringError as error:
            if not dynamic:
                self.fallbacks.append(Fallback(child.path, None, error.what))
                return
            dynamic = False  # the sizes of its most expensive call alone
            parts = segmented(child.graph, child.fixed(tensors), settings, unsupported)
            self.fallbacks.append(Fallback(child.path, None, f"calls of other sizes than the example's: {error.what}"))
        infos = built_segments(parts, self.request)
        if not infos:
            reasons = "; ".join(dict.fromkeys(f.reason for f in parts.fallbacks))
            self.fallbacks.append(Fallback(child.path, None, reasons or "it is empty"))
            return
        for index, info in enumerate(infos):
            label = child.path if len(infos) == 1 else f"{child.path}.{index}"
            segment: Any = parts.glue.get_submodule(info.name)
            segment.name = info.name = label
            if child.note is not None:
                info.precision = str(self.request.settings.float_type)
        if child.note is not None:
            self.fallbacks.append(Fallback(child.path, None, child.note))
        if child.others:
            reason = f"{child.others} of {child.others + len(child.calls)} calls have arguments of another form"
            self.fallbacks.append(Fallback(child.path, None, reason))
        self.fallbacks += [Fallback(f"{child.path}: {f.node}", f.source, f.reason) for f in parts.fallbacks]
        self.infos += infos
        self.flops += child.flops * parts.measured.flops_share
        self.children.append(LoweredChild(child.path, child.accepts(dynamic), parts.glue))


def _outermost(choice: Choice) -> list[tuple[str, str]]:
    """The refused submodules that hold no child, without those inside another one of them."""
    taken = [child.path for child in choice.children]
    found: list[tuple[str, str]] = []
    for path, reason in choice.refused.items():
        holds = any(child.startswith(f"{path}.") for child in taken)
        inside = any(path.startswith(f"{other}.") for other, _ in found)
        if not holds and not inside:
            found.append((path, reason))
    return found


def _inputs(root: nn.Module, children: Sequence[Child], sizes: ShapeRange) -> dict[str, list[Tensor]]:
    """The tensors that each child gets in its most expensive call, in one run of the root."""
    wanted = {child.path: child for child in children}
    found: dict[str, list[Tensor]] = {}

    def keep(path: str, forward: Callable[..., Any]) -> Callable[..., Any] | None:
        if path not in wanted:
            return None
        signature, shapes = inspect.signature(forward), [shape.sizes for shape in wanted[path].calls[0].shapes()]

        def kept(*args: Any, **kwargs: Any) -> Any:
            leaves = leaves_of(bound_arguments(signature, args, kwargs))
            tensors = [leaf.detach() for _, leaf in leaves if isinstance(leaf, Tensor)]
            if path not in found and [tuple(t.shape) for t in tensors] == shapes:
                found[path] = [t.clone() for t in tensors]
            return forward(*args, **kwargs)

        return kept

    with restored_state(root), torch.random.fork_rng(devices=[]), torch.no_grad(), replaced_forwards(root, keep):
        args, kwargs = copied_inputs((sizes.opt.args, sizes.opt.kwargs))
        root(*args, **kwargs)
    return found
