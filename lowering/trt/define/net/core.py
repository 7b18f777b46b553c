"""What every primitive of `Net` stands on: adding a layer safely, names and metadata, constants, dtypes, casts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch.fx import Node
from torch.utils._pytree import tree_map_only

from fx_passes.errors import BuildError, UnsupportedOpError
from lowering.trt.bindings import BuilderLog, has_dtype, torch_dtype, trt, trt_dtype
from lowering.trt.define.net.scalar import Scalar

__all__ = ["Core", "Tensor", "Value", "safe_name"]

Tensor: TypeAlias = Any  # trt.ITensor
Value: TypeAlias = Any  # trt.ITensor, torch.Tensor (a constant known on the host), Scalar or a Python number

# The layer listing prints names unescaped between these characters, and the parser of the report relies on them.
_FORBIDDEN = re.compile(r"[\n\r{}\[\],]+")
_NOT_FOLDED_ABOVE = 1 << 20


def safe_name(name: str) -> str:
    """`name` without the characters that would break the layer listing, at most 1000 of them."""
    return _FORBIDDEN.sub("_", name)[:1000] or "_"


class Core:
    """State of one network definition and the few operations that all primitives share.

    Attributes:
        definition: the `INetworkDefinition` being filled.
        log: what TensorRT said so far; the first ERROR in it becomes an exception naming the current node.
        node: the aten node being converted.
        kept: host tensors whose memory the definition points into. They must outlive the definition.
        label: what the current node's layers are called: the path of the module it stands for, as near as is known.
        tag: what their metadata says: "[label | file.py:line]". It survives fusion, the names do not.
    """

    def __init__(self, definition: Any, log: BuilderLog, reserved: Sequence[str] = ()):
        self.definition, self.log = definition, log
        self.node: Node | None = None
        self.kept: list[torch.Tensor] = []
        self.label = "network"
        self.tag = ""
        self._layer_names: set[str] = set()
        self._tensor_names: set[str] = set(reserved)
        self._constants: dict[Any, Tensor] = {}
        self._sizes: dict[tuple[str, int], Scalar] = {}
        self._shapes: dict[str, Tensor] = {}
        self._indices: dict[int, torch.Tensor] = {}
        self._bytes_as_int32 = False

    # -- the node being converted -------------------------------------------------------------------------------

    @property
    def result(self) -> Any:
        """Fake result of the current node: its dtype and (symbolic) shape, as torch will have them."""
        val = self.node.meta["val"] if self.node is not None else None
        return tree_map_only(torch.Tensor, _in_int32, val) if self._bytes_as_int32 else val

    @contextmanager
    def bytes_as_int32(self) -> Iterator[None]:
        """While a node on 8-bit integers is computed in int32: what `result` says."""
        self._bytes_as_int32 = True
        try:
            yield
        finally:
            self._bytes_as_int32 = False

    def unsupported(self, reason: str, hint: str | None = None) -> UnsupportedOpError:
        """The error for something that TensorRT, or this converter, cannot express."""
        return UnsupportedOpError(reason, node=self.node, hint=hint)

    # -- layers ---------------------------------------------------------------------------------------------------

    def add(self, kind: str, layer: Any) -> Tensor:
        """Finish a layer: name it, tag it with its node, make TensorRT check it. Returns its first output.

        Args:
            kind: short name of what the layer does; the layer is called "<label>/<kind>".
            layer: what an `add_*` method of the definition gave, inputs and attributes set.

        Raises:
            BuildError: TensorRT refuses the layer; the message is the first error of its log.
        """
        self.check(kind, refused=layer is None)
        layer.name = _unique(f"{self.label}/{kind}", self._layer_names)
        layer.metadata = self.tag
        outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
        for index, output in enumerate(outputs):
            self.rename(output, layer.name if index == 0 else f"{layer.name}.{index}")
            try:
                tuple(output.shape)
            except (RuntimeError, ValueError) as error:
                self.check(kind, refused=True, otherwise=str(error))
        self.check(kind)
        return outputs[0]

    def check(self, what: str, refused: bool = False, otherwise: str = "no reason given") -> None:
        """Raise `BuildError` if TensorRT has logged an error since the last check, or if `refused`."""
        if refused or self.log.errors:
            text = self.log.errors[0].strip() if self.log.errors else otherwise
            self.log.errors.clear()
            raise BuildError(f"TensorRT refuses the {what} layer: {text}", node=self.node)

    def rename(self, tensor: Tensor, name: str, *, reserved: bool = False) -> str:
        """Call a tensor `name`, or the nearest free name. Returns the name it got.

        Args:
            tensor: a tensor of this definition.
            name: the wish.
            reserved: the name was set aside by `reserve` for this very tensor.
        """
        old, new = tensor.name, name if reserved else _unique(safe_name(name), self._tensor_names)
        tensor.name = new
        self._sizes.update({(new, dim): size for (of, dim), size in self._sizes.items() if of == old})
        if old in self._shapes:
            self._shapes[new] = self._shapes[old]
        return new

    def reserve(self, names: Sequence[str]) -> None:
        """Keep names for tensors that come later (inputs and outputs of the network)."""
        self._tensor_names.update(names)

    # -- values -------------------------------------------------------------------------------------------------

    def dtype(self, x: Value) -> torch.dtype:
        """The torch dtype of a tensor, host constant or scalar."""
        if isinstance(x, torch.Tensor | Scalar):
            return x.dtype
        if isinstance(x, bool):
            return torch.bool
        if isinstance(x, int):
            return torch.int64
        if isinstance(x, float):
            return torch.get_default_dtype()
        return torch_dtype(x.dtype)

    def rank(self, x: Value) -> int:
        """Number of dimensions; 0 for scalars."""
        return 0 if isinstance(x, Scalar | bool | int | float) else len(x.shape)

    def constant(self, value: torch.Tensor, *, quantized: bool = False) -> Tensor:
        """A constant layer that points at `value`'s own memory (kept alive, copied only if not contiguous on the CPU).

        Args:
            value: any shape; float32, float16, bfloat16, int64, int32 or bool, and int8 or uint8 through a cast.
            quantized: the constant goes directly into a dequantize layer: the one place where TensorRT takes int8.

        Raises:
            UnsupportedOpError: TensorRT has no such dtype.
        """
        value = value.detach()
        if not has_dtype(value.dtype):
            raise self.unsupported(f"TensorRT has no {str(value.dtype).removeprefix('torch.')} tensors")
        key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), str(value.device), quantized)
        if value.numel() and key in self._constants:
            return self._constants[key]
        if value.numel() == 0:
            tensor = self._empty(value)
        elif value.dtype == torch.uint8 or (value.dtype == torch.int8 and not quantized):
            tensor = self.cast(self.constant(value.to(torch.int32)), value.dtype)
        else:
            held = value.cpu().contiguous()
            # `held` may be a new tensor; `value` itself stays too, so that its address cannot come up again.
            self.kept += [value, held]
            weights = trt.Weights(trt_dtype(held.dtype), held.data_ptr(), held.numel())
            tensor = self.add("constant", self.definition.add_constant(tuple(held.shape), weights))
        self._constants[key] = tensor
        return tensor

    def weights(self, value: torch.Tensor) -> Any:
        """`value` as `trt.Weights` for a layer's own weight argument; its memory is kept alive, not copied."""
        held = value.detach().cpu().contiguous()
        self.kept.append(held)
        return trt.Weights(trt_dtype(held.dtype), held.data_ptr(), held.numel())

    def _empty(self, value: torch.Tensor) -> Tensor:
        # TensorRT has empty tensors but no empty constants: an empty slice of a one-element constant.
        ones = [1] * value.dim()
        seed = self.constant(torch.zeros(ones, dtype=value.dtype))
        layer = self.definition.add_slice(seed, [0] * value.dim(), [min(d, 1) for d in value.shape], ones)
        layer.set_input(2, self.constant(torch.tensor(value.shape, dtype=torch.int64)))
        layer.mode = trt.SampleMode.CLAMP
        return self.add("empty", layer)

    def tensor(self, x: Value, dtype: torch.dtype | None = None, rank: int | None = None) -> Tensor:
        """Any value as a network tensor, cast to `dtype` if given.

        Args:
            x: a tensor, a host constant, a `Scalar` or a number.
            dtype: what it should become; numbers and host constants are converted on the host.
            rank: for numbers, the rank of the constant (all ones).
        """
        if isinstance(x, bool | int | float):
            key = (x, type(x), dtype, rank)
            if key not in self._constants:
                shape = [1] * (rank or 0)
                self._constants[key] = self.constant(torch.full(shape, x, dtype=dtype or self.dtype(x)))
            return self._constants[key]
        if isinstance(x, torch.Tensor):
            return self.constant(x if dtype is None else self.host_cast(x, dtype))
        if isinstance(x, Scalar):
            x = self._scalar_shape(x, rank or 0)
        return x if dtype is None else self.cast(x, dtype)

    def _scalar_shape(self, x: Scalar, rank: int) -> Tensor:
        if rank == 1:
            return x.tensor
        layer = self.definition.add_shuffle(x.tensor)
        layer.reshape_dims = (1,) * rank
        if rank == 0:
            layer.set_input(1, self.constant(torch.empty(0, dtype=torch.int64)))
        return self.add("scalar", layer)

    def host_cast(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A host constant in another dtype, converted once per (tensor, dtype)."""
        if x.dtype == dtype:
            return x
        key = ("cast", x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), dtype)
        if key not in self._constants or not x.numel():
            self.kept.append(x)
            self._constants[key] = x.detach().to(dtype)
        return self._constants[key]

    def cast(self, x: Value, dtype: torch.dtype) -> Tensor:
        """`x` in another dtype, with torch's rules: float to int truncates, anything to bool is `!= 0`."""
        if not isinstance(x, torch.Tensor) and isinstance(x, bool | int | float | Scalar):
            return self.tensor(x, dtype)
        if isinstance(x, torch.Tensor):
            return self.constant(self.host_cast(x, dtype))
        if self.dtype(x) == dtype:
            return x
        if not has_dtype(dtype):
            raise self.unsupported(f"TensorRT has no {str(dtype).removeprefix('torch.')} tensors")
        return self.add("cast", self.definition.add_cast(x, trt_dtype(dtype)))

    def identity(self, x: Value) -> Tensor:
        """A tensor of its own with the same value."""
        return self.add("identity", self.definition.add_identity(self.tensor(x)))

    def foldable(self, numel_in: int, numel_out: int) -> bool:
        """Whether a result known on the host is worth storing: not when it blows a small constant up to a large one."""
        return numel_out <= max(_NOT_FOLDED_ABOVE, numel_in)


def _in_int32(fake: torch.Tensor) -> torch.Tensor:
    return fake.to(torch.int32) if fake.dtype in (torch.uint8, torch.int8) else fake


def _unique(name: str, taken: set[str]) -> str:
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}~{count}"
    taken.add(candidate)
    return candidate
