"""Test cases of the `onnx` package that NVIDIA's parser accepts, but whose recorded outputs its network does not give.

By cause. The list is held exact: a case that fails unlisted fails the tests, and so does a listed one that passes.
"""

from __future__ import annotations

__all__ = ["EXCEPTIONS", "EXCEPTIONS_DYNAMIC"]

_BY_CAUSE: dict[str, tuple[str, ...]] = {
    "The parser drops the input nonpad_kv_seqlen of Attention: the network has no layer that uses it.": (
        "test_attention_4d_causal_nonpad_batch_prefill",
        "test_attention_4d_causal_nonpad_continued_prefill",
        "test_attention_4d_causal_nonpad_negative_offset_structural_empty",
        "test_attention_4d_gqa_causal_nonpad_decode",
        "test_attention_4d_gqa_causal_nonpad_decode_fp16",
    ),
    "The parser drops left_window_size and right_window_size of Attention.": (
        "test_attention_bidirectional_window",
        "test_attention_local_window",
    ),
    "A row whose every key is masked has no softmax: NaN here, 0 recorded. What the device gives is not known.": (
        "test_attention_23_boolmask_fullymasked_row_nan_robustness",
    ),
    (
        "TensorRT keeps a pooling window that starts in the padding (EXPLICIT_ROUND_UP), ONNX drops it; NVIDIA's "
        "own shape inference says so."
    ): (
        "test_averagepool_2d_ceil_last_window_starts_on_pad",
        "test_maxpool_2d_ceil_output_size_reduce_by_one",
    ),
    "Random values: the recorded ones come from another generator, so the executor refuses.": (
        "test_bernoulli_double_expanded",
        "test_bernoulli_seed_expanded",
    ),
    (
        "NaN to FP4, which has none: 6 as NVIDIA's conversion instruction defines (PTX ISA, cvt.satfinite), -0 "
        "recorded."
    ): (
        "test_cast_FLOAT16_to_FLOAT4E2M1",
        "test_cast_FLOAT_to_FLOAT4E2M1",
        "test_castlike_FLOAT16_to_FLOAT4E2M1",
        "test_castlike_FLOAT16_to_FLOAT4E2M1_expanded",
        "test_castlike_FLOAT_to_FLOAT4E2M1",
        "test_castlike_FLOAT_to_FLOAT4E2M1_expanded",
    ),
    "The parser drops saturate=0: a Cast layer to FP8 has no such attribute.": (
        "test_cast_no_saturate_FLOAT16_to_FLOAT8E4M3FN",
        "test_cast_no_saturate_FLOAT_to_FLOAT8E4M3FN",
        "test_castlike_no_saturate_FLOAT16_to_FLOAT8E4M3FN",
        "test_castlike_no_saturate_FLOAT16_to_FLOAT8E4M3FN_expanded",
        "test_castlike_no_saturate_FLOAT_to_FLOAT8E4M3FN",
        "test_castlike_no_saturate_FLOAT_to_FLOAT8E4M3FN_expanded",
    ),
    "The parser drops layout=1 of RNN, GRU and LSTM: the network iterates over the batch.": (
        "test_gru_batchwise",
        "test_lstm_batchwise",
        "test_simple_rnn_batchwise",
    ),
    (
        "TensorRT lists the boxes of a batch by falling score over all classes, ONNX class by class: the same rows "
        "in another order."
    ): ("test_nonmaxsuppression_two_classes",),
    (
        "The parser makes a uint8 quantization an Int8 one (the network's output is Int8); the builder refuses its "
        "zero point."
    ): (
        "test_quantizelinear",
        "test_quantizelinear_axis",
    ),
    "The parser drops mode=CRD of SpaceToDepth.": ("test_spacetodepth_crd_mode_example",),
    (
        "The parser takes a Trilu without the attribute upper for a lower one; ONNX's default is upper=1. With "
        "upper=1 spelled out it is right."
    ): (
        "test_triu",
        "test_triu_neg",
        "test_triu_one_row",
        "test_triu_out_neg_out",
        "test_triu_out_pos",
        "test_triu_pos",
        "test_triu_square",
        "test_triu_square_neg",
    ),
}

#: The cause of each exception, by the name of the case.
EXCEPTIONS: dict[str, str] = {name: cause for cause, names in _BY_CAUSE.items() for name in names}

_BY_CAUSE_DYNAMIC: dict[str, tuple[str, ...]] = {
    "The parser drops left_window_size of Attention.": ("test_attention_3d_local_window",),
    "The parser pads a mask that is shorter than the keys only where it knows the sizes.": (
        "test_attention_4d_diff_heads_mask4d_padded_kv",
        "test_attention_4d_padded_kv_bf16",
    ),
    "The parser takes dimension 0 out of a vector-matrix product, but the vector's is dimension 1.": (
        "test_matmul_1d_3d",
    ),
}

#: Further exceptions of the cases whose sizes are unknown.
EXCEPTIONS_DYNAMIC: dict[str, str] = {name: cause for cause, names in _BY_CAUSE_DYNAMIC.items() for name in names}
