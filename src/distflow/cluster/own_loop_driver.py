"""A user's own training loop over Ray, in the driver: it knows where the columns of a batch are,
and each training rank executes its calls on the rank's rows (`own_loop_worker.py`)."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import ray
import torch

from distflow.cluster.own_loop_worker import stored
from distflow.cluster.remote_calls import COORDINATOR, WorkerDied
from distflow.cluster.remote_sample_queue import GroupRef, RemoteSampleQueue, Taken
from distflow.cluster.supervisor import RayRun
from distflow.data.batch import Batch
from distflow.observe.writing.timing import Waits
from distflow.planning.plan import dp_groups_of
from distflow.rewards.reward_results import RewardCounts
from distflow.runtime.dp_groups import (
    DpGroupShares,
    divide_among_ranks,
    queue_dp_group,
    with_samples,
)
from distflow.runtime.rollout_loop.group import rows_by_group
from distflow.runtime.sample_queue.protocol import NewWorkers, TrainingStep
from distflow.runtime.sample_queue.submissions import OfGroup
from distflow.runtime.spec import Get, Spec
from distflow.runtime.stop_signals import Stop
from distflow.scheduling.sample_queue import Exhausted
from distflow.training.engine import LossFn

_TOO_LATE = (
    "a rollout worker has died within a step that was trained in part, and the one in its place "
    "needs the weights from before that. The same call resumes from the last checkpoint. Take the "
    "whole of a step before you train on it"
)


def _reply(run: RayRun, ref: Any) -> Any:
    """The reply of the coordinator."""
    return run.replies({ref: COORDINATOR})[0]


class RemoteIntake:
    """The methods of the coordinator's queue that a user's own loop calls. Functions are passed by
    reference, since user modules are not imported there."""

    def __init__(self, run: RayRun) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return partial(self._ask, name)

    def _ask(self, name: str, *arguments: Any) -> Any:
        sent = []
        for argument in arguments:
            is_code = isinstance(argument, OfGroup) and any(argument)
            sent.append((ray.put(argument),) if is_code else argument)
        return _reply(self._run, getattr(self._run.coordinator, name).remote(*sent))


class TrainingRanks:
    """The `Worker` of a user's own loop in the driver. Its methods work on whole batches, whose
    groups it divides among the ranks as in any other run."""

    def __init__(self, spec: Spec, run: RayRun, step: int) -> None:
        """step: number consumed in total."""
        self._spec = spec
        self._run = run
        self.step = step
        self._has_trained = False
        wait = partial(_reply, run)
        self._queue = RemoteSampleQueue(
            run.coordinator, -1, 0, Waits(), Stop(), wait=wait, read=self._hold
        )
        self._dp_groups = dp_groups_of(spec.plan)
        self._reward_counts = RewardCounts()
        engines: dict[str, object] = dict.fromkeys(("actor", "critic", "ref"))
        for role in filter(self._having, engines):
            engines[role] = SimpleNamespace(forward=partial(self.forward, role))
        self.resources = SimpleNamespace(
            tokenizer=Get(spec.factories, spec.plan.ranks[0], {})("tokenizer"), **engines
        )

    def take(self, wanted: int, deadline: float | None) -> TrainingStep[Batch] | None:
        try:
            while isinstance(step := self._queue.take(self.step, 0, wanted, deadline), NewWorkers):
                if self._has_trained:
                    raise WorkerDied(_TOO_LATE)
                self._run.call("send_to_new_workers", dict.fromkeys(self._run.training_ranks, ()))
        except Exhausted:
            self.reward_metrics()  # which may be the reason
            raise

        if step is not None:
            self._reward_counts = RewardCounts.joined([self._reward_counts, step.reward_counts])
            self._call("check_taken", self._dp_groups, step.group_ids, step.batch)

        return step

    def reward_metrics(self) -> dict[str, float]:
        counts = self._reward_counts
        self._reward_counts = RewardCounts()
        calls: dict[int, Sequence[Any]] = dict.fromkeys(self._run.training_ranks, ())
        leader = self._run.training_ranks[0]
        calls[leader] = (counts,)
        return cast(dict[str, float], self._run.call("reward_metrics", calls)[leader][1])

    def forward(self, role: str, batch: Batch, outputs: tuple[str, ...]) -> Batch:
        return cast(Batch, self._call("forward", self._having(role), role, batch, outputs)[0])

    def apply(self, batch: Batch, function: Callable[[Batch], object]) -> Batch:
        """Apply the function on each rank to its rows."""
        return cast(Batch, self._call("apply", self._dp_groups[:1], batch, function)[0])

    def learn(self, group_ids: Sequence[int], batch: Batch) -> tuple[Batch, dict[str, float]]:
        return self._call("learn", self._dp_groups, group_ids, batch)

    def train_step(self, role: str, batch: Batch, loss: LossFn) -> dict[str, float]:
        return cast(
            dict[str, float], self._call("train_step", self._having(role), role, batch, loss)[1]
        )

    def finish(self, batch: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
        _, recorded = self._call("finish", self._dp_groups, batch, metrics)
        self.step += 1
        self._has_trained = False
        return cast(dict[str, float], recorded)

    def generate(self, request: Any) -> Any:
        """Generate with the workers' engines in turn; one that dies passes the request on."""
        gone = set[int]()
        while True:
            rank = self._generating_rank(request, gone)
            ref = self._run.generate(rank, request)
            try:
                return self._run.replies({ref: rank})[0]
            except WorkerDied:
                if rank in self._run.training_ranks:
                    raise
                gone.add(rank)

    async def agenerate(self, request: Any) -> Any:
        """`generate` in the caller's event loop."""
        rank = self._generating_rank(request, ())
        ref = self._run.generate(rank, request)
        await self._run.done(ref)

        try:
            return self._run.replies({ref: rank})[0]
        except WorkerDied:
            if rank in self._run.training_ranks:
                raise
            return self.generate(request)

    def _generating_rank(self, request: Any, gone: Collection[int]) -> int:
        """A worker with the newest weights. gone: ranks that have died with the request. Raises
        WorkerDied if there is none."""
        ready = {*self._run.with_newest_weights()}
        for rank in self._run.training_ranks:
            if "rollout" in self._spec.plan.ranks[rank].engines:
                ready.add(rank)

        left = sorted(ready.difference(gone))
        if not left:
            raise WorkerDied(
                "no rollout worker has the newest weights: a new one gets them with the next batch."
            )

        return left[request.stream.row % len(left)]

    def _having(self, role: str) -> list[tuple[int, ...]]:
        """The dp groups that have the role's engine."""
        return [
            dp_group
            for dp_group in self._dp_groups
            if role in self._spec.plan.ranks[dp_group[0]].engines
        ]

    def _hold(self, taken: Taken, groups: Sequence[GroupRef]) -> tuple[Batch | None, list[int]]:
        """Have each rank read its groups from the workers that generated them; returns the batch,
        or ids of lost groups."""
        dp_group = self._dp_groups[0]
        sizes = Batch(torch.zeros(len(taken.own)), torch.tensor(taken.loads))
        sizes["group_index"] = torch.tensor(taken.own)
        holders = with_samples(self._spec.plan, dp_group)

        calls = {}
        for rank, rows in self._rows_of_ranks(sizes, dp_group).items():
            if rank in holders and rows:
                calls[rank] = ([taken.own[row] for row in rows], [groups[row] for row in rows])

        parts = []
        lost = []
        rows_of_group = defaultdict[int, list[int]](list)
        num_rows = 0
        for part, group_of_rows, missing in self._run.call("hold", calls).values():
            parts.append(part)
            lost += missing
            for number in group_of_rows:
                rows_of_group[number].append(num_rows)
                num_rows += 1

        if lost:
            return None, lost
        order = list(chain.from_iterable(rows_of_group[number] for number in taken.own))
        return Batch.concat(parts).select(order), []

    def _call(
        self, name: str, dp_groups: Sequence[tuple[int, ...]], *arguments: Any
    ) -> tuple[Any, Any]:
        """Call a method of the workers of these dp groups, each with its rows in place of the batch
        among the arguments. Returns the columns that it wrote, which stay with the ranks, and the
        rest of the first one's result."""
        (batch,) = (value for value in arguments if isinstance(value, Batch))
        if name in ("learn", "train_step"):
            self._has_trained = True
        rows = dict[int, list[int]]()
        for dp_group in dp_groups:
            rows |= self._rows_of_ranks(batch, dp_group, by_mini_batches=name == "learn")
        in_store = stored(batch)

        parts = {}
        calls = {}
        for rank, own_rows in rows.items():
            parts[rank] = in_store.select(own_rows)
            calls[rank] = [parts[rank] if value is batch else value for value in arguments]

        replies = self._run.call(name, calls)
        columns, rest = replies[dp_groups[0][0]]
        if columns is None:
            return None, rest

        written = batch.only([])
        for dp_group in dp_groups:
            holders = with_samples(self._spec.plan, dp_group)
            replied = []
            replied_rows = []
            for rank in [rank for rank in holders if rows[rank]] or holders[:1]:
                lengths = (parts[rank].lengths("prompt"), parts[rank].lengths("response"))
                replied.append(Batch.from_columns(*lengths, replies[rank][0]))
                replied_rows += rows[rank]

            in_order = sorted(range(len(replied_rows)), key=replied_rows.__getitem__)
            written = written.merge(Batch.concat(replied).select(in_order))

        return written, rest

    def _rows_of_ranks(
        self, batch: Batch, dp_group: tuple[int, ...], by_mini_batches: bool = False
    ) -> dict[int, list[int]]:
        """The rows of each rank. by_mini_batches: divide each mini-batch of the training nodes, not
        the batch."""
        shares = queue_dp_group(self._spec, dp_group)
        if not by_mini_batches:
            shares = DpGroupShares(shares.shares)
        rows_of_group = rows_by_group(batch)
        numbers = sorted(rows_of_group)
        lengths = batch.lengths("sequence").tolist()
        loads = [sum(lengths[row] for row in rows_of_group[number]) for number in numbers]
        divided = divide_among_ranks(shares, loads, numbers, self.step)

        rows: dict[int, list[int]] = {}
        for rank, places in zip(dp_group, divided, strict=True):
            rows[rank] = []
            for place in places:
                rows[rank] += rows_of_group[numbers[place]]

        return rows


@dataclass(frozen=True)
class OwnLoop:
    """The interface of a user's own loop: see `launch.one_process_launcher.Running`."""

    worker: TrainingRanks
    intake: RemoteIntake
