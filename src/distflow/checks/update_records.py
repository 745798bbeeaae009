"""Records optimizer steps: the inputs of the loss, the gradients with respect to them, and sampled
elements of the weights, their gradients and moments before and after."""

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distflow.data.batch import Batch
from distflow.models.sharding import at_places, own_part, square_sum
from distflow.training.engine import (
    Collective,
    Counts,
    LossFn,
    OneRank,
    Sums,
    TrainEngine,
    compares_samples,
)

STRIPE = 256
"""Sampled elements of a weight."""
NUM_STRIPES = 4
"""Weights, beside the first and the last, whose gradient is summed as well."""
NUM_MOVED = 64
"""Further weights that must move as the optimizer moves them."""
MAX_STRIPED = 2**24
"""Larger weights are not sampled."""


@runtime_checkable
class OpenEngine(Protocol):
    """A train engine that exposes its model and optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


@dataclass
class MicroRecord:
    """One call of the loss."""

    uids: list[str]
    outputs: dict[str, Tensor]
    """The values of each output, `(rows, response_length)` on the CPU."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the loss by each output."""
    share: Tensor | float = 0.0
    """Of the mini-batch's loss."""
    weights: list[Tensor] | None = None
    """Those with which backward passes started at the loss; None if it has no gradient."""

    def watch(self, loss: Tensor) -> None:
        if loss.requires_grad:
            self.weights = []
            loss.register_hook(self.weights.append)

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        part = gradient.detach().cpu()
        known = self.gradients.get(name)
        self.gradients[name] = part.clone() if known is None else known + part


@dataclass
class Stripe:
    """Sampled elements of one weight around a step, float64 on the CPU; for a sharded weight those
    of this rank."""

    before: Tensor
    moments: dict[str, Any]
    """The optimizer's tensors for the weight before the step, and its number of steps."""
    contributions: Tensor | None = None
    """The sum of the gradients of all ranks' backward passes; None for a sharded weight."""
    gradient: Tensor | None = None
    """The optimizer's input."""
    after: Tensor | None = None
    moved_moments: dict[str, Any] = field(default_factory=dict)
    """The optimizer's tensors after the step."""
    passes: list[Tensor] = field(default_factory=list)
    """The gradients of this rank's backward passes."""

    def contribute(self, gradient: Tensor) -> None:
        """gradient: of a backward pass, before summation over the ranks."""
        self.passes.append(gradient.detach().reshape(-1)[:: _spacing(gradient)].clone())


