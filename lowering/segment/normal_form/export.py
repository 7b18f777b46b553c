"""`torch.export` of one segment: dynamic dimensions that stay dynamic, errors that name the user's line."""

from __future__ import annotations

import logging
import operator
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node

from fx_passes.capture.export import export_program, exporting
from fx_passes.capture.state import restored_state
from fx_passes.capture.tensor_indices import taken
from fx_passes.errors import ExportError, InputError
from lowering.segment.normal_form.edit import is_static, shape_of
from lowering.segment.normal_form.einsum import normalize_einsums
from lowering.segment.normal_form.functional import functionalize_fresh, is_functional

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from lowering.segment.program import TensorSpec

__all__ = ["GuardLog", "check_dynamic", "export_segment"]

aten = torch.ops.aten

_INDEXING = (operator.getitem, Tensor.__getitem__, "__getitem__")
_PREFIX = "node_"  # of the names in the copy that is exported


def export_segment(
    segment: GraphModule, inputs: list[TensorSpec], example: tuple[Tensor, ...]
) -> tuple[ExportedProgram, GuardLog]:
    """Export in non-strict mode to a functional aten program with composite ops whole.

    One trace suffices for a segment that `functionalize` has been through: torch's training IR is then already
    functional, and the second trace of `run_decompositions` (two thirds of the time) is skipped. It is made only where
    a mutation is left, which it turns into an output with a mutation entry in the signature.

    Returns:
        The program, and which node of the segment each of its guards comes from.

    Raises:
        InputError: the example does not fit the specs.
        ExportError: torch.export refuses.
    """
    _check_example(inputs, example)
    log = GuardLog()
    marked = _with_export_meta(segment, log)
    with restored_state(segment), exporting(), torch.no_grad():
        exported = _export(marked, inputs, example, segment, log)
        _keep_ranks(exported.graph, segment, log)
        functionalize_fresh(exported.graph)
        if not is_functional(exported.graph_module):
            try:
                exported = exported.run_decompositions({})
            except Exception as error:
                raise _export_error(error, segment) from error
    normalize_einsums(exported.graph)
    return exported, log


class GuardLog:
    """Which node of a segment ran when torch noted a condition: marks between the nodes count the conditions."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._counts: list[int] = []
        self._mark = self._count

    def after(self, node: Node, graph: Graph) -> None:
        """Add a mark to `graph`, in which the copy of `node` was made last."""
        graph.call_function(self._mark, (len(self._nodes),))
        self._nodes.append(node)

    def restart(self) -> None:
        self._counts = [0] * len(self._nodes)

    def node_of(self, index: int | None) -> Node | None:
        """The node that ran when this condition was noted; None for what stands in the shapes of the inputs."""
        if index is None:
            return None
        return next((n for n, count in zip(self._nodes, self._counts, strict=True) if count > index), None)

    def assume(self, condition: torch.SymBool, node: Node | None) -> bool:
        """Let torch note a condition, which holds for the example or not, on behalf of a node of the segment."""
        held = bool(condition)
        env = condition.node.shape_env
        if node is not None and env is not None:
            self._nodes.append(node)
            self._counts.append(len(env.guards))
        return held

    def _count(self, index: int) -> None:
        mode = detect_fake_mode()
        if mode is not None and mode.shape_env is not None:
            self._counts[index] = len(mode.shape_env.guards)


_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


def _keep_ranks(graph: Graph, segment: GraphModule, log: GuardLog) -> None:
    """Note that no squeezed dimension of a free size is 1: the result would have another rank."""
    for node in list(graph.nodes):
        if node.target not in _SQUEEZES:
            continue
        shape, dims = shape_of(node.args[0]), node.args[1] if len(node.args) > 1 else ()
        squeezed = range(len(shape)) if not dims and node.target is aten.squeeze.default else _as_list(dims)
        origin = _node_named(segment, node.meta.get("custom", {}).get("fx_node"))
        for dim in squeezed:
            size = shape[dim]
            if not is_static(size) and not log.assume(size != 1, origin):
                raise ExportError(
                    f"squeezes dimension {dim}, of size 1 in the example, whose size follows from dynamic ones",
                    node=origin,
                    hint="name the dimension by an index: x[:, :, 0] in place of x.squeeze(2)",
                )


def _as_list(dims: Any) -> list[int]:
    return [dims] if isinstance(dims, int) else list(dims)


def _node_named(segment: GraphModule, name: str | None) -> Node | None:
    return next((n for n in segment.graph.nodes if n.name == name), None)


def _check_example(inputs: list[TensorSpec], example: tuple[Tensor, ...]) -> None:
    if len(inputs) != len(example):
        raise InputError(f"{len(inputs)} input specs, but {len(example)} example tensors")
    for spec, tensor in zip(inputs, example, strict=True):
        if tensor.dtype != spec.dtype or tensor.dim() != len(spec.min):
            raise InputError(
                f"example for input '{spec.name}' is {tensor.dtype} of rank {tensor.dim()}, "
                f"the spec says {spec.dtype} of rank {len(spec.min)}"
            )
        for d, size in enumerate(tensor.shape):
            if not spec.min[d] <= size <= spec.max[d]:
                raise InputError(
                    f"example for input '{spec.name}' has size {size} in dimension {d}, "
                    f"the spec says {spec.min[d]} to {spec.max[d]}"
                )
            if spec.is_dynamic(d) and size < 2:
                raise InputError(
                    f"example for input '{spec.name}' has size {size} in dynamic dimension {d}",
                    hint="export with an example of at least 2 there: torch.export takes 0 and 1 for constants",
                )


def _with_export_meta(segment: GraphModule, log: GuardLog) -> GraphModule:
    """A copy of the graph over the same state, whose nodes carry through export where they come from."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for old in segment.graph.nodes:
        new = copies[old] = graph.node_copy(old, copies.__getitem__)
        if new.op.startswith("call_"):
            log.after(old, graph)
        custom = {"fx_node": old.name}
        for key in ("source", "module_path"):
            if old.meta.get(key) is not None:
                custom[key] = old.meta[key]
        new.meta = {"custom": custom}
        if new.target in _INDEXING:
            new.op, new.target = "call_function", taken
        if new.op not in ("placeholder", "output"):
            # torch.export refuses a node of the name that it will give to a placeholder (a buffer's last name, say)
            new._rename(_PREFIX + old.name)
    return GraphModule(segment, graph)


