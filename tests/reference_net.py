"""Networks made with NVIDIA's API alone, for the tests of the reference executor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowering.trt.reference import ReferenceNetwork, read_network

trt = pytest.importorskip("tensorrt_rtx")

ARGUMENTS = {torch.float32: "float32", torch.float16: "float16", torch.int32: "int32", torch.int64: "int64"}


class Net:
    """A network definition made with NVIDIA's API alone, and all that it must outlive."""

    def __init__(self):
        self.logger = trt.Logger(trt.Logger.ERROR)
        self.builder = trt.Builder(self.logger)
        self.definition = self.builder.create_network(0)
        self.kept = []

    def __getattr__(self, name):
        return getattr(self.definition, name)

    def input(self, name, *shape, dtype=torch.float32):
        return self.definition.add_input(name, getattr(trt, ARGUMENTS.get(dtype, "bool")), shape)

    def constant(self, value, dtype=np.float32):
        array = np.array(value.numpy() if isinstance(value, torch.Tensor) else value, dtype=dtype, order="C")
        self.kept.append(array)
        return self.definition.add_constant(array.shape, trt.Weights(array)).get_output(0)

    def finish(self, *tensors) -> ReferenceNetwork:
        for tensor in tensors:
            self.definition.mark_output(tensor)
        return read_network(self.definition)


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
