"""What a user passes as inputs: one example, calibration batches, ranges of sizes. Normalised here, once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fx_passes.entry.ambient import as_caller, plain_state
from fx_passes.entry.call import arguments_of, call_signature
from fx_passes.errors import CalibrationError, InputError
from fx_passes.graph.copies import copied_inputs
from fx_passes.graph.resized import brought_to
from fx_passes.quantize.calibrate import check_batch
from lowering.request.dimensions import DynamicShapes, settings_apart
from lowering.request.images import declared_input

__all__ = ["CalibrationData", "Example", "ShapeRange", "example_for", "shape_range"]


@dataclass(frozen=True)
class Example:
    """Arguments of one call of the model: `model(*args, **kwargs)`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: Any) -> Example:
        """From a tensor (one argument), a tuple or list (positional arguments) or a dict (keyword arguments)."""
        return inputs if isinstance(inputs, Example) else cls(*arguments_of(inputs))

    def inputs(self) -> tuple[Any, ...] | dict[str, Any]:
        """The arguments as the passes take example inputs."""
        return self.args or self.kwargs

    def map(self, function: Callable[[Tensor], Tensor]) -> Example:
        """The same structure with `function` applied to every tensor."""
        args, kwargs = pytree.tree_map_only(Tensor, function, (self.args, self.kwargs))
        return Example(args, kwargs)

    def tensors(self) -> list[Tensor]:
        """All tensors, in order, also those inside lists and dicts."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def bind(self, model: nn.Module) -> inspect.BoundArguments:
        """The arguments by the names that `model` has for them.

        Raises:
            InputError: the model cannot be called like this; the message gives its signature.
        """
        signature = call_signature(model, self.args, self.kwargs)
        try:
            return signature.bind(*self.args, **self.kwargs)
        except TypeError as error:
            raise InputError(
                f"the model cannot be called with these inputs: {error} (its forward is forward{signature})",
                hint="pass one value for each argument; for a loader of (images, labels) pass only the images",
            ) from error


@dataclass(frozen=True)
class ShapeRange:
    """One call of the model at the smallest, the usual and the largest sizes, and at those that export traces with.

    All four are the same if nothing is dynamic. `torch.export` takes a size of 1 for a constant, so `export` has at
    least 2 in every dynamic dimension. With several optimization profiles, `profiles` has (min, opt, max) of each;
    `min` and `max` are over all of them, and `opt` is the first one's.

    Several dimensions may vary independently. In the calls `apart` they are at different ends of their ranges, so that
    what follows from one can be told from what follows from another. `named` has, for each call by its identity, the
    sizes of the dimensions that have names.
    """

    min: Example
    opt: Example
    max: Example
    export: Example
    profiles: tuple[tuple[Example, Example, Example], ...] = ()
    apart: tuple[Example, ...] = ()
    named: dict[int, dict[str, int]] = field(default_factory=dict)

    @property
    def dynamic(self) -> bool:
        return self.min is not self.opt or self.max is not self.opt


class CalibrationData:
    """Calibration batches that can be gone through more than once.

    A re-iterable (list, `DataLoader`) is iterated afresh each time. A one-shot iterator is consumed once by
    `batches()`, and its first `kept` batches serve every later pass. Every pass gets copies, which a model that writes
    to its inputs may change.
    """

    def __init__(self, batches: Iterable[Any] | None, kept: int):
        if isinstance(batches, (Tensor, dict)) or (batches is not None and not isinstance(batches, Iterable)):
            raise InputError(
                f"calibration is a {type(batches).__name__}", hint="pass an iterable of batches, for example [tensor]"
            )
        self._source = batches
        self._one_shot = isinstance(batches, Iterator)
        self._limit = kept
        self._kept: list[Any] = []
        self._spent = False
        self._call: tuple[inspect.Signature, Example] | None = None

    def check_against(self, signature: inspect.Signature, example: Example) -> None:
        """From now on, refuse batches that do not fit a signature, or whose dtypes are not the example's."""
        self._call = signature, example

    def __bool__(self) -> bool:
        return self._source is not None

    def first(self) -> Any:
        """The first batch, without losing it for `batches()`."""
        if self._source is None:
            raise CalibrationError("there is no calibration data")
        for batch in islice(iter(self), 1):
            return batch
        raise CalibrationError(
            "the calibration data is empty", hint="an exhausted generator gives no batches; pass a list or a DataLoader"
        )

    def __iter__(self) -> Iterator[Any]:
        if self._source is None:
            return
        for index, batch in enumerate(self._passed()):
            if self._call is not None:
                signature, example = self._call
                check_batch(batch, index, signature, example.inputs())
            with plain_state():  # whoever asks: tensors made in inference mode could not be written to
                own = copied_inputs(batch)
            yield own

    def _passed(self) -> Iterator[Any]:
        assert self._source is not None
        if not self._one_shot:
            yield from as_caller(self._source)
            return
        yield from list(self._kept)
        if self._spent:
            return
        for batch in as_caller(self._source):
            if len(self._kept) < self._limit:
                self._kept.append(batch)
            yield batch
        self._spent = True

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]


