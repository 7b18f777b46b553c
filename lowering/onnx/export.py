"""An aten program as an ONNX model, by torch's own exporter.

There is no op converter here. Before the exporter, ops that it has no form for become others (`lowering.onnx.legalize`)
and the aten graph gets what the exporter's metadata needs to name nodes (`_named_program`); after it, a few rewrites of
the ONNX graph state the same computation in the form that runtimes look for (`lowering.onnx.rewrites`).
"""

from __future__ import annotations

import ast
import os
import re
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Node

from fx_passes.capture.exclusive import in_turn
from fx_passes.errors import ArtifactError, ExportError
from fx_passes.graph.node_meta import source_line
from lowering.onnx.legalize import check_translations, legalize
from lowering.segment.normal_form.state import output_specs

if TYPE_CHECKING:
    import onnx
    import onnx_ir
    from torch.export import ExportedProgram

    from lowering.segment.program import AtenProgram

__all__ = ["export_onnx"]

_LARGEST_MESSAGE = 2**31 - 2**20  # protobuf refuses 2 GB; the rest is for the graph around the weights


@in_turn
def export_onnx(
    program: AtenProgram, path: str | os.PathLike[str] | None = None, *, opset: int | None = None
) -> onnx.ModelProto:
    """Export a program to ONNX, check it, and write it if a path is given.

    Args:
        program: what `to_aten` gave, perhaps with its float part cast.
        path: the file to write. Weights above 2 GB in all go to `<path>.data` beside it.
        opset: by default 21, or 23 where a Q or DQ reads or gives Half (invalid before).

    Returns:
        The model. Inputs and outputs carry the program's names; nodes are called after the module they come from
        (`layer1.0.conv1`); the only metadata is `source`, "file.py:12". The bytes depend on the program alone.

    Raises:
        ExportError: the exporter or the ONNX checker refuses, or the opset is too low for the program.
        ArtifactError: the file cannot be written.
    """
    least = 23 if _half_meets_quantization(program) else 18
    opset = max(21, least) if opset is None else opset
    if opset < least:
        why = "Q/DQ on Half tensors is invalid before" if least == 23 else "torch's exporter begins with"
        raise ExportError(f"opset {opset} is too low for this program: {why} opset {least}")
    model = _run_exporter(program, opset)
    return _finish(model, path)


def _half_meets_quantization(program: AtenProgram) -> bool:
    for node in program.call_nodes():
        if "quantize_per_" in str(node.target):
            values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
            if any(isinstance(v, torch.Tensor) and v.dtype in (torch.float16, torch.bfloat16) for v in values):
                return True
    return False


def _run_exporter(program: AtenProgram, opset: int) -> onnx_ir.Model:
    from fx_passes.capture.quiet import quiet_torch
    from lowering.onnx.rewrites import canonicalize

    check_translations(program.graph)
    prepared = _named_program(program)
    try:
        with quiet_torch():
            exported = torch.onnx.export(
                prepared,
                (),
                dynamo=True,
                opset_version=opset,
                input_names=[spec.name for spec in program.inputs],
                output_names=program.outputs,
                optimize=False,  # see rewrites.canonicalize
                verbose=False,
            )
    except Exception as error:
        raise _exporter_error(error, program, prepared) from error
    assert exported is not None
    model = exported.model
    if model.opset_imports[""] != opset:
        raise ExportError(f"the exporter gave opset {model.opset_imports['']} where {opset} was asked for")
    canonicalize(model)
    _name_nodes(model)
    _name_dimensions(model, program)
    return model


