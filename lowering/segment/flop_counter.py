"""FLOPs of what runs: torch's formulas for convolutions, matmuls and attention, one per result element elsewhere."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fx_passes.ops import OPS, Role

__all__ = ["FlopCounter"]

# Ops that compute, as opposed to moving, picking or making data; one FLOP for each element of their result.
_COMPUTING = (
    *(Role.ELEMENTWISE_ADD, Role.ELEMENTWISE_MUL, Role.ACTIVATION, Role.NORM, Role.SOFTMAX, Role.REDUCTION),
    *(Role.POOL_AVG, Role.POOL_MAX),
)


class FlopCounter(TorchDispatchMode):
    """Counts while it is active.

    Attributes:
        total: FLOPs so far (1 multiply-add = 2).
        heavy: those of convolutions, matmuls and attention.
    """

    def __init__(self) -> None:
        super().__init__()
        from torch.utils.flop_counter import flop_registry

        self.total = 0
        self.heavy = 0
        self._formulas = flop_registry
        self._elementwise = {packet for op in OPS.values() if op.role in _COMPUTING for packet in op.aten}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in self._formulas:
            flops = self._formulas[packet](*args, **(kwargs or {}), out_val=out)
            self.total += flops
            self.heavy += flops
        elif packet._qualified_op_name in self._elementwise:
            self.total += sum(prod(t.shape) for t in pytree.tree_leaves(out)[:1] if isinstance(t, Tensor))
        return out
