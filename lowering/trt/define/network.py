"""From an aten program to a TensorRT network definition.

    network = build_network(program, name="resnet50")
    network.definition            # the INetworkDefinition, as NVIDIA's API has it
    supports(program)             # {node: reason} for what has no TensorRT form, nothing raised

The aten graph is walked once (`definer`). What depends on constants only is computed on the host (casts of
weights, masks, ramps); everything else goes through the converter of its op, or, where that has none, through the
converters of what torch itself takes the op apart into. Quantized weights are the exception: they stay int8 in front of
their dequantize layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from fx_passes.capture.exclusive import in_turn
from fx_passes.errors import BuildError
from lowering.trt.bindings import BuilderLog, collect_log, logger, trt
from lowering.trt.bindings import flavour as current_flavour
from lowering.trt.define.definer import Definer
from lowering.trt.define.definition import Network, Profile, Program

__all__ = ["build_network", "supports"]

aten = torch.ops.aten


@in_turn
def build_network(
    program: Program,
    *,
    name: str,
    profiles: Sequence[Profile] | None = None,
    flavour: str | None = None,
    static_at: Profile | None = None,
) -> Network:
    """Define the TensorRT network of an aten program.

    Args:
        program: an `AtenProgram`.
        name: name of the network.
        profiles: optimization profiles; by default one, from the min, opt and max of the program's inputs.
        flavour: "rtx" or "tensorrt"; None takes what this machine offers. Must be the one in use.
        static_at: make every dimension static, at this profile's opt shapes; there are then no profiles.

    Raises:
        UnsupportedOpError: an op, or this use of it, has no converter.
        BuildError: TensorRT refuses a layer; the text is the first error of its log.
        BackendUnavailableError: no TensorRT.
    """
    if flavour is not None and flavour != current_flavour():
        raise BuildError(f"this process uses TensorRT flavour '{current_flavour()}', not '{flavour}'")
    network = _empty(program, name)
    if static_at is None:
        network.profiles = list(profiles) if profiles is not None else _default_profiles(program)
    return Definer(network, program, collect=False, static_at=static_at).run()


@in_turn
def supports(program: Program) -> dict[Node, str]:
    """Why each node that TensorRT cannot express cannot be: aten node -> reason; empty if all can.

    The network is defined for real, without weights being copied, so the reasons include TensorRT's own. Where a node
    fails its result is replaced by a fresh network input and the walk goes on.
    """
    return Definer(_empty(program, "supports"), program, collect=True).run().unsupported


def _empty(program: Program, name: str) -> Network:
    """A network of that name without layers."""
    log = BuilderLog()
    with collect_log(log):
        builder = trt.Builder(logger())
        definition = builder.create_network(_creation_flags())
    definition.name = name
    inputs, outputs = list(program.inputs), list(program.outputs)
    return Network(name, definition, builder, log, inputs, outputs, current_flavour(), program)


def _creation_flags() -> int:
    # strongly typed is the only kind from TensorRT 11 on, where the flag may be gone; the same networks on 10.x need it
    flags = trt.NetworkDefinitionCreationFlag
    return 1 << int(flags.STRONGLY_TYPED) if hasattr(flags, "STRONGLY_TYPED") else 0


def _default_profiles(program: Program) -> list[Profile]:
    dynamic = [spec for spec in program.inputs if tuple(spec.min) != tuple(spec.max)]
    count = max((len(spec.profiles) for spec in dynamic), default=1)
    if count <= 1:
        return [{spec.name: (tuple(spec.min), tuple(spec.opt), tuple(spec.max)) for spec in dynamic}] if dynamic else []
    return [{spec.name: spec.profiles[index] for spec in dynamic} for index in range(count)]
