"""Records what the engine and the verifiers were asked for a prompt group, and what they answered, as it happens.

Watches an optimizer step from outside: what the loss was given, what came back to it, what the weights became.
"""

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from distflow.audit.plain_model import PlainScores
from distflow.data.batch import Batch
from distflow.models.shards import own_part, square_sum
from distflow.rewards.score import RewardResult
from distflow.rollout.engine import GenerateRequest, GenerateResult
from distflow.scheduling.groups import PromptGroup
from distflow.training.engine import Counts, LossFn, Sums, TrainEngine


@dataclass(frozen=True)
class GroupRecord:
    """generated: each request with its result. judged: the verifier's name, its arguments, its verdict."""

    prompt_group: PromptGroup
    generated: list[tuple[GenerateRequest, GenerateResult]] = field(default_factory=list)
    judged: list[tuple[str, Mapping[str, object], RewardResult]] = field(default_factory=list)


_current: ContextVar[GroupRecord | None] = ContextVar("group_record", default=None)
"""The record of the group whose task is running; tasks that it starts inherit it. None in a validation."""


class GroupRecords:
    """Keeps the records of groups that wait for their step. What it keeps are references to what lives anyhow."""

    def __init__(self) -> None:
        self._kept: dict[int, GroupRecord] = {}

    def begin(self, prompt_group: PromptGroup) -> None:
        """From here on the running task works for this group's group."""
        _current.set(GroupRecord(prompt_group))

    def generated(self, request: GenerateRequest, result: GenerateResult) -> None:
        if (record := _current.get()) is not None:
            record.generated.append((request, result))

    def judged(self, name: str, arguments: Mapping[str, object], reward_result: RewardResult) -> None:
        if (record := _current.get()) is not None:
            record.judged.append((name, arguments, reward_result))

    def keep(self) -> None:
        """The running task's group goes to the queue; records of groups that do not are forgotten with their tasks."""
        if (record := _current.get()) is not None:
            self._kept[record.prompt_group.group_id] = record

    def take(self, group_ids: Iterable[int]) -> dict[int, GroupRecord]:
        """The records of a step's groups, which are no longer kept; none for those of another worker or process."""
        return {number: self._kept.pop(number) for number in group_ids if number in self._kept}


STRIPE = 256
NUM_STRIPES = 4
MAX_STRIPED = 2**24


@runtime_checkable
class OpenEngine(Protocol):
    """A train engine that shows its inside."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


@dataclass
class MicroRecord:
    """One call of the loss: the samples, each output's values, and the gradient that came back to it, one row a sample
    (`(bs, response_length)`, CPU). loss: the value that it returned."""

    uids: list[str]
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0


@dataclass
class Stripe:
    """Elements of one weight around a step, float64 on the CPU: of this rank's part, where it lies over ranks.

    contributions: the sum of the gradients that each backward pass brought; None where they are summed over ranks as
    they come. gradient: what the optimizer was given.
    moments: the optimizer's tensors of it before the step, and the number of steps it had taken.
    """

    before: Tensor
    moments: dict[str, Any]
    contributions: Tensor | None = None
    gradient: Tensor | None = None
    after: Tensor | None = None


@dataclass
class UpdateRecord:
    """One optimizer step. leftover: weights that had a gradient before it began. norm: of the gradient that the
    optimizer was given, None where it was not called. loss: the loss function, unwrapped. plain: of a sample, by the
    model's own forward right before the step."""

    role: str
    engine: TrainEngine
    loss: LossFn
    batch: Batch
    micros: list[MicroRecord] = field(default_factory=list)
    stripes: dict[str, Stripe] = field(default_factory=dict)
    leftover: list[str] = field(default_factory=list)
    norm: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    plain: dict[str, PlainScores] = field(default_factory=dict)

    @property
    def uids(self) -> list[str]:
        return list(self.batch["uid"])


