"""Equivalent forms that runtimes look for, as rewrites of the exported ONNX graph. Each changes no value.

They exist because torch's exporter chooses among equivalent ONNX ops, and ONNX Runtime's and TensorRT's fusions match
only one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx_ir

__all__ = ["canonicalize"]


def canonicalize(model: onnx_ir.Model) -> None:
    """Apply all rewrites in place."""
    graph = model.graph
    if model.opset_imports[""] >= 23:
        _dequantize_to_cast_type(graph)
    _global_average_pools(graph)
    _zero_points_of_matmul_weights(graph)


def _dequantize_to_cast_type(graph: onnx_ir.Graph) -> None:
    """DequantizeLinear + Cast is DequantizeLinear with `output_dtype`, as TensorRT's convolution fusion expects it.

    torch's exporter writes `dequantize_per_tensor(..., out_dtype=torch.float16)` as two nodes.
    """
    import onnx_ir as ir

    for node in list(graph):
        if node.op_type != "DequantizeLinear":
            continue
        value = node.outputs[0]
        casts = [user for user, _ in value.uses()]
        types = {user.attributes["to"].as_int() for user in casts if user.op_type == "Cast"}
        if len(types) != 1 or any(user.op_type != "Cast" for user in casts) or value.is_graph_output():
            continue
        target = ir.DataType(types.pop())
        if target not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            continue
        node.attributes["output_dtype"] = ir.AttrInt64("output_dtype", int(target))
        value.dtype = target
        for cast in casts:
            _replace(graph, cast, value)


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


def _zero_points_of_matmul_weights(graph: onnx_ir.Graph) -> None:
    """Write out the zero point of a quantized Gemm or MatMul weight: ONNX Runtime makes a QGemm only then.

    (Measured with 1.32: the same graph without this input keeps a float Gemm. For Conv the input may be left out.)
    """
    import onnx_ir as ir

    for node in list(graph):
        if node.op_type not in ("Gemm", "MatMul"):
            continue
        weight = node.inputs[1]
        dequantize = weight.producer() if weight is not None else None
        if dequantize is None or dequantize.op_type != "DequantizeLinear":
            continue
        quantized, scale, *zero_point = dequantize.inputs
        if (zero_point and zero_point[0] is not None) or quantized is None or quantized.const_value is None:
            continue
        assert scale is not None and scale.const_value is not None
        name = f"{quantized.name}_zero_point"
        if name not in graph.initializers:
            zeros = np.zeros(scale.const_value.shape.numpy(), quantized.const_value.dtype.numpy())
            value = ir.Value(
                name=name,
                type=ir.TensorType(quantized.const_value.dtype),
                shape=ir.Shape(zeros.shape),
                const_value=ir.tensor(zeros, name=name),
            )
            graph.register_initializer(value)
        dequantize.resize_inputs(3)
        dequantize.replace_input_with(2, graph.initializers[name])


def _replace(graph: onnx_ir.Graph, node: onnx_ir.Node, value: onnx_ir.Value) -> None:
    """Let everything that reads the node's only output read `value`, which takes over its name, and drop the node."""
    import onnx_ir as ir

    old = node.outputs[0]
    name = old.name
    ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    if any(value is output for output in graph.outputs):
        value.name = name
