"""`Net`: what a converter writes its layers with.

A converter gets values (network tensors, host constants as `torch.Tensor`, run-time `Scalar`s, Python numbers) and
returns a network tensor, or a tuple of them. The primitives take any of these and do what every converter would
otherwise repeat: axis bitmasks, rank alignment, dtype promotion, keeping weights alive, names and metadata, and
turning the first error in TensorRT's log into an exception that names the node.

| family | primitives |
| --- | --- |
| values (`core`) | `tensor`, `constant`, `cast`, `dtype`, `rank`, `identity`, `result`, `unsupported` |
| sizes (`sizes`) | `dims`, `size`, `numel`, `shape_tensor`, `scalar`, `iota`, `minimum_size`, `maximum_size` |
| movement | `reshape`, `unsqueeze`, `squeeze`, `permute`, `flatten`, `expand`, `concat` |
| movement | `slice`, `narrow`, `select`, `gather`, `gather_elements`, `gather_nd`, `scatter`, `pad` |
| pointwise | `binary`, `unary`, `activation` and their short names, `clamp`, `where` |
| pointwise | `equal`, `greater`, `less`, `logical`, `logical_not`, `in_dtype`, `align`, `result_type` |
| reduction | `reduce`, `mean`, `softmax`, `topk`, `cumsum`, `normalization` |
| windows | `convolution`, `deconvolution`, `pool` |
| contraction | `matmul`, `einsum`, `quantize`, `dequantize` |
| loops | `scan` |

For anything else: make the layer with `net.definition.add_...`, then ``return net.add("kind", layer)``.
"""

from __future__ import annotations

from lowering.trt.define.net.core import Tensor, Value
from lowering.trt.define.net.loops import Loops
from lowering.trt.define.net.scalar import Scalar
from lowering.trt.define.net.sizes import Size, is_static, product

__all__ = ["Net", "Scalar", "Size", "Tensor", "Value", "is_static", "product"]


class Net(Loops):
    """All primitives, on one network definition."""
