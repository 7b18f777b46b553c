"""The engine's layers as the builder's DETAILED listing has them, and what they add up to.

A verbose build prints one line per kernel ("TENSORRT_RTX_FACTS", section 6, has the grammar). Nothing here needs
TensorRT: a saved log is as good as a fresh one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isqrt, prod
from typing import Any

__all__ = ["Layer", "LayerReport", "LayerTensor", "first_profile", "layer_report", "parse_layers"]

_LINE = re.compile(
    r"^Name: (.*?), LayerType: (\w+), Inputs: \[(.*?)\], (?:Constants: \[(.*?)\], )?Outputs: \[(.*?)\], "
    r"((?:TacticName|ParameterType): .*?)Metadata: ?(.*)$"
)
_TENSOR = re.compile(
    r"\{ Name: (.*?), Dimensions: \[([\d,\-]*)\], Strides: \[([\d,\-]*)\], StrideOrder: \[([\d,\-]*)\], "
    r"Datatype: (\w+), Format: (.*?) \}"
)
_TAG = re.compile(r"\[([^\[\]]*)\]")
_BITS = {
    "Float": 32,
    "Half": 16,
    "BFloat16": 16,
    "Int8": 8,
    "UInt8": 8,
    "Bool": 8,
    "FP8": 8,
    "Int32": 32,
    "Int64": 64,
    "Int4": 4,
}
# Kinds that start no kernel on the GPU: synchronisation, loop counters, and shape arithmetic on the host.
_NO_KERNEL = frozenset({"signal", "wait", "shape_call", "ShapeHostToDevice", "jmp", "cjmp", "add", "mul", "div"})
# Kinds that multiply and accumulate: convolutions and matrix products.
_COMPUTE = frozenset({"correlation", "deconv", "gemm"})
# A fused kernel that holds a convolution or a matrix product says so by an operation called Corr or Fc, or is the fused
# attention kernel.
_FUSED_COMPUTE = re.compile(r"__myl_[A-Za-z]*(?:Corr|Fc)[A-Z_0-9]|_gemm_mha")
_CAST_FIRST = re.compile(r"__myl_[A-Za-z]*Cast[A-Za-z]*Fc")
_ATTENTION = re.compile(r"_gemm_mha")
# Names of fused pointwise kernels are the names of their operations, cut to four letters.
_OPERATION = re.compile(r"[A-Z][a-z]*")
_MOVES = frozenset({"Cast", "Conc", "Copy", "Move", "Resh", "Slic", "Tran"})
_QUANTIZES = _MOVES | {"Max", "Min", "Mul", "Roun"}
_WEIGHTS = re.compile(r"^Total Weights Memory: (\d+) bytes", re.MULTILINE)
_GRAPH = re.compile(r"_myl(\d+)(?:_\d+)?$")


@dataclass(frozen=True)
class LayerTensor:
    """One tensor of a layer: name, sizes (-1 where dynamic), the listing's own type name, memory format."""

    name: str
    dims: tuple[int, ...]
    dtype: str
    format: str

    def bytes(self, free: int = 1) -> int:
        """Size in bytes, dynamic dimensions counted as `free`."""
        return prod(d if d >= 0 else free for d in self.dims) * _BITS[self.dtype] // 8


@dataclass(frozen=True)
class Layer:
    """One line of the listing.

    Attributes:
        name: the engine's own name of the layer.
        kind: its `LayerType`, such as "correlation" (a convolution), "gemm" (a matmul), "kgen" (fused pointwise).
        inputs: what it reads.
        constants: weights and scalars it holds.
        outputs: what it writes.
        modules: what the network's layers are called that were fused into this one, such as "layer1.0.conv2".
        sources: the user's lines that they come from.
        tactic: name of the kernel.
    """

    name: str
    kind: str
    inputs: tuple[LayerTensor, ...]
    constants: tuple[LayerTensor, ...]
    outputs: tuple[LayerTensor, ...]
    modules: tuple[str, ...]
    sources: tuple[str, ...] = ()
    tactic: str = ""

    @property
    def is_kernel(self) -> bool:
        """Whether it starts work on the GPU."""
        return self.kind not in _NO_KERNEL

    @property
    def is_compute(self) -> bool:
        """Whether it is a convolution or a matrix product."""
        return self.kind in _COMPUTE or _FUSED_COMPUTE.search(self.name + " " + self.tactic) is not None

    @property
    def overhead(self) -> str | None:
        """ "quantize" for a kernel that does nothing but quantize or dequantize, "reformat" for one that only moves or
        casts values, None for one that computes.
        """
        if self.kind == "copy":
            return "reformat"
        found = re.match(r"__myl_([A-Za-z]+)_", self.name) if self.kind == "kgen" else None
        operations = set(_OPERATION.findall(found[1])) if found else set()
        if not operations or not operations <= _QUANTIZES or "Etc" in operations:
            return None
        if operations <= _MOVES:
            return "reformat"
        types = {t.dtype for t in (*self.inputs, *self.constants, *self.outputs)}
        return "quantize" if "Int8" in types else None

    @property
    def operations(self) -> int:
        """Operations of its convolution or matrix products, two for a multiplication with its addition; else 0.

        From the sizes alone: what pads a convolution's channels is counted, and so is the padding of its borders. 0
        where the sizes do not say which of the operands are multiplied, or are dynamic.
        """
        if not self.is_compute or not self.outputs or not self.inputs:
            return 0
        result, operands = self.outputs[0], (*self.inputs, *self.constants)
        if any(d < 0 for t in (result, *operands) for d in t.dims):
            return 0
        if _ATTENTION.search(self.name):
            return _attention_operations(self.inputs, result)
        if self.kind in ("correlation", "deconv") or "Corr" in self.name:
            return _convolution_operations(self, result)
        return _product_operations(operands, result)

    @property
    def is_int8(self) -> bool:
        """Whether it is a convolution or matrix product whose activation input is int8.

        A fused kernel that casts its int8 input before the product ("CastMulFc": dequantized on the way in) is not.
        """
        if not self.is_compute or not self.inputs or self.inputs[0].dtype != "Int8":
            return False
        return _CAST_FIRST.search(self.name) is None