def example_for(model: nn.Module, example_inputs: Any, calibration: CalibrationData) -> Example:
    """The example to capture and measure with: the given one, the first calibration batch, what a prepared model
    recorded, or the input size that the model declares (timm's `default_cfg`, torchvision's weights).

    Raises:
        InputError: none of them is there, or the model cannot be called with it.
    """
    if example_inputs is not None:
        example = Example.of(example_inputs)
    elif calibration:
        example = Example.of(calibration.first())
    elif (recorded := getattr(model, "meta", {}).get("example_inputs")) is not None:
        example = Example.of(recorded)
    elif (declared := declared_input(model)) is not None:
        example = Example((declared.example(),))
    else:
        raise InputError(
            f"no example inputs for {type(model).__name__}",
            hint="pass example_inputs=torch.randn(1, 3, 224, 224), or calibration batches to take the first of",
        )
    example.bind(model)
    return example.map(lambda t: t.clone() if t.is_inference() else t)


def shape_range(
    model: nn.Module,
    example: Example,
    dynamic_batch: tuple[int, int, int] | Sequence[tuple[int, int, int]] | None,
    dynamic_shapes: dict[str, Any] | tuple[Any, ...] | None,
) -> ShapeRange:
    """The example at min, opt and max sizes.

    Args:
        model: for its signature.
        example: at the usual sizes.
        dynamic_batch: (min, opt, max) of dimension 0 of every tensor that has the example's batch size, or a list of
            them, one for each optimization profile.
        dynamic_shapes: as `torch.export` takes them (see `DynamicShapes`); opt is the example.
    """
    if dynamic_batch is not None and dynamic_shapes is not None:
        raise InputError("both dynamic_batch and dynamic_shapes are given", hint="put the batch into dynamic_shapes")
    if dynamic_batch is not None:
        return _batch_range(example, dynamic_batch)
    if dynamic_shapes is not None:
        return _dims_range(model, example, dynamic_shapes)
    return ShapeRange(example, example, example, example)


def _batch_range(example: Example, dynamic_batch: Any) -> ShapeRange:
    ranges = _batch_ranges(dynamic_batch)
    batched = [t for t in example.tensors() if t.dim() > 0]
    if not batched:
        raise InputError("dynamic_batch is given, but no input has a dimension to vary", hint="leave it out")
    size = batched[0].shape[0]

    @cache
    def at(batch: int) -> Example:
        return example.map(lambda t: brought_to(t, (batch, *t.shape[1:])) if t.dim() > 0 and t.shape[0] == size else t)

    least, usual, most = min(low for low, _, _ in ranges), ranges[0][1], max(high for _, _, high in ranges)
    if least == most:
        return ShapeRange(at(usual), at(usual), at(usual), at(usual))
    profiles = tuple((at(low), at(opt), at(high)) for low, opt, high in ranges) if len(ranges) > 1 else ()
    calls = {usual, least, most, max(usual, 2), *(size for values in ranges for size in values)}
    named = {id(at(size)): {"batch": size} for size in calls}
    return ShapeRange(at(least), at(usual), at(most), at(max(usual, 2)), profiles, named=named)


def _batch_ranges(dynamic_batch: Any) -> list[tuple[int, int, int]]:
    given = list(dynamic_batch) if isinstance(dynamic_batch, (tuple, list)) else []
    several = bool(given) and all(isinstance(item, (tuple, list)) for item in given)
    ranges = [tuple(item) for item in given] if several else [tuple(given)]
    for values in ranges:
        if (
            len(values) != 3
            or not all(isinstance(v, int) for v in values)
            or not 1 <= values[0] <= values[1] <= values[2]
        ):
            raise InputError(
                f"dynamic_batch is {dynamic_batch!r}",
                hint="pass (min, opt, max) with 1 <= min <= opt <= max, or a list of such, one for each profile",
            )
    return ranges


def _dims_range(model: nn.Module, example: Example, dynamic_shapes: Any) -> ShapeRange:
    bound = example.bind(model)
    if hasattr(dynamic_shapes, "dynamic_shapes"):  # a torch.export.ShapesCollection
        dynamic_shapes = dynamic_shapes.dynamic_shapes(model, example.args, example.kwargs)
    shapes = DynamicShapes(dynamic_shapes, dict(bound.arguments))
    dims = list(shapes.dimensions.values())
    sizes: dict[int, dict[str, int]] = {}

    def at(values: dict[str, int]) -> Example:
        changed = example.bind(model)
        changed.arguments.update(shapes.at(values))
        made = Example(changed.args, changed.kwargs)
        sizes[id(made)] = values
        return made

    usual = {dim.name: dim.usual for dim in dims}
    sizes[id(example)] = usual
    least, most = at({dim.name: dim.min for dim in dims}), at({dim.name: dim.max for dim in dims})
    if all(dim.min == dim.max for dim in dims):
        return ShapeRange(example, example, example, example)
    traced = {dim.name: min(max(dim.usual, 2), dim.max) for dim in dims}
    export = example if traced == usual else at(traced)
    apart = tuple(at(values) for values in settings_apart(dims))
    return ShapeRange(least, example, most, export, apart=apart, named=sizes)
