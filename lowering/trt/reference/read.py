"""`INetworkDefinition` → `NetworkRecord`.

`network.get_layer(i)` gives a bare `ILayer`; assigning `layer.__class__` exposes the properties of the real class. A
wrong class does not raise but reads garbage, so `LAYER_CLASSES` names the class of *every* `LayerType`, and an unknown
type is an error.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fx_passes.errors import BackendUnavailableError, BuildError, UnsupportedOpError
from lowering.trt.reference.records import Attribute, LayerRecord, NetworkRecord, TensorRecord

__all__ = ["LAYER_CLASSES", "LayerClass", "read_record"]


@dataclass(frozen=True)
class LayerClass:
    """How to read one type of layer.

    Attributes:
        name: the Python class.
        attributes: properties to record.
        weights: properties that hold weights.
        unless: attributes that may be asked for only if the input with that index is absent; otherwise the getter logs
            an ERROR, and a logger that collects errors would take it for a failed build.
        instead_of: attributes that may be asked for only if another one, read before them, is not set; likewise.
    """

    name: str
    attributes: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    unless: dict[str, int] = field(default_factory=dict)
    instead_of: dict[str, str] = field(default_factory=dict)


_CONVOLUTION = (
    "kernel_size_nd",
    "num_output_maps",
    "num_groups",
    "stride_nd",
    "dilation_nd",
    "padding_mode",
    "pre_padding",
    "post_padding",
)
_POOLING = (
    "type",
    "window_size_nd",
    "stride_nd",
    "padding_mode",
    "pre_padding",
    "post_padding",
    "blend_factor",
    "average_count_excludes_padding",
)
_RESIZE = (
    "resize_mode",
    "shape",
    "scales",
    "coordinate_transformation",
    "selector_for_single_pixel",
    "nearest_rounding",
    "exclude_outside",
    "cubic_coeff",
)

#: The class of each `LayerType`. Total: a test compares it with the installed bindings.
LAYER_CLASSES: dict[str, LayerClass] = {
    "CONVOLUTION": LayerClass("IConvolutionLayer", _CONVOLUTION, ("kernel", "bias")),
    "DECONVOLUTION": LayerClass("IDeconvolutionLayer", _CONVOLUTION, ("kernel", "bias")),
    "GRID_SAMPLE": LayerClass("IGridSampleLayer", ("interpolation_mode", "align_corners", "sample_mode")),
    "NMS": LayerClass("INMSLayer", ("bounding_box_format", "topk_box_limit", "indices_type")),
    "ACTIVATION": LayerClass("IActivationLayer", ("type", "alpha", "beta")),
    "POOLING": LayerClass("IPoolingLayer", _POOLING),
    "LRN": LayerClass("ILRNLayer", ("window_size", "alpha", "beta", "k")),
    "SCALE": LayerClass("IScaleLayer", ("mode", "channel_axis"), ("shift", "scale", "power")),
    "SOFTMAX": LayerClass("ISoftMaxLayer", ("axes",)),
    "CONCATENATION": LayerClass("IConcatenationLayer", ("axis",)),
    "ELEMENTWISE": LayerClass("IElementWiseLayer", ("op",)),
    "PLUGIN": LayerClass("ILayer"),
    "UNARY": LayerClass("IUnaryLayer", ("op",)),
    "PADDING": LayerClass("IPaddingLayer", ("pre_padding_nd", "post_padding_nd")),
    "SHUFFLE": LayerClass(
        "IShuffleLayer",
        ("first_transpose", "reshape_dims", "second_transpose", "zero_is_placeholder"),
        unless={"reshape_dims": 1},
    ),
    "REDUCE": LayerClass("IReduceLayer", ("op", "axes", "keep_dims")),
    "TOPK": LayerClass("ITopKLayer", ("op", "k", "axes", "indices_type"), unless={"k": 1}),
    "GATHER": LayerClass("IGatherLayer", ("mode", "axis", "num_elementwise_dims")),
    "MATRIX_MULTIPLY": LayerClass("IMatrixMultiplyLayer", ("op0", "op1")),
    "RAGGED_SOFTMAX": LayerClass("IRaggedSoftMaxLayer"),
    "CONSTANT": LayerClass("IConstantLayer", ("shape",), ("weights",)),
    "IDENTITY": LayerClass("IIdentityLayer"),
    "CAST": LayerClass("ICastLayer", ("to_type",)),
    "PLUGIN_V2": LayerClass("IPluginV2Layer"),
    "PLUGIN_V3": LayerClass("IPluginV3Layer"),
    "SLICE": LayerClass(
        "ISliceLayer",
        ("mode", "start", "shape", "stride", "axes"),
        unless={"start": 1, "shape": 2, "stride": 3, "axes": 5},
    ),
    "SHAPE": LayerClass("IShapeLayer"),
    "PARAMETRIC_RELU": LayerClass("IParametricReLULayer"),
    "RESIZE": LayerClass("IResizeLayer", _RESIZE, unless={"shape": 1, "scales": 1}, instead_of={"scales": "shape"}),
    "TRIP_LIMIT": LayerClass("ITripLimitLayer", ("kind", "loop")),
    "RECURRENCE": LayerClass("IRecurrenceLayer", ("loop",)),
    "ITERATOR": LayerClass("IIteratorLayer", ("axis", "reverse", "loop")),
    "LOOP_OUTPUT": LayerClass("ILoopOutputLayer", ("kind", "axis", "loop")),
    "SELECT": LayerClass("ISelectLayer"),
    "ASSERTION": LayerClass("IAssertionLayer", ("message",)),
    "FILL": LayerClass(
        "IFillLayer",
        ("operation", "shape", "alpha", "beta", "is_alpha_beta_int64", "to_type"),
        unless={"shape": 0, "alpha": 1, "beta": 2},
    ),
    "QUANTIZE": LayerClass("IQuantizeLayer", ("axis", "to_type")),
    "DEQUANTIZE": LayerClass("IDequantizeLayer", ("axis", "to_type")),
    "CONDITION": LayerClass("IConditionLayer", ("conditional",)),
    "CONDITIONAL_INPUT": LayerClass("IIfConditionalInputLayer", ("conditional",)),
    "CONDITIONAL_OUTPUT": LayerClass("IIfConditionalOutputLayer", ("conditional",)),
    "SCATTER": LayerClass("IScatterLayer", ("mode", "axis")),
    "EINSUM": LayerClass("IEinsumLayer", ("equation",)),
    "ONE_HOT": LayerClass("IOneHotLayer", ("axis",)),
    "NON_ZERO": LayerClass("INonZeroLayer", ("indices_type",)),
    "REVERSE_SEQUENCE": LayerClass("IReverseSequenceLayer", ("batch_axis", "sequence_axis")),
    "NORMALIZATION": LayerClass("INormalizationLayer", ("axes", "epsilon", "num_groups", "is_v2")),
    "SQUEEZE": LayerClass("ISqueezeLayer"),
    "UNSQUEEZE": LayerClass("IUnsqueezeLayer"),
    "CUMULATIVE": LayerClass("ICumulativeLayer", ("op", "exclusive", "reverse")),
    "DYNAMIC_QUANTIZE": LayerClass("IDynamicQuantizeLayer", ("axis", "block_size", "to_type", "scale_type")),
    "ATTENTION_INPUT": LayerClass("IAttentionInputLayer", ("attention",)),
    "ATTENTION_OUTPUT": LayerClass("IAttentionOutputLayer", ("attention",)),
    "ROTARY_EMBEDDING": LayerClass("IRotaryEmbeddingLayer", ("interleaved", "rotary_embedding_dim")),
    "KV_CACHE_UPDATE": LayerClass("IKVCacheUpdateLayer", ("cache_mode", "update_form")),
    "MOE": LayerClass("IMoELayer"),
    "DIST_COLLECTIVE": LayerClass("IDistCollectiveLayer"),
}

#: What an attention adds to the attributes of its two boundary layers. Absent in bindings that don't know it yet.
_ATTENTION = ("name", "norm_op", "causal", "causal_kind", "query_form", "key_value_form")
_ATTENTION_TENSORS = ("mask", "normalization_quantize_scale", "query_lengths", "key_value_lengths")


def read_record(network: Any, owned: Iterable[torch.Tensor] = ()) -> NetworkRecord:
    """Reads a finished `INetworkDefinition` into a plain record; weights are copied once, unless they are `owned`.

    Args:
        network: `tensorrt.INetworkDefinition` or `tensorrt_rtx.INetworkDefinition`.
        owned: tensors that the network points into and that nobody will change: they become part of the record.

    Returns:
        A record that stays valid when the network, its builder and the caller's weights are gone.

    Raises:
        UnsupportedOpError: a layer type that this package does not know.
        BuildError: a tensor without a shape, which means that defining the network failed.
    """
    return _Reader(network, owned).read()


class _Reader:
    def __init__(self, network: Any, owned: Iterable[torch.Tensor]):
        self.owned = {(t.data_ptr(), t.numel(), t.dtype): t for t in owned if t.is_contiguous() and t.numel()}
        self.trt = _module_of(network)
        self.network = network
        self.names: dict[int, str] = {}
        self.kept: list[Any] = []  # pybind gives the same object for the same tensor only while that object lives
        self.tensors: dict[str, TensorRecord] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.weight_keys: dict[tuple[int, int, str], str] = {}

    def read(self) -> NetworkRecord:
        network = self.network
        inputs = tuple(self.tensor(network.get_input(i)) for i in range(network.num_inputs))
        layers = tuple(self.layer(network.get_layer(i)) for i in range(network.num_layers))
        outputs = tuple(self.tensor(network.get_output(i)) for i in range(network.num_outputs))
        return NetworkRecord(network.name, inputs, outputs, layers, self.tensors, self.weights)

    def tensor(self, tensor: Any) -> str:
        """Records a tensor and returns its name, made unique where NVIDIA's parser gave one name to two."""
        known = self.names.get(id(tensor))
        if known is not None:
            return known
        name, count = tensor.name, 1
        while name in self.tensors:
            count += 1
            name = f"{tensor.name}#{count}"
        try:
            shape = tuple(tensor.shape)
        except RuntimeError as error:
            raise BuildError(
                f"tensor {name!r} has no shape: {error}", hint="the first ERROR of the builder's log names the cause"
            ) from error
        self.kept.append(tensor)
        self.names[id(tensor)] = name
        self.tensors[name] = TensorRecord(name, shape, tensor.dtype.name, tensor.is_shape_tensor)
        return name

    def layer(self, layer: Any) -> LayerRecord:
        type_name = layer.type.name
        how = LAYER_CLASSES.get(type_name)
        if how is None or not hasattr(self.trt, how.name):
            raise UnsupportedOpError(
                f"layer {layer.name!r} has type {type_name}, which the reader has no class for",
                hint="add it to LAYER_CLASSES in lowering/trt/reference/read.py",
            )
        inputs = tuple(self.optional(layer.get_input(i)) for i in range(layer.num_inputs))
        outputs = tuple(self.tensor(layer.get_output(i)) for i in range(layer.num_outputs))
        name, metadata = layer.name, layer.metadata
        layer.__class__ = getattr(self.trt, how.name)
        attributes: dict[str, Attribute] = {}
        for attribute in how.attributes:
            index = how.unless.get(attribute, len(inputs))
            by_input = index < len(inputs) and inputs[index] is not None
            if by_input or attributes.get(how.instead_of.get(attribute, "")) is not None:
                attributes[attribute] = None
            elif attribute == "attention":
                attributes |= self.attention(layer.attention)
            elif hasattr(layer, attribute):
                attributes[attribute] = self.value(getattr(layer, attribute))
        weights = {role: key for role in how.weights if (key := self.weight(f"{name}.{role}", getattr(layer, role)))}
        return LayerRecord(name, type_name, inputs, outputs, attributes, weights, metadata)

    def optional(self, tensor: Any) -> str | None:
        return None if tensor is None else self.tensor(tensor)

    def attention(self, attention: Any) -> dict[str, Attribute]:
        found: dict[str, Attribute] = {}
        for attribute in _ATTENTION:
            if hasattr(attention, attribute):
                found[attribute] = self.value(getattr(attention, attribute))
        for attribute in _ATTENTION_TENSORS:
            found[attribute] = self.optional(getattr(attention, attribute, None))
        if found["normalization_quantize_scale"] is not None:  # the getter logs an ERROR if it was never set
            found["normalization_quantize_to_type"] = self.value(attention.normalization_quantize_to_type)
        return found

    def value(self, value: Any) -> Attribute:
        if callable(value):  # IFillLayer.is_alpha_beta_int64 and its like are methods in some bindings
            value = value()
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if hasattr(type(value), "__members__"):
            return str(value.name)
        if type(value).__name__ in ("ILoop", "IIfConditional"):
            return str(value.name)
        if hasattr(value, "__len__") and hasattr(value, "__getitem__"):  # Dims, Permutation, lists
            return tuple(value)
        raise UnsupportedOpError(f"the reader can't record an attribute of type {type(value).__name__}")

    def weight(self, key: str, weights: Any) -> str | None:
        """Takes weights over and returns their key, or None for empty ones; the same memory is copied once at most."""
        array = _as_torch(weights)
        if array.numel() == 0:
            return None
        identity = (array.data_ptr(), array.numel(), str(array.dtype))
        if identity in self.weight_keys:
            return self.weight_keys[identity]
        unique, count = key, 1
        while unique in self.weights:
            count += 1
            unique = f"{key}#{count}"
        owned = self.owned.get((array.data_ptr(), array.numel(), array.dtype))
        self.weights[unique] = array.clone() if owned is None else owned.detach().reshape(-1)
        self.weight_keys[identity] = unique
        self.kept.append(array)  # so that no other weights come to lie at the same address
        return unique


