"""Learned rounding: which way each weight is rounded, so that the layer's output changes least.

Source: Nagel, Amjad, van Baalen, Louizos, Blankevoort, "Up or Down? Adaptive Rounding for Post-Training Quantization"
(AdaRound), ICML 2020. A rectified sigmoid h(V) stands for the choice between floor and ceiling (eq. 23), a regularizer
1 - |2 h - 1|^b with a falling b drives it to 0 or 1 (eq. 24), and the layer sees the inputs that the quantized layers
before it give while it is to reproduce the float output (eq. 25, "asymmetric reconstruction").

Other than there, outputs are sampled at random places (see `samples`), every output channel is
learned for itself, its bias takes up the mean of the error, and a channel keeps the nearest rounding where the learned
one is not better on places that it was not learned on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fx_passes.errors import CalibrationError
from fx_passes.graph.module import set_buffer
from fx_passes.quantize.accuracy.lockstep import SteppedRun, batches_that_fit
from fx_passes.quantize.scheme import TargetScheme
from fx_passes.quantize.weights.layer import Layer
from fx_passes.quantize.weights.samples import (
    bias_free_targets,
    input_rows,
    output_places,
    weight_of_rows,
    weight_rows,
    with_batch,
)
from fx_passes.quantize.weights.saturation import fits_pairs
from fx_passes.quantize.weights.scales import integer_bias, spread_scale

__all__ = ["LearnedLayer", "RoundedLayer", "learn_rounding"]

_LOW, _HIGH = -0.1, 1.1  # of the rectified sigmoid, before it is cut to [0, 1]
_WARM_UP = 0.2  # of the steps, without regularizer
_BETA = (20.0, 2.0)
_RATE, _WEIGHT = 1e-2, 1.0
_BATCH = 256
_HELD_OUT = 4  # one place in so many is not learned on
_ROWS_BYTES = 128 << 20  # of one layer's inputs
_PLACES = 4096


@dataclass(frozen=True)
class RoundedLayer:
    """One layer of a converted graph, and what its integers have to keep to.

    Attributes:
        name: of the node, in the converted and in the float graph.
        layer: the float layer.
        integers: where its int8 weight is stored.
        bias: where its bias is stored, None if it has none or may not change.
        scale: of the weight, (channels,) or 0-dim.
        axis: channel axis of the weight, None for one scale.
        input_scale: of its input where the bias is stored as integers, else None.
        pairs: groups of the convolution if pairs of products are kept within 16 bits, else None.
        highest: largest integer of every input channel, None where it is not known.
    """

    name: str
    layer: Layer
    integers: str
    bias: str | None
    scale: Tensor
    axis: int | None
    input_scale: float | None
    pairs: int | None
    highest: Tensor | None


@dataclass(frozen=True)
class LearnedLayer:
    """What learning did to one layer.

    Attributes:
        name: of the node.
        nearest, learned: mean squared error of the output, on places that were not learned on, with weights rounded
            to the nearest and as learned, over the mean square of the float output.
        changed: share of the weights that are not rounded to the nearest.
    """

    name: str
    nearest: float
    learned: float
    changed: float


def learn_rounding(
    converted: GraphModule,
    reference: GraphModule,
    layers: Iterable[RoundedLayer],
    scheme: TargetScheme,
    batches: Iterable[Any],
    *,
    steps: int = 300,
    seed: int = 0,
    memory: int = 1 << 30,
    progress: bool = False,
) -> list[LearnedLayer]:
    """Round the weights of `layers` anew, one after the other, in the order of the graph.

    Args:
        converted: the caller's own; the buffers of its layers' integers and biases are replaced.
        reference: the float graph that it was converted from.
        layers: what may be changed.
        scheme: the target's formats.
        batches: calibration batches; as many of the first ones are used as fit into `memory`.
        steps: of the optimizer, for each layer.
        seed: of the places that are sampled; the result is the same on every run.
        memory: bytes that the two graphs' activations may take together.
        progress: show a progress bar with an estimate of the time left.

    Raises:
        CalibrationError: there are no batches.
    """
    kept = batches_that_fit(reference, batches, 2, memory)
    if not kept:
        raise CalibrationError(
            "there are no calibration batches to learn the rounding on", hint="pass the batches that were calibrated on"
        )
    quantized, floats = SteppedRun(converted, kept), SteppedRun(reference, kept)
    there = {node.name: node for node in reference.graph.nodes}
    here = {node.name: node for node in converted.graph.nodes}
    todo = sorted(layers, key=lambda item: list(there).index(item.name))
    generator = torch.Generator().manual_seed(seed)
    report = []
    with _progress([(item.name, _cost(item.layer)) for item in todo], progress) as advance:
        for item in todo:
            node = here[item.name]
            floats.advance(there[item.name].next)
            quantized.advance(node)
            problem = _problem(
                _on_cpu(item).layer, quantized.values(_input(node)), floats.values(there[item.name]), generator
            )
            if problem is not None:
                rounding = _Rounding(item, scheme, problem)
                report.append(rounding.learn(steps, generator))
                rounding.store(converted)
                for changed in node.args[1:3]:
                    if isinstance(changed, Node):
                        quantized.renew(changed)
            advance(item.name)
    return report


@dataclass(frozen=True)
class _Problem:
    """Rows of inputs of the quantized graph, (groups, places, products), and what they should give without the bias.

    Places up to `split` are learned on; the others are of samples that those know nothing of.
    """

    inputs: Tensor
    targets: Tensor
    split: int


def _problem(layer: Layer, inputs: list[Tensor], outputs: list[Tensor], generator: torch.Generator) -> _Problem | None:
    """None if no batch gives the layer anything to compute."""
    computed = zip(inputs, outputs, strict=True)
    pairs = [(with_batch(layer, x.cpu()), with_batch(layer, y.cpu())) for x, y in computed if y.numel()]
    if not pairs:
        return None
    row_bytes = 4 * layer.products * layer.groups
    count = -(-max(_BATCH, min(_PLACES, _ROWS_BYTES // row_bytes)) // len(pairs))
    rows, targets, samples = [], [], []
    before = 0
    for x, y in pairs:
        places = output_places(layer, y, count, generator)
        rows.append(input_rows(layer, x.float(), places))
        targets.append(bias_free_targets(layer, y.float(), places))
        samples.append(places[0] + before)
        before += y.shape[0]
    # Neighbouring places of one sample are alike: whole samples are held out, where there are enough.
    held_out = torch.cat(samples) % _HELD_OUT == _HELD_OUT - 1
    if before < _HELD_OUT:
        held_out = torch.arange(count * len(pairs)) % _HELD_OUT == _HELD_OUT - 1
    order = held_out.int().argsort(stable=True)
    split = int((~held_out).sum())
    return _Problem(torch.cat(rows, 1)[:, order], torch.cat(targets, 1)[:, order], split)


class _Rounding:
    """The rounding of one layer: its weight as (groups, out / groups, products), on the CPU."""

    def __init__(self, item: RoundedLayer, scheme: TargetScheme, problem: _Problem):
        self.device = item.layer.weight.device
        self.item, self.scheme, self.problem = _on_cpu(item), scheme, problem
        item, layer = self.item, self.item.layer
        scale = spread_scale(item.scale, layer.weight, item.axis).expand(layer.weight.shape)
        self.scale = weight_rows(layer, scale.contiguous())
        steps = weight_rows(layer, layer.weight) * (1.0 / self.scale)
        low, high = scheme.weight.quant_min, scheme.weight.quant_max
        self.nearest = steps.round().clamp(low, high)
        self.floor = steps.floor().clamp(low, high - 1)
        self.share = (steps - self.floor).clamp(0.0, 1.0)
        self.integers = self.nearest

    def learn(self, steps: int, generator: torch.Generator) -> LearnedLayer:
        """Choose `integers`."""
        chosen = self._safe(self.floor + (self._optimized(steps, generator) >= 0.5).float())
        before, after = self._errors(self.nearest), self._errors(chosen)
        better = ((after < before).all(0)).unsqueeze(-1)
        self.integers = torch.where(better, chosen, self.nearest)
        signal = float(self.problem.targets.square().mean(1).sum().clamp_min(1e-30))
        return LearnedLayer(
            self.item.name,
            nearest=float(before[1].sum()) / signal,
            learned=float(torch.where(better.squeeze(-1), after[1], before[1]).sum()) / signal,
            changed=float((self.integers != self.nearest).double().mean()),
        )

    def store(self, converted: GraphModule) -> None:
        """Put the integers, and a bias that takes up the mean error, into the converted graph."""
        item, layer = self.item, self.item.layer
        integers = weight_of_rows(layer, self.integers).to(self.scheme.weight.dtype)
        set_buffer(converted, item.integers, integers.to(self.device))
        if item.bias is None or layer.bias is None:
            return
        residual = self.problem.inputs @ (self.integers * self.scale).transpose(1, 2) - self.problem.targets
        bias = layer.bias - residual.mean(1).flatten()
        if item.input_scale is not None:
            bias, _ = integer_bias(bias, item.scale, item.input_scale, self.scheme)
        set_buffer(converted, item.bias, bias.to(self.device))

    def _errors(self, integers: Tensor) -> Tensor:
        """Mean squared error of every channel on the places learned on and on the others, (2, groups, out / groups)."""
        weight, found = integers * self.scale, []
        for part in (slice(0, self.problem.split), slice(self.problem.split, None)):
            residual = self.problem.inputs[:, part] @ weight.transpose(1, 2) - self.problem.targets[:, part]
            found.append(residual.var(1, correction=0) if self.item.bias else residual.square().mean(1))
        return torch.stack(found)

    def _safe(self, integers: Tensor) -> Tensor:
        """`integers`, rounded to the nearest where a pair of products would not fit into 16 bits."""
        if self.item.pairs is None:
            return integers
        layer = self.item.layer
        chosen, nearest = weight_of_rows(layer, integers), weight_of_rows(layer, self.nearest)
        fits = fits_pairs(chosen, self.item.pairs, self.item.highest)
        return weight_rows(layer, torch.where(fits, chosen, nearest))

    def _optimized(self, steps: int, generator: torch.Generator) -> Tensor:
        """How far up every weight is rounded, near 0 or 1."""
        start = ((self.share - _LOW) / (_HIGH - _LOW)).clamp(1e-4, 1.0 - 1e-4)
        free = torch.log(start / (1.0 - start)).requires_grad_()
        optimizer = torch.optim.Adam([free], lr=_RATE)
        slope_of_error = self._slopes(generator)
        unit = self.scale / self._errors(self.nearest)[0].clamp_min(1e-30).unsqueeze(2)
        for step in range(steps):
            sigmoid = free.detach().sigmoid()
            stretched = sigmoid * (_HIGH - _LOW) + _LOW
            up = stretched.clamp(0.0, 1.0)
            slope = slope_of_error((self.floor + up) * self.scale) * unit
            slope = slope + _regularizer_slope(up, step / steps) / up.shape[2]
            inside = (stretched > 0.0) & (stretched < 1.0)
            free.grad = slope * inside * (_HIGH - _LOW) * sigmoid * (1.0 - sigmoid)
            optimizer.step()
        return (free.detach().sigmoid() * (_HIGH - _LOW) + _LOW).clamp(0.0, 1.0)

    def _slopes(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """From a weight to the slope of its squared error: of all places where that costs little, else of some."""
        inputs, targets = (t[:, : self.problem.split] for t in (self.problem.inputs, self.problem.targets))
        centre = self.item.bias is not None
        if inputs.shape[2] <= 2 * _BATCH:
            if centre:
                inputs, targets = (t - t.mean(1, keepdim=True) for t in (inputs, targets))
            gram = inputs.transpose(1, 2) @ inputs * (2.0 / inputs.shape[1])
            mixed = targets.transpose(1, 2) @ inputs * (2.0 / inputs.shape[1])
            return lambda weight: weight @ gram - mixed

        def sampled(weight: Tensor) -> Tensor:
            rows = torch.randint(inputs.shape[1], (min(_BATCH, inputs.shape[1]),), generator=generator)
            x = inputs[:, rows]
            residual = x @ weight.transpose(1, 2) - targets[:, rows]
            if centre:
                residual = residual - residual.mean(1, keepdim=True)
            return residual.transpose(1, 2) @ x * (2.0 / len(rows))

        return sampled


def _on_cpu(item: RoundedLayer) -> RoundedLayer:
    layer, highest = item.layer, item.highest
    bias = None if layer.bias is None else layer.bias.cpu()
    return replace(
        item,
        layer=replace(layer, weight=layer.weight.cpu(), bias=bias),
        scale=item.scale.cpu(),
        highest=None if highest is None else highest.cpu(),
    )


def _regularizer_slope(up: Tensor, done: float) -> Tensor | float:
    """Slope of 1 - |2 h - 1|^b."""
    if done < _WARM_UP:
        return 0.0
    start, end = _BETA
    # From the start to the end value along half a cosine, as in the published code.
    beta = end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * (done - _WARM_UP) / (1.0 - _WARM_UP)))
    centred = 2.0 * up - 1.0
    return -2.0 * _WEIGHT * beta * centred.abs().pow(beta - 1.0) * centred.sign()


def _input(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _cost(layer: Layer) -> float:
    """Of learning a layer, in arbitrary units: products, and what every step takes however small the layer."""
    return layer.weight.numel() + 2e4


@contextmanager
def _progress(layers: list[tuple[str, float]], shown: bool) -> Iterator[Any]:
    """A function to be called with the name of each layer that is done."""
    costs = dict(layers)
    if not shown:
        yield lambda name: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("learning to round"), BarColumn(), TextColumn("{task.fields[layer]}"), TimeRemainingColumn()
    with Progress(*columns) as bar:
        task = bar.add_task("", total=sum(costs.values()), layer=layers[0][0] if layers else "")
        yield lambda name: bar.update(task, advance=costs[name], layer=name)
