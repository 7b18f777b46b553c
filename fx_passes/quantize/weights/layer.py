"""One view of a weighted node, be it a module call or a function call: its weight, bias, axes and functional form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_passes.ops import bind, module_of, op_of

__all__ = ["Layer", "layer_of"]

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "conv1d": F.conv1d,
    "conv2d": F.conv2d,
    "conv3d": F.conv3d,
    "conv_transpose1d": F.conv_transpose1d,
    "conv_transpose2d": F.conv_transpose2d,
    "conv_transpose3d": F.conv_transpose3d,
    "linear": F.linear,
}


@dataclass(frozen=True)
class Layer:
    """A convolution, transposed convolution or linear layer with constant parameters.

    Attributes:
        op: canonical op name.
        path: where its parameters live; the quantized ones are stored as `<path>.weight`, `<path>.weight_scale`, ...
        input: the node of its activation.
        weight, bias: the float parameters.
        function, options: `function(input, weight, bias, *options)` computes it.
        pad: arguments of `F.pad` to be applied to the input before (modules with a padding mode), or None.
        groups: of a convolution, else 1.
        parameters: qualified names of the parameters that this node alone needs in float.
    """

    op: str
    path: str
    input: Node
    weight: Tensor
    bias: Tensor | None
    function: Callable[..., Any]
    options: tuple[Any, ...]
    pad: tuple[list[int], str] | None
    groups: int
    parameters: tuple[str, ...]

    @property
    def transposed(self) -> bool:
        return self.op.startswith("conv_transpose")

    @property
    def depthwise(self) -> bool:
        """Every group has one input channel (and, transposed, one output channel)."""
        if self.groups == 1:
            return False
        return self.weight.shape[1] == 1 and (not self.transposed or self.weight.shape[0] == self.groups)

    @property
    def axis(self) -> int:
        """Axis of the weight along which one scale per slice can be factored out of the layer's sum.

        The output channels; for a grouped transposed convolution, whose weight is (in, out / groups, ...), no axis
        runs over them, and the one returned runs over the outputs within every group.
        """
        return 1 if self.transposed else 0

    @property
    def products(self) -> int:
        """Number of products that are added up to one output value."""
        if self.op == "linear":
            return self.weight.shape[1]
        inputs = self.weight.shape[0] // self.groups if self.transposed else self.weight.shape[1]
        return inputs * self.weight[0, 0].numel()


def layer_of(gm: GraphModule, node: Node) -> Layer | str:
    """The layer that `node` computes, or the reason why it is none with constant float parameters."""
    op = op_of(node, gm)
    if op is None or op.name not in _FUNCTIONS:
        return "not a convolution or linear layer"
    layer = _of_module(gm, node, op.name) if node.op == "call_module" else _of_function(gm, node, op.name)
    if isinstance(layer, Layer) and layer.weight.dtype != torch.float32:
        return f"its weight is {str(layer.weight.dtype).removeprefix('torch.')}; int8 starts from float32"
    return layer


def _of_module(gm: GraphModule, node: Node, op: str) -> Layer | str:
    module: Any = module_of(node, gm)
    if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], Node):
        return "called with an output size, which sets its padding at run time"
    pad = None
    if op == "linear":
        options: tuple[Any, ...] = ()
    elif op.startswith("conv_transpose"):
        options = (module.stride, module.padding, module.output_padding, module.groups, module.dilation)
    else:
        padding = module.padding
        if module.padding_mode != "zeros":
            pad = (list(module._reversed_padding_repeated_twice), module.padding_mode)
            padding = (0,) * len(module.stride)
        options = (module.stride, padding, module.dilation, module.groups)
    return Layer(
        op=op,
        path=str(node.target),
        input=node.args[0],
        weight=module.weight.detach(),
        bias=None if module.bias is None else module.bias.detach(),
        function=_FUNCTIONS[op],
        options=options,
        pad=pad,
        groups=getattr(module, "groups", 1),
        parameters=(),
    )


def _of_function(gm: GraphModule, node: Node, op: str) -> Layer | str:
    given = bind(node)
    if not given:
        return "its arguments could not be matched with the function's signature"
    names = list(given)
    activation, weight, bias = (given[name] for name in names[:3])
    if not isinstance(activation, Node):
        return "its input is no tensor of the graph"
    value, why = _constant(gm, weight)
    if value is None:
        return f"its weight {why}"
    offset, why = (None, "") if bias is None else _constant(gm, bias)
    if bias is not None and offset is None:
        return f"its bias {why}"
    return Layer(
        op=op,
        path=_parent(str(weight.target)),
        input=activation,
        weight=value,
        bias=offset,
        function=_FUNCTIONS[op],
        options=tuple(given[name] for name in names[3:]),
        pad=None,
        groups=int(given.get("groups", 1)),
        parameters=tuple(str(p.target) for p in (weight, bias) if isinstance(p, Node)),
    )


def _parent(target: str) -> str:
    """Where the quantized form of a parameter goes: beside it if it is called "weight", else in a place of its own."""
    prefix, _, name = target.rpartition(".")
    return prefix if name == "weight" else f"{target}_quantized"


def _constant(gm: GraphModule, node: Any) -> tuple[Tensor | None, str]:
    """The tensor of a get_attr node, or why there is none."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None, "is computed in the graph"
    value: Any = gm
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    if isinstance(value, nn.Parameter) or (isinstance(value, Tensor) and value.is_floating_point()):
        return value.detach(), ""
    return None, "is no float tensor"