def _elements(tensor: LayerTensor) -> int:
    return prod(tensor.dims)


def _convolution_operations(layer: Layer, result: LayerTensor) -> int:
    """Of a convolution with a kernel (out, in / groups, ...), or a transposed one, whose kernel begins (in, ...).

    The kernel is a constant, or an input where it is computed by another kernel; a residual may be an input, too.
    """
    steps = layer.inputs[0] if layer.kind == "deconv" else result
    rank = len(result.dims)
    for operands in (layer.constants, layer.inputs[1:]):
        kernels = [t for t in operands if len(t.dims) == rank > 2 and t.dims[0] == steps.dims[1]]
        if kernels:
            return 2 * _elements(steps) * prod(max(kernels, key=_elements).dims[1:])
    return 0


def _attention_operations(inputs: Sequence[LayerTensor], result: LayerTensor) -> int:
    """Of softmax(q k^T) v: two products over (batch, targets, sources, head size)."""
    size = result.dims[-1]
    lengths = [t.dims[-1] for t in inputs if t.dims[-1] != size]  # the keys are transposed: (batch, size, sources)
    sources = max(lengths, default=inputs[0].dims[-2])
    return 4 * sources * _elements(result)


def _product_operations(operands: Sequence[LayerTensor], result: LayerTensor) -> int:
    """Of (batch, m, k) x (batch, k, n), whichever two of the operands are multiplied, and whichever way they lie.

    The three tensors hold b*m*k, b*k*n and b*m*n values, so their product is b (b*m*k*n)^2, where b counts the
    matrices that all three have.
    """
    weights = [t for t in operands if len(t.dims) >= 2]
    best = 0
    for i, first in enumerate(weights):
        for second in weights[i + 1 :]:
            shared = _matrices(first) if _matrices(first) == _matrices(second) else 1
            square, left = divmod(_elements(first) * _elements(second) * _elements(result), shared)
            products = isqrt(square)
            if left or products * products != square or products % _elements(result):
                continue
            length = products // _elements(result)
            if length in first.dims[-2:] and length in second.dims[-2:]:
                best = max(best, products)
    return 2 * best


def _matrices(tensor: LayerTensor) -> int:
    return prod(tensor.dims[:-2])


def _tensors(text: str | None) -> tuple[LayerTensor, ...]:
    return tuple(
        LayerTensor(name, tuple(int(d) for d in dims.split(",") if d), dtype, format_)
        for name, dims, _, _, dtype, format_ in _TENSOR.findall(text or "")
    )


def parse_layers(log_text: str) -> list[Layer]:
    """The layers listed in a verbose build log, in order, of all optimization profiles; empty if there is no listing.

    Args:
        log_text: all messages of the build, one after the other.
    """
    layers: list[Layer] = []
    inside = False
    for line in log_text.splitlines():
        if line.startswith("Layers:"):
            inside, layers = True, []
        elif line.startswith("I/O Tensors:"):
            inside = False
        elif inside and (match := _LINE.match(line)):
            layers.append(_layer(match))
        elif inside and layers and line.strip():  # metadata of fused layers may go on on the next line
            modules, sources = _tags(line)
            last = layers[-1]
            layers[-1] = replace(
                last,
                modules=tuple(dict.fromkeys(last.modules + modules)),
                sources=tuple(dict.fromkeys(last.sources + sources)),
            )
    return layers