def _export(
    marked: GraphModule,
    inputs: list[TensorSpec],
    example: tuple[Tensor, ...],
    segment: GraphModule,
    log: GuardLog,
) -> ExportedProgram:
    """Try shared symbols; where the model relates dimensions in another way (2*b), let export find the relations."""
    from torch._dynamo.exc import UserError

    attempts = [_shared_dims(inputs), _independent_dims(inputs)] if any(i.dynamic for i in inputs) else [None]
    failure: Exception | None = None
    for shapes in attempts:
        log.restart()
        try:
            return export_program(marked, example, dynamic_shapes=shapes)
        except UserError as error:
            failure = error
            if "Constraints violated" not in str(error):
                break
        except Exception as error:
            failure = error
            break
    assert failure is not None
    if "specialized" in str(failure):
        raise _export_error(failure, segment, locate_frozen(segment, inputs, example)) from failure
    raise _export_error(failure, segment) from failure


def _shared_dims(inputs: list[TensorSpec]) -> tuple[dict[int, Any], ...]:
    """One named dimension for all that must be equal (see `TensorSpec.symbols`); a free one for each of the rest."""
    from torch.export import Dim

    names = [[_symbol_name(spec, d) if spec.is_dynamic(d) else None for d in range(len(spec.min))] for spec in inputs]
    uses = Counter(name for row in names for name in set(row) if name)
    dims: dict[str, Any] = {}
    shapes = []
    for spec, row in zip(inputs, names, strict=True):
        entry: dict[int, Any] = {}
        for d, name in enumerate(row):
            if name is None:
                entry[d] = Dim.STATIC
            elif uses[name] > 1 or row.count(name) > 1:
                entry[d] = dims.setdefault(name, Dim(name, min=spec.min[d], max=_most(spec, d)))
            else:
                entry[d] = Dim.DYNAMIC(min=spec.min[d], max=_most(spec, d))
        shapes.append(entry)
    return tuple(shapes)


def _most(spec: TensorSpec, dim: int) -> int:
    """The upper end of a dynamic range: at least 3, as torch.export reasons from 2 on, and 2 to 2 is a constant."""
    return max(spec.max[dim], 3)


