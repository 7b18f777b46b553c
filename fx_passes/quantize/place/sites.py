"""The nodes of a graph as placement sees them, and what each target gains from int8.

The three targets differ: TensorRT fuses int8 convolutions with their epilogue and a residual add; TensorRT-RTX computes
int8 convolutions but writes float; ONNX Runtime needs integers on both sides of every op. So placement is data of a
target: `RULES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch.fx import GraphModule, Node

from fx_passes.ops import Role, is_size, op_of
from fx_passes.quantize.annotation import Annotation, Granularity
from fx_passes.quantize.qconfig import LayerConfig, QConfig
from fx_passes.quantize.scheme import QuantScheme, TargetScheme
from fx_passes.quantize.weights.layer import Layer, layer_of
from fx_passes.quantize.weights.scales import channel_sqnr

__all__ = ["RULES", "PlacementRules", "Site", "granularity_of", "int8_product", "refused_product", "sites_of"]


@dataclass(frozen=True)
class PlacementRules:
    """What a target gains from int8.

    Attributes:
        depthwise: why depthwise convolutions stay float; None to quantize them.
        transposed: why transposed convolutions stay float; None to quantize them, with per-tensor weights.
        per_tensor_above: in dB. Per-tensor weights are used for a layer whose worst channel keeps at least this
            signal-to-noise ratio; None for per-channel weights always.
        shortcut: quantize the shortcut branch of a residual add that fuses into a convolution.
    """

    depthwise: str | None
    transposed: str | None
    per_tensor_above: float | None
    shortcut: bool


_DEPTHWISE = "depthwise: TensorRT pads its int8 weights, which costs more than fp16, and int8 costs it most accuracy"

RULES: Mapping[str, PlacementRules] = MappingProxyType(
    {
        "tensorrt": PlacementRules(depthwise=_DEPTHWISE, transposed=None, per_tensor_above=None, shortcut=True),
        "tensorrt-rtx": PlacementRules(
            depthwise=_DEPTHWISE,
            transposed="transposed convolution: TensorRT-RTX never runs it in int8, wherever the scales are",
            per_tensor_above=32.0,
            shortcut=False,
        ),
        "onnxruntime": PlacementRules(
            depthwise=None,
            transposed="transposed convolution: ONNX Runtime has no int8 kernel for it on the CPU",
            per_tensor_above=None,
            shortcut=False,
        ),
    }
)

# Of a transposed convolution, below which per-tensor weights are not good enough (in dB, worst channel).
_TRANSPOSED_PER_TENSOR_ABOVE = 20.0


@dataclass
class Site:
    """A node as placement sees it."""

    node: Node
    name: str
    role: Role | None
    layer: Layer | None
    config: LayerConfig
    float_reason: str | None = None

    def annotation(self, reason: str, **more) -> Annotation:
        return Annotation(
            self.name,
            reason,
            weight_method=self.config.weight_observer,
            correct_bias=self.config.bias_correction,
            smooth=self.config.smooth,
            learn_rounding=self.config.rounding == "learned",
            observer=self.config.observer,
            **more,
        )


def sites_of(gm: GraphModule, target: str, scheme: TargetScheme, qconfig: QConfig) -> dict[Node, Site]:
    """Every computing node of the graph, with the reason why it can't be quantized where there is one."""
    sites = {}
    configs = qconfig.resolve(gm)
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        op = op_of(node, gm)
        name = op.name if op else _kind(node)
        site = Site(node, name, op.role if op else None, None, configs[node])
        sites[node] = site
        if op is not None and op.role is Role.WEIGHTED:
            found = layer_of(gm, node)
            if isinstance(found, Layer):
                site.layer = found
                site.float_reason = _layer_float_reason(site, found, RULES[target], scheme.weight)
            else:
                site.float_reason = found
        if site.config.dtype == "float":
            site.float_reason = f"the configuration keeps it in float ({site.config.origin})"
        elif (why := _aliased_input(node)) is not None:
            site.float_reason = why
    return sites


def int8_product(site: Site) -> str | None:
    """Why the product of two activations at `site` runs in int8; None where it does not."""
    if site.config.dtype != "int8" or site.float_reason is not None or site.name not in ("matmul", "mm", "bmm"):
        return None
    if len(site.node.args) != 2 or site.node.kwargs or not all(isinstance(a, Node) for a in site.node.args):
        return None
    return f"{site.name}: product of two activations, in int8 as configured ({site.config.origin})"


def refused_product(site: Site) -> str | None:
    """Why a product that is configured as int8 stays float; None for other sites."""
    if site.role is not Role.MATMUL or site.config.dtype != "int8":
        return None
    return (
        f"{site.name}: configured as int8 ({site.config.origin}), but no plain product of two tensors; an attention "
        "with is_causal, or with a mask that may be bool, stays whole"
    )


def _kind(node: Node) -> str:
    if node.meta.get("python"):
        return "python"
    return {"placeholder": "input", "get_attr": "constant"}.get(
        node.op, str(getattr(node.target, "__name__", node.target))
    )


def _layer_float_reason(site: Site, layer: Layer, rules: PlacementRules, weight: QuantScheme) -> str | None:
    if site.config.dtype == "int8":
        return None
    if layer.transposed:
        if rules.transposed is not None:
            return rules.transposed
        worst = worst_channel(layer, weight, "per_tensor")
        if worst < _TRANSPOSED_PER_TENSOR_ABOVE:
            return (
                "transposed convolution: TensorRT wants one weight scale per tensor, which leaves its worst channel "
                f"at {worst:.0f} dB"
            )
        return None
    return rules.depthwise if layer.depthwise else None


def _aliased_input(node: Node) -> str | None:
    for value in node.all_input_nodes:
        if (why := value.meta.get("aliased")) and not is_size(value):
            return f"its input '{value.name}' may share memory: {why}"
    return None


def worst_channel(layer: Layer, scheme: QuantScheme, granularity: Granularity) -> float:
    """Lowest signal-to-noise ratio, in dB, of the layer's channels that hold anything."""
    sqnr = channel_sqnr(layer.weight, scheme, layer.axis, granularity)
    sqnr = sqnr[sqnr.isfinite()]
    return float(sqnr.min()) if sqnr.numel() else float("inf")


def granularity_of(site: Site, rules: PlacementRules, scheme: QuantScheme) -> tuple[Granularity, str]:
    """Granularity of a layer's weight scales, and why."""
    layer = site.layer
    assert layer is not None
    if site.config.weight is not None:
        return site.config.weight, f"{_words(site.config.weight)} weights, as configured ({site.config.origin})"
    if layer.transposed:
        return "per_tensor", "per-tensor weights, as TensorRT wants them for a transposed convolution"
    if rules.per_tensor_above is None:
        return "per_channel", "per-channel weights"
    worst = worst_channel(layer, scheme, "per_tensor")
    if worst >= rules.per_tensor_above:
        return (
            "per_tensor",
            f"per-tensor weights, so that bias and activation fuse: the worst channel keeps {worst:.0f} dB",
        )
    return "per_channel", f"per-channel weights: per-tensor ones would leave a channel at {worst:.0f} dB"


def _words(granularity: str) -> str:
    return granularity.replace("_", "-")
