"""A network definition with everything that must live as long as it does, and the program that it is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.fx import Node

from lowering.trt.bindings import BuilderLog

__all__ = ["Network", "Profile", "Program"]

Profile = Mapping[str, tuple[Sequence[int], Sequence[int], Sequence[int]]]


class Program(Protocol):
    """What is read of `lowering.segment.program.AtenProgram`."""

    exported: Any
    inputs: list[Any]
    outputs: list[str]

    def constant(self, node: Node) -> torch.Tensor | None: ...

    def constant_name(self, node: Node) -> str | None: ...


@dataclass
class Network:
    """A finished network definition and everything that must live as long as it does.

    Attributes:
        name: the network's name, part of the engine's bytes.
        definition: the `INetworkDefinition`.
        builder: the `Builder` that made it.
        kept: host tensors that the definition points into; mutating them would change the engine.
        log: what TensorRT said while it was defined.
        inputs: the program's `TensorSpec`s.
        outputs: output names, in order.
        profiles: per optimization profile, input name -> (min, opt, max) shapes; empty when all is static.
        tensors: aten node name -> name of the network tensor that holds its value.
        unsupported: aten node -> reason; filled by `supports` only.
        flavour: "rtx" or "tensorrt".
        program: what it was made from.
        quantized: whether it has quantize or dequantize layers.
    """

    name: str
    definition: Any
    builder: Any
    log: BuilderLog
    inputs: list[Any]
    outputs: list[str]
    flavour: str
    program: Program | None = None
    quantized: bool = False
    kept: list[torch.Tensor] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)
    tensors: dict[str, str] = field(default_factory=dict)
    unsupported: dict[Node, str] = field(default_factory=dict)
