"""Example inputs and what ONNX Runtime makes of them, for Polygraphy to compare TensorRT with on a machine with a GPU.

The engine of a file for TensorRT is built and run where the GPU is, perhaps without this project and without torch.
Polygraphy (NVIDIA's own tool) builds it there, runs it on these inputs, and holds it to these outputs.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowering.onnx.tensorrt_file import profiles

if TYPE_CHECKING:
    from lowering.segment.program import TensorSpec

__all__ = ["INPUTS", "OUTPUTS", "Expected", "expect", "polygraphy_command"]

_log = logging.getLogger("lowering.onnxruntime")
INPUTS, OUTPUTS = "inputs.json", "outputs.json"
# Mean error over mean magnitude. What is sought is a wrong network, not the rounding of other kernels.
_SHARES = {"fp32": 0.001, "fp16": 0.01, "bf16": 0.03, "int8": 0.05}
_LARGEST = 64 << 20
_HELD = (torch.float32, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)


@dataclass(frozen=True)
class Expected:
    """Inputs and outputs of one call, as the bytes of Polygraphy's JSON files.

    Attributes:
        inputs: what `polygraphy run --load-inputs` takes.
        outputs: what `polygraphy run --load-outputs` takes.
        tolerances: largest mean absolute error of each output.
    """

    inputs: bytes
    outputs: bytes
    tolerances: dict[str, float]


def expect(
    specs: Sequence[TensorSpec],
    names: Sequence[str],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    precision: str,
) -> Expected | None:
    """One call for Polygraphy; None for tensors that NumPy does not hold (bfloat16), for more than 64 MB of them, and
    for sizes between two optimization profiles.

    Args:
        specs: of the inputs.
        names: of the outputs.
        inputs: what was passed.
        outputs: what came out, in a runtime that is trusted.
        precision: of the file: "fp32", "fp16", "bf16" or "int8".
    """
    from polygraphy.comparator import IterationResult, RunResults
    from polygraphy.json import to_json

    given = {spec.name: value.numpy() for spec, value in zip(specs, inputs, strict=True) if value.dtype in _HELD}
    values = [*inputs, *outputs]
    too_much = any(v.dtype not in _HELD for v in values) or sum(v.nbytes for v in values) > _LARGEST
    if too_much or not _covered({name: array.shape for name, array in given.items()}, specs):
        _log.info("no example for polygraphy: too large, of a type that NumPy lacks, or between two profiles")
        return None
    found = {name: value.numpy() for name, value in zip(names, outputs, strict=True)}
    results = RunResults([("onnxruntime", [IterationResult(found, runner_name="onnxruntime")])])
    magnitudes = [float(value.double().abs().mean()) for value in outputs]
    tolerances = {name: _SHARES[precision] * m for name, m in zip(names, magnitudes, strict=True)}
    return Expected(to_json([given]).encode(), to_json(results).encode(), tolerances)


def _covered(shapes: dict[str, tuple[int, ...]], specs: Sequence[TensorSpec]) -> bool:
    """Whether one optimization profile has these shapes."""
    ranges = profiles(specs)
    return not ranges or any(
        all(a <= n <= b for name in low for a, n, b in zip(low[name], shapes[name], high[name], strict=True))
        for low, _, high in ranges
    )


def polygraphy_command(name: str, inputs: Sequence[TensorSpec], tolerances: dict[str, float]) -> str:
    """The command line that builds an engine of `<name>.onnx` where the GPU is, and compares it with what is expected.

    Args:
        name: of the segment; its files lie in the working directory.
        inputs: the file's inputs; shapes are given only if one of them is dynamic.
        tolerances: of `Expected`.

    Example:
        >>> import torch
        >>> from lowering.segment.program import TensorSpec
        >>> x = TensorSpec("x", torch.float32, (1, 3), (4, 3), (8, 3))
        >>> print(polygraphy_command("net", [x], {"y": 0.01}))
        polygraphy run net.onnx --trt --strongly-typed --trt-min-shapes 'x:[1,3]' --trt-opt-shapes 'x:[4,3]' \
--trt-max-shapes 'x:[8,3]' --load-inputs net.inputs.json --load-outputs net.outputs.json --check-error-stat mean \
--rtol 0 --atol y:0.01
    """
    words = ["polygraphy", "run", f"{name}.onnx", "--trt", "--strongly-typed"]
    for profile in profiles(inputs):
        for option, shapes in zip(("min", "opt", "max"), profile, strict=True):
            given = (f"{name}:[{','.join(map(str, shape))}]" for name, shape in shapes.items())
            words += [f"--trt-{option}-shapes", *given]
    words += ["--load-inputs", f"{name}.{INPUTS}", "--load-outputs", f"{name}.{OUTPUTS}"]
    words += ["--check-error-stat", "mean", "--rtol", "0", "--atol"]
    return shlex.join([*words, *(f"{output}:{limit:.3g}" for output, limit in tolerances.items())])
