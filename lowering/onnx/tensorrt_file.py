"""The ONNX file for TensorRT proper: whether NVIDIA's parser takes it, and the command that builds it on a GPU."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from fx_passes.errors import ExportError

if TYPE_CHECKING:
    from lowering.onnx.files import OnnxFile
    from lowering.segment.program import TensorSpec

__all__ = ["check_parser", "profiles", "trtexec_command"]

Shape = tuple[int, ...]


def trtexec_command(file: str, inputs: Sequence[TensorSpec], *, engine: str | None = None) -> str:
    """The command line that builds and times an engine from `file` where the GPU is.

    Args:
        file: name of the ONNX file.
        inputs: the file's inputs; shapes are given only if one of them is dynamic, as trtexec wants it, for each
            optimization profile.
        engine: name of the engine file to write; by default the file's with the suffix `.engine`.

    Example:
        >>> import torch
        >>> from lowering.segment.program import TensorSpec
        >>> x = TensorSpec("x", torch.float32, (1, 3, 8, 8), (4, 3, 8, 8), (8, 3, 8, 8))
        >>> print(trtexec_command("net.onnx", [x]))
        trtexec --onnx=net.onnx --saveEngine=net.engine --stronglyTyped --minShapes=x:1x3x8x8 --optShapes=x:4x3x8x8 \
--maxShapes=x:8x3x8x8
    """
    words = ["trtexec", f"--onnx={file}", f"--saveEngine={engine or PurePath(file).with_suffix('.engine').name}"]
    # Types come from the file: int8 by its Q/DQ nodes, fp16 by its casts. TensorRT 11 has no other kind of network.
    words.append("--stronglyTyped")
    ranges = profiles(inputs)
    for index, profile in enumerate(ranges):
        if len(ranges) > 1:
            words.append(f"--profile={index}")
        for option, shapes in zip(("min", "opt", "max"), profile, strict=True):
            given = (f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())
            words.append(f"--{option}Shapes={','.join(given)}")
    return shlex.join(words)


def profiles(inputs: Sequence[TensorSpec]) -> list[tuple[dict[str, Shape], dict[str, Shape], dict[str, Shape]]]:
    """For each optimization profile (smallest, usual, largest) shapes by input; none if all sizes are fixed."""
    if not any(spec.dynamic for spec in inputs):
        return []
    count = max([1, *(len(spec.profiles) for spec in inputs)])

    def at(index: int, which: int) -> dict[str, Shape]:
        return {
            spec.name: spec.profiles[index][which] if spec.profiles else (spec.min, spec.opt, spec.max)[which]
            for spec in inputs
            if spec.min
        }

    return [(at(index, 0), at(index, 1), at(index, 2)) for index in range(count)]


def check_parser(model: bytes | OnnxFile) -> None:
    """Let NVIDIA's ONNX parser read a model, as trtexec will.

    Raises:
        ExportError: the parser refuses; its first error is in the message.
        BackendUnavailableError: no TensorRT package is installed.
    """
    from lowering.onnx.files import OnnxFile
    from lowering.trt.bindings import collect_log, logger, trt

    file = OnnxFile.of(model)
    with collect_log():
        builder = trt.Builder(logger())
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, logger())
        accepted = parser.parse(file.content) if file.path is None else parser.parse_from_file(str(file.path))
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
    if not accepted:
        first = errors[0] if errors else None
        what = f"{first.node_operator()} '{first.node_name()}': {first.desc()}" if first else "no reason given"
        raise ExportError(
            f"NVIDIA's ONNX parser refuses the file: {what}", hint="keep this operator in Python with wrap()"
        )
