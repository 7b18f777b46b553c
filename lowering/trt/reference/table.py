"""Which function compiles which type of layer: one entry per `LayerType`, so that nothing is run by a guess."""

from __future__ import annotations

from collections.abc import Callable

from lowering.trt.reference.kernel import Kernel, Layer
from lowering.trt.reference.ops import (
    attention,
    convolution,
    detection,
    elementwise,
    indexing,
    matmul,
    movement,
    normalization,
    pooling,
    quantization,
    reduction,
    resize,
    shapes,
)

__all__ = ["KERNELS", "UNSUPPORTED"]

#: Layer types that the executor refuses, and why.
UNSUPPORTED: dict[str, str] = {
    "PLUGIN": "runs code of its own",
    "PLUGIN_V2": "runs code of its own",
    "PLUGIN_V3": "runs code of its own",
    "DYNAMIC_QUANTIZE": "quantizes in blocks by run-time ranges, for FP4 and MXFP8 on data-centre GPUs",
    "MOE": "is a mixture of experts, which no vision model here uses",
    "DIST_COLLECTIVE": "works across several GPUs",
}


def _refuse(layer: Layer) -> Kernel:
    raise layer.unsupported(UNSUPPORTED[layer.record.type])


def _compound(layer: Layer) -> Kernel:
    raise layer.unsupported("belongs to a loop or a conditional, and can't be executed alone")


KERNELS: dict[str, Callable[[Layer], Kernel]] = {
    "CONVOLUTION": convolution.convolution,
    "DECONVOLUTION": convolution.deconvolution,
    "GRID_SAMPLE": resize.grid_sample,
    "NMS": detection.nms,
    "ACTIVATION": elementwise.activation,
    "POOLING": pooling.pooling,
    "LRN": normalization.lrn,
    "SCALE": elementwise.scale,
    "SOFTMAX": reduction.softmax,
    "CONCATENATION": movement.concatenation,
    "ELEMENTWISE": elementwise.elementwise,
    "UNARY": elementwise.unary,
    "PADDING": movement.padding,
    "SHUFFLE": movement.shuffle,
    "REDUCE": reduction.reduce,
    "TOPK": indexing.topk,
    "GATHER": indexing.gather,
    "MATRIX_MULTIPLY": matmul.matrix_multiply,
    "RAGGED_SOFTMAX": reduction.ragged_softmax,
    "CONSTANT": shapes.constant,
    "IDENTITY": elementwise.identity,
    "CAST": elementwise.cast,
    "SLICE": movement.slice_,
    "SHAPE": shapes.shape,
    "PARAMETRIC_RELU": elementwise.parametric_relu,
    "RESIZE": resize.resize,
    "SELECT": elementwise.select,
    "ASSERTION": shapes.assertion,
    "FILL": shapes.fill,
    "QUANTIZE": quantization.quantize,
    "DEQUANTIZE": quantization.dequantize,
    "SCATTER": indexing.scatter,
    "EINSUM": matmul.einsum,
    "ONE_HOT": indexing.one_hot,
    "NON_ZERO": indexing.non_zero,
    "REVERSE_SEQUENCE": movement.reverse_sequence,
    "NORMALIZATION": normalization.normalization,
    "SQUEEZE": movement.squeeze,
    "UNSQUEEZE": movement.unsqueeze,
    "CUMULATIVE": reduction.cumulative,
    "ATTENTION_INPUT": attention.attention_input,
    "ATTENTION_OUTPUT": attention.attention_output,
    "ROTARY_EMBEDDING": attention.rotary_embedding,
    "KV_CACHE_UPDATE": attention.kv_cache_update,
    "TRIP_LIMIT": _compound,
    "RECURRENCE": _compound,
    "ITERATOR": _compound,
    "LOOP_OUTPUT": _compound,
    "CONDITION": _compound,
    "CONDITIONAL_INPUT": _compound,
    "CONDITIONAL_OUTPUT": _compound,
    **dict.fromkeys(UNSUPPORTED, _refuse),
}