def _module_of(network: Any) -> ModuleType:
    """The bindings that a network comes from: its class lives in `tensorrt_rtx` or `tensorrt`."""
    package = type(network).__module__.partition(".")[0]
    for name in (package.removesuffix("_bindings"), package):
        if name in sys.modules and hasattr(sys.modules[name], "INetworkDefinition"):
            return sys.modules[name]
    raise BackendUnavailableError(f"{type(network)!r} is no network definition of tensorrt or tensorrt_rtx")


def _as_torch(weights: Any) -> torch.Tensor:
    """A flat tensor over the memory of weights, which the bindings give as an array or, in types that NumPy does not
    have, as a `Weights` object with no way to its values."""
    if isinstance(weights, np.ndarray):
        if weights.size == 0:
            return torch.empty(0)
        return torch.from_numpy(weights.reshape(-1))
    if weights.size == 0:
        return torch.empty(0)
    return _opaque_weights(weights)


class _CWeights(ctypes.Structure):
    """`nvinfer1::Weights` (NvInferRuntimeBase.h): a DataType, a pointer, a count."""

    _fields_ = (("type", ctypes.c_int32), ("values", ctypes.c_void_p), ("count", ctypes.c_int64))


def _opaque_weights(weights: Any) -> torch.Tensor:
    """BFloat16, FP8 and Int4 weights, through the C++ object that the pybind11 instance points to.

    The structure found there must repeat the type and count that the Python properties state; otherwise the layout is
    not the one assumed, and nothing is read.
    """
    address = ctypes.c_void_p.from_address(id(weights) + object.__basicsize__).value
    found = _CWeights.from_address(address) if address else None
    if found is None or (found.type, found.count) != (int(weights.dtype), weights.size) or not found.values:
        raise UnsupportedOpError(f"weights of type {weights.dtype.name} can't be read through these bindings")
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * weights.nbytes).from_address(found.values))
    memory = torch.from_numpy(raw)
    name = weights.dtype.name
    if name == "BF16":
        return memory.view(torch.bfloat16)
    if name == "FP8":
        return memory.view(torch.float8_e4m3fn)
    if name == "INT4":  # two values a byte, the low half first
        low, high = memory & 15, memory >> 4
        pairs = torch.stack((low, high), 1).reshape(-1)[: weights.size].to(torch.int8)
        return torch.where(pairs > 7, pairs - 16, pairs)
    raise UnsupportedOpError(f"the reader does not know weights of type {name}")
