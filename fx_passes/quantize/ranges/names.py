"""Observers by the name that a configuration uses."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

from torch.fx import Node

from fx_passes.graph.node_meta import describe
from fx_passes.quantize.annotation import annotation_of
from fx_passes.quantize.ranges.histogram import EntropyObserver, HistogramObserver, MSEObserver, PercentileObserver
from fx_passes.quantize.ranges.observers import (
    FixedRangeObserver,
    MinMaxObserver,
    MovingAverageObserver,
    Observer,
    RunningRangeObserver,
)
from fx_passes.quantize.scheme import QuantScheme

__all__ = ["OBSERVERS", "observer_for"]

OBSERVERS: MappingProxyType[str, type[Observer]] = MappingProxyType(
    {
        "minmax": MinMaxObserver,
        "moving_average": MovingAverageObserver,
        "running": RunningRangeObserver,
        "histogram": HistogramObserver,
        "percentile": PercentileObserver,
        "entropy": EntropyObserver,
        "mse": MSEObserver,
    }
)


def observer_for(node: Node, readers: Iterable[Node], scheme: QuantScheme, default: str) -> Observer:
    """A new observer of the kind that the configuration of the value's producer asks for, else that of a reader.

    Args:
        node: what produces the value; its annotation and those of `readers` may name an observer, "percentile:99.9"
            with the percentile.
        readers: what reads the quantized value.
        scheme: the integer format.
        default: the kind where none is asked for. A softmax then has the range [0, 1].
    """
    wishes = [annotation.observer for n in (node, *readers) if (annotation := annotation_of(n)) is not None]
    if not any(wishes) and (annotation := annotation_of(node)) is not None and annotation.op == "softmax":
        return FixedRangeObserver(scheme, name=node.name, where=describe(node))
    name, _, number = next((wish for wish in wishes if wish), default).partition(":")
    options: dict[str, Any] = {"percentile": float(number)} if number else {}
    return OBSERVERS[name](scheme, name=node.name, where=describe(node), **options)