class WatchedLoss:
    """A loss function that calls another, and records it."""

    def __init__(self, loss: LossFn, record: UpdateRecord) -> None:
        self._loss, self._record = loss, record
        self.outputs = loss.outputs

    def counts(self, batch: Batch) -> Counts:
        return self._loss.counts(batch)

    def __call__(self, outputs: Mapping[str, Tensor], micro: Batch, counts: Counts) -> tuple[Tensor, Sums]:
        values = {name: output.detach().cpu().clone() for name, output in outputs.items()}
        seen = MicroRecord(list(micro["uid"]), values)
        self._record.micros.append(seen)
        for name, output in outputs.items():
            if output.requires_grad:
                output.register_hook(lambda gradient, name=name: _add(seen.gradients, name, gradient))
        loss, sums = self._loss(outputs, micro, counts)
        seen.loss = float(loss.detach())
        return loss, sums

    def finish(self, sums: Counts, counts: Counts) -> dict[str, float]:
        return self._loss.finish(sums, counts)


class UpdateWatch:
    """Watches one optimizer step, from before the engine is called until `end`."""

    def __init__(self, role: str, engine: TrainEngine, batch: Batch, loss: LossFn, turn: int) -> None:
        """turn: chooses the weights that are watched."""
        self.record, self._turn = UpdateRecord(role, engine, loss, batch), turn
        self.loss = WatchedLoss(loss, self.record)
        self._handles: list[Any] = []
        if isinstance(engine, OpenEngine):
            self._open(engine)

    def end(self, metrics: Mapping[str, float]) -> UpdateRecord:
        """The step is over."""
        for handle in self._handles:
            handle.remove()
        self.record.metrics = dict(metrics)
        if isinstance(self.record.engine, OpenEngine):
            for name, parameter in striped(self.record.engine.model, self._turn):
                self.record.stripes[name].after = _stripe(parameter)
        return self.record

    def _open(self, engine: OpenEngine) -> None:
        trained = [(name, p) for name, p in engine.model.named_parameters() if p.requires_grad]
        self.record.leftover = [name for name, p in trained if p.grad is not None and bool(own_part(p.grad).any())]
        for name, parameter in striped(engine.model, self._turn):
            stripe = Stripe(_stripe(parameter), _moments(engine.optimizer, parameter))
            self.record.stripes[name] = stripe
            self._handles.append(parameter.register_hook(lambda grad, stripe=stripe: _contribute(stripe, grad)))
        self._handles.append(engine.optimizer.register_step_pre_hook(lambda *_: self._before_step(engine)))

    def _before_step(self, engine: OpenEngine) -> None:
        gradients = [p.grad for p in engine.model.parameters() if p.requires_grad and p.grad is not None]
        self.record.norm = math.sqrt(square_sum(gradients))
        for name, parameter in striped(engine.model, self._turn):
            if parameter.grad is not None:
                self.record.stripes[name].gradient = _stripe(parameter.grad)


def striped(model: nn.Module, turn: int) -> Iterator[tuple[str, nn.Parameter]]:
    """A few weights: the first, the last, and others in each turn."""
    found = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.numel() <= MAX_STRIPED]
    ends = {0, len(found) - 1}
    between = [i for i in range(len(found)) if i not in ends]
    drawn = random.Random(turn).sample(between, min(NUM_STRIPES, len(between)))
    yield from (found[i] for i in sorted({*ends, *drawn} if found else ()))


def _stripe(tensor: Tensor) -> Tensor:
    """At most `STRIPE` elements, evenly over the tensor, or over this rank's part of it."""
    flat = own_part(tensor.detach()).reshape(-1)
    return flat[:: -(-flat.numel() // STRIPE) | 1].to("cpu", torch.float64, copy=True)


def _moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    state = optimizer.state.get(parameter, {})
    return {
        name: _stripe(value) if value.dim() else float(value)
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def _contribute(stripe: Stripe, gradient: Tensor) -> None:
    part = _stripe(gradient)
    stripe.contributions = part if stripe.contributions is None else stripe.contributions + part


def _add(gradients: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    part = gradient.detach().cpu()
    gradients[name] = gradients[name] + part if name in gradients else part.clone()
