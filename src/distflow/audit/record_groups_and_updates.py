"""Records engine requests, reward calls and their results for each group, and optimizer steps: the
inputs of the loss, the gradients with respect to them, and samples of the weights before and
after."""

import asyncio
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from distflow.audit.model_forward import PlainScores
from distflow.data.batch import Batch
from distflow.data.sample import Segment, on_event
from distflow.models.sharding import at_places, is_spread, own_part, square_sum, whole
from distflow.rewards.reward_results import RewardResult
from distflow.rollout.engine import GenerateRequest
from distflow.runtime.rollout_loop.generation_batches import group_task
from distflow.runtime.sample_queue.protocol import LoadedGroups
from distflow.scheduling.group_states import PromptGroup
from distflow.training.engine import Collective, Counts, LossFn, OneRank, Sums, TrainEngine

STRIPE = 256
NUM_STRIPES = 4
NUM_MOVED = 64
"""Weights, beside the first and the last, whose gradient is summed as well, and those that must
move by the formula."""
MAX_STRIPED = 2**24
NUM_FEW = 4
VALUE_COLUMNS = ("response_mask", "valid", "loss_mask", "values", "returns")
NUM_DROPPED = 8


@dataclass(frozen=True)
class GroupRecord:
    """generated: each request with its result. scored: the reward function's name, arguments and
    result. events: of each episode, by its index; see `on_event`."""

    prompt_group: PromptGroup
    generated: list[tuple[GenerateRequest, tuple[Segment, ...]]] = field(default_factory=list)
    scored: list[tuple[str, Mapping[str, object], RewardResult]] = field(default_factory=list)
    events: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)

    def add_event(self, index: int, *event: object) -> None:
        self.events.setdefault(index, []).append(event)


_current: ContextVar[GroupRecord | None] = ContextVar("group_record", default=None)
"""The record of the running task's group; tasks that it starts inherit it."""


class GroupRecords:
    """The `GroupRecorder` of a worker: keeps records until their step, and references only existing
    objects."""

    def __init__(self, on_keep: Callable[[GroupRecord, Batch], None] | None = None) -> None:
        """on_keep: receives training records with their columns on a worker that takes no step."""
        self._on_keep = on_keep
        self._kept: dict[int, GroupRecord] = {}
        self.dropped = deque[tuple[GroupRecord, str, Batch]](maxlen=NUM_DROPPED)
        """The last groups that a node dropped: their records, the reasons and their columns."""
        self._num_dropped = Counter[str]()
        self.passed_over: list[tuple[PromptGroup, PromptGroup]] = []
        """Groups that wait though the last step has another one, which should have come later."""
        self._validated: list[GroupRecord] = []
        self._tasks = WeakSet[asyncio.Task[Any]]()
        self.most_at_once = 0
        """Tasks of training groups, and the most that ran at once. A task that is being cancelled
        has given its place back."""

    def begin(self, prompt_group: PromptGroup) -> None:
        record = GroupRecord(prompt_group)
        task = group_task.get()
        if task is not None:  # a validation has none
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if len(self._tasks) > self.most_at_once:  # else there cannot be more that run
                running = sum(not each.done() and not each.cancelling() for each in self._tasks)
                self.most_at_once = max(self.most_at_once, running)
        _current.set(record)
        on_event.set(record.add_event)

    def generated(self, request: GenerateRequest, result: tuple[Segment, ...]) -> None:
        if (record := _current.get()) is not None:
            record.generated.append((request, result))

    def add_score(
        self, name: str, arguments: Mapping[str, object], reward_result: RewardResult
    ) -> None:
        if (record := _current.get()) is not None:
            record.scored.append((name, arguments, reward_result))

    def keep(self, batch: Batch | None = None) -> None:
        if (record := _current.get()) is None:
            return
        if batch is None:
            self._validated.append(record)
        elif self._on_keep is not None:
            self._on_keep(record, batch)
        else:
            self._kept.pop(record.prompt_group.group_id, None)  # of an earlier attempt
            self._kept[record.prompt_group.group_id] = record

    def keep_loaded(self, loaded: LoadedGroups[Batch]) -> None:
        if self._on_keep is None:
            self._kept |= {group.group_id: GroupRecord(group) for group in loaded.prompt_groups}
            return
        for group in loaded.finished:
            self._on_keep(GroupRecord(group.prompt_group), loaded.data.select(group.rows or ()))

    def drop(self, reason: str, batch: Batch) -> None:
        self._num_dropped[reason] += 1
        if (record := _current.get()) is not None:
            self.dropped.append((record, reason, batch))

    def take_num_dropped(self) -> Counter[str]:
        """Remove and return the numbers of groups that nodes have dropped, by reason."""
        taken = self._num_dropped
        self._num_dropped = Counter[str]()
        return taken

    def take_validated(self) -> list[GroupRecord]:
        """Remove and return the records of a validation."""
        taken = self._validated
        self._validated = []
        return taken

    def take(self, group_ids: Iterable[int]) -> dict[int, GroupRecord]:
        """Remove and return the records of a step's groups; groups of another worker or process
        have none. Notes groups that were complete before the step's last one, should come before
        it, and still wait."""
        # in order of completion
        kept = {number: record.prompt_group for number, record in dict(self._kept).items()}
        places = {number: place for place, number in enumerate(kept)}
        taken = {number: self._kept.pop(number) for number in group_ids if number in kept}
        last = {
            group.stream: group
            for group in sorted((kept[number] for number in taken), key=_urgency)
        }
        left = [
            (group, last[group.stream])
            for number, group in kept.items()
            if number not in taken and group.stream in last
        ]
        self.passed_over = [
            (group, other)
            for group, other in left
            if _urgency(group) < _urgency(other) and places[group.group_id] < places[other.group_id]
        ]
        return taken


