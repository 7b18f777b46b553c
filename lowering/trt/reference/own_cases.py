"""Small ONNX models for uses of layers that the `onnx` package's own cases lack but our converters need.

Their recorded outputs are those of ONNX Runtime without optimisations, so they are outside truth too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["MODELS", "feed_of", "make_cases", "onnx_model"]

#: Models in ONNX's textual syntax, by name; opset 20. Inputs are drawn by type, see `feed_of`.
MODELS: dict[str, str] = {
    "clip_from_zero": "(float[2,5] x) => (float[2,5] y) <float a = {0}, float b = {6}> { y = Clip(x, a, b) }",
    "clip_positive": "(float[2,5] x) => (float[2,5] y) <float a = {0.5}, float b = {1.5}> { y = Clip(x, a, b) }",
    "clip_to_minus_one": "(float[2,5] x) => (float[2,5] y) <float a = {-1}, float b = {-1}> { y = Clip(x, a, b) }",
    "int64_to_uint8": "(int64[9] x) => (uint8[9] y) { y = Cast<to = 2>(x) }",
    "uint8_to_float": "(uint8[9] x) => (float[9] y) { y = Cast<to = 1>(x) }",
    "int8_to_float": "(int8[9] x) => (float[9] y) { y = Cast<to = 1>(x) }",
    "int32_to_int64": "(int32[9] x) => (int64[9] y) { y = Cast<to = 7>(x) }",
    "concat_bool": "(bool[2,3] a, bool[2,2] b) => (bool[2,5] y) { y = Concat<axis = 1>(a, b) }",
    "slice_bool": """(bool[4,5] x) => (bool[2,2] y) <int64[2] s = {1, 0}, int64[2] e = {3, 5}, int64[2] a = {0, 1},
        int64[2] t = {1, 3}> { y = Slice(x, s, e, a, t) }""",
    "prelu_by_channel": "(float[2,3,4] x) => (float[2,3,4] y) <float[3,1] s = {0.1, 0.2, -0.3}> { y = PRelu(x, s) }",
    "scale_one_by_three": "(float[2,3] x) => (float[2,3] y) <float[1,3] s = {0.1, 0.2, -0.3}> { y = Mul(x, s) }",
    "conv_pads_one_two": """(float[1,2,7,9] x, float[4,2,2,4] w) => (float y)
        { y = Conv<pads = [0, 1, 1, 2], dilations = [1, 1]>(x, w) }""",
    "conv_free_sizes": """(float[n,2,h,w0] x, float[4,2,3,3] w) => (float y)
        { y = Conv<pads = [1, 1, 1, 1], strides = [2, 1]>(x, w) }""",
    "conv_transposed_kernels": """(float[1,4,5,6] x, float[4,3,3,4] w) => (float y)
        { y = ConvTranspose<pads = [1, 0, 1, 0], strides = [2, 3]>(x, w) }""",
    "conv_transposed_output_padding": """(float[1,4,5,6] x, float[4,3,3,3] w) => (float y)
        { y = ConvTranspose<pads = [0, 1, 0, 1], strides = [2, 3], output_padding = [0, 1]>(x, w) }""",
    "conv_transposed_padded": """(float[1,4,5,6] x, float[4,3,3,3] w) => (float y)
        { y = ConvTranspose<pads = [1, 1, 1, 1], strides = [2, 2]>(x, w) }""",
    "conv_transposed_padded_after": """(float[1,4,5,6] x, float[4,3,3,3] w) => (float y)
        { y = ConvTranspose<pads = [0, 0, 1, 0], strides = [1, 2]>(x, w) }""",
    "conv_transposed_grouped": """(float[2,4,5,6] x, float[4,2,3,3] w, float[4] b) => (float y)
        { y = ConvTranspose<pads = [1, 1, 0, 1], strides = [1, 2], group = 2>(x, w, b) }""",
    "conv_transposed_free_batch": """(float[n,4,5,6] x, float[4,3,3,3] w) => (float y)
        { y = ConvTranspose<pads = [1, 0, 0, 0], strides = [2, 1]>(x, w) }""",
    "cumsum_int64": "(int64[3,4] x) => (int64[3,4] y) <int64 a = {1}> { y = CumSum(x, a) }",
    "greater_int32": "(int32[3,4] a, int32[4] b) => (bool[3,4] y) { y = Greater(a, b) }",
    "reduce_max_int32": "(int32[3,4] x) => (int32 y) <int64[1] a = {1}> { y = ReduceMax<keepdims = 0>(x, a) }",
    "reduce_min_int32": "(int32[3,4] x) => (int32 y) <int64[1] a = {0}> { y = ReduceMin(x, a) }",
    "reduce_min_int64": "(int64[3,4] x) => (int64 y) <int64[1] a = {1}> { y = ReduceMin(x, a) }",
    "reduce_max_int64": "(int64[3,4] x) => (int64 y) <int64[1] a = {1}> { y = ReduceMax(x, a) }",
    "reduce_sum_int64": "(int64[3,4] x) => (int64 y) <int64[1] a = {1}> { y = ReduceSum(x, a) }",
    "reduce_prod_int32": "(int32[3,4] x) => (int32 y) <int64[1] a = {1}> { y = ReduceProd(x, a) }",
    "abs_int64": "(int64[9] x) => (int64[9] y) { y = Abs(x) }",
    "sign_int64": "(int64[9] x) => (int64[9] y) { y = Sign(x) }",
    "neg_int64": "(int64[9] x) => (int64[9] y) { y = Neg(x) }",
    "layer_norm_last": """(float[2,3,8] x, float[8] s, float[8] b) => (float[2,3,8] y)
        { y = LayerNormalization<axis = -1, epsilon = 0.001>(x, s, b) }""",
    "layer_norm_two": """(float[2,3,8] x, float[3,8] s, float[3,8] b) => (float[2,3,8] y)
        { y = LayerNormalization<axis = 1>(x, s, b) }""",
    "instance_norm_1d": """(float[2,3,8] x, float[3] s, float[3] b) => (float[2,3,8] y)
        { y = InstanceNormalization<epsilon = 0.001>(x, s, b) }""",
    "max_pool_pads_zero_one": """(float[1,2,7,9] x) => (float y)
        { y = MaxPool<kernel_shape = [2, 3], pads = [0, 1, 1, 1]>(x) }""",
    "average_pool_pads_zero_one": """(float[1,2,7,9] x) => (float y)
        { y = AveragePool<kernel_shape = [2, 3], pads = [0, 1, 0, 1], strides = [3, 2]>(x) }""",
    "average_pool_counting_pads": """(float[1,2,7,9] x) => (float y)
        { y = AveragePool<kernel_shape = [4, 3], pads = [1, 1, 2, 1], strides = [3, 2], count_include_pad = 1>(x) }""",
    "average_pool_three_pads": """(float[1,2,7,9,8] x) => (float y)
        { y = AveragePool<kernel_shape = [2, 3, 4], pads = [0, 1, 1, 1, 0, 2], strides = [1, 2, 2]>(x) }""",
    "resize_to_size": """(float[1,2,5,6] x) => (float y) <int64[4] s = {1, 2, 9, 11}>
        { y = Resize<mode = "linear", coordinate_transformation_mode = "half_pixel">(x, , , s) }""",
    "resize_to_size_corners": """(float[1,2,5,6] x) => (float y) <int64[4] s = {1, 2, 3, 11}>
        { y = Resize<mode = "linear", coordinate_transformation_mode = "align_corners">(x, , , s) }""",
    "resize_cubic": """(float[1,2,5,6] x) => (float y) <int64[4] s = {1, 2, 9, 11}> { y = Resize<mode = "cubic",
        coordinate_transformation_mode = "half_pixel", cubic_coeff_a = -0.75>(x, , , s) }""",
    "resize_cubic_corners": """(float[1,2,5,6] x) => (float y) <int64[4] s = {1, 2, 9, 11}> { y = Resize<mode = "cubic",
        coordinate_transformation_mode = "align_corners", cubic_coeff_a = -0.75>(x, , , s) }""",
    "resize_nearest_floor": """(float[1,2,5,6] x) => (float y) <int64[4] s = {1, 2, 8, 4}>
        { y = Resize<mode = "nearest",
        coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">(x, , , s) }""",
    "resize_nearest_exact": """(float[1,2,5,6] x) => (float y) <int64[4] s = {1, 2, 8, 4}>
        { y = Resize<mode = "nearest",
        coordinate_transformation_mode = "half_pixel", nearest_mode = "round_prefer_ceil">(x, , , s) }""",
    "resize_one_dimension": """(float[1,2,1,6] x) => (float y) <int64[4] s = {1, 2, 1, 9}>
        { y = Resize<mode = "linear", coordinate_transformation_mode = "half_pixel">(x, , , s) }""",
    "resize_batch": """(float[2,3,5,6] x) => (float y) <int64[4] s = {2, 3, 9, 11}>
        { y = Resize<mode = "linear", coordinate_transformation_mode = "half_pixel">(x, , , s) }""",
    "resize_scales": """(float[1,2,5,6] x) => (float y) <float[4] s = {1, 1, 2.5, 1.5}>
        { y = Resize<mode = "linear", coordinate_transformation_mode = "half_pixel">(x, , s) }""",
    "scatter_elements_axis_two": """(float[2,3,4] x, float[2,3,1] u) => (float[2,3,4] y)
        <int64[2,3,1] i = {0, 1, 2, 3, 0, 1}> { y = ScatterElements<axis = 2>(x, i, u) }""",
    "reshape_flat": "(float[2,3,4] x) => (float y) <int64[1] s = {-1}> { y = Reshape(x, s) }",
    "slice_empty": """(float[4,5] x) => (float[0,5] y) <int64[1] s = {2}, int64[1] e = {2}, int64[1] a = {0}>
        { y = Slice(x, s, e, a) }""",
    "slice_one": """(float[4,5] x) => (float[1,1] y) <int64[2] s = {2, 1}, int64[2] e = {3, 2}, int64[2] a = {0, 1}>
        { y = Slice(x, s, e, a) }""",
    "slice_offsets": """(float[4,5,6] x) => (float y) <int64[3] s = {0, 1, 2}, int64[3] e = {4, 5, 6},
        int64[3] a = {0, 1, 2},
        int64[3] t = {1, 1, 2}> { y = Slice(x, s, e, a, t) }""",
    "slice_all_backwards": """(float[4,2,6] x) => (float[4,2,6] y) <int64[3] s = {-1, -1, -1},
        int64[3] e = {-9, -9, -9},
        int64[3] a = {0, 1, 2}, int64[3] t = {-1, -1, -1}> { y = Slice(x, s, e, a, t) }""",
    "slice_some_backwards": """(float[4,2,6] x) => (float[4,2,6] y) <int64[2] s = {-1, -1}, int64[2] e = {-9, -9},
        int64[2] a = {1, 2}, int64[2] t = {-1, -1}> { y = Slice(x, s, e, a, t) }""",
    "slice_one_of_five": """(float[5] x) => (float[1] y) <int64[1] s = {2}, int64[1] e = {3}> { y = Slice(x, s, e) }""",
    "slice_nothing": """(float[2,3,4] x) => (float[2,0,4] y) <int64[1] s = {1}, int64[1] e = {1}, int64[1] a = {1}>
        { y = Slice(x, s, e, a) }""",
    "slice_backwards": """(float[4,5] x) => (float[4,5] y) <int64[1] s = {-1}, int64[1] e = {-9}, int64[1] a = {1},
        int64[1] t = {-1}> { y = Slice(x, s, e, a, t) }""",
    "pad_reflect": """(float[2,5] x) => (float[3,9] y) <int64[4] p = {1, 3, 0, 1}>
        { y = Pad<mode = "reflect">(x, p) }""",
    "pad_edge": """(float[2,5] x) => (float[3,9] y) <int64[4] p = {1, 3, 0, 1}> { y = Pad<mode = "edge">(x, p) }""",
    "pad_wrap": """(float[2,5] x) => (float[3,9] y) <int64[4] p = {1, 3, 0, 1}> { y = Pad<mode = "wrap">(x, p) }""",
    "pad_left_with_one": """(float[2,5] x) => (float[2,6] y) <int64[4] p = {0, 1, 0, 0}, float v = {1}>
        { y = Pad(x, p, v) }""",
    "topk_three": "(float[2,8] x) => (float[2,3] y, int64[2,3] i) <int64[1] k = {3}> { y, i = TopK(x, k) }",
    "topk_smallest": """(float[2,8] x) => (float[2,3] y, int64[2,3] i) <int64[1] k = {3}>
        { y, i = TopK<largest = 0>(x, k) }""",
    "quantize_free_batch": """(float[n,3,4] x) => (float[n,3,4] y) <float s = {0.05}, int8 z = {0}>
        { q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }""",
    "dequantize_input": "(int8[2,3,4] x) => (float[2,3,4] y) <float s = {0.05}> { y = DequantizeLinear(x, s) }",
    "dequantize_by_channel": """(float[2,3,4] x) => (float[2,3,4] y) <float[3] s = {0.05, 0.1, 0.02},
        int8[3] z = {0, 0, 0}>
        { q = QuantizeLinear<axis = 1>(x, s, z)  y = DequantizeLinear<axis = 1>(q, s, z) }""",
    "dequantize_by_row": """(float[3,4] x) => (float[3,4] y) <float[3] s = {0.05, 0.1, 0.02}, int8[3] z = {0, 0, 0}>
        { q = QuantizeLinear<axis = 0>(x, s, z)  y = DequantizeLinear<axis = 0>(q, s, z) }""",
    "half_abs": "(float16[2,5] x) => (float16[2,5] y) { y = Abs(x) }",
    "half_exp": "(float16[2,5] x) => (float16[2,5] y) { y = Exp(x) }",
    "half_log": "(float16[2,5] x) => (float16[2,5] y) { a = Abs(x)  y = Log(a) }",
    "half_neg": "(float16[2,5] x) => (float16[2,5] y) { y = Neg(x) }",
    "half_less": "(float16[2,5] a, float16[5] b) => (bool[2,5] y) { y = Less(a, b) }",
    "half_pow": "(float16[2,5] a, float16[5] b) => (float16[2,5] y) { c = Abs(a)  y = Pow(c, b) }",
    "half_sum": "(float16[2,5] x) => (float16 y) <int64[1] a = {1}> { y = ReduceSum(x, a) }",
    "int_division": "(int64[9] x) => (int64[9] y) <int64[1] d = {4}> { y = Div(x, d) }",
    "gather_bool": """(bool[4,3] x) => (bool[2,3] y) <int64[2] i = {3, 1}> { y = Gather(x, i) }""",
    "neg_int32": "(int32[9] x) => (int32[9] y) { y = Neg(x) }",
    "reduce_prod_int64": "(int64[3,4] x) => (int64 y) <int64[1] a = {1}> { y = ReduceProd(x, a) }",
    "reduce_sum_int32": "(int32[3,4] x) => (int32 y) <int64[1] a = {1}> { y = ReduceSum(x, a) }",
    "scatter_elements_int64": """(int64[2,3] x, int64[2,1] u) => (int64[2,3] y) <int64[2,1] i = {2, 0}>
        { y = ScatterElements<axis = 1>(x, i, u) }""",
    "reshape_square": "(float[2,8] x) => (float[4,4] y) <int64[2] s = {4, 4}> { y = Reshape(x, s) }",
    "reshape_rest_one_and_some": """(float[2,3,4] x) => (float y) <int64[3] s = {-1, 1, 4}> { y = Reshape(x, s) }""",
    "empty_reduce_sum": "(float[0,3] x) => (float y) <int64[1] a = {0}> { y = ReduceSum<keepdims = 0>(x, a) }",
    "empty_softmax": "(float[0,3] x) => (float[0,3] y) { y = Softmax<axis = 1>(x) }",
    "empty_cumsum": "(float[0,3] x) => (float[0,3] y) <int64 a = {1}> { y = CumSum(x, a) }",
    "empty_matmul": "(float[3,0] a, float[0,2] b) => (float[3,2] y) { y = MatMul(a, b) }",
    "empty_layer_norm": """(float[0,2,3] x, float[3] s, float[3] b) => (float[0,2,3] y)
        { y = LayerNormalization<axis = -1>(x, s, b) }""",
    "empty_conv": "(float[0,2,7,9] x, float[4,2,3,3] w) => (float y) { y = Conv(x, w) }",
    "matmul_free_batch": "(float[n,3,4] a, float[n,4,5] b) => (float[n,3,5] y) { y = MatMul(a, b) }",
}

