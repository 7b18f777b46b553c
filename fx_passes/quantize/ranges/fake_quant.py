"""Fake quantization: float values rounded as they will be, with gradients, for training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fx_passes.errors import StageError
from fx_passes.quantize.compiling import outside_compile
from fx_passes.quantize.decomposed import decomposed
from fx_passes.quantize.ranges.observers import Observer
from fx_passes.quantize.scheme import QuantScheme

__all__ = ["FakeQuantize", "QatState", "fake_quantize"]

QatState = str
"""What a module with fake quantization is doing: "calibrate", "train" or "validate"."""

_REMEDY = 'call set_qat_state(model, "calibrate" | "train" | "validate"), which sets train or eval mode too'


class _FakeQuantize(torch.autograd.Function):
    """Round to the grid; straight-through gradient inside the range, none outside.

    The gradient of the scale is that of LSQ (Esser et al., "Learned Step Size Quantization", ICLR 2020, eq. 3), scaled
    by 1 / sqrt(values * quant_max) as in its section 2.2.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor | int, quant_min: int, quant_max: int) -> Tensor:
        steps = x * (1.0 / scale)
        ctx.save_for_backward(steps, scale)
        ctx.limits = zero_point, quant_min, quant_max
        return ((torch.round(steps) + zero_point).clamp(quant_min, quant_max) - zero_point) * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        steps, scale = ctx.saved_tensors
        zero_point, quant_min, quant_max = ctx.limits
        low, high = quant_min - zero_point, quant_max - zero_point
        inside = (steps >= low) & (steps <= high)
        grad_scale = None
        if ctx.needs_input_grad[1]:
            slope = torch.where(inside, torch.round(steps) - steps, steps.clamp(low, high))
            reach = high.clamp_min(1) if isinstance(high, Tensor) else max(high, 1)
            weight = (steps.numel() / scale.numel() * reach) ** -0.5
            grad_scale = (grad * slope * weight).sum_to_size(scale.shape)
        return grad * inside, grad_scale, None, None, None


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor | int, scheme: QuantScheme) -> Tensor:
    """`x` rounded to the grid of `scale` (broadcastable to `x`) and `zero_point`, differentiable in both."""
    return _FakeQuantize.apply(x, scale, zero_point, scheme.quant_min, scheme.quant_max)


class FakeQuantize(nn.Module):
    """Fake quantization of one activation.

    Args:
        observer: takes in the values while calibrating and training.
        learned: the scale is a parameter that training adjusts (LSQ), set from the first values that are seen.

    Buffers:
        scale, zero_point: 0-dim float32 and int64; what a conversion takes. `scale` is a parameter if `learned`.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, observer: Observer, learned: bool = False):
        super().__init__()
        self.observer, self.learned = observer, learned
        self.scheme = observer.scheme
        self.state: QatState = "train"
        self.frozen = False
        self._known = False  # the scale is not 0: read once, and not by `torch.compile` from a tensor
        if learned:
            self.scale = nn.Parameter(torch.tensor(0.0))
        else:
            self.register_buffer("scale", torch.tensor(0.0))
        self.register_buffer("zero_point", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        check_state(self)
        if self.observer.seen_type is not None or not x.is_floating_point():
            return self.observer(x)
        if self.state == "calibrate" or (self.training and not self.frozen and not self._learning()):
            self._observe(x)
        if self.state == "calibrate":
            return x
        if not self._is_known():
            raise StageError(
                f"the range of {self.observer.where or self.observer.name} is not known",
                hint='train, or run data in the state "calibrate", before validating',
            )
        if self.training:
            scale = self.scale.abs() if self.learned else self.scale
            return fake_quantize(x.float(), scale, self.zero_point, self.scheme).to(x.dtype)
        return self._deployed(x)

    @property
    def calibrated(self) -> bool:
        return bool(self.scale != 0)

    def qparams(self) -> tuple[float, int]:
        """Scale and zero point, as a conversion uses them.

        Raises:
            StageError: no value was seen.
        """
        if not self.calibrated:
            return self.observer.qparams()
        return abs(float(self.scale.detach())), int(self.zero_point)

    def _learning(self) -> bool:
        return self.learned and self._is_known()

    def _is_known(self) -> bool:
        if not self._known:
            self._known = self.calibrated
        return self._known

    @outside_compile
    def _observe(self, x: Tensor) -> None:
        """Take `x` into the range: Python that decides by values, which `torch.compile` steps over."""
        self.observer(x)
        if self.training and self.learned and dist.is_available() and dist.is_initialized():
            # The first batch of training sets a parameter, which has to start alike on all ranks.
            self.observer.synchronize()
        scale, zero_point = self.observer.qparams()
        with torch.no_grad():
            self.scale.fill_(scale)
            self.zero_point.fill_(zero_point)

    @outside_compile
    def _deployed(self, x: Tensor) -> Tensor:
        """The very operators of the converted graph."""
        s, ops = self.scheme, decomposed()
        args = (*self.qparams(), s.quant_min, s.quant_max, s.dtype)
        return ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *args), *args).to(x.dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A checkpoint of the float model has no ranges: ours stay.
        for key, value in self.state_dict(prefix=prefix).items():
            state_dict.setdefault(key, value)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._known = False


def check_state(module: Any) -> None:
    """Refuse a train or eval mode that contradicts the state that was set.

    Raises:
        StageError: calibrating or validating in train mode.
    """
    if module.training and module.state in ("calibrate", "validate"):
        raise StageError(f"the model is in train mode, but its state is {module.state!r}", hint=_REMEDY)
