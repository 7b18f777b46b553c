"""A TensorRT network as plain data: what `read` produces, `store` keeps on disk and `plan` executes.

Names of types, operations and modes are NVIDIA's own enum member names ("CONVOLUTION", "EXPLICIT_ROUND_DOWN", "HALF"),
so that a record reads like the API it came from and needs no TensorRT to be understood.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch

__all__ = ["Attribute", "LayerRecord", "NetworkRecord", "TensorRecord"]

Attribute: TypeAlias = "bool | int | float | str | tuple[int, ...] | tuple[float, ...] | None"


@dataclass(frozen=True)
class TensorRecord:
    """One `ITensor`.

    Attributes:
        name: unique in its network.
        shape: what NVIDIA's shape inference says; -1 is a dimension known at run time only.
        dtype: member name of `tensorrt.DataType`.
        is_shape_tensor: whether TensorRT needs the value on the host to infer shapes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_shape_tensor: bool = False


@dataclass(frozen=True)
class LayerRecord:
    """One `ILayer`.

    Attributes:
        name: the layer's name.
        type: member name of `tensorrt.LayerType`.
        inputs: tensor names; None where an optional input is absent.
        outputs: tensor names.
        attributes: by the name of the property in the Python API; None is "not set".
        weights: role ("kernel", "bias", ...) to a key of `NetworkRecord.weights`; empty weights are absent.
        metadata: the layer's metadata string.
    """

    name: str
    type: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Attribute] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    metadata: str = ""


@dataclass
class NetworkRecord:
    """One `INetworkDefinition`.

    Attributes:
        name: the network's name.
        inputs: names of the network inputs, in order.
        outputs: names of the network outputs, in order.
        layers: in the order of definition, which need not be an order of execution.
        tensors: every tensor that a layer or the network mentions, by name.
        weights: flat tensors by key; a key may serve several layers.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    layers: tuple[LayerRecord, ...]
    tensors: dict[str, TensorRecord]
    weights: dict[str, torch.Tensor]
