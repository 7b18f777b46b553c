"""Markers that older quantization workflows put around the quantized part of a model; tracing sees through them."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["DeQuantStub", "QuantStub", "is_stub"]


class QuantStub(nn.Module):
    """Identity. Says where float becomes quantized; placement is decided by the target, so the graph drops it."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class DeQuantStub(nn.Module):
    """Identity. Says where quantized becomes float; placement is decided by the target, so the graph drops it."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def is_stub(module: nn.Module) -> bool:
    """True for the stubs of this package and for torch's own (named, not imported: that package is on its way out)."""
    if isinstance(module, (QuantStub, DeQuantStub)):
        return True
    cls = type(module)
    return cls.__name__ in ("QuantStub", "DeQuantStub") and cls.__module__.startswith("torch.ao.quantization")