def _symbol_name(spec: TensorSpec, dim: int) -> str:
    if spec.symbols is not None and spec.symbols[dim]:
        return str(spec.symbols[dim])
    sizes = (spec.min[dim], spec.opt[dim], spec.max[dim])
    same = [d for d in range(dim) if (spec.min[d], spec.opt[d], spec.max[d]) == sizes]
    # Two axes of one tensor (height and width) may have one range and still differ from call to call.
    return "d" + "_".join(map(str, sizes)) + (f"_{len(same)}" if same else "")


def _independent_dims(inputs: list[TensorSpec]) -> tuple[dict[int, Any], ...]:
    from torch.export import Dim

    return tuple(
        {
            d: Dim.DYNAMIC(min=spec.min[d], max=_most(spec, d)) if spec.is_dynamic(d) else Dim.STATIC
            for d in range(len(spec.min))
        }
        for spec in inputs
    )


def check_dynamic(
    exported: ExportedProgram, inputs: list[TensorSpec], segment: GraphModule, example: tuple[Tensor, ...]
) -> None:
    """Every dimension that the spec calls dynamic is still symbolic after export.

    Raises:
        ExportError: naming the dimension and, where it can be found, the node that froze it.
    """
    names = list(exported.graph_signature.user_inputs)
    placeholders = {n.name: n for n in exported.graph.find_nodes(op="placeholder")}
    for spec, name in zip(inputs, names, strict=True):
        shape = placeholders[str(name)].meta["val"].shape
        for d, size in enumerate(shape):
            if spec.is_dynamic(d) and not _is_symbolic(size):
                raise _frozen_error(spec.name, d, int(size), segment, inputs, example)


def _is_symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


def _frozen_error(
    name: str, dim: int, size: int, segment: GraphModule, inputs: list[TensorSpec], example: tuple[Tensor, ...]
) -> ExportError:
    node = locate_frozen(segment, inputs, example)
    return ExportError(
        f"dimension {dim} of input '{name}' is given as dynamic, but the model works only with size {size}",
        node=node,
        hint="compute sizes from the tensor's shape at this line, wrap() the function, or give a static size",
    )


def locate_frozen(segment: GraphModule, inputs: list[TensorSpec], example: tuple[Tensor, ...]) -> Node | None:
    """The first node of the segment at which a dynamic dimension becomes a number: a second run, node by node."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = []
    for spec, tensor in zip(inputs, example, strict=True):
        sizes = [DimDynamic.DYNAMIC if spec.is_dynamic(d) else DimDynamic.STATIC for d in range(tensor.dim())]
        fakes.append(mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)))
    free = [s for fake, spec in zip(fakes, inputs, strict=True) for d, s in enumerate(fake.shape) if spec.is_dynamic(d)]

    class Probe(torch.fx.Interpreter):
        culprit: Node | None = None

        def run_node(self, n: Node) -> Any:
            try:
                result = super().run_node(n)
            except Exception:
                self.culprit = self.culprit or n
                raise
            if self.culprit is None and not all(_is_symbolic(s) for s in free):
                self.culprit = n
            return result

    probe = Probe(segment)
    try:
        with mode, torch.no_grad():
            probe.run(*fakes)
    except Exception as error:  # the node is what we came for; the failure itself is reported by the caller
        logging.getLogger(__name__).debug("probe stopped: %s", error)
    return probe.culprit


def _export_error(error: Exception, segment: GraphModule, node: Node | None = None) -> ExportError:
    """What torch.export said, without paths and logging advice, at the node of the segment where it happened."""
    text = str(error)
    if found := re.search(r"While executing %(\w+)", text):
        name = found.group(1).removeprefix(_PREFIX)
        node = _node_named(segment, name)
    return ExportError(f"torch.export: {_summary(text)}", node=node, hint=_hint(text))


def _summary(text: str) -> str:
    first = re.split(
        "While executing|Original traceback|The error above|consider using|Caused by:|For more info", text
    )[0]
    lines = [line.strip() for line in first.splitlines() if line.strip() and not line.strip().startswith("File ")]
    joined = re.sub(r"(?:/[\w.\-+]+)+/([\w.\-]+)", r"\1", " ".join(lines))
    return joined[:600] or "failed without a message"


def _hint(text: str) -> str:
    if "data-dependent" in text or "GuardOnDataDependent" in text or ".item()" in text:
        return "the value decides a size or a branch: wrap() the function around this line so that it stays in Python"
    if "Constraints violated" in text or "specialized" in text:
        return "compute sizes from the tensor's shape, narrow the dynamic range, or make the dimension static"
    return "wrap() the function or module around this line so that it stays in Python"
