"""Automatic mixed precision: the fewest layers turned back to float that bring a model to the accuracy asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_passes.analysis.cost import estimate_cost
from fx_passes.analysis.profile import profile_nodes
from fx_passes.entry.ambient import as_caller, plain_state
from fx_passes.entry.call import arguments_of
from fx_passes.errors import InputError, QuantizationError
from fx_passes.ops import Role, op_of
from fx_passes.partition.recording import bind_inputs, positional
from fx_passes.quantize.accuracy.partial import Errors, PartlyQuantized, errors, run
from fx_passes.quantize.annotation import annotation_of
from fx_passes.quantize.qconfig import QConfig

__all__ = ["MixedPrecision", "Trial", "search_mixed_precision"]


@dataclass(frozen=True)
class Trial:
    """One configuration that was tried.

    Attributes:
        floats: the layers that it keeps in float.
        value: what was measured: accuracy by the user's metric, SQNR in dB, or cosine.
        meets: whether that is enough.
    """

    floats: tuple[str, ...]
    value: float
    meets: bool


@dataclass(frozen=True)
class MixedPrecision:
    """The result of a search.

    Attributes:
        qconfig: the configuration that was found; `qconfig.to_file(path)` keeps it.
        target: the placement that it is for.
        floats: the layers turned back to float, the most sensitive first.
        criterion: what was asked for, in words.
        value: what the configuration reaches; `value_int8` and `value_float`: with nothing and with everything turned
            back.
        flops_share: share of the quantized layers' FLOPs that the floats have, 0 to 1.
        time_share: share of the float model's measured time that they take on this machine, 0 to 1: about what int8
            could have made faster and now does not.
        trials: everything that was tried, in order.
    """

    qconfig: QConfig
    target: str
    floats: tuple[str, ...]
    criterion: str
    value: float
    value_int8: float
    value_float: float
    flops_share: float
    time_share: float
    trials: tuple[Trial, ...] = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "qconfig": self.qconfig.as_dict()}

    def __str__(self) -> str:
        kept = ", ".join(self.floats) or "nothing"
        return (
            f"{self.criterion}: {self.value:.6g} with {kept} in float (all int8: {self.value_int8:.6g}, float: "
            f"{self.value_float:.6g}); that is {self.flops_share:.1%} of the FLOPs that int8 could have run and "
            f"{self.time_share:.1%} of the float model's time"
        )


@plain_state()
def search_mixed_precision(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    target: str = "tensorrt-rtx",
    qconfig: QConfig | Mapping[Any, Any] | str | os.PathLike[str] | None = None,
    calibration: Iterable[Any] | None = None,
    min_sqnr: float | None = None,
    min_cosine: float | None = None,
    max_accuracy_drop: float | None = None,
    metric: Callable[[nn.Module], float] | None = None,
) -> MixedPrecision:
    """Find which layers to keep in float so that int8 is accurate enough, and as few of them as it takes.

    Layers are ranked by what quantizing each alone does to the outputs (`sensitivity`). The shortest beginning of that
    ranking that is enough is found by bisection; then each of its layers that turns out not to be needed goes back to
    int8. Every trial is placed and converted from its configuration, as the result will be; calibration runs once.

    Args:
        model: a float module or a graph of one, traced in eval mode; it stays as it is.
        batches: to rank layers and to measure SQNR and cosine on.
        target, qconfig: as for `prepare_calibration_fx`; layers that `qconfig` keeps in float stay so.
        calibration: batches to calibrate on; by default `batches`.
        min_sqnr: outputs must have at least this signal to quantization noise, in dB.
        min_cosine: outputs must have at least this cosine similarity with float's.
        max_accuracy_drop: `metric` may be lower than for the float model by at most this.
        metric: from a model in eval mode, called as `model` is, to a number of which more is better. Needed with
            `max_accuracy_drop`, and called about 2 + log2(layers) + found layers times.

    Returns:
        The configuration and what it costs.

    Raises:
        InputError: not exactly one criterion, or no batches.
        QuantizationError: not even with all layers in float the criterion is met.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
        >>> found = search_mixed_precision(model, [torch.randn(2, 3, 8, 8)], min_sqnr=10.0)
        >>> found.floats
        ()
    """
    criterion = _Criterion.of(min_sqnr, min_cosine, max_accuracy_drop, metric)
    batches = list(as_caller(batches))
    calibration = batches if calibration is None else calibration
    parts = PartlyQuantized.of(model, target, qconfig, calibration, batches)
    criterion.prepare(parts.reference, batches)
    return _Search(parts, batches, QConfig.of(qconfig), criterion).run()


@dataclass
class _Criterion:
    """What is measured of a model, and how much of it is enough."""

    words: str
    kind: str
    least: float
    metric: Callable[[nn.Module], float] | None = None
    batches: list[Any] = field(default_factory=list)
    expected: list[Tensor] = field(default_factory=list)
    value_float: float = 0.0

    @classmethod
    def of(
        cls,
        min_sqnr: float | None,
        min_cosine: float | None,
        max_accuracy_drop: float | None,
        metric: Callable[[nn.Module], float] | None,
    ) -> _Criterion:
        given = [v for v in (min_sqnr, min_cosine, max_accuracy_drop) if v is not None]
        if len(given) != 1:
            raise InputError(
                f"{len(given)} criteria are given", hint="give one of min_sqnr, min_cosine and max_accuracy_drop"
            )
        if (metric is None) != (max_accuracy_drop is None):
            raise InputError(
                "max_accuracy_drop and metric go together", hint="pass metric=: a function from a model to its accuracy"
            )
        if min_sqnr is not None:
            return cls(f"SQNR of at least {min_sqnr:g} dB", "sqnr_db", min_sqnr)
        if min_cosine is not None:
            return cls(f"cosine of at least {min_cosine:g}", "cosine", min_cosine)
        return cls(f"accuracy at most {given[0]:g} below float's", "metric", -given[0], metric)

    def prepare(self, reference: GraphModule, batches: list[Any]) -> None:
        self.batches = batches
        self.expected = [run(reference, batch)[0] for batch in batches]
        self.value_float = self.measure(reference)
        if self.kind == "metric":
            self.least += self.value_float

    def measure(self, gm: GraphModule) -> float:
        if self.metric is not None:
            with torch.no_grad():
                return float(self.metric(gm))
        return float(getattr(self.similarity(gm), self.kind))

    def similarity(self, gm: GraphModule) -> Errors:
        """How far the outputs of `gm` are from float's."""
        return errors(self.expected, [run(gm, batch)[0] for batch in self.batches])


