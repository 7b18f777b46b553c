"""One run of a graph on example inputs: what kind of value each node gives, what shares memory, what is written to.

Shapes and values are not kept: they may differ at the next call. Which memory a value lives in is read off its
storage, and which memory a call writes to off the version counters of the tensors that it gets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fx_passes.capture.state import restored_state
from fx_passes.errors import InputError, LoweringError
from fx_passes.graph.copies import copied_inputs

__all__ = ["Recording", "bind_inputs", "positional", "record", "tensors_in"]


class Recording:
    """What one run showed.

    Attributes:
        kinds: per node "tensor", "container" (of tensors), "host" (numbers, sizes, None, ...) or "object".
        groups: per node the memory groups that its value lives in.
        reads: per node the memory groups that its arguments, or the state of the module it calls, live in.
        writes: those of them that it wrote to.
        same: per node the input node whose very object it returned.
        containers: per node of kind "container" its value, with None for each tensor.
        state_groups: the memory groups of the model's parameters and buffers.
        output: the result of the run.
    """

    def __init__(self) -> None:
        self.kinds: dict[Node, str] = {}
        self.groups: dict[Node, set[int]] = {}
        self.reads: dict[Node, set[int]] = {}
        self.writes: dict[Node, set[int]] = {}
        self.state_groups: set[int] = set()
        self.same: dict[Node, Node] = {}
        self.containers: dict[Node, Any] = {}
        self.output: Any = None


def record(gm: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    """Run `gm` once, on copies of the inputs and without gradients; buffers, attributes and random state are put back.

    Raises:
        InputError: the inputs do not fit the graph's signature, or the run fails; names the node.
    """
    with restored_state(gm), torch.random.fork_rng(devices=[]), torch.no_grad():
        return _Recorder(gm, bind_inputs(gm, *copied_inputs((args, kwargs)))).record()


def bind_inputs(gm: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Node, Any]:
    """The value of each placeholder for a call of `gm` with these arguments.

    Raises:
        InputError: an argument is missing, or there are too many.
    """
    values: dict[Node, Any] = {}
    positional, named = list(args), dict(kwargs)
    for node in gm.graph.find_nodes(op="placeholder"):
        name = str(node.target)
        if name.startswith("**"):
            values[node], named = named, {}
        elif name.startswith("*"):
            values[node], positional = tuple(positional), []
        elif positional:
            values[node] = positional.pop(0)
        elif name in named:
            values[node] = named.pop(name)
        elif node.args:
            values[node] = node.args[0]
        else:
            raise InputError(f"the example inputs give no '{name}'", hint="pass example inputs for every argument")
    if positional or named:
        raise InputError(f"the example inputs have {len(positional)} arguments too many, and {sorted(named)}")
    return values


def positional(values: dict[Node, Any]) -> list[Any]:
    """What `bind_inputs` gave as the arguments of `Interpreter.run`, starred ones spread out."""
    found: list[Any] = []
    for node, value in values.items():
        found += list(value) if str(node.target).startswith("*") else [value]
    return found


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclass instances."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name, None))


_HOST = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size, slice)


def _is_host(value: Any) -> bool:
    if isinstance(value, (tuple, list, set)):
        return all(_is_host(item) for item in value)
    if isinstance(value, dict):
        return all(_is_host(item) for item in value.values())
    return isinstance(value, (*_HOST, torch.memory_format, type(...), torch.finfo, torch.iinfo, range))


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, (tuple, list, dict)) and any(True for _ in tensors_in(value)):
        return "container"
    return "host" if _is_host(value) else "object"


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Recorder(Interpreter):
    def __init__(self, gm: GraphModule, inputs: dict[Node, Any]):
        super().__init__(gm)
        self.inputs = inputs
        self.recording = Recording()
        self.fresh = itertools.count()
        # Memory that lives on the model: valid for the whole run.
        root = gm.__dict__.get("_self")
        state = [*gm.parameters(), *gm.buffers(), *([*root.parameters(), *root.buffers()] if root is not None else [])]
        self.state_tensors = [t for t in state if _has_storage(t)]
        self.state = {key: next(self.fresh) for key in {_key(t) for t in self.state_tensors}}
        self.recording.state_groups = set(self.state.values())
        # Memory of intermediate values, by node: their storages are alive wherever the node's value is an argument.
        self.memory: dict[Node, dict[int, int]] = {}

    def record(self) -> Recording:
        self.recording.output = self.run(*[None] * len(self.inputs))
        return self.recording

    def run_node(self, n: Node) -> Any:
        rec = self.recording
        args = [(node, self.env[node]) for node in n.all_input_nodes]
        known = dict(self.state)
        if n.op == "placeholder":  # two arguments may be one tensor
            for node in self.inputs:
                known.update(self.memory.get(node, {}))
        for node, _ in args:
            known.update(self.memory.get(node, {}))
        watched = [t for _, value in args for t in tensors_in(value) if _has_storage(t)]
        watched += _module_state(self.module, n)
        # A wrapped method may write to any state of the model.
        hidden = self.state_tensors if n.meta.get("python") else []
        watched += hidden
        versions = [t._version for t in watched]
        statistics = [(t, t.clone()) for t in _training_buffers(self.module, n)]
        result = self._run(n)
        changed = [t for t, version in zip(watched, versions, strict=True) if t._version != version]
        changed += [t for t, before in statistics if not torch.equal(t, before)]
        rec.writes[n] = {known[_key(t)] for t in changed if _key(t) in known}
        arguments = watched[: len(watched) - len(hidden)]
        rec.reads[n] = {known[_key(t)] for t in arguments if _key(t) in known} | rec.writes[n]
        mine: dict[int, int] = {}
        for t in tensors_in(result):
            if _has_storage(t):
                mine[_key(t)] = known.get(_key(t), mine.get(_key(t), -1))
                if mine[_key(t)] < 0:
                    mine[_key(t)] = next(self.fresh)
        self.memory[n] = mine
        rec.groups[n] = set(mine.values())
        rec.kinds[n] = _kind(result)
        if rec.kinds[n] == "container":
            rec.containers[n] = torch.utils._pytree.tree_map_only(Tensor, lambda _: None, result)
        if isinstance(result, Tensor):
            twin = next((node for node, value in args if value is result), None)
            if twin is not None:
                rec.same[n] = twin
        return result

    def _run(self, n: Node) -> Any:
        if n.op == "placeholder":
            return self.inputs[n]
        try:
            return super().run_node(n)
        except LoweringError:
            raise
        except Exception as error:
            text = str(error).split("\n")[0]
            raise InputError(
                f"the model fails on the example inputs: {type(error).__name__}: {text}",
                node=n,
                hint="check that the model itself runs on them: their rank, sizes and dtypes",
            ) from error


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > 0 and not tensor.is_inference()


def _training_buffers(gm: torch.nn.Module, node: Node) -> Iterable[Tensor]:
    """Buffers of a module in train mode: batch_norm writes to its statistics without counting a version."""
    if node.op != "call_module" or not gm.get_submodule(str(node.target)).training:
        return ()
    return [t for t in gm.get_submodule(str(node.target)).buffers() if _has_storage(t)]


def _module_state(gm: torch.nn.Module, node: Node) -> Iterable[Tensor]:
    if node.op != "call_module":
        return ()
    module = gm.get_submodule(str(node.target))
    return [t for t in (*module.parameters(), *module.buffers()) if _has_storage(t)]
