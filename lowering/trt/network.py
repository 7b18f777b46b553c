"""From an aten program to a TensorRT network definition.

    network = build_network(program, name="resnet50")
    network.definition            # the INetworkDefinition, as NVIDIA's API has it
    supports(program)             # {node: reason} for what has no TensorRT form, nothing raised

The aten graph is walked once. What depends on constants only is computed on the host (casts of weights, masks,
ramps); everything else goes through the converter of its op. Quantized weights are the exception: they stay int8 in
front of their dequantize layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.fx import Node

from fx_passes.errors import BuildError, InputError, LoweringError, UnsupportedOpError
from fx_passes.node_meta import source_line
from lowering.trt.bindings import BuilderLog, collect_log, has_dtype, logger, trt, trt_dtype
from lowering.trt.bindings import flavour as current_flavour
from lowering.trt.net import Net, Scalar
from lowering.trt.net.core import safe_name
from lowering.trt.registry import bind, converter_for

__all__ = ["Network", "Profile", "build_network", "supports"]

aten = torch.ops.aten
Profile = Mapping[str, tuple[Sequence[int], Sequence[int], Sequence[int]]]

# Checks that eager and export make on values: nothing to compute.
_NO_RESULT = (
    "_assert_scalar",
    "_assert_tensor_metadata",
    "_assert_async",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
)
_MAX_RANK = 8


class Program(Protocol):
    """What is read of `lowering.aten.AtenProgram`."""

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
    return _Definer(program, name, profiles, collect=False, static_at=static_at).run()


def supports(program: Program) -> dict[Node, str]:
    """Why each node that TensorRT cannot express cannot be: aten node -> reason; empty if all can.

    The network is defined for real, without weights being copied, so the reasons include TensorRT's own. Where a node
    fails its result is replaced by a fresh network input and the walk goes on.
    """
    return _Definer(program, "supports", None, collect=True).run().unsupported


class _Definer:
    def __init__(
        self,
        program: Program,
        name: str,
        profiles: Sequence[Profile] | None,
        collect: bool,
        static_at: Profile | None = None,
    ):
        self.program, self.collect, self.static_at = program, collect, static_at
        log = BuilderLog()
        with collect_log(log):
            builder = trt.Builder(logger())
            definition = builder.create_network(_creation_flags())
        definition.name = name
        self.network = Network(
            name, definition, builder, log, list(program.inputs), list(program.outputs), current_flavour()
        )
        self.network.program = program
        if static_at is None:
            self.network.profiles = list(profiles) if profiles is not None else _default_profiles(program)
        self.net = Net(definition, log)
        self.net.kept = self.network.kept
        self.values: dict[Node, Any] = {}

    def run(self) -> Network:
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
        label = safe_name(_label(self.program, node))
        line = source_line(node)
        self.net.node, self.net.label = node, label
        self.net.tag = f"[{label} | {safe_name(line)}]" if line else f"[{label}]"

    def _input(self, spec: Any) -> Any:
        if not has_dtype(spec.dtype):
            raise InputError(f"input '{spec.name}' is {spec.dtype}, which TensorRT does not have", node=self.net.node)
        shape = [lo if lo == hi else -1 for lo, hi in zip(spec.min, spec.max, strict=True)]
        if self.static_at is not None and spec.name in self.static_at:
            shape = list(self.static_at[spec.name][1])
        if len(shape) > _MAX_RANK:
            raise InputError(f"input '{spec.name}' has {len(shape)} dimensions, TensorRT takes {_MAX_RANK}")
        tensor = self.network.definition.add_input(spec.name, trt_dtype(spec.dtype), shape)
        self.net.check("input", refused=tensor is None)
        self.network.tensors[self.net.node.name] = spec.name  # type: ignore[union-attr]
        return tensor

    # -- one node -------------------------------------------------------------------------------------------------

    def _convert(self, node: Node) -> None:
        if getattr(node.target, "__name__", "").split(".")[0] in _NO_RESULT:
            return
        try:
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

    def _value(self, node: Node) -> Any:
        args, kwargs = _filled(node, lambda n: self.values[n])
        if node.target is operator.getitem:
            return args[0][args[1]]
        if node.op != "call_function":
            raise UnsupportedOpError(f"a {node.op} node in an aten graph", node=node)
        found = self._on_host(node, args, kwargs)
        if found is not None:
            return found
        converter = converter_for(node.target)
        if converter is None:
            raise UnsupportedOpError(f"no TensorRT converter for {_op_name(node)}", node=node)
        reason = _general_reason(node)
        if reason is None and converter.check is not None:
            fakes, named = _filled(node, lambda n: n.meta.get("val"))
            bound = bind(node.target, converter.check, fakes, named, {"result": node.meta.get("val")})
            reason = converter.check(**bound)
        if reason is not None:
            raise UnsupportedOpError(f"{_op_name(node)}: {reason}", node=node)
        try:
            return converter.function(self.net, **bind(node.target, converter.function, args, kwargs))
        except LoweringError:
            raise
        except (TypeError, ValueError, RuntimeError, KeyError) as error:
            # a wrong argument for a binding is a TypeError of the binding; the log, if any, says more
            self.net.check(_op_name(node), refused=bool(self.network.log.errors))
            raise BuildError(f"{_op_name(node)}: {type(error).__name__}: {error}", node=node) from error

    def _on_host(self, node: Node, args: tuple, kwargs: dict) -> Any:
        """The node's value if it depends on nothing but constants and is not better kept as layers, else None."""
        if not isinstance(node.target, torch._ops.OpOverload):
            values = [*args, *kwargs.values()]
            known = all(isinstance(v, int | float | bool) for v in values)
            return node.target(*args, **kwargs) if known else None  # type: ignore[operator]
        if node.target.namespace == "quantized_decomposed" or torch.Tag.nondeterministic_seeded in node.target.tags:
            return None
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(_is_run_time(value) for value in flat):
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
            if not agrees or self.net.dtype(tensor) != fake.dtype:
                raise BuildError(
                    f"{_op_name(node)}: the TensorRT form has shape {shape} and dtype {self.net.dtype(tensor)}, torch "
                    f"gives {tuple(fake.shape)} and {fake.dtype}",
                    node=node,
                    hint="this is a defect of the converter; keep the module that holds this node in Python",
                )

    def _substitute(self, node: Node) -> Any:
        """Fresh inputs in place of a node that failed, so that what follows can be judged."""
        self.network.log.errors.clear()

        def fresh(fake: Any) -> Any:
            if not isinstance(fake, torch.Tensor) or not has_dtype(fake.dtype) or fake.dim() > _MAX_RANK:
                return fake if not isinstance(fake, torch.Tensor) else torch.zeros(())
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
            tensor = self.net.tensor(self.values[result])
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


