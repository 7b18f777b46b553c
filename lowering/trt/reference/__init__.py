"""The reference executor: reads a finished TensorRT network back and runs it on the CPU.

It imports nothing from the converters or the network builder, so that a mistake there can't repeat itself here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lowering.trt.reference.errors import ExecutionError, InferenceMismatchError
from lowering.trt.reference.records import LayerRecord, NetworkRecord, TensorRecord
from lowering.trt.reference.run import ReferenceNetwork

__all__ = [
    "ExecutionError",
    "InferenceMismatchError",
    "LayerRecord",
    "NetworkRecord",
    "ReferenceNetwork",
    "TensorRecord",
    "read_network",
]


def read_network(network: Any, owned: Iterable[torch.Tensor] = ()) -> ReferenceNetwork:
    """Reads a finished `INetworkDefinition` into an executable network; see `read.read_record`.

    Args:
        network: `tensorrt.INetworkDefinition` or `tensorrt_rtx.INetworkDefinition`.
        owned: tensors that the network points into and that nobody will change: they are not copied.

    Returns:
        A network that needs neither TensorRT nor the builder any more.
    """
    from lowering.trt.reference.read import read_record

    return ReferenceNetwork(read_record(network, owned))
