"""The one place that imports torch's `quantized_decomposed` operators.

They are the quantize and dequantize nodes of a converted graph: they survive `torch.export` and
`run_decompositions({})`, and PyTorch's ONNX exporter turns them into QuantizeLinear and DequantizeLinear.
Registration is a side effect of importing one private module of `torch.ao`; nothing else of it is used.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import Node

from fx_passes.errors import BackendUnavailableError

__all__ = ["decomposed", "is_dequantize", "is_quantize"]

_NAMESPACE = "quantized_decomposed"


@functools.cache
def decomposed() -> Any:
    """The `torch.ops.quantized_decomposed` namespace, its operators registered.

    Raises:
        BackendUnavailableError: this torch no longer has the module that registers them.
    """
    try:
        from torch.ao.quantization.fx import _decomposed  # noqa: F401  (registers the operators)
    except ImportError as error:
        raise BackendUnavailableError(
            f"torch {torch.__version__} has no quantized_decomposed operators",
            hint="install a torch release with torch.ao.quantization.fx._decomposed (2.9 to 2.14 are known to have it)",
        ) from error
    return torch.ops.quantized_decomposed


def _is(node: object, prefix: str) -> bool:
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name.startswith(f"{_NAMESPACE}::{prefix}")


def is_quantize(node: object) -> bool:
    """Whether `node` is a float-to-integer node of any granularity."""
    return _is(node, "quantize_per")


def is_dequantize(node: object) -> bool:
    """Whether `node` is an integer-to-float node of any granularity."""
    return _is(node, "dequantize_per")
