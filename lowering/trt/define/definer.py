"""The walk over an aten graph that fills a network definition, node by node."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fx_passes.errors import BuildError, InputError, LoweringError, UnsupportedOpError
from fx_passes.graph.node_meta import source_line
from lowering.trt.bindings import collect_log, has_dtype, trt, trt_dtype
from lowering.trt.define.decompose import decomposed
from lowering.trt.define.net import Net, Scalar
from lowering.trt.define.net.core import safe_name
from lowering.trt.define.nodes import MAX_RANK, filled, foreign, general_reason, is_run_time, label_of, op_name
from lowering.trt.define.registry import Converter, bind, converter_for

if TYPE_CHECKING:
    from lowering.trt.define.definition import Network, Profile, Program

__all__ = ["Definer"]

# Checks that eager and export make on values: nothing to compute.
_NO_RESULT = (
    "_assert_scalar",
    "_assert_tensor_metadata",
    "_assert_async",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
)
_BYTES = (torch.uint8, torch.int8)


class Definer:
    """Fills the definition of `network` from `program`.

    Args:
        network: with an empty definition.
        program: an `AtenProgram`.
        collect: put the reason into `network.unsupported` where a node fails, and go on; otherwise raise.
        static_at: make every dimension static, at this profile's opt shapes.
    """

    def __init__(self, network: Network, program: Program, *, collect: bool, static_at: Profile | None = None):
        self.network, self.program, self.collect, self.static_at = network, program, collect, static_at
        self.net = Net(network.definition, network.log)
        self.net.kept = network.kept
        self.values: dict[Node, Any] = {}

    def run(self) -> Network:
        """Walk the graph once."""
        with collect_log(self.network.log):
            self.net.reserve([spec.name for spec in self.program.inputs])
            self.net.reserve(self.program.outputs)
            user_inputs = iter(self.program.inputs)
            for node in self.program.exported.graph_module.graph.nodes:
                self._enter(node)
                if node.op == "placeholder":
                    value = self.program.constant(node)
                    self.values[node] = value if value is not None else self._input(next(user_inputs))
                elif node.op == "output":
                    self._outputs(node)
                else:
                    self._convert(node)
            self.net.node = None
        self._describe()
        return self.network

    def _enter(self, node: Node) -> None:
        label = safe_name(label_of(self.program, node))
        line = source_line(node)
        self.net.node, self.net.label = node, label
        self.net.tag = f"[{label} | {safe_name(line)}]" if line else f"[{label}]"

    def _input(self, spec: Any) -> Any:
        if not has_dtype(spec.dtype):
            raise InputError(f"input '{spec.name}' is {spec.dtype}, which TensorRT does not have", node=self.net.node)
        shape = [lo if lo == hi else -1 for lo, hi in zip(spec.min, spec.max, strict=True)]
        if self.static_at is not None and spec.name in self.static_at:
            shape = list(self.static_at[spec.name][1])
        if len(shape) > MAX_RANK:
            raise InputError(f"input '{spec.name}' has {len(shape)} dimensions, TensorRT takes {MAX_RANK}")
        tensor = self.network.definition.add_input(spec.name, trt_dtype(spec.dtype), shape)
        self.net.check("input", refused=tensor is None)
        self.network.tensors[self.net.node.name] = spec.name  # type: ignore[union-attr]
        return tensor

    # -- one node -------------------------------------------------------------------------------------------------

    def _convert(self, node: Node) -> None:
        if getattr(node.target, "__name__", "").split(".")[0] in _NO_RESULT:
            return
        try:
            self._check_sources(node)
            value = self._value(node)
            self._verify(node, value)
        except LoweringError as error:
            if not self.collect:
                raise (
                    error if error.node is not None else type(error)(error.what, node=node, hint=error.hint)
                ) from error
            self.network.unsupported[node] = error.what
            value = self._substitute(node)
        self.values[node] = value
        if not isinstance(value, tuple | list | torch.Tensor | Scalar | bool | int | float | None):
            self._name(node, value)

    def _check_sources(self, node: Node) -> None:
        """Refuse what reads a value that only a substitute without content stands for (see `_substitute`)."""
        for source in node.all_input_nodes:
            if source in self.network.unsupported and (reason := foreign(source.meta.get("val"))) is not None:
                raise UnsupportedOpError(f"it reads {reason}", node=node)

    def _value(self, node: Node) -> Any:
        args, kwargs = filled(node, lambda n: self.values[n])
        if node.target is operator.getitem:
            if args[0][args[1]] is None:
                source = op_name(node.all_input_nodes[0])
                raise UnsupportedOpError(f"result {args[1]} of {source} has no TensorRT form", node=node)
            return args[0][args[1]]
        if node.op != "call_function":
            raise UnsupportedOpError(f"a {node.op} node in an aten graph", node=node)
        found = self._on_host(node, args, kwargs)
        if found is not None:
            return found
        converter = converter_for(node.target)
        reason = general_reason(node)
        if reason is None and converter is not None and converter.check is not None:
            fakes, named = filled(node, lambda n: n.meta.get("val"))
            bound = bind(node.target, converter.check, fakes, named, {"result": node.meta.get("val")})
            reason = converter.check(**bound)
        if reason is not None:
            raise UnsupportedOpError(f"{op_name(node)}: {reason}", node=node)
        if converter is None:
            parts = decomposed(node)
            if parts is None:
                raise UnsupportedOpError(f"no TensorRT converter for {op_name(node)}", node=node)
            return self._in_parts(node, parts)
        try:
            if not converter.narrow and _has_bytes(node):
                return self._in_int32(node, converter, args, kwargs)
            return converter.function(self.net, **bind(node.target, converter.function, args, kwargs))
        except LoweringError:
            raise
        except (TypeError, ValueError, RuntimeError, KeyError) as error:
            # a wrong argument for a binding is a TypeError of the binding; the log, if any, says more
            self.net.check(op_name(node), refused=bool(self.network.log.errors))
            raise BuildError(f"{op_name(node)}: {type(error).__name__}: {error}", node=node) from error

    def _in_int32(self, node: Node, converter: Converter, args: tuple, kwargs: dict) -> Any:
        """The value of a node on 8-bit integers, which stay int32 inside a network.

        TensorRT computes with hardly any of them, and takes uint8 nowhere but as an input or output. Where a result
        may have left the range of the type it is brought back into it.
        """

        def widened(n: Node) -> Any:
            value, fake = self.values[n], n.meta.get("val")
            narrow = isinstance(fake, torch.Tensor) and fake.dtype in _BYTES
            return self.net.cast(value, torch.int32) if narrow else value

        args, kwargs = filled(node, widened)
        with self.net.bytes_as_int32():
            value = converter.function(self.net, **bind(node.target, converter.function, args, kwargs))
        fake = node.meta["val"]
        if not isinstance(fake, torch.Tensor) or fake.dtype not in _BYTES or not _computes(node):
            return value
        lowest = torch.iinfo(fake.dtype).min
        above = value if lowest == 0 else self.net.sub(value, lowest)
        above = self.net.sub(above, self.net.mul(self.net.floor_div(above, 256), 256))
        return above if lowest == 0 else self.net.sum(above, lowest)

    def _in_parts(self, node: Node, parts: GraphModule) -> Any:
        """The value of a node from torch's own decomposition of it."""
        inputs = iter(node.all_input_nodes)
        result = None
        for inner in parts.graph.nodes:
            if inner.op == "placeholder":
                self.values[inner] = self.values[next(inputs)]
            elif inner.op == "get_attr":
                self.values[inner] = getattr(parts, str(inner.target))
            elif inner.op == "output":
                result = map_arg(inner.args[0], lambda n: self.values[n])
            else:
                self.net.node = inner
                try:
                    value = self._value(inner)
                    self._verify(inner, value)
                except LoweringError as error:
                    what = f"{op_name(node)}, which torch computes with {op_name(inner)}: {error.what}"
                    raise type(error)(what, node=node, hint=error.hint) from error
                self.values[inner] = value
        self.net.node = node
        return result

    def _on_host(self, node: Node, args: tuple, kwargs: dict) -> Any:
        """The node's value if it depends on nothing but constants and is not better kept as layers, else None."""
        if not isinstance(node.target, torch._ops.OpOverload):
            values = [*args, *kwargs.values()]
            known = all(isinstance(v, int | float | bool) for v in values)
            return node.target(*args, **kwargs) if known else None  # type: ignore[operator]
        if node.target.namespace == "quantized_decomposed" or torch.Tag.nondeterministic_seeded in node.target.tags:
            return None
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(is_run_time(value) for value in flat):
            return None
        outputs = [v for v in torch.utils._pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
        if any(not isinstance(d, int) for v in outputs for d in v.shape):
            return None
        numel_in = sum(v.numel() for v in flat if isinstance(v, torch.Tensor))
        if not self.net.foldable(numel_in, sum(v.numel() for v in outputs)):
            return None
        kwargs = {k: (torch.device("cpu") if k == "device" and v is not None else v) for k, v in kwargs.items()}
        with torch.no_grad():
            args = torch.utils._pytree.tree_map(lambda v: v.cpu() if isinstance(v, torch.Tensor) else v, args)
            return node.target(*args, **kwargs)

    def _verify(self, node: Node, value: Any) -> None:
        """Hold what a converter made to the dtype and the shape that torch gives this node."""
        fakes, values = (v if isinstance(v, tuple | list) else (v,) for v in (node.meta.get("val"), value))
        for fake, tensor in zip(fakes, values, strict=False):
            if not isinstance(fake, torch.Tensor) or tensor is None or isinstance(tensor, torch.Tensor | Scalar):
                continue
            shape = tuple(tensor.shape)
            agrees = len(shape) == fake.dim() and all(
                have == want
                for have, want in zip(shape, fake.shape, strict=True)
                if isinstance(want, int) and have >= 0
            )
            found = self.net.dtype(tensor)
            if not agrees or (found != fake.dtype and not (found == torch.int32 and fake.dtype in _BYTES)):
                raise BuildError(
                    f"{op_name(node)}: the TensorRT form has shape {shape} and dtype {found}, torch "
                    f"gives {tuple(fake.shape)} and {fake.dtype}",
                    node=node,
                    hint="this is a defect of the converter; keep the module that holds this node in Python",
                )

    def _substitute(self, node: Node) -> Any:
        """Fresh inputs in place of a node that failed, so that what follows can be judged."""
        self.network.log.errors.clear()

        def fresh(fake: Any) -> Any:
            if not isinstance(fake, torch.Tensor):
                return fake
            if foreign(fake) is not None:
                return torch.zeros(())  # what reads it is refused
            shape = [d if isinstance(d, int) else -1 for d in fake.shape]
            name = f"{node.name}.unsupported.{self.network.definition.num_inputs}"
            tensor = self.network.definition.add_input(name, trt_dtype(fake.dtype), shape)
            self.net.check("input", refused=tensor is None)
            return tensor

        val = node.meta.get("val")
        return tuple(fresh(v) for v in val) if isinstance(val, tuple | list) else fresh(val)

    def _name(self, node: Node, tensor: Any) -> None:
        """Call a node's tensor as the node, unless an earlier node has named it (an op that changes nothing)."""
        if tensor.name not in self.network.tensors.values():
            self.net.rename(tensor, node.name)
        self.network.tensors[node.name] = tensor.name

    # -- outputs --------------------------------------------------------------------------------------------------

    def _outputs(self, node: Node) -> None:
        results = node.args[0]
        assert isinstance(results, Sequence)
        marked: set[str] = set()
        for name, result in zip(self.program.outputs, results, strict=True):
            assert isinstance(result, Node)
            self._enter(result)
            try:
                tensor = self.net.cast(self.net.tensor(self.values[result]), result.meta["val"].dtype)
            except LoweringError as error:
                if not self.collect:
                    raise
                self.network.unsupported.setdefault(result, error.what)
                continue
            if tensor.is_network_input or tensor.name in marked or isinstance(self.values[result], torch.Tensor):
                # TensorRT refuses an input as an output, and ignores the second marking of one tensor
                tensor = self.net.identity(tensor)
            old = tensor.name
            self.net.rename(tensor, name, reserved=True)
            self.network.definition.mark_output(tensor)
            self.net.check("output")
            marked.add(name)
            for of, current in self.network.tensors.items():
                if current == old:
                    self.network.tensors[of] = name
            self.network.tensors.setdefault(result.name, name)

    def _describe(self) -> None:
        kinds = (trt.LayerType.QUANTIZE, trt.LayerType.DEQUANTIZE)
        definition = self.network.definition
        self.network.quantized = any(definition.get_layer(i).type in kinds for i in range(definition.num_layers))


def _has_bytes(node: Node) -> bool:
    """Whether the node reads or gives 8-bit integers."""
    fakes = [*(n.meta.get("val") for n in node.all_input_nodes), node.meta.get("val")]
    return any(isinstance(v, torch.Tensor) and v.dtype in _BYTES for v in torch.utils._pytree.tree_leaves(fakes))


def _computes(node: Node) -> bool:
    """Whether a node makes new numbers, as opposed to moving those it gets."""
    return torch.Tag.pointwise in node.target.tags or node.target is torch.ops.aten._to_copy.default  # type: ignore[union-attr]