def _tags(metadata: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modules and source lines in "[layer1.0.conv2 | resnet.py:155][...]": what `Net` wrote, run together by fusion."""
    pairs = [tag.partition(" | ") for tag in _TAG.findall(metadata)]
    modules = dict.fromkeys(module for module, _, _ in pairs)
    return tuple(modules), tuple(dict.fromkeys(source for _, _, source in pairs if source))


def _layer(match: re.Match[str]) -> Layer:
    name, kind, inputs, constants, outputs, tail, metadata = match.groups()
    tactic = re.search(r"TacticName: (.*?), StreamId", tail)
    modules, sources = _tags(metadata)
    return Layer(
        name=name,
        kind=kind,
        inputs=_tensors(inputs),
        constants=_tensors(constants),
        outputs=_tensors(outputs),
        modules=modules,
        sources=sources,
        tactic=tactic.group(1) if tactic else "",
    )


def first_profile(layers: Sequence[Layer]) -> list[Layer]:
    """The layers that run for one profile: later profiles repeat the list, marked " [profile 1]" in some names."""
    for layer in layers:
        names = (layer.name, *(t.name for t in layer.inputs + layer.outputs))
        if any("[profile 1]" in name for name in names) and (graph := _GRAPH.search(layer.name)):
            return [other for other in layers[: layers.index(layer)] if _graph_of(other) != graph[1]]
    return list(layers)


def _graph_of(layer: Layer) -> str | None:
    match = _GRAPH.search(layer.name)
    return match[1] if match else None


@dataclass(frozen=True)
class LayerReport:
    """What an engine's kernels are and what they move.

    Attributes:
        kernels: kernels started per run (synchronisation and shape arithmetic on the host are none).
        int8_compute: convolutions and matrix products whose activation input is Int8.
        float_compute: the other convolutions and matrix products.
        activation_bytes: per run, the bytes of every kernel's inputs plus outputs, each tensor counted wherever it is
            read or written, weights and constants left out. (ResNet-50 in fp16 at batch 1: 57 kernels, 57.6 MB.)
        weight_bytes: what the builder says the weights take.
        engine_bytes: size of the serialized engine.
        compute_capabilities: what it was built for; None: portable.
        shapes: which shapes the bytes are of: "static", or "opt" for a dynamic engine.
        rows: one dict per kernel: name, kind, modules, sources, inputs, outputs, bytes, int8; "operations" of its
            products, "overhead" ("quantize", "reformat" or None), and "reads", "constants" and "writes": lists of
            [tensor name, bytes].
    """

    kernels: int
    int8_compute: int
    float_compute: int
    activation_bytes: int
    weight_bytes: int
    engine_bytes: int
    compute_capabilities: list[str] | None = None
    shapes: str = "static"
    rows: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for reports and manifests."""
        return asdict(self)


def layer_report(
    log_text: str,
    engine_bytes: int,
    opt_log: str | None = None,
    compute_capabilities: Sequence[str] | None = None,
) -> LayerReport:
    """Read a build log.

    Args:
        log_text: all messages of the build.
        engine_bytes: size of the engine it gave.
        opt_log: log of a static build at the opt shape, from which the bytes of a dynamic engine are counted.
        compute_capabilities: what the engine was built for, for the record.
    """
    layers = first_profile(parse_layers(log_text))
    kernels = [layer for layer in layers if layer.is_kernel]
    measured = kernels if opt_log is None else [layer for layer in parse_layers(opt_log) if layer.is_kernel]
    compute = [layer for layer in kernels if layer.is_compute]
    int8 = sum(layer.is_int8 for layer in compute)
    stated = _WEIGHTS.search(log_text)
    held = {t.name: t.bytes() for layer in kernels for t in layer.constants}
    return LayerReport(
        kernels=len(kernels),
        int8_compute=int8,
        float_compute=len(compute) - int8,
        activation_bytes=sum(t.bytes() for layer in measured for t in layer.inputs + layer.outputs),
        weight_bytes=int(stated.group(1)) if stated else sum(held.values()),
        engine_bytes=engine_bytes,
        compute_capabilities=list(compute_capabilities) if compute_capabilities else None,
        shapes="static" if opt_log is None else "opt",
        rows=[_row(layer) for layer in measured],
    )


def _row(layer: Layer) -> dict[str, Any]:
    return {
        "name": layer.name,
        "kind": layer.kind,
        "modules": list(layer.modules),
        "sources": list(layer.sources),
        "inputs": [f"{t.dtype}[{','.join(map(str, t.dims))}]" for t in layer.inputs],
        "outputs": [f"{t.dtype}[{','.join(map(str, t.dims))}]" for t in layer.outputs],
        "bytes": sum(t.bytes() for t in layer.inputs + layer.outputs),
        "int8": layer.is_int8,
        "operations": layer.operations,
        "overhead": layer.overhead,
        "reads": [[t.name, t.bytes()] for t in layer.inputs],
        "constants": [[t.name, t.bytes()] for t in layer.constants],
        "writes": [[t.name, t.bytes()] for t in layer.outputs],
    }
