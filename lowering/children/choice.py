"""Which children of a Python root are lowered, and for which sizes: the largest ones that are tensor programs."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fx_passes import fuse_fx, trace
from fx_passes.capture.state import restored_state
from fx_passes.capture.wrap import is_wrapped_module
from fx_passes.entry.call import has_own_call
from fx_passes.errors import CaptureError, LoweringError
from fx_passes.graph.copies import eval_copy
from fx_passes.graph.hooks import without_hooks
from fx_passes.graph.resized import brought_to
from fx_passes.ops import OPS, Role
from lowering.children.calls import Call, Opaque, Shape, record_calls
from lowering.children.lowered import Accepts, TensorRange
from lowering.request.arguments import as_example, signature_of
from lowering.request.inputs import Example, ShapeRange
from lowering.request.probes import HEADROOM, alike, of_other_sizes

__all__ = ["Child", "Choice", "choose", "computes"]

Sizes = tuple[int, ...]


@dataclass
class Child:
    """A submodule that is lowered on its own.

    Attributes:
        path: qualified name.
        module: the original.
        calls: those that were recorded of its program at the opt sizes, the most expensive first.
        ranges: for each tensor argument, in order, smallest and largest sizes.
        graph: captured and fused, then converted where int8 is asked for.
        others: how many calls at the opt sizes have other arguments: of another structure or with other constants.
        note: why it is not int8 although asked for, or None.
    """

    path: str
    module: nn.Module
    calls: list[Call]
    ranges: list[tuple[Sizes, Sizes]]
    graph: GraphModule
    others: int = 0
    note: str | None = None

    @property
    def flops(self) -> int:
        """FLOPs of all its calls at the opt sizes."""
        return sum(call.flops for call in self.calls)

    def takes(self, arguments: dict[str, Any]) -> bool:
        """Whether a call with these arguments, whatever their sizes, is one of its program."""
        call = Call.of(self.path, (), arguments)
        return call.form == self.calls[0].form and all(all(shape.sizes) for shape in call.shapes())

    def accepts(self, dynamic: bool = True) -> Accepts:
        """The calls that its program takes; those with the opt sizes alone if it is not `dynamic`."""
        ranges = iter(self.ranges)
        places: list[tuple[str, Any]] = []
        for where, leaf in self.calls[0].leaves:
            if isinstance(leaf, Shape):
                low, high = next(ranges)
                leaf = TensorRange(leaf.dtype, *((low, high) if dynamic else (leaf.sizes, leaf.sizes)))
            places.append((where, leaf))
        return Accepts(signature_of(self.module.forward), tuple(places))

    def sizes(self, tensors: list[Tensor]) -> ShapeRange:
        """Its calls at the smallest, usual and largest sizes, with the values of `tensors`, repeated or cut."""
        low, high = ([r[i] for r in self.ranges] for i in (0, 1))
        if low == high:
            return self.fixed(tensors)
        export = [
            tuple(max(n, 2) if a != b else n for n, a, b in zip(shape.sizes, *r, strict=True))
            for shape, r in zip(self.calls[0].shapes(), self.ranges, strict=True)
        ]
        return ShapeRange(
            self.at(tensors, low), self.at(tensors, None), self.at(tensors, high), self.at(tensors, export)
        )

    def fixed(self, tensors: list[Tensor]) -> ShapeRange:
        """Its call with these tensors alone."""
        example = self.at(tensors, None)
        return ShapeRange(example, example, example, example)

    def at(self, tensors: list[Tensor], sizes: list[Sizes] | None) -> Example:
        """One call with these tensors, brought to these sizes."""
        fitted = iter(tensors if sizes is None else [brought_to(t, s) for t, s in zip(tensors, sizes, strict=True)])
        arguments = pytree.tree_map_only(Shape, lambda _: next(fitted), self.calls[0].arguments)
        return as_example(inspect.signature(self.module.forward), arguments)


@dataclass
class Choice:
    """What is lowered of a root, and what is not.

    Attributes:
        children: in the order of their first calls.
        refused: why a submodule that computes stays Python, by qualified name.
        flops: of the whole root at the opt sizes.
    """

    children: list[Child] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    flops: int = 0


def choose(root: nn.Module, sizes: ShapeRange, batches: Iterable[Any], below: Sequence[str] | None = None) -> Choice:
    """Run `root` and choose its children.

    A child is taken if it convolves or multiplies matrices, is called with tensors (in lists, tuples and dicts) and
    plain values, and is captured as a graph; else its own children are looked at.

    How far a size may vary is measured, over the calls of one run, over runs at the smallest, usual and largest sizes
    of the root, and over calibration batches with images of other sizes. A size that differs between inputs of one size
    (calibration batches, the example with its values shuffled, zeros) follows from the data: it is lowered from 1 to
    twice the largest seen.

    Args:
        root: a copy of the model, in eval mode; it is left as it is.
        sizes: of the root's inputs.
        batches: calibration batches as further examples; a few are used.
        below: choose only among what these submodules call.

    Raises:
        CaptureError: the root fails on its example.
    """
    return _Chooser(root, sizes, batches).choose(below)


class _Chooser:
    def __init__(self, root: nn.Module, sizes: ShapeRange, batches: Iterable[Any]):
        self.root = root
        self.choice = Choice()
        with restored_state(root), torch.random.fork_rng(devices=[]), torch.no_grad():
            try:
                self.opt, self.choice.flops = record_calls(root, sizes.opt)
                others = [sizes.min, sizes.max] if sizes.dynamic else []
                self.runs = [self.opt, *(record_calls(root, example)[0] for example in others)]
            except Exception as error:
                raise CaptureError(
                    f"{type(root).__name__} fails on the example inputs: {type(error).__name__}: {error}",
                    hint="check that the model itself runs on them, at the smallest and largest sizes too",
                ) from error
            self.probes = list(_probe(root, alike(sizes.opt, batches)))
            self.runs += _probe(root, of_other_sizes(sizes.opt, batches))
        self.chosen: set[str] = set()

    def choose(self, below: Sequence[str] | None) -> Choice:
        for call in self.opt:
            if (not call.parents) if below is None else (call.parents and call.parents[-1] in below):
                self._visit(call.path)
        if below is None:
            self._note_uncalled()
        return self.choice

    def _visit(self, path: str) -> None:
        calls = [c for c in self.opt if c.path == path and not self.chosen & set(c.parents)]
        if path in self.chosen or path in self.choice.refused or not calls:
            return
        module = self.root.get_submodule(path)
        if not sum(c.heavy for c in calls):
            if computes(module):
                self.choice.refused[path] = "there was nothing for it to compute on the example inputs"
            return
        if is_wrapped_module(module):
            self.choice.refused[path] = "wrapped by the user"
            return
        found = self._child(path, module, calls)
        if isinstance(found, Child):
            self.chosen.add(path)
            self.choice.children.append(found)
            return
        self.choice.refused[path] = found
        for call in self.opt:
            if call.parents and call.parents[-1] == path:
                self._visit(call.path)

    def _child(self, path: str, module: nn.Module, calls: list[Call]) -> Child | str:
        """The submodule as a child to lower, or why it is none."""
        forms = dict.fromkeys(c.form for c in calls)  # of equal ones, the first
        form = max(forms, key=lambda form: sum(c.heavy for c in calls if c.form == form))
        others = sum(c.form != form for c in calls)
        calls = sorted((c for c in calls if c.form == form), key=lambda c: -c.flops)
        if strange := next(((where, leaf) for where, leaf in calls[0].leaves if isinstance(leaf, Opaque)), None):
            return f"its argument '{strange[0]}' is a {strange[1].kind}"
        if not calls[0].shapes():
            return "it takes no tensor"
        if has_own_call(type(module)):
            return "its class has a __call__ of its own"
        child = Child(path, module, calls, self._ranges(path, form), GraphModule({}, torch.fx.Graph()), others)
        blank = [torch.zeros(shape.sizes, dtype=shape.dtype) for shape in calls[0].shapes()]
        sizes = child.sizes(blank)
        try:
            graph = trace(
                without_hooks(eval_copy(module)),  # they run around the lowered forward
                sizes.export.inputs(),
                varying=(sizes.min.inputs(), sizes.max.inputs()),
                concrete_args=_constants(calls[0].arguments),
            )
            child.graph = fuse_fx(graph)
        except LoweringError as error:
            return error.what
        return child

    def _ranges(self, path: str, form: tuple[Any, ...]) -> list[tuple[Sizes, Sizes]]:
        seen = [_extremes(run, path, form) for run in self.runs]
        usual = seen[0]
        assert usual is not None
        probes = [found for run in self.probes if (found := _extremes(run, path, form)) is not None]
        ranges = []
        for index, (opt_low, opt_high) in enumerate(usual):
            lows = [s[index][0] for s in seen if s is not None]
            highs = [s[index][1] for s in seen if s is not None]
            low, high = ([pick(n) for n in zip(*rows, strict=True)] for pick, rows in ((min, lows), (max, highs)))
            for d in range(len(low)):
                extremes = {(p[index][0][d], p[index][1][d]) for p in probes} | {(opt_low[d], opt_high[d])}
                if len(extremes) > 1:  # other data of the same size gave another size here
                    low[d], high[d] = 1, HEADROOM * max(high[d], *(most for _, most in extremes))
            ranges.append((tuple(max(n, 1) for n in low), tuple(high)))  # a call with an empty tensor is not lowered
        return ranges

    def _note_uncalled(self) -> None:
        """Note the outermost modules that would compute and were not called."""
        called = {call.path for call in self.opt}
        known = set(self.chosen)
        for path, module in self.root.named_modules():
            inside = any(path == other or path.startswith(f"{other}.") for other in known)
            if path and not inside and not any(f"{other}.".startswith(f"{path}.") for other in called):
                if computes(module):
                    self.choice.refused[path] = "not called on the example inputs"
                known.add(path)


def _constants(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are numbers, or tuples and lists of them: a child is lowered for these values."""
    plain = {name: pytree.tree_leaves(value) for name, value in arguments.items()}
    return {
        name: arguments[name]
        for name, leaves in plain.items()
        if leaves and all(isinstance(leaf, (int, float)) and not isinstance(leaf, bool) for leaf in leaves)
    }


def _extremes(calls: list[Call], path: str, form: tuple[Any, ...]) -> list[tuple[Sizes, Sizes]] | None:
    """Smallest and largest sizes of each tensor argument over the calls of one program; None if there are none."""
    rows = [[shape.sizes for shape in c.shapes()] for c in calls if c.path == path and c.form == form]
    if not rows:
        return None
    return [
        (tuple(map(min, zip(*column, strict=True))), tuple(map(max, zip(*column, strict=True))))
        for column in zip(*rows, strict=True)
    ]


def computes(module: nn.Module) -> bool:
    """Whether there is a convolution or linear layer in a module."""
    weighted = tuple(m for op in OPS.values() if op.role is Role.WEIGHTED for m in op.modules)
    return any(isinstance(m, weighted) for m in module.modules())


def _probe(root: nn.Module, examples: Iterator[Example]) -> Iterator[list[Call]]:
    for example in examples:
        try:
            yield record_calls(root, example)[0]
        except Exception as error:  # shuffled pixels and zeros may be no input that the model's Python expects
            logging.getLogger(__name__).debug("a probe of %s failed: %s", type(root).__name__, error)