def _exporter_error(error: Exception, program: AtenProgram, prepared: Any) -> ExportError:
    """The exporter's words, at the node that it could not translate."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None:
        chain.append(current)
        current = current.__cause__
    text = str(chain[-1]).strip().splitlines()
    names = {name for e in chain for name in re.findall(r"%(\w+) : \[num_users", str(e))}
    labels = {_scope(n, "label") for n in prepared.decomposed.graph.nodes if n.name in names}
    node = next((n for n in program.call_nodes() if _label(n) in labels), None)
    return ExportError(
        f"torch's ONNX exporter: {text[0] if text else type(error).__name__}",
        node=node,
        hint="wrap() the function around this line so that it stays in Python",
    )


def _scope(node: Node, key: str) -> str | None:
    found = node.meta.get("nn_module_stack", {}).get(key)
    return found[0] if found else None


def _named_program(program: AtenProgram) -> Any:
    """A copy of the graph over the same weights, for the exporter to edit; nodes carry their label and source line."""
    from torch.export import ExportedProgram

    class Prepared(ExportedProgram):
        """An exported program that is decomposed again only if the exporter has an op to decompose.

        The exporter asks for `run_decompositions` with a table of all the ops it cannot translate. For a functional
        program that has none of them the result is the same graph, after two more traces.
        """

        def run_decompositions(self, decomp_table: Any = None, **options: Any) -> ExportedProgram:
            self.decomposed: ExportedProgram = self
            if decomp_table is None or any(n.target in decomp_table for n in self.graph.nodes):
                self.decomposed = super().run_decompositions(decomp_table, **options)
            return self.decomposed

    source = program.exported
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(source.graph, copies))  # type: ignore[arg-type]
    for old, new in copies.items():
        if old.op == "call_function":
            stack = {"label": (_label(old), "")}
            if (line := source_line(old)) is not None:
                stack["source"] = (line, "")
            new.meta = {"val": old.meta["val"], "nn_module_stack": stack}
    legalize(graph)
    return Prepared(
        root=GraphModule(source.graph_module, graph),
        graph=graph,
        graph_signature=replace(source.graph_signature, output_specs=output_specs(graph)),
        state_dict=source.state_dict,
        range_constraints=source.range_constraints,
        module_call_graph=source.module_call_graph,
        constants=source.constants,
        verifiers=source.verifiers,
    )


def _label(node: Node) -> str:
    """`layer1.0.conv1` for the call of that module, `layer1.0.add` for an op in the forward of `layer1.0`.

    FX calls the call of module `layer1.0.conv1` `layer1_0_conv1`, in the forward of `layer1.0`.
    """
    name = str(node.meta.get("fx_node", node.name))
    path = str(node.meta.get("module_path") or "")
    prefix = path.replace(".", "_")
    if not path or name == prefix:
        return path or name
    return f"{path}.{name.removeprefix(f'{prefix}_')}"


def named_node(program: AtenProgram, operator: str | None) -> Node | None:
    """The aten node that the ONNX node called `operator` was made of, or None."""
    if operator is None:
        return None
    nodes = {_label(node): node for node in program.call_nodes()}
    for name in (operator, re.sub(r"_\d+$", "", operator), operator.rpartition("/")[0]):
        if name in nodes:
            return nodes[name]
    return None


def _name_nodes(model: onnx_ir.Model) -> None:
    """Names from the labels, made distinct; metadata, which holds paths and torch's own frames, reduced to `source`."""
    graph = model.graph
    nodes = list(graph)
    labels = [_scopes(node) for node in nodes]
    shared = Counter(label for label, _ in labels if label)
    taken: Counter[str] = Counter()
    for node, (label, source) in zip(nodes, labels, strict=True):
        name = label or node.name or node.op_type
        if shared[label] > 1:
            name = f"{name}/{node.op_type}"
        taken[name] += 1
        node.name = name if taken[name] == 1 else f"{name}_{taken[name] - 1}"
        node.metadata_props.clear()
        if source:
            node.metadata_props["source"] = source
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*graph.inputs, *graph.initializers.values()):
        value.metadata_props.clear()
    graph.metadata_props.clear()
    model.metadata_props.clear()
    graph.name = "main"


def _scopes(node: onnx_ir.Node) -> tuple[str, str]:
    """Label and source line, as `_named_program` put them into the module stack."""
    scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
    if len(scopes) < 2:
        return "", ""
    return str(scopes[0]), str(scopes[1]) if len(scopes) > 2 else ""


def _name_dimensions(model: onnx_ir.Model, program: AtenProgram) -> None:
    """Free dimensions by the caller's names, else "batch" or `<input>_<dimension>`, instead of torch's symbols."""
    import onnx_ir as ir

    names: dict[str, str] = {}
    for value, spec in zip(model.graph.inputs, program.inputs, strict=True):
        assert value.shape is not None
        for d, size in enumerate(value.shape):
            given = spec.symbols[d] if spec.symbols else None
            if isinstance(size, ir.SymbolicDim) and size.value is not None:
                names.setdefault(
                    size.value, given or ("batch" if d == 0 and "batch" not in names.values() else f"{spec.name}_{d}")
                )
    pattern = re.compile("|".join(rf"\b{re.escape(n)}\b" for n in sorted(names, key=len, reverse=True)) or r"(?!)")
    values = [*model.graph.inputs, *(v for node in model.graph for v in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape(
                [
                    pattern.sub(lambda m: names[m.group()], d.value) if isinstance(d, ir.SymbolicDim) and d.value else d
                    for d in value.shape
                ]
            )


def _finish(model: onnx_ir.Model, path: str | os.PathLike[str] | None) -> onnx.ModelProto:
    """Serialize, check, write."""
    import onnx_ir as ir

    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    if size > _LARGEST_MESSAGE:
        return _finish_large(model, path)
    proto = ir.to_proto(model)
    _check(proto)
    if path is not None:
        _write(Path(path), lambda temporary: temporary.write_bytes(proto.SerializeToString(deterministic=True)))
    return proto


def _finish_large(model: onnx_ir.Model, path: str | os.PathLike[str] | None) -> onnx.ModelProto:
    """Above 2 GB the weights lie in a file of their own, and the checker has to read the file."""
    import onnx
    import onnx_ir as ir

    if path is None:
        raise ExportError(
            "the weights are above 2 GB, which ONNX stores beside the model", hint="give a path to write to"
        )
    path = Path(path)

    def save(temporary: Path) -> None:
        ir.save(model, temporary, external_data=f"{path.name}.data")
        _check(str(temporary))

    _write(path, save)
    return onnx.load(path, load_external_data=False)


def _check(model: Any) -> None:
    import onnx

    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise ExportError(f"onnx.checker refuses the exported model: {str(error).strip().splitlines()[0]}") from error


def _write(path: Path, save: Any) -> None:
    """Under a temporary name first, so that a reader never sees half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(descriptor)
        temporary = Path(name)
        try:
            save(temporary)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ArtifactError(
            f"cannot write {path}: {error.strerror}", hint="choose a folder that you may write to"
        ) from error