class _Search:
    """One search. Layers are named as in the graph; the configuration names them the same way."""

    def __init__(self, parts: PartlyQuantized, batches: list[Any], qconfig: QConfig, criterion: _Criterion):
        self.parts, self.batches, self.qconfig, self.criterion = parts, batches, qconfig, criterion
        self.trials: list[Trial] = []
        self.layers = [node.name for node in parts.operators if _is_layer(node, parts.reference)]
        self.learns = any(a.learn_rounding for n in parts.prepared.graph.nodes if (a := annotation_of(n)) is not None)

    def run(self) -> MixedPrecision:
        int8 = self._try([])
        found: list[str] = []
        ranking: list[str] = []
        if not int8.meets:
            ranking = self._ranking()
            found = self._pruned(ranking[: self._shortest(ranking)])
        verified = self._verified(found, ranking)
        flops, time = self._cost(verified.floats)
        return MixedPrecision(
            qconfig=self._configuration(verified.floats),
            target=self.parts.target,
            floats=verified.floats,
            criterion=self.criterion.words,
            value=verified.value,
            value_int8=int8.value,
            value_float=self.criterion.value_float,
            flops_share=flops,
            time_share=time,
            trials=tuple(self.trials),
        )

    def _ranking(self) -> list[str]:
        """The layers, the most sensitive first: each alone with what is quantized between it and the next layers."""
        loss = {}
        for node in self.parts.operators:
            if node.name in self.layers:
                alone = self.parts.int8([node.name, *self._behind(node)])
                loss[node.name] = self.criterion.similarity(alone).sqnr_db
        return sorted(loss, key=lambda name: loss[name])

    def _behind(self, layer: Node) -> list[str]:
        """The quantized ops, no layers, that are reached from a layer without passing another."""
        found: dict[Node, None] = {}
        todo = list(layer.users)
        while todo:
            node = todo.pop()
            if node in found or node.name in self.layers:
                continue
            found[node] = None
            todo += node.users
        return [node.name for node in self.parts.operators if node in found]

    def _try(self, floats: Collection[str]) -> Trial:
        return self._record(floats, self.criterion.measure(self._converted(floats, learn=False)))

    def _record(self, floats: Collection[str], value: float) -> Trial:
        self.trials.append(Trial(tuple(floats), value, value >= self.criterion.least))
        return self.trials[-1]

    def _shortest(self, ranking: list[str]) -> int:
        """Length of the shortest beginning that is enough, if more floats are never worse."""
        low, high = 0, len(ranking)  # `low` is not enough, `high` is taken to be
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._try(ranking[:middle]).meets else (middle, high)
        return high

    def _pruned(self, floats: list[str]) -> list[str]:
        """Without the layers that the others do not need, least sensitive first. The last one was found necessary."""
        for name in reversed(floats[:-1]):
            fewer = [other for other in floats if other != name]
            if self._try(fewer).meets:
                floats = fewer
        return floats

    def _verified(self, floats: list[str], ranking: list[str]) -> Trial:
        """The model as it will be used; with more layers in float where learned rounding or the bisection misled."""
        rest = [name for name in ranking or self._ranking() if name not in floats]
        while True:
            known = next((trial for trial in self.trials if set(trial.floats) == set(floats)), None)
            if known is None or self.learns:
                known = self._record(floats, self.criterion.measure(self._converted(floats, learn=True)))
            if known.meets:
                return known
            if not rest:
                raise QuantizationError(
                    f"the model does not reach a {self.criterion.words}, even with all layers in float",
                    hint=f"ask for less: with all layers in float it reaches {known.value:.6g}",
                )
            floats = [*floats, rest.pop(0)]

    def _converted(self, floats: Collection[str], learn: bool) -> GraphModule:
        if set(floats) >= set(self.layers):
            return self.parts.reference
        if not floats and learn == self.learns:
            return self.parts.converted
        return self.parts.configured(self._configuration(floats), learn)

    def _configuration(self, floats: Collection[str]) -> QConfig:
        return self.qconfig.merged({name: {"dtype": "float"} for name in floats})

    def _cost(self, floats: Collection[str]) -> tuple[float, float]:
        """Shares of the layers' FLOPs, and of the float graph's time."""
        args, kwargs = arguments_of(self.batches[0])
        inputs = positional(bind_inputs(self.parts.reference, args, kwargs))
        flops = {n.name: n.flops or 0 for n in estimate_cost(self.parts.reference, kwargs or args).nodes}
        profile = profile_nodes(self.parts.reference, *inputs, iterations=3, warmup=1)
        spent = sum(n.milliseconds for n in profile.nodes if n.name in floats)
        total = sum(flops.get(name, 0) for name in self.layers)
        return (
            sum(flops.get(name, 0) for name in floats) / total if total else 0.0,
            spent / profile.milliseconds if profile.milliseconds else 0.0,
        )


def _is_layer(node: Node, reference: GraphModule) -> bool:
    there = next((n for n in reference.graph.nodes if n.name == node.name), None)
    op = op_of(there, reference) if there is not None else None
    return op is not None and op.role in (Role.WEIGHTED, Role.MATMUL)