def _urgency(group: PromptGroup) -> tuple[int, int]:
    """The order in which a step takes complete groups: due earliest first, then by number."""
    return group.version, group.group_id


@runtime_checkable
class OpenEngine(Protocol):
    """A train engine that exposes its model and optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


@dataclass
class MicroRecord:
    """One call of the loss: the samples, and for those in `rows` the values of each output and its
    gradient, `(rows, response_length)` on the CPU. share: of the mini-batch's loss. sums: of its
    metrics. weights: those with which backward passes started at the loss; None if it has no
    gradient. batch: its columns, if all values of a critic's update are kept."""

    uids: list[str]
    rows: list[int]
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    share: Tensor | float = 0.0
    sums: Sums = field(default_factory=dict)
    weights: list[Tensor] | None = None
    batch: Batch | None = None

    def watch(self, loss: Tensor) -> None:
        if loss.requires_grad:
            self.weights = []
            loss.register_hook(self.weights.append)

    @property
    def recorded(self) -> list[str]:
        """The samples whose outputs were recorded."""
        return [self.uids[row] for row in self.rows]

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        part = gradient.detach()[self.rows].cpu()
        self.gradients[name] = (
            self.gradients[name] + part if name in self.gradients else part.clone()
        )


@dataclass
class Stripe:
    """Sampled elements of one weight around a step, float64 on the CPU; for a sharded weight those
    of this rank.

    own: for all sampled elements, the sum of the gradients of this rank's backward passes, followed
    by their number. contributions: the sum over all ranks. gradient: the optimizer's input.
    moments: the optimizer's tensors for the weight before the step, and its number of steps;
    moved_moments: after it. passes: gradients not yet in `own`.
    """

    before: Tensor
    moments: dict[str, Any]
    own: Tensor
    contributions: Tensor | None = None
    gradient: Tensor | None = None
    after: Tensor | None = None
    moved_moments: dict[str, Any] = field(default_factory=dict)
    passes: list[Tensor] = field(default_factory=list)

    def contribute(self, gradient: Tensor) -> None:
        """gradient: of a backward pass, before summation over the ranks; for a layer that ranks
        compute together, each has its own part, or a summand."""
        if isinstance(gradient, DTensor) and any(each.is_partial() for each in gradient.placements):
            gradient = whole(gradient)
        if isinstance(gradient, DTensor):
            here, values = at_places(gradient, _places(gradient))
            self.own[here] += values.cpu().double()
            self.own[-1] += 1
        else:
            self.passes.append(gradient.detach().reshape(-1)[:: _spacing(gradient)].clone())

    def total(self) -> Tensor:
        """`own`, with the backward passes that were only copied."""
        if self.passes:
            self.own[:-1] += torch.stack(self.passes).cpu().double().sum(0)
            self.own[-1] += len(self.passes)
            self.passes = []
        return self.own


def _num_units(batch: Batch, dim: int) -> int:
    """Actions of `dim` tokens, or chunks if it is 0, with a token that counts."""
    turns = batch.flat("turn_index").split(batch.lengths("response").tolist())
    return len(units_of(turns, batch.flat("loss_mask") > 0, dim).unique())