@dataclass
class PlainPass:
    """What a few sequences give by the model's own forward, by the weights before the update."""

    rows: list[int] = field(default_factory=list)
    """Of the mini-batch."""
    outputs: list[dict[str, Tensor]] = field(default_factory=list)
    """Of each row, float64 on the CPU."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """By its outputs, of the loss of each row, or of the rows that it compares."""


@dataclass
class UpdateRecord:
    """One optimizer step."""

    role: str
    engine: TrainEngine
    loss: LossFn
    """The loss function, unwrapped."""
    batch: Batch
    """This rank's part of the mini-batch."""
    micros: list[MicroRecord] = field(default_factory=list)
    stripes: dict[str, Stripe] = field(default_factory=dict)
    """By the name of the weight."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """The loss's denominators over all ranks, added up here."""
    share: tuple[float, float] = (0.0, 0.0)
    """This rank's share of the loss, and the sum over the ranks."""
    norm: float | None = None
    """Of the gradient passed to the optimizer; None if it was not called."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    plain: PlainPass | None = None
    """What a few sequences give without packing, by the weights before the step."""

    @property
    def uids(self) -> list[str]:
        return self.batch.row_names


class UpdateWatch:
    """Watches one optimizer step, from `begin` to `end`, as the loss function passed to the engine,
    which calls the real one and records it."""

    def __init__(self, role: str, engine: TrainEngine, batch: Batch, loss: LossFn) -> None:
        """Ranks that share the mini-batch call it together."""
        self.record = UpdateRecord(role, engine, loss, batch)
        self.outputs = loss.outputs
        self.whole_groups = compares_samples(loss)
        self._handles = list[Any]()
        self._group: Collective = getattr(engine, "group", OneRank())
        self.record.counts = _over_ranks(loss.counts(batch), self._group)
        self._trained = list[tuple[str, nn.Parameter]]()
        self._striped = list[tuple[str, nn.Parameter]]()
        self._summed = set[str]()

    def begin(self, turn: int) -> None:
        """Call right before the engine, since every backward pass counts from here on. turn:
        selects the watched weights."""
        engine = self.record.engine
        if not isinstance(engine, OpenEngine):
            return

        self._trained = trained(engine.model)
        self._striped += striped(self._trained, turn)
        self._summed = {name for name, _ in self._striped}
        others = [each for each in _small(self._trained) if each[0] not in self._summed]
        self._striped += random.Random(turn).sample(others, min(NUM_MOVED, len(others)))

        for name, parameter in self._striped:
            moments = _moments(engine.optimizer, parameter)
            stripe = Stripe(_stripe(parameter), moments)
            self.record.stripes[name] = stripe
            if name in self._summed and not isinstance(parameter, DTensor):
                self._handles.append(parameter.register_hook(stripe.contribute))

        self._handles.append(engine.optimizer.register_step_pre_hook(self._before_step))

    def counts(self, batch: Batch) -> Counts:
        return self.record.loss.counts(batch)

    def __call__(
        self, outputs: Mapping[str, Tensor], micro: Batch, counts: Counts
    ) -> tuple[Tensor, Sums]:
        seen = MicroRecord(micro.row_names, {})
        self.record.micros.append(seen)

        for name, output in outputs.items():
            seen.outputs[name] = output.detach().cpu()
            if output.requires_grad:
                output.register_hook(partial(seen.add_gradient, name))

        loss, sums = self.record.loss(outputs, micro, counts)
        seen.share = loss.detach()
        seen.watch(loss)
        return loss, sums

    def finish(self, sums: Counts, counts: Counts) -> dict[str, float]:
        return self.record.loss.finish(sums, counts)

    def end(self, metrics: Mapping[str, float]) -> UpdateRecord:
        """Call after the step, on all ranks that share the mini-batch."""
        for handle in self._handles:
            handle.remove()
        self.record.metrics = dict(metrics)
        share = math.fsum(float(micro.share) for micro in self.record.micros)
        self.record.share = share, _over_ranks({"loss": share}, self._group)["loss"]

        for name, parameter in self._striped:
            stripe = self.record.stripes[name]
            stripe.after = _stripe(parameter)
            engine: Any = self.record.engine  # an open one
            stripe.moved_moments = _moments(engine.optimizer, parameter)
            if name not in self._summed or isinstance(parameter, DTensor):
                continue  # sharded gradients are summed over the ranks before they are seen

            num_passes = self._group.sum(float(len(stripe.passes)))
            total = torch.zeros_like(stripe.before)
            for each in stripe.passes:
                total += each.cpu()
            total = self._group.sum(total)
            stripe.passes = []
            if num_passes > 0:
                stripe.contributions = total

        return self.record

    def _before_step(self, *_: object) -> None:
        gradients = [p.grad for _, p in self._trained if p.grad is not None]
        self.record.norm = math.sqrt(square_sum(gradients))
        for name, parameter in self._striped:
            if parameter.grad is not None:
                self.record.stripes[name].gradient = _stripe(parameter.grad)


def _over_ranks(own: Mapping[str, float], group: Collective) -> dict[str, float]:
    """Sums over the ranks, without their own reductions, which are checked."""
    ranks = group.gather(dict(own))
    return {name: math.fsum(rank.get(name, 0.0) for rank in ranks) for name in own}


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def leftover(model: nn.Module) -> list[str]:
    """Weights that have a gradient."""
    return [
        name for name, p in trained(model) if p.grad is not None and bool(own_part(p.grad).any())
    ]


def striped(
    weights: Iterable[tuple[str, nn.Parameter]], turn: int
) -> Iterator[tuple[str, nn.Parameter]]:
    """A few of the weights: the first, the last, and others drawn by `turn`."""
    small = _small(weights)
    if not small:
        return

    last = len(small) - 1
    between = range(1, last)
    drawn = random.Random(turn).sample(between, min(NUM_STRIPES, len(between)))
    for i in sorted({0, *drawn, last}):
        yield small[i]


def _small(found: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in found if p.numel() <= MAX_STRIPED]


def _places(tensor: Tensor) -> Tensor:
    """At most `STRIPE` positions, evenly spaced over the whole tensor."""
    return torch.arange(0, tensor.numel(), _spacing(tensor))


def _spacing(tensor: Tensor) -> int:
    return -(-tensor.numel() // STRIPE) | 1


def _stripe(tensor: Tensor) -> Tensor:
    """The elements at `_places` that this rank has."""
    if isinstance(tensor, DTensor):
        own = at_places(tensor, _places(tensor))[1]
    else:
        own = tensor.detach().reshape(-1)[:: _spacing(tensor)]
    return own.to("cpu", torch.float64, copy=True)


def _moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    found = dict[str, Any]()
    for name, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor):
            found[name] = _stripe(value) if value.dim() else float(value)
    return found