_DRAWS: dict[int, tuple[type, int, int]] = {2: (np.uint8, 0, 255), 3: (np.int8, -128, 127), 6: (np.int32, -5, 6)}


def onnx_model(text: str) -> Any:
    """The ONNX model of an entry of `MODELS`."""
    import onnx.parser

    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20]> main {text}')
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")  # "float y" would declare a scalar
    return model


def feed_of(model: Any) -> dict[str, np.ndarray]:
    """Inputs drawn with a fixed seed: normal floats, small integers, coins; a symbolic size becomes 3 and up."""
    rng = np.random.default_rng(0)
    feed: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = [d.dim_value if d.HasField("dim_value") else 3 + i for i, d in enumerate(tensor.shape.dim)]
        if tensor.elem_type in (1, 10):
            dtype = np.float32 if tensor.elem_type == 1 else np.float16
            feed[value.name] = (rng.standard_normal(shape) * 1.5).astype(dtype)
        elif tensor.elem_type == 9:
            feed[value.name] = rng.integers(0, 2, shape).astype(bool)
        else:
            integer, low, high = _DRAWS.get(tensor.elem_type, (np.int64, -9, 10))
            feed[value.name] = rng.integers(low, high, shape).astype(integer)
    return feed


def make_cases() -> list[tuple[str, Any, list[np.ndarray], list[np.ndarray]]]:
    """(name, model, inputs, outputs by ONNX Runtime) of every model."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    found = []
    for name, text in MODELS.items():
        model = onnx_model(text)
        feed = feed_of(model)
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found.append((name, model, list(feed.values()), session.run(None, feed)))
    return found
