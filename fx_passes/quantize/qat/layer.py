"""A weighted layer under quantization-aware training, BatchNorm folded as it will be deployed."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_passes.errors import QuantizationError
from fx_passes.fuse.batch_norm import fold_batch_norm
from fx_passes.quantize.annotation import Granularity
from fx_passes.quantize.compiling import outside_compile
from fx_passes.quantize.ranges.fake_quant import QatState, check_state, fake_quantize
from fx_passes.quantize.scheme import TargetScheme
from fx_passes.quantize.weights.layer import Layer
from fx_passes.quantize.weights.scales import LayerScale, dequantize_weight, integer_bias, quantize_weight

__all__ = ["QatLayer"]


class QatLayer(nn.Module):
    """Convolution, transposed convolution or linear layer, with the BatchNorm behind it, on a fake-quantized weight.

    It owns no parameters of the model: they come as arguments, so that they stay where the float model has them.
    While training, the weight is rounded on the grid that it will have once BatchNorm is folded into it: the grid of
    the folded weight divided by the factor that folding multiplies channel c with. So no division by a factor that may
    be zero is needed, and the BatchNorm itself runs unchanged on the layer's output. In eval mode the layer computes
    what is deployed, to the bit: weight and bias folded in float64, rounded, and the layer's own function.

    Args:
        layer: the float layer, for its options.
        scheme: the target's formats.
        granularity: of the weight's scales; None leaves the weight in float.
        method: how the weight's range is found.
        eps, momentum: of the BatchNorm.
        learned: the scales are a parameter that training adjusts (LSQ).
        module: the module of the layer, if it is one.
    """

    def __init__(
        self,
        layer: Layer,
        scheme: TargetScheme,
        granularity: Granularity | None,
        method: str = "minmax",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        learned: bool = False,
        module: nn.Module | None = None,
    ):
        super().__init__()
        self.function, self.options, self.pad = layer.function, layer.options, layer.pad
        self.transposed, self.groups = layer.transposed, layer.groups
        self.scheme, self.granularity = scheme, granularity
        self.scaling = LayerScale.for_layer(layer, scheme, granularity or "per_channel", method)
        self.eps, self.momentum = eps, momentum
        # BatchNorm works on axis 1: the channels of a linear layer or an unbatched conv1d only at this rank.
        self.rank = {"linear": 2, "conv1d": 3, "conv_transpose1d": 3}.get(layer.op)
        self.state: QatState = "train"
        self.norm_frozen = False
        # No child: it has no parameters, and is of use only once training is over.
        self.__dict__["template"] = None if module is None else _without_parameters(module)
        self.step: nn.Parameter | None = None
        if learned and granularity is not None:
            self.step = nn.Parameter(self.scaling.of(layer.weight, None, None))

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        norm: tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None] | None = None,
        input_scale: Tensor | None = None,
    ) -> Tensor:
        """The layer's output.

        Args:
            x: the layer's input, fake-quantized already.
            weight, bias: the float layer's own.
            norm: weight, bias, running mean, running variance and number of batches of the BatchNorm behind it.
            input_scale: scale of `x`, where the bias is rounded to integers (ONNX Runtime).

        Raises:
            QuantizationError: the rank of `x` is one at which the BatchNorm cannot be folded.
        """
        check_state(self)
        if norm is not None and self.rank is not None and x.dim() != self.rank:
            raise QuantizationError(
                f"a BatchNorm behind a layer whose input has {x.dim()} dimensions does not normalise its channels",
                hint=f"give it {self.rank} dimensions, or keep the layer and its BatchNorm apart",
            )
        if self.pad is not None:
            x = F.pad(x, *self.pad)
        if self.training:
            return self._train(x, weight, bias, norm, input_scale)
        weight, bias = self.folded(weight, bias, norm)
        if self.state != "calibrate" and self.granularity is not None:
            weight, bias = self._rounded(weight, bias, input_scale)
        return self.function(x, weight, bias, *self.options)

    def folded(self, weight: Tensor, bias: Tensor | None, norm: Any) -> tuple[Tensor, Tensor | None]:
        """Weight and bias with the BatchNorm folded in, by the arithmetic of `fuse_fx`."""
        if norm is None:
            return weight, bias
        factor, shift = self._affine(norm)
        return fold_batch_norm(weight.detach(), bias, factor, shift, self.groups, transposed=self.transposed)

    def deployed(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """The module that the layer was made of, with these parameters."""
        module = copy.copy(self.__dict__["template"])
        module.__dict__["_parameters"] = {
            "weight": nn.Parameter(weight),
            "bias": None if bias is None else nn.Parameter(bias),
        }
        return module

    def scale(self, weight: Tensor, bias: Tensor | None, input_scale: float | None) -> Tensor:
        """Scales of the folded weight, as they are deployed."""
        return self.scaling.of(weight, bias, input_scale, None if self.step is None else self.step.abs())

    @outside_compile
    def _rounded(self, weight: Tensor, bias: Tensor | None, input_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        axis = self.scaling.axis
        step = _number(input_scale)
        scale = self.scale(weight, bias, step).detach()
        rounded = dequantize_weight(quantize_weight(weight, scale, self.scheme.weight, axis), scale, axis)
        if bias is not None and step is not None:
            integers, unit = integer_bias(bias, scale, step, self.scheme)
            bias = integers * unit
        return rounded, bias

    def _train(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Any, input_scale: Tensor | None) -> Tensor:
        if self.granularity is not None:
            weight = self._straight_through(weight, bias, norm, input_scale)
        y = self.function(x, weight, bias, *self.options)
        if norm is None:
            return y
        gamma, beta, mean, variance, batches = norm
        if batches is not None and not self.norm_frozen:
            batches.add_(1)
        momentum = self.momentum
        if momentum is None:  # cumulative average, as nn.BatchNorm2d(momentum=None)
            momentum = 1.0 / float(batches) if batches is not None else 0.0
        return F.batch_norm(y, mean, variance, gamma, beta, not self.norm_frozen, momentum, self.eps)

    def _straight_through(self, weight: Tensor, bias: Tensor | None, norm: Any, input_scale: Tensor | None) -> Tensor:
        """The weight rounded on the grid of the folded one."""
        scale = self._grid(weight, bias, norm, input_scale)
        return fake_quantize(weight.float(), scale, 0, self.scheme.weight).to(weight.dtype)

    @outside_compile
    def _grid(self, weight: Tensor, bias: Tensor | None, norm: Any, input_scale: Tensor | None) -> Tensor:
        """Scales of the folded weight over the factors that folding multiplies it with, shaped like the weight."""
        step = _number(input_scale)
        with torch.no_grad():
            folded, folded_bias = self.folded(weight, bias, norm)
        scale = self._broadcast(self.scale(folded, folded_bias, step), weight)
        if norm is not None:
            factor = self._spread(self._affine(norm)[0].to(weight.dtype), weight).abs()
            scale = scale / torch.where(factor == 0, torch.ones_like(factor), factor)
        return scale

    def _affine(self, norm: Any) -> tuple[Tensor, Tensor]:
        """What the BatchNorm with its running statistics does to a channel: x * factor + shift, in float64."""
        gamma, beta = (None if t is None else t.detach().double() for t in norm[:2])
        mean, variance = (t.detach().double() for t in norm[2:4])
        factor = torch.rsqrt(variance + self.eps)
        if gamma is not None:
            factor = factor * gamma
        shift = -mean * factor
        return factor, shift if beta is None else shift + beta

    def _broadcast(self, scale: Tensor, weight: Tensor) -> Tensor:
        if self.scaling.axis is None:
            return scale
        return scale.reshape([-1 if i == self.scaling.axis else 1 for i in range(weight.dim())])

    def _spread(self, factor: Tensor, weight: Tensor) -> Tensor:
        """One factor per output channel, shaped to multiply the weight."""
        ones = [1] * (weight.dim() - 2)
        if not self.transposed:
            return factor.reshape(-1, 1, *ones)
        rows = factor.reshape(self.groups, 1, -1).expand(-1, weight.shape[0] // self.groups, -1)
        return rows.reshape(*weight.shape[:2], *ones)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A checkpoint of the float model has no learned steps: ours stay.
        for key, value in self.state_dict(prefix=prefix).items():
            state_dict.setdefault(key, value)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _number(scale: Tensor | None) -> float | None:
    """A scale as a number; None where there is none yet."""
    value = 0.0 if scale is None else abs(float(scale.detach()))
    return value or None


def _without_parameters(module: nn.Module) -> nn.Module:
    copied = copy.copy(module)
    copied.__dict__["_parameters"] = dict.fromkeys(module._parameters)
    return copied