def units_of(turn_index: Iterable[Tensor], counted: Tensor, dim: int) -> Tensor:
    """The unit of each token that counts, numbered from 0: its chunk, or its action if `dim` is its
    number of tokens.

    turn_index: of each sample. counted: of all response tokens, sample after sample.
    """
    names = list[tuple[int, int, int]]()
    for number, turns in enumerate(turn_index):
        drawn = Counter[int]()
        for turn in turns.tolist():
            names.append((number, turn, drawn[turn] // dim if dim else 0))
            drawn[turn] += 1
    own = [name for name, counts in zip(names, counted.tolist(), strict=True) if counts]
    number_of = {name: number for number, name in enumerate(dict.fromkeys(own))}
    return torch.tensor([number_of[name] for name in own], dtype=torch.int64)


@dataclass
class UpdateRecord:
    """One optimizer step. leftover: weights that had a gradient before it began. changed: what
    something else changed since the previous step. norm: of the gradient passed to the optimizer;
    None if it was not called, or the watch is quick. loss: the loss function, unwrapped. totals:
    over all ranks, the mini-batch's rows, rows with a token that counts, and such tokens; empty if
    only the gradient was watched. share: this rank's share of the loss, and the sum over the ranks.
    sums: of each metric over micro-batches and ranks, by the engine and as added here. plain:
    scores by sample, from the model's own forward right before the step. few: `few_of` the trained
    weights before and after."""

    role: str
    engine: TrainEngine
    loss: LossFn
    batch: Batch
    micros: list[MicroRecord] = field(default_factory=list)
    stripes: dict[str, Stripe] = field(default_factory=dict)
    leftover: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    totals: Mapping[str, float] = field(default_factory=dict)
    share: tuple[float, float] = (0.0, 0.0)
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    norm: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    plain: dict[str, PlainScores] = field(default_factory=dict)
    few: list[Tensor] = field(default_factory=list)

    @property
    def uids(self) -> list[str]:
        return self.batch.row_names

    @property
    def is_whole(self) -> bool:
        """Whether the outputs of all samples were recorded."""
        return all(len(micro.rows) == len(micro.uids) for micro in self.micros)


class UpdateWatch:
    """Watches one optimizer step, from before the engine is called until `end`, as the loss
    function passed to the engine, which calls the real one and records it."""

    def __init__(
        self,
        role: str,
        engine: TrainEngine,
        batch: Batch,
        loss: LossFn,
        turn: int,
        few: Collection[str] = (),
        quick: bool = False,
    ) -> None:
        """turn: selects the watched weights. few: samples whose outputs are recorded; all if empty.
        quick: watch one weight, and not the norm of all gradients. Ranks that share the mini-batch
        call it together."""
        self.record = UpdateRecord(role, engine, loss, batch)
        self.outputs = loss.outputs
        self._few = few
        self._trained = list[tuple[str, nn.Parameter]]()
        self._striped = list[tuple[str, nn.Parameter]]()
        self._handles = list[Any]()
        self._quick = quick
        self._summed = set[str]()
        self._group: Collective = getattr(engine, "group", OneRank())
        counted = batch.flat("loss_mask") > 0
        scored = torch.zeros(len(batch)).index_add(0, batch.rows(), counted.float())
        totals = {
            "rows": len(batch),
            "scored": int((scored > 0).sum()),
            "tokens": int(counted.sum()),
        }
        if getattr(loss, "logprob_level", "token") != "token":
            is_action = loss.logprob_level == "action"  # type: ignore[attr-defined]
            action_dim = loss.action_dim if is_action else 0  # type: ignore[attr-defined]
            totals["units"] = _num_units(batch, action_dim)
        self.record.totals = _over_ranks(
            {name: float(total) for name, total in totals.items()}, self._group
        )
        if not isinstance(engine, OpenEngine):
            return
        self._trained = trained(engine.model)
        self.record.few.append(few_of(self._trained))
        self._striped += striped(self._trained, turn, quick)
        self._summed = {name for name, _ in self._striped}
        others = [each for each in _small(self._trained) if each[0] not in self._summed]
        self._striped += (
            [] if quick else random.Random(turn).sample(others, min(NUM_MOVED, len(others)))
        )
        self.record.leftover = _leftover(self._trained)
        for name, parameter in self._striped:
            own = _no_sum(parameter)
            moments = _moments(engine.optimizer, parameter)
            self.record.stripes[name] = Stripe(_stripe(parameter), moments, own)
            if name in self._summed and not isinstance(parameter, DTensor):
                self._handles.append(parameter.register_hook(self.record.stripes[name].contribute))
        if is_spread(engine.model):
            watch = partial(self._watch_gathered, engine.model, set[int]())
            self._handles += [
                module.register_forward_pre_hook(watch) for module in engine.model.modules()
            ]
        self._handles.append(engine.optimizer.register_step_pre_hook(self._before_step))

    def counts(self, batch: Batch) -> Counts:
        return self.record.loss.counts(batch)

    def __call__(
        self, outputs: Mapping[str, Tensor], micro: Batch, counts: Counts
    ) -> tuple[Tensor, Sums]:
        uids = micro.row_names
        rows = [row for row, uid in enumerate(micro["uid"]) if not self._few or uid in self._few]
        seen = MicroRecord(uids, rows, {})
        self.record.micros.append(seen)
        if rows:
            for name, output in outputs.items():
                seen.outputs[name] = output.detach()[rows].cpu()
                if output.requires_grad:
                    output.register_hook(partial(seen.add_gradient, name))
        loss, sums = self.record.loss(outputs, micro, counts)
        seen.share = loss.detach()
        seen.sums = sums
        seen.watch(loss)
        return loss, sums

    def finish(self, sums: Counts, counts: Counts) -> dict[str, float]:
        self.record.sums = {name: (value, value) for name, value in sums.items()}
        return self.record.loss.finish(sums, counts)

    def end(self, metrics: Mapping[str, float]) -> UpdateRecord:
        """Call after the step, on all ranks that share the mini-batch."""
        for handle in self._handles:
            handle.remove()
        self.record.metrics = dict(metrics)
        own = {"loss": math.fsum(float(micro.share) for micro in self.record.micros)}
        for name in self.record.sums.keys() - own.keys():
            own[name] = math.fsum(float(micro.sums.get(name, 0.0)) for micro in self.record.micros)
        every = _over_ranks(own, self._group)
        self.record.few.append(few_of(self._trained))
        self.record.share = own["loss"], every["loss"]
        self.record.sums = {
            name: (found, every[name]) for name, (found, _) in self.record.sums.items()
        }
        for name, parameter in self._striped:
            stripe = self.record.stripes[name]
            stripe.after = _stripe(parameter)
            stripe.moved_moments = _moments(self.record.engine.optimizer, parameter)  # type: ignore[attr-defined]
            sums = self._group.sum(stripe.total()) if name in self._summed else stripe.own
            if sums[-1] > 0:
                is_part = isinstance(parameter, DTensor)
                stripe.contributions = sums[
                    at_places(parameter, _places(parameter))[0] if is_part else slice(-1)
                ]
        return self.record

    def _watch_gathered(self, model: nn.Module, seen: set[int], *_: object) -> None:
        """Called when a module runs: watch the weights that are gathered now, since sums over ranks
        come later."""
        for name, parameter in (each for each in self._striped if each[0] in self._summed):
            gathered = model.get_parameter(name)
            if gathered is not parameter and id(gathered) not in seen:
                seen.add(id(gathered))
                self._handles.append(gathered.register_hook(self.record.stripes[name].contribute))

    def _before_step(self, *_: object) -> None:
        if not self._quick:
            self.record.norm = math.sqrt(
                square_sum([p.grad for _, p in self._trained if p.grad is not None])
            )
        for name, parameter in self._striped:
            if parameter.grad is not None:
                self.record.stripes[name].gradient = _stripe(parameter.grad)


class GradientWatch:
    """Watches the gradients of those optimizer steps of an engine that no `UpdateWatch` watches:
    leftovers from the previous step, the norm that the optimizer receives, one weight's sum over
    micro-batches and ranks, and the samples passed to the loss function, in whose place it is
    called. It reads no other tensor, so every update can be
    watched. Of sharded weights it watches neither norm nor sum, only how this rank's part of one
    weight moves."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self._group = getattr(engine, "group", OneRank())
        self._trained = trained(engine.model) if isinstance(engine, OpenEngine) else []
        self._spread = any(isinstance(p, DTensor) for _, p in self._trained)
        self._striped = _small(self._trained)
        self._handles = list[Any]()
        self._last: tuple[int, str, Stripe] | None = None
        self._record: UpdateRecord
        self.outputs: tuple[str, ...] = ()

    def leftover(self) -> list[str]:
        """Weights that still have a gradient."""
        return _leftover(self._trained)

    def few(self) -> Tensor:
        return few_of(self._trained)

    def begin(self, record: UpdateRecord, turn: int) -> None:
        """turn: the number of earlier optimizer steps. Two in a row watch the same weight, to
        detect whether anything else changed it or its moments in between."""
        self._record = record
        self.outputs = record.loss.outputs
        if not self._striped:
            return
        # of an open engine
        optimizer: torch.optim.Optimizer = self._engine.optimizer  # type: ignore[attr-defined]
        name, parameter = self._striped[(turn + 1) // 2 % len(self._striped)]
        own = _no_sum(parameter)
        moments = _moments(optimizer, parameter)
        stripe = record.stripes[name] = Stripe(_stripe(parameter), moments, own)
        if self._last is not None and self._last[:2] == (turn - 1, name):
            now = {name: stripe.before, **moments}
            was = {name: self._last[2].after, **self._last[2].moved_moments}
            alike = {
                each
                for each in now.keys() & was
                if torch.equal(*map(torch.as_tensor, (now[each], was[each])))
            }
            record.changed = sorted({*was} - alike)
        self._last = turn, name, stripe

        def before_step(*_: object) -> None:
            stripe.gradient = None if parameter.grad is None else _stripe(parameter.grad)
            if not self._spread:
                record.norm = float(
                    get_total_norm(p.grad for _, p in self._trained if p.grad is not None)
                )

        self._handles.append(optimizer.register_step_pre_hook(before_step))
        if not self._spread:
            self._handles.append(parameter.register_hook(stripe.contribute))

    def counts(self, batch: Batch) -> Counts:
        return self._record.loss.counts(batch)

    def __call__(
        self, outputs: Mapping[str, Tensor], micro: Batch, counts: Counts
    ) -> tuple[Tensor, Sums]:
        self._record.micros.append(seen := MicroRecord(micro.row_names, [], {}))
        if self._record.role == "critic":
            seen.batch = micro.only(name for name in micro.names if name in VALUE_COLUMNS)
            seen.outputs = {"values": outputs["values"].detach()}
            outputs["values"].register_hook(partial(seen.gradients.__setitem__, "values"))
        loss, sums = self._record.loss(outputs, micro, counts)
        seen.watch(loss)
        return loss, sums

    def finish(self, sums: Counts, counts: Counts) -> dict[str, float]:
        return self._record.loss.finish(sums, counts)

    def end(self, record: UpdateRecord) -> None:
        """Call after the step, on all ranks that share the mini-batch."""
        while self._handles:
            self._handles.pop().remove()
        # it has no number: a step that another watches may have the next one
        if record.metrics.get("skipped"):
            self._last = None
        for name, stripe in record.stripes.items():
            if not self._spread:
                sums = self._group.sum(stripe.total())
                stripe.contributions = sums[:-1] if sums[-1] > 0 else None
            parameter = next(p for other, p in self._striped if other == name)
            stripe.after = _stripe(parameter)
            # as above
            stripe.moved_moments = _moments(self._engine.optimizer, parameter)  # type: ignore[attr-defined]


def _over_ranks(own: Mapping[str, float], group: Collective) -> dict[str, float]:
    """Sums over the ranks, without their own reductions, which are checked."""
    every = group.gather(dict(own))
    return {name: math.fsum(each.get(name, 0.0) for each in every) for name in own}


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _small(found: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in found if p.numel() <= MAX_STRIPED]


def whole_here(found: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """The weights that this rank has whole, on the device of the first."""
    here = [(name, p) for name, p in found if not isinstance(p, DTensor)]
    return [(name, p) for name, p in here if p.device == here[0][1].device]


def few_of(found: Iterable[tuple[str, nn.Parameter]]) -> Tensor:
    """The first elements of each weight that is whole here, float64 on the CPU: cheap enough for
    every update."""
    parts = [p.detach().reshape(-1)[:NUM_FEW] for _, p in whole_here(found)]
    return torch.cat(parts).cpu().double() if parts else torch.zeros(0, dtype=torch.float64)


def _leftover(trained: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    return [name for name, p in trained if p.grad is not None and bool(own_part(p.grad).any())]


def striped(
    weights: Iterable[tuple[str, nn.Parameter]], turn: int, one: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """A few of the weights: the first, the last, and others drawn by `turn`; or a single drawn
    one."""
    found = _small(weights)
    if one:
        yield from random.Random(turn).sample(found, min(1, len(found)))
        return
    ends = {0, len(found) - 1}
    between = [i for i in range(len(found)) if i not in ends]
    drawn = random.Random(turn).sample(between, min(NUM_STRIPES, len(between)))
    yield from (found[i] for i in sorted({*ends, *drawn} if found else ()))


def _places(tensor: Tensor) -> Tensor:
    """At most `STRIPE` positions, evenly spaced over the whole tensor."""
    return torch.arange(0, tensor.numel(), _spacing(tensor))


def _no_sum(tensor: Tensor) -> Tensor:
    """`Stripe.own` before any backward pass."""
    return torch.zeros(-(-tensor.numel() // _spacing(tensor)) + 1, dtype=torch.float64)


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
    state = optimizer.state.get(parameter, {})
    return {
        name: _stripe(value) if value.dim() else float(value)
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
