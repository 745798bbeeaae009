"""A training loop of the user's own over Ray, in the driver: it has the batches, and each training rank carries out its
calls on rows of its own (`own_loop_worker.py`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any, cast

import ray

from distflow.cluster.actor_calls import COORDINATOR, WorkerDied
from distflow.cluster.own_loop_worker import Part
from distflow.cluster.sample_queue import RemoteSampleQueue
from distflow.cluster.supervisor import RayRun
from distflow.data.batch import Batch
from distflow.data.batch_bytes import Buffers, gather, to_buffers
from distflow.planning.plan import dp_groups_of
from distflow.rewards.score import RewardCounts
from distflow.runtime.prompt_group import rows_by_group
from distflow.runtime.rank_info import queue_dp_group, with_samples
from distflow.runtime.sample_queue.protocol import NewWorkers, TrainingStep
from distflow.runtime.spec import Get, Spec
from distflow.runtime.stop import Stop
from distflow.runtime.wait_log import Waits
from distflow.scheduling.bin_packing import DpGroupShares, divide_among_ranks
from distflow.scheduling.sample_queue import Exhausted
from distflow.training.engine import LossFn

_TOO_LATE = (
    "a rollout worker has died within a step that was trained in part, and the one in its place needs the weights from "
    "before that. The same call resumes from the last checkpoint. Take the whole of a step before you train on it"
)


def _reply(run: RayRun, ref: Any) -> Any:
    """Of the coordinator."""
    return run.replies({ref: COORDINATOR})[0]


class RemoteIntake:
    """The methods of the coordinator's queue that a user's own loop calls. Functions go by reference, since modules of
    the user's are not imported there."""

    def __init__(self, run: RayRun) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return partial(self._ask, name)

    def _ask(self, name: str, *arguments: Any) -> Any:
        stored = [(ray.put(each),) if callable(each) else each for each in arguments]
        return _reply(self._run, getattr(self._run.coordinator, name).remote(*stored))


class TrainingRanks:
    """The `Worker` of a user's own loop in the driver. Its methods work on whole batches, whose groups it divides among
    the ranks as any other run does."""

    def __init__(self, spec: Spec, run: RayRun, step: int) -> None:
        """step: consumed in all."""
        self._spec, self._run, self.step, self._has_trained = spec, run, step, False
        self._queue = RemoteSampleQueue(run.coordinator, -1, 0, Waits(), Stop(), wait=partial(_reply, run))
        self._dp_groups, self._reward_counts = dp_groups_of(spec.plan), RewardCounts()
        engines: dict[str, object] = dict.fromkeys(("actor", "critic", "ref"))
        for role in filter(self._having, engines):
            engines[role] = SimpleNamespace(forward=partial(self.forward, role))
        self.resources = SimpleNamespace(tokenizer=Get(spec.factories, spec.plan.ranks[0], {})("tokenizer"), **engines)

    def take(self, wanted: int, deadline: float | None) -> TrainingStep[Batch] | None:
        try:
            while isinstance(step := self._queue.take(self.step, 0, wanted, deadline), NewWorkers):
                if self._has_trained:
                    raise WorkerDied(_TOO_LATE)
                self._run.call("send_to_new_workers", dict.fromkeys(self._run.training_ranks, ()))
        except Exhausted:
            self.reward_metrics()  # which may be why
            raise
        if step is not None:
            self._reward_counts = RewardCounts.joined([self._reward_counts, step.reward_counts])
            self._call("check_taken", self._dp_groups, step.group_ids, step.batch)
        return step

    def reward_metrics(self) -> dict[str, float]:
        counts, self._reward_counts = self._reward_counts, RewardCounts()
        leader, *others = self._run.training_ranks
        replies = self._run.call("reward_metrics", {leader: (counts,), **dict.fromkeys(others, ())})
        return cast(dict[str, float], replies[leader][1])

    def forward(self, role: str, batch: Batch, outputs: tuple[str, ...]) -> Batch:
        return cast(Batch, self._call("forward", self._having(role), role, batch, outputs)[0])

    def learn(self, group_ids: Sequence[int], batch: Batch) -> tuple[Batch, dict[str, float]]:
        return self._call("learn", self._dp_groups, group_ids, batch)

    def train_step(self, role: str, batch: Batch, loss: LossFn) -> dict[str, float]:
        return cast(dict[str, float], self._call("train_step", self._having(role), role, batch, loss)[1])

    def finish(self, batch: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
        _, recorded = self._call("finish", self._dp_groups, batch, metrics)
        self.step, self._has_trained = self.step + 1, False
        return cast(dict[str, float], recorded)

    def _having(self, role: str) -> list[tuple[int, ...]]:
        """The dp groups that have it."""
        return [dp_group for dp_group in self._dp_groups if role in self._spec.plan.ranks[dp_group[0]].engines]

    def _call(self, name: str, dp_groups: Sequence[tuple[int, ...]], *arguments: Any) -> tuple[Any, Any]:
        """Call a method of the workers of these dp groups, each with its rows in place of the batch that is among the
        arguments. Returns the batch of the results, with the rows of all ranks, and the rest of the first one."""
        (batch,) = (each for each in arguments if isinstance(each, Batch))
        self._has_trained |= name in ("learn", "train_step")
        rows: dict[int, list[int]] = {}
        for dp_group in dp_groups:
            rows |= zip(dp_group, self._divided(batch, dp_group, by_mini_batches=name == "learn"), strict=True)
        stored = (ray.put(to_buffers(batch)),)
        calls = {
            rank: [Part(stored, own) if each is batch else each for each in arguments] for rank, own in rows.items()
        }
        replies = self._run.call(name, calls)
        found, rest = replies[dp_groups[0][0]]
        if found is not None:
            parts = {rank: buffers for rank, (buffers, _) in replies.items()}
            found = reduce(Batch.merge, [self._joined(dp_group, rows, parts, len(batch)) for dp_group in dp_groups])
        return found, rest

    def _divided(self, batch: Batch, dp_group: tuple[int, ...], by_mini_batches: bool) -> list[list[int]]:
        """The rows of each rank. by_mini_batches: of the nodes that train; else the batch is one."""
        shares = queue_dp_group(self._spec, dp_group)
        rows = rows_by_group(batch)
        numbers, lengths = sorted(rows), batch.lengths("sequence").tolist()
        loads = [sum(lengths[row] for row in rows[number]) for number in numbers]
        shares = shares if by_mini_batches else DpGroupShares(shares.shares)
        divided = divide_among_ranks(shares, loads, numbers, self.step)
        return [[row for index in own for row in rows[numbers[index]]] for own in divided]

    def _joined(
        self, dp_group: tuple[int, ...], rows: Mapping[int, list[int]], parts: Mapping[int, Buffers], num_rows: int
    ) -> Batch:
        """The rows of a dp group, in the order of the batch that was divided."""
        ranks, picks = with_samples(self._spec.plan, dp_group), [(0, 0)] * num_rows
        for part, rank in enumerate(ranks):
            for place, row in enumerate(rows[rank]):
                picks[row] = part, place
        return gather([parts[rank] for rank in ranks], picks)


@dataclass(frozen=True)
class OwnLoop:
    """What a user's own loop works with: see `launch.local_launcher.Running`."""

    worker: TrainingRanks
    intake: RemoteIntake