def _label(program: Program, node: Node) -> str:
    """The module that a node stands for, such as "layer1.0.conv2"; near enough where the node has no module of its own.

    A weighted op is called as the owner of its weight; anything else as its FX node, whose name begins with the path
    of the module if it was a call of that module.
    """
    for argument in node.all_input_nodes:
        origin = argument.all_input_nodes[0] if _is_dequantize(argument) else argument
        fqn = program.constant_name(origin)
        if fqn is not None and fqn.endswith("weight") and "." in fqn:
            return fqn.rpartition(".")[0]
    name = str(node.meta.get("fx_node") or node.name)
    path = str(node.meta.get("module_path") or "")
    prefix = path.replace(".", "_") + "_"
    if path and name.startswith(prefix):
        return f"{path}.{name.removeprefix(prefix)}"
    return f"{path}/{name}" if path else name


def _is_dequantize(node: Node) -> bool:
    return str(node.target).startswith("quantized_decomposed.dequantize") and bool(node.all_input_nodes)


def _creation_flags() -> int:
    # strongly typed is the only kind from TensorRT 11 on, where the flag may be gone; the same networks on 10.x need it
    flags = trt.NetworkDefinitionCreationFlag
    return 1 << int(flags.STRONGLY_TYPED) if hasattr(flags, "STRONGLY_TYPED") else 0


def _default_profiles(program: Program) -> list[Profile]:
    dynamic = {
        s.name: (tuple(s.min), tuple(s.opt), tuple(s.max)) for s in program.inputs if tuple(s.min) != tuple(s.max)
    }
    return [dynamic] if dynamic else []


def _is_run_time(value: Any) -> bool:
    return not isinstance(
        value,
        torch.Tensor
        | bool
        | int
        | float
        | str
        | None
        | torch.dtype
        | torch.device
        | torch.layout
        | torch.memory_format,
    )


def _filled(node: Node, value_of: Callable[[Node], Any]) -> Any:
    """The node's arguments with values in place of nodes."""
    return torch.fx.node.map_arg((node.args, node.kwargs), value_of)


def _op_name(node: Node) -> str:
    return str(node.target) if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "__name__", "?")


def _general_reason(node: Node) -> str | None:
    """Limits of TensorRT that hold for every op: its dtypes and ranks, complex numbers and sparse tensors."""
    used = [node.meta.get("val")]
    if isinstance(used[0], tuple | list):
        indices = {user.args[1] for user in node.users if user.target is operator.getitem}
        used = [v for i, v in enumerate(used[0]) if i in indices]
    for fake in [*used, *(n.meta.get("val") for n in node.all_input_nodes)]:
        if not isinstance(fake, torch.Tensor):
            continue
        if not has_dtype(fake.dtype) and not (fake.dim() == 0 and fake.dtype == torch.float64):
            return f"TensorRT has no {str(fake.dtype).removeprefix('torch.')} tensors"
        if fake.dim() > _MAX_RANK:
            return f"{fake.dim()} dimensions, TensorRT takes at most {_MAX_RANK}"
        if fake.layout != torch.strided:
            return f"layout {fake.layout}"
    return None
