"""`torch.export` of one segment: dynamic dimensions that stay dynamic, errors that name the user's line."""

from __future__ import annotations

import logging
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fx_passes.errors import ExportError, InputError
from fx_passes.quiet import quiet_torch
from lowering.aten_einsum import normalize_einsums

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from lowering.aten import TensorSpec

aten = torch.ops.aten
__all__ = ["check_dynamic", "export_segment", "is_functional"]

_PREFIX = "node_"  # of the names in the copy that is exported


def export_segment(segment: GraphModule, inputs: list[TensorSpec], example: tuple[Tensor, ...]) -> ExportedProgram:
    """Export in non-strict mode to a functional aten program with composite ops whole.

    One trace suffices for a segment that `functionalize` has been through: torch's training IR is then already
    functional, and the second trace of `run_decompositions` (two thirds of the time) is skipped. It is made only where
    a mutation is left, which it turns into an output with a mutation entry in the signature.

    Raises:
        InputError: the example does not fit the specs.
        ExportError: torch.export refuses.
    """
    _check_example(inputs, example)
    marked = _with_export_meta(segment)
    with quiet_torch(), torch.no_grad():
        exported = _export(marked, inputs, example, segment)
        functionalize_fresh(exported.graph)
        if not is_functional(exported.graph_module):
            try:
                exported = exported.run_decompositions({})
            except Exception as error:
                raise _export_error(error, segment) from error
    normalize_einsums(exported.graph)
    return exported


def is_functional(gm: GraphModule) -> bool:
    """Whether no op of the graph writes to an argument and no op holds a graph of its own."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return False
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            return False
    return True


def functionalize_fresh(graph: Graph) -> None:
    """Make in-place ops on values that nothing else shares memory with out-of-place ops.

    Such a value comes from an op that returns new memory, and no op that returns a view reads it, so that the mutation
    can be seen through this value alone: its later users read the new one. Anything else stays for
    `run_decompositions`. (`nn.ReLU(inplace=True)` inside a module that tracing did not enter is the usual case.)
    Writing into a part of such a value (``mask[:, 2:] = 1``) is a scatter into it.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function" or _writes_a_part(node, position) or (twin := _out_of_place(node)) is None:
            continue
        value = node.args[0]
        later = [user for user in value.users if position[user] > position[node]]
        node.target = twin
        for user in later:
            user.replace_input_with(value, node)


_SCATTERS: dict[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}
_WRITES: dict[Any, Any] = {
    aten.copy_.default: aten.copy.default,
    aten.fill_.Scalar: aten.fill.Scalar,
    aten.fill_.Tensor: aten.fill.Tensor,
    aten.zero_.default: aten.zeros_like.default,
}

_IDENTITIES_IN_EVAL = {aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default}


def _writes_a_part(node: Node, position: dict[Node, int]) -> bool:
    """Make a write into slices of a fresh value scatters, if nothing else that shares its memory is read later."""
    if node.target not in _WRITES or not isinstance(node.args[0], Node):
        return False
    views, base = [], node.args[0]
    while base.op == "call_function" and base.target in _SCATTERS:
        views.append(base)
        base = base.args[0]  # type: ignore[assignment]
    if not views or base.op != "call_function" or _aliases(base.target):
        return False
    now = position[node]
    others = [v for v in _views_of(base) if position[v] < now]
    if any(position[user] > now for view in others for user in view.users):
        return False
    graph, later = node.graph, [user for user in base.users if position[user] > now]
    written: Node = node
    node.target = _WRITES[node.target]
    for view in views:
        with graph.inserting_after(written):
            scatter = graph.call_function(_SCATTERS[view.target], (view.args[0], written, *view.args[1:]), view.kwargs)
        scatter.meta = dict(node.meta) | {"val": view.args[0].meta["val"]}  # type: ignore[union-attr]
        position[scatter] = now
        written = scatter
    for user in later:
        user.replace_input_with(base, written)
    return True


def _views_of(node: Node) -> list[Node]:
    """Everything that may share memory with `node` and was made from it."""
    found = []
    for user in node.users:
        if user.op == "call_function" and (_aliases(user.target) or user.target in _WRITES):
            found += [user, *_views_of(user)]
    return found


def _aliases(op: Any) -> bool:
    """Whether the result may share memory with an argument; anything but an op of torch may."""
    if not isinstance(op, torch._ops.OpOverload) or op in _IDENTITIES_IN_EVAL:
        return True
    return any(a.alias_info is not None for a in op._schema.arguments)


def _out_of_place(node: Node) -> torch._ops.OpOverload | None:
    """The out-of-place twin of an in-place op on a value of its own, or None."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.is_mutable or op.namespace != "aten":
        return None
    name = op._schema.name.split("::")[1]
    twin = getattr(getattr(torch.ops.aten, name[:-1], None), op._overloadname, None) if name.endswith("_") else None
    value: Any = node.args[0]
    if twin is None or not isinstance(value, Node) or not (_is_fresh(value) and _is_fresh(node)):
        return None
    dtypes = {n.meta["val"].dtype for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)}
    return twin if len(dtypes) == 1 else None  # in place keeps the dtype, out of place would promote


def _is_fresh(node: Node) -> bool:
    """Whether the node's memory is new (or its in-place op's input's was) and no view of it is taken."""
    ops = [node.target, *(user.target for user in node.users if user.op != "output")]
    return node.op == "call_function" and not any(
        not isinstance(op, torch._ops.OpOverload)
        or any(a.alias_info is not None and not a.alias_info.is_write for a in op._schema.arguments)
        for op in ops
    )


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


def _with_export_meta(segment: GraphModule) -> GraphModule:
    """A copy of the graph over the same state, whose nodes carry through export where they come from."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(segment.graph, copies))  # type: ignore[arg-type]
    for old, new in copies.items():
        custom = {"fx_node": old.name}
        for key in ("source", "module_path"):
            if old.meta.get(key) is not None:
                custom[key] = old.meta[key]
        new.meta = {"custom": custom}
        if new.op not in ("placeholder", "output"):
            # torch.export refuses a node of the name that it will give to a placeholder (a buffer's last name, say)
            new._rename(_PREFIX + old.name)
    return GraphModule(segment, graph)


def _export(
    marked: GraphModule, inputs: list[TensorSpec], example: tuple[Tensor, ...], segment: GraphModule
) -> ExportedProgram:
    """Try shared symbols; where the model relates dimensions in another way (2*b), let export find the relations."""
    from torch._dynamo.exc import UserError

    attempts = [_shared_dims(inputs), _independent_dims(inputs)] if any(i.dynamic for i in inputs) else [None]
    failure: Exception | None = None
    for shapes in attempts:
        try:
            return torch.export.export(marked, example, dynamic_shapes=shapes, strict=False)
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
        node = next((n for n in segment.graph.nodes if n.name == name), None)
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
