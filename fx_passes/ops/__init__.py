"""The op table: what an op is, in every spelling that a graph may hold (module, function, method, aten overload).

One lookup, `op_of(node, root)`, serves fusing, quantization, autocast and cost. To add an op, enter it in `compute.py`
or `movement.py`; there is no other op list in `fx_passes`.
"""

from fx_passes.ops.arguments import bind
from fx_passes.ops.lookup import OPS, is_inplace, is_size, module_of, op_of, out_of_place
from fx_passes.ops.masks import attention_mask
from fx_passes.ops.op import Amp, Op, Result, Role, Shape
from fx_passes.ops.writes import setitem, write_view

__all__ = [
    "OPS",
    "Amp",
    "Op",
    "Result",
    "Role",
    "Shape",
    "attention_mask",
    "bind",
    "is_inplace",
    "is_size",
    "module_of",
    "op_of",
    "out_of_place",
    "setitem",
    "write_view",
]
