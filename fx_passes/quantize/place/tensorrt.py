"""Placement for TensorRT: pairs at the inputs of weighted ops, nothing after outputs.

Source of the rules: NVIDIA's TensorRT documentation, "Working with Quantized Types", explicit quantization. TensorRT
moves quantization across ops that commute with it, so those need no pairs of their own (TensorRT-RTX 1.7, too: a pair
around a max pool changes neither kernels nor bytes of the engine).
"""

from __future__ import annotations

from torch.fx import Node

from fx_passes.ops import Role
from fx_passes.quantize.annotation import NO_TENSOR, Annotation
from fx_passes.quantize.place.sites import PlacementRules, Site, granularity_of, int8_product, refused_product
from fx_passes.quantize.scheme import SCHEMES

__all__ = ["place_inputs"]

_COMMUTES = frozenset({Role.POOL_MAX, Role.RESHAPE, Role.CONCAT})


def place_inputs(sites: dict[Node, Site], rules: PlacementRules) -> dict[Node, Annotation]:
    """An annotation for every site."""
    depth = _weighted_depth(sites)
    return {node: _place(node, site, sites, rules, depth) for node, site in sites.items()}


def _place(
    node: Node, site: Site, sites: dict[Node, Site], rules: PlacementRules, depth: dict[Node, int]
) -> Annotation:
    if site.layer is not None and site.float_reason is None:
        weight, why = granularity_of(site, rules, SCHEMES["tensorrt"].weight)
        index = node.all_input_nodes.index(site.layer.input)
        return site.annotation(f"input of a weighted op, {why}", quantized_inputs=(index,), weight=weight)
    if site.float_reason is not None:
        return site.annotation(site.float_reason)
    if site.name == "add":
        return _place_add(node, site, sites, rules, depth)
    if (reason := int8_product(site)) is not None:
        return site.annotation(reason, quantized_inputs=tuple(range(len(node.all_input_nodes))))
    return site.annotation(_why_float(site))


def _place_add(
    node: Node, site: Site, sites: dict[Node, Site], rules: PlacementRules, depth: dict[Node, int]
) -> Annotation:
    branches = node.all_input_nodes
    if not rules.shortcut:
        return site.annotation("add: TensorRT-RTX does not fuse it into an int8 convolution, so a pair only costs")
    if len(branches) != 2 or node.kwargs:
        return site.annotation("add: not of two tensors")
    fusable = [i for i, branch in enumerate(branches) if _fuses(branch, node, sites)]
    if not fusable:
        return site.annotation("add: no branch is an int8 convolution that it can fuse with")
    # Of two convolutions the deeper one ends the residual branch, the other one is the shortcut.
    main = max(fusable, key=lambda i: (depth[branches[i]], -i))
    shortcut = 1 - main
    if branches[shortcut].meta.get("aliased"):
        return site.annotation(f"its shortcut '{branches[shortcut].name}' may share memory")
    reason = (
        f"residual add: fuses with the convolution '{branches[main].name}', "
        f"so only the shortcut '{branches[shortcut].name}' is quantized"
    )
    return site.annotation(reason, quantized_inputs=(shortcut,))


def _fuses(branch: Node, add: Node, sites: dict[Node, Site]) -> bool:
    """Whether TensorRT can compute `add` as the epilogue of the int8 convolution `branch`."""
    site = sites[branch]
    if site.layer is None or site.float_reason is not None or site.layer.transposed:
        return False
    return site.layer.op.startswith("conv") and len(branch.users) == 1


def _weighted_depth(sites: dict[Node, Site]) -> dict[Node, int]:
    """For every node the largest number of weighted ops on a path that ends with it."""
    depth: dict[Node, int] = {}
    for node, site in sites.items():
        depth[node] = max((depth[i] for i in node.all_input_nodes), default=0) + (site.role is Role.WEIGHTED)
    return depth


def _why_float(site: Site) -> str:
    if site.name in ("input", "constant"):
        return f"{site.name}: quantized where an int8 op reads it"
    if site.name == "python":
        return "stays a Python call"
    if site.role in _COMMUTES:
        return f"{site.name}: commutes with quantization, TensorRT moves its reader's quantization across it"
    if site.role is Role.ACTIVATION:
        return f"{site.name}: computed with the op before it"
    if (why := refused_product(site)) is not None:
        return why
    if site.role is Role.MATMUL:
        return f"{site.name}: product of two activations, kept float for its accuracy"
    if site.role is Role.SHAPE:
        return f"{site.name}: {NO_TENSOR}"
    return f"{site.name}: not a weighted op, so int8 gains it nothing"
