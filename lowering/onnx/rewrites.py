"""Equivalent forms that runtimes look for, as rewrites of the exported ONNX graph. Each changes no value.

They exist because torch's exporter chooses among equivalent ONNX ops, and ONNX Runtime's and TensorRT's fusions match
only one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx_ir
    from numpy.typing import DTypeLike

__all__ = ["canonicalize"]


def canonicalize(model: onnx_ir.Model) -> None:
    """Apply all rewrites in place."""
    _simplify(model)
    graph = model.graph
    if model.opset_imports[""] >= 23:
        _dequantize_to_cast_type(graph)
    _global_average_pools(graph)
    _single_groups(graph)
    _zero_points_of_weights(graph)
    _name_quantization_parameters(graph)


def _simplify(model: onnx_ir.Model) -> None:
    """Fold constants, inline functions, drop what is unused, store equal constants once.

    This is the exporter's `optimize=True` without its pattern rules: they took a third of the export of a ResNet-50,
    and what they do, the runtimes do again.
    """
    import onnx_ir as ir
    from onnx_ir.passes import common
    from onnxscript.optimizer import fold_constants

    common.InlinePass()(model)
    fold_constants(model)
    passes = ir.passes.Sequential(
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )
    passes(model)


def _dequantize_to_cast_type(graph: onnx_ir.Graph) -> None:
    """DequantizeLinear + Cast is DequantizeLinear with `output_dtype`, as TensorRT's convolution fusion expects it.

    torch's exporter writes `dequantize_per_tensor(..., out_dtype=torch.float16)` as two nodes.
    """
    import onnx_ir as ir

    for node in list(graph):
        source = node.inputs[0].producer() if node.op_type == "Cast" and node.inputs[0] is not None else None
        if source is None or source.op_type != "DequantizeLinear" or "output_dtype" in source.attributes:
            continue
        target = ir.DataType(node.attributes["to"].as_int())
        if target not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            continue
        attributes = [*source.attributes.values(), ir.AttrInt64("output_dtype", int(target))]
        metadata = dict(source.metadata_props)
        twin = ir.Node("", "DequantizeLinear", source.inputs, attributes, name=node.name, metadata_props=metadata)
        twin.outputs[0].type, twin.outputs[0].shape = ir.TensorType(target), node.outputs[0].shape
        graph.insert_before(node, twin)
        _replace(graph, node, twin.outputs[0])
        if not source.outputs[0].uses() and not source.outputs[0].is_graph_output():
            graph.remove(source, safe=True)


def _global_average_pools(graph: onnx_ir.Graph) -> None:
    """A mean over all spatial positions is GlobalAveragePool, which has an integer kernel in ONNX Runtime.

    (Its QDQ rules cover AveragePool and GlobalAveragePool, not ReduceMean: qdq_selector_action_transformer.cc.)
    """
    import onnx_ir as ir

    for node in list(graph):
        flat = False
        if node.op_type == "AveragePool" and _covers_input(node):
            pass
        elif node.op_type == "ReduceMean" and _reduces_space(node):
            flat = node.attributes.get_int("keepdims", 1) == 0
        else:
            continue
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        if x.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
            continue  # ONNX Runtime has no pool for others
        pool = ir.node("GlobalAveragePool", [x], name=node.name, metadata_props=dict(node.metadata_props))
        graph.insert_before(node, pool)
        result = pool.outputs[0]
        if flat:
            assert x.shape is not None
            result.type = y.type
            result.shape = ir.Shape([*x.shape[:2], *[1] * (len(x.shape) - 2)])
            flatten = ir.node("Flatten", [result], {"axis": 1}, metadata_props=dict(node.metadata_props))
            graph.insert_before(node, flatten)
            result = flatten.outputs[0]
        result.type, result.shape = y.type, y.shape
        _replace(graph, node, result)


def _covers_input(node: onnx_ir.Node) -> bool:
    x = node.inputs[0]
    kernel = node.attributes["kernel_shape"].as_ints()
    pads = node.attributes.get_ints("pads", [0])
    return x is not None and x.shape is not None and list(x.shape[2:]) == list(kernel) and not any(pads or [0])


def _reduces_space(node: onnx_ir.Node) -> bool:
    x, axes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if x is None or x.shape is None or len(x.shape) < 3 or axes is None or axes.const_value is None:
        return False
    reduced = sorted(int(a) % len(x.shape) for a in axes.const_value.numpy().ravel())
    return reduced == list(range(2, len(x.shape)))


def _single_groups(graph: onnx_ir.Graph) -> None:
    """GroupNormalization of one group is InstanceNormalization over all channels and positions as one channel.

    NVIDIA's parser (TensorRT-RTX 1.7) makes the same layer of GroupNormalization with one group and of
    InstanceNormalization, so every channel would get statistics of its own.
    """
    for node in list(graph):
        if node.op_type == "GroupNormalization" and node.attributes.get_int("num_groups") == 1:
            _replace(graph, node, _as_one_channel(graph, node))


def _as_one_channel(graph: onnx_ir.Graph, node: onnx_ir.Node) -> onnx_ir.Value:
    x, scale, shift = node.inputs
    y = node.outputs[0]
    assert x is not None and x.shape is not None and x.dtype is not None
    name, sizes, dtype = y.name, list(x.shape), x.dtype.numpy()

    def add(op: str, *inputs: onnx_ir.Value | None, **attributes: float) -> onnx_ir.Value:
        import onnx_ir as ir

        made = ir.node(op, inputs, attributes, metadata_props=dict(node.metadata_props))
        made.outputs[0].type = ir.TensorType(ir.DataType.INT64) if op == "Shape" else y.type
        graph.insert_before(node, made)
        return made.outputs[0]

    def constant(values: Sequence[int], suffix: str, dtype: DTypeLike = np.int64) -> onnx_ir.Value:
        return _initializer(graph, np.array(values, dtype), f"{name}_{suffix}")

    one, zero = constant([1], "one", dtype), constant([0], "zero", dtype)
    rows = add("Reshape", x, constant([0, 1, -1], "rows"))
    rows = add("InstanceNormalization", rows, one, zero, epsilon=node.attributes.get_float("epsilon", 1e-5))
    known = [d for d in sizes if isinstance(d, int)]
    normal = add("Reshape", rows, constant(known, "shape") if len(known) == len(sizes) else add("Shape", x))
    per_channel = constant([-1, *[1] * (len(sizes) - 2)], "channels")
    result = add("Mul", normal, add("Reshape", scale, per_channel))
    result = add("Add", result, add("Reshape", shift, per_channel))
    result.shape = y.shape
    producer = result.producer()
    assert producer is not None
    producer.name = node.name
    return result


def _initializer(graph: onnx_ir.Graph, value: np.ndarray, name: str) -> onnx_ir.Value:
    """A constant of the graph under that name, or the nearest free one."""
    import onnx_ir as ir

    while name in graph.initializers:
        name += "_"
    tensor = ir.tensor(value, name=name)
    made = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(value.shape), const_value=tensor)
    graph.register_initializer(made)
    return made


def _zero_points_of_weights(graph: onnx_ir.Graph) -> None:
    """Every quantized Gemm or MatMul weight has a zero point, and no two weights share one.

    Without it ONNX Runtime keeps a float Gemm (measured with 1.32; for Conv the input may be left out). Where weights
    share one, its option against saturation (`session.x64quantprecision`) fails: it converts each zero point twice.
    """
    import onnx_ir as ir

    for node in list(graph):
        stored = (
            node.inputs[0].const_value if node.op_type == "DequantizeLinear" and node.inputs[0] is not None else None
        )
        if stored is None or stored.dtype != ir.DataType.INT8:
            continue
        quantized, scale, *rest = node.inputs
        assert quantized is not None and scale is not None and scale.const_value is not None
        zero_point = rest[0] if rest else None
        multiplies = any(user.op_type in ("Gemm", "MatMul") for user, _ in node.outputs[0].uses())
        if zero_point is None and not multiplies:
            continue
        if zero_point is not None and (zero_point.const_value is None or len(zero_point.uses()) == 1):
            continue
        values = np.zeros(scale.const_value.shape.numpy(), np.int8)
        if zero_point is not None and zero_point.const_value is not None:
            values = zero_point.const_value.numpy()
        own = _initializer(graph, values, f"{quantized.name}_zero_point")
        if zero_point is None:
            node.resize_inputs(3)
        node.replace_input_with(2, own)


def _name_quantization_parameters(graph: onnx_ir.Graph) -> None:
    """Scales and zero points of weights are called after the weight: `fc.weight_scale` instead of `val_7`."""
    for node in graph:
        if node.op_type != "DequantizeLinear":
            continue
        quantized, *parameters = node.inputs
        if quantized is None or quantized.name not in graph.initializers:
            continue
        for parameter, suffix in zip(parameters, ("scale", "zero_point"), strict=False):
            name = f"{quantized.name}_{suffix}"
            own = parameter is not None and parameter.name in graph.initializers and len(parameter.uses()) == 1
            if parameter is not None and own and name not in graph.initializers:
                parameter.name = name


def _replace(graph: onnx_ir.Graph, node: onnx_ir.Node, value: onnx_ir.Value) -> None:
    """Let everything that reads the node's only output read `value`, which takes over its name, and drop the node."""
    import onnx_ir as ir

    old = node.outputs[0]
    name = old.name
    ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    if any(value is output for output in graph.outputs):
        value.name = name
