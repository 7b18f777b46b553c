"""Placement for ONNX Runtime: integers in and integers out.

ONNX Runtime turns DequantizeLinear -> op -> QuantizeLinear into one integer kernel (QLinearConv, QLinearAdd, ...) if
the op has one, and drops a ReLU or Clip whose bounds the integers imply. A pair around any other op only costs. So a
convolution always gets integers on both sides, a linear layer where its result is read as int8, and an elementwise op
where it lies between int8 ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.fx import Node

from fx_passes.ops import Role, bind, module_of
from fx_passes.quantize.annotation import NO_TENSOR, Annotation
from fx_passes.quantize.place.sites import PlacementRules, Site, granularity_of, int8_product, refused_product
from fx_passes.quantize.scheme import SCHEMES

__all__ = ["KERNELS", "PASS_THROUGH", "place_outputs"]

# Ops without weights that ONNX Runtime's CPU provider runs on uint8, with the kernel it takes.
KERNELS: Mapping[str, str] = MappingProxyType(
    {
        "add": "QLinearAdd",
        "mul": "QLinearMul",
        "cat": "QLinearConcat",
        "sigmoid": "QLinearSigmoid",
        "leaky_relu": "QLinearLeakyRelu",
        "avg_pool2d": "QLinearAveragePool",
        "adaptive_avg_pool2d": "QLinearGlobalAveragePool",
    }
)
# Ops that move or pick values: they run on uint8 as they are, and their result keeps the scale.
PASS_THROUGH = frozenset(
    [
        "max_pool2d",
        "flatten",
        "reshape",
        "view",
        "permute",
        "transpose",
        "t",
        "squeeze",
        "unsqueeze",
        "contiguous",
        "channel_shuffle",
    ]
)
_BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType({"relu": (0.0, float("inf")), "relu6": (0.0, 6.0)})


def place_outputs(sites: dict[Node, Site], rules: PlacementRules) -> dict[Node, Annotation]:
    """An annotation for every site."""
    placer = _Placer(sites, rules)
    placer.find_sources()
    placer.find_demand()
    return {node: placer.annotation(node) for node in sites}


class _Placer:
    """Two sweeps over the graph: which values can come out of an integer kernel, and which are wanted as integers."""

    def __init__(self, sites: dict[Node, Site], rules: PlacementRules):
        self.sites, self.rules = sites, rules
        self.source: set[Node] = set()  # values that come, or could come, out of an integer kernel
        self.demanded: set[Node] = set()  # values that some reader wants as integers
        self.int8: set[Node] = set()  # ops chosen to run on integers

    def find_sources(self) -> None:
        for node in self.sites:
            from_int8 = any(i in self.source for i in node.all_input_nodes)
            follows = from_int8 and (self.has_kernel(node) or self.passes(node) or self.bounds(node))
            if self.is_layer(node) or int8_product(self.sites[node]) or follows:
                self.source.add(node)

    def find_demand(self) -> None:
        for node in reversed(self.sites):
            wanted = node in self.demanded
            inputs = node.all_input_nodes
            if self.is_layer(node):
                self.int8.add(node)
                self.demanded.add(self.activation(node))
            elif int8_product(self.sites[node]) or (wanted and self.lies_between(node)):
                self.int8.add(node)
                self.demanded.update(inputs)
            elif wanted and self.absorbed(node):
                # The value before it is not quantized, but its producer's result is wanted in integers.
                self.demanded.update(inputs)

    def lies_between(self, node: Node) -> bool:
        """Whether `node` can run on the integers that one of its inputs is."""
        from_int8 = any(i in self.source for i in node.all_input_nodes)
        return from_int8 and (self.passes(node) or self.has_kernel(node))

    def is_layer(self, node: Node) -> bool:
        site = self.sites[node]
        if site.layer is None or site.float_reason is not None:
            return False
        return site.layer.op == "linear" or not self.result(node).meta.get("aliased")

    def has_kernel(self, node: Node) -> bool:
        site = self.sites[node]
        if site.name not in KERNELS or site.float_reason is not None or self.result(node).meta.get("aliased"):
            return False
        if site.name in ("add", "mul"):
            return len(node.args) == 2 and not node.kwargs and all(isinstance(a, Node) for a in node.args)
        if site.name == "adaptive_avg_pool2d":
            return _argument(node, "output_size") in (1, (1, 1), [1, 1])
        return True

    def passes(self, node: Node) -> bool:
        site = self.sites[node]
        if site.name not in PASS_THROUGH or site.float_reason is not None or node.meta.get("aliased"):
            return False
        return site.role is not Role.POOL_MAX or not _argument(node, "return_indices")

    def bounds(self, node: Node) -> tuple[float, float] | None:
        """The range of a clamping activation that contains 0, else None."""
        site = self.sites[node]
        if site.float_reason is not None or site.role is not Role.ACTIVATION:
            return None
        found = _BOUNDS.get(site.name)
        if site.name == "hardtanh":
            found = (_argument(node, "min_val"), _argument(node, "max_val"))
        elif site.name == "clamp":
            low, high = _argument(node, "min"), _argument(node, "max")
            found = (float("-inf") if low is None else low, float("inf") if high is None else high)
        if found is None or not all(isinstance(bound, (int, float)) for bound in found):
            return None
        return found if found[0] <= 0.0 <= found[1] else None

    def absorbed(self, node: Node) -> bool:
        """Whether a clamping activation vanishes into the quantization of its result."""
        return self.bounds(node) is not None and len(node.all_input_nodes[0].users) == 1

    def pads_layer(self, node: Node) -> bool:
        """Whether `node` pads with zeros for one int8 layer alone: ONNX Runtime makes it the layer's own padding."""
        site = self.sites[node]
        if site.name != "pad" or site.float_reason is not None or len(node.users) != 1:
            return False
        mode, value = _argument(node, "mode"), _argument(node, "value")
        if mode not in (None, "constant") or value not in (None, 0) or _is_other_padding(node):
            return False
        reader = next(iter(node.users))
        return reader in self.sites and self.is_layer(reader) and self.sites[reader].layer.input is node  # type: ignore[union-attr]

    def activation(self, layer: Node) -> Node:
        """The value that is quantized for a layer: its input, or what is padded to become its input."""
        source = self.sites[layer].layer.input  # type: ignore[union-attr]
        return source.all_input_nodes[0] if self.pads_layer(source) else source

    def result(self, node: Node) -> Node:
        """The value that is quantized when `node` is: its own, or that of the activation behind it."""
        users = list(node.users)
        return users[0] if len(users) == 1 and users[0] in self.sites and self.absorbed(users[0]) else node

    def annotation(self, node: Node) -> Annotation:
        site = self.sites[node]
        if node in self.int8:
            return self._int8(node, site)
        if self.absorbed(node) and not node.meta.get("aliased") and self._writes_int8(node.all_input_nodes[0]):
            before = node.all_input_nodes[0].name
            return site.annotation(f"{site.name}: vanishes into the quantization of '{before}'", output=True)
        if self.pads_layer(node):
            reader = next(iter(node.users)).name
            return site.annotation(f"zero padding: becomes part of '{reader}'", quantized_inputs=(0,))
        return site.annotation(site.float_reason or self._why_float(node, site))

    def _int8(self, node: Node, site: Site) -> Annotation:
        own_result = self._writes_int8(node) and self.result(node) is node
        if site.layer is not None:
            weight, why = granularity_of(site, self.rules, SCHEMES["onnxruntime"].weight)
            reason = f"integers in{' and out' if self._writes_int8(node) else ''}, {why}"
            index = node.all_input_nodes.index(site.layer.input)
            inputs = () if self.pads_layer(site.layer.input) else (index,)
            return site.annotation(reason, quantized_inputs=inputs, weight=weight, output=own_result)
        indices = tuple(range(len(node.all_input_nodes)))
        if (product := int8_product(site)) is not None:
            return site.annotation(product, quantized_inputs=indices, output=own_result)
        if self.passes(node):
            reason = f"{site.name}: moves or picks values, so it runs on the integers of its input"
            share = node.all_input_nodes[0].name
            return site.annotation(reason, quantized_inputs=indices[:1], output=True, share_scale_with=share)
        return site.annotation(f"between int8 ops: {KERNELS[site.name]}", quantized_inputs=indices, output=own_result)

    def _writes_int8(self, node: Node) -> bool:
        """Whether `node` is an integer kernel that also writes integers (a matrix product may write float)."""
        if node not in self.int8:
            return False
        is_convolution = self.sites[node].layer is not None and self.sites[node].name != "linear"
        return is_convolution or node in self.demanded

    def _why_float(self, node: Node, site: Site) -> str:
        if site.name in ("input", "constant"):
            return f"{site.name}: quantized where an int8 op reads it"
        if site.name == "python":
            return "stays a Python call"
        if site.layer is not None:
            return f"its result may share memory: {self.result(node).meta['aliased']}"
        if (why := refused_product(site)) is not None:
            return why
        if site.role is Role.SHAPE:
            return f"{site.name}: {NO_TENSOR}"
        if self.has_kernel(node) or self.passes(node) or self.bounds(node):
            return f"{site.name}: not between int8 ops, so a pair around it only costs"
        return f"{site.name}: ONNX Runtime has no int8 kernel for it"


def _is_other_padding(node: Node) -> bool:
    """Whether a module pads with something else than a constant."""
    return node.op == "call_module" and not isinstance(
        module_of(node), (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
    )


def _argument(node: Node, name: str) -> Any:
    """An argument of a call, or the attribute of the module that is called."""
    if node.op == "call_module":
        return getattr(module_of(node), name, None)
    return bind(node).get(name)
