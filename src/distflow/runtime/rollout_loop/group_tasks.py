"""The rollout loop: one asyncio task per prompt group takes it from the prompt to the scored and
filtered group."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from distflow.algorithms.group_filter import TOO_FEW_SCORES
from distflow.data.batch import Batch
from distflow.data.encoded_prompts import PromptRows, UnusableRow
from distflow.data.sample import Sample
from distflow.errors import TrustError, UserError
from distflow.graph import BoundNode, Drop, NodeRole
from distflow.observe.crash_safe_files import JSON
from distflow.observe.writing.timing import (
    DATA,
    OTHER_GROUPS,
    REWARDS,
    Waits,
    group_waits,
    running_group,
)
from distflow.rewards.reward_results import CallCounts, RewardCounts, RewardResult, Score, texts_of
from distflow.rewards.router import RewardOutcome, RewardRouter
from distflow.runtime import fault_injection
from distflow.runtime.checks_protocol import GroupRecorder
from distflow.runtime.compiled_node import Step, compile_steps
from distflow.runtime.node_context import Contexts, NodeContext
from distflow.runtime.resources import Resources
from distflow.runtime.rollout_loop.early_stop import EarlyStop, GroupTask
from distflow.runtime.rollout_loop.generation_batches import GenerationBatch, group_task
from distflow.runtime.rollout_loop.group import Group, finished_group, mean_score
from distflow.runtime.rollout_loop.rollout_client import RolloutClient
from distflow.runtime.rollout_loop.row_loader import RowLoader
from distflow.runtime.rollout_loop.user_calls import PlainCalls, deadline_paused
from distflow.runtime.run_errors import Failure, NodeError
from distflow.runtime.sample_queue.protocol import (
    AbortedGroups,
    DroppedGroup,
    FinishedGroup,
    ForeseenGroups,
    RolloutQueue,
    SampleQueuePort,
)
from distflow.runtime.spec import Spec
from distflow.scheduling.group_states import PromptGroup

MakeContext = Callable[[Group, str], NodeContext]


class RolloutLoopFailed(RuntimeError):
    """Something other than a node failed in the rollout loop, so that groups would never
    complete."""


@dataclass(frozen=True)
class GroupEvents:
    """Callbacks for events of prompt groups."""

    ended: Callable[[int, int, str, float, float], None] = (
        lambda group_id, version, outcome, started, ended: None
    )
    """For every group, before it reaches the queue: the outcome is "complete" or the reason it was
    dropped; times are `time.time()`."""
    dropped: Callable[[int, str, Batch], None] = lambda version, reason, batch: None
    """If a node dropped it, with its columns."""
    failed: Callable[[int, Failure], None] = lambda group_id, failure: None
    """If a node raised."""
    waits: Waits = field(default_factory=Waits)
    """Logs how long each group waits for its rewards."""


@dataclass
class RolloutLoop:
    """Runs the compiled nodes of the rollout loop on groups."""

    steps: Sequence[Step]
    make_group: Callable[[PromptGroup], Group]
    """Makes the group of a prompt group, without responses."""
    context: MakeContext
    client: RolloutClient | None
    """None if the pipeline generates nothing."""
    timeout_s: float
    """Limit of a sync function for each sample."""
    events: GroupEvents
    group_recorder: GroupRecorder
    """Records what engine and reward functions did for each group."""
    in_batches: bool = True
    """Groups start together as a generation batch, and the next ones when these have ended."""
    stops_early: bool = False
    """Groups of a generation batch that remain when the step is full are aborted."""
    plain_calls: PlainCalls = field(default_factory=PlainCalls)
    call_counts: CallCounts = field(default_factory=CallCounts)
    """Of reward calls on all groups, including dropped ones."""
    prepare_rows: Callable[[Sequence[int]], None] = lambda rows: None
    """Called with the rows of groups about to start."""
    asks_in_rounds: bool = False
    """Groups that start together also send their later requests together."""
    row_loader: RowLoader | None = None
    """Loads the groups that start together, in place of the steps; None if there is more to do."""
    _batch: GenerationBatch | None = field(default=None, init=False)

    @staticmethod
    def of(
        spec: Spec,
        nodes: Sequence[BoundNode],
        resources: Resources,
        contexts: Contexts,
        group_recorder: GroupRecorder,
        events: GroupEvents,
    ) -> "RolloutLoop":
        client = resources.rollout
        if client is not None:
            assert isinstance(client, RolloutClient), "the services have wrapped the engine"
            client.recorder = group_recorder

        parts = resources.by_name()
        call_counts = CallCounts()
        if resources.reward_fn is not None:
            parts["reward_fn"] = partial(_score_samples, resources.reward_fn, events.waits)
            call_counts = resources.reward_fn.call_counts

        ends = resources.stop_token_ids
        sampling = replace(spec.sampling, stop_token_ids=ends)
        sampling_of = {
            name: replace(own, stop_token_ids=ends) for name, own in spec.sampling_of.items()
        }

        def make_group(prompt_group: PromptGroup) -> Group:
            row = spec.rows[prompt_group.row]
            return Group(
                prompt_group, row, sampling_of.get(row.domain, sampling), spec.config.trainer.seed
            )

        return RolloutLoop(
            compile_steps(nodes, parts),
            make_group,
            contexts.for_rollout,
            client,
            spec.config.reward.timeout_s,
            events,
            group_recorder,
            in_batches=spec.data.max_staleness == 0,
            stops_early=spec.data.oversampling > 0,
            call_counts=call_counts,
            prepare_rows=spec.rows.prepare
            if isinstance(spec.rows, PromptRows)
            else lambda rows: None,
            asks_in_rounds=spec.config.actor_rollout_ref.rollout.workflow is not None,
            row_loader=RowLoader.of(nodes, spec.rows, resources.tokenizer),
        )

    async def run(self, group: Group, steps: Sequence[Step], context: MakeContext) -> Drop | None:
        """Run the steps on the group; returns `Drop` if one of them dropped it. Raises
        NodeError."""
        fault_injection.reach("rollout.generate")
        for step in steps:
            ctx = context(group, step.node.node_id)
            is_reward = step.node.node_role is NodeRole.REWARD
            try:
                drop = await step.on_group(group, ctx, self.plain_calls, self.timeout_s)
            except NodeError as err:
                if is_reward:
                    self.call_counts.add(RewardCounts(len(group), len(group), str(err)))
                raise

            self._count(step, group, drop)
            if drop is not None:
                return drop

        return None

    def _count(self, step: Step, group: Group, drop: Drop | None) -> None:
        """Count the scores of a reward node, or the episodes that were not rejected; `reward_fn`
        counts its own calls."""
        node = step.node
        if node.node_role is not NodeRole.REWARD or "reward_fn" in node.contract.services:
            return

        batch = group.batch()
        num_asked = len(batch)
        num_failed = int((~batch["valid"]).sum())
        errors = list[str]()
        as_text = dict[str, JSON]()
        if (results := _episode_results(group.samples)) is not None:
            errors = [str(result) for result in results if not isinstance(result, Score)]
            for result in results:
                as_text |= texts_of(result.extra) if isinstance(result, Score) else {}
            num_asked = len(results)
            num_failed = len(errors)
        elif drop is not None and drop.reason == TOO_FEW_SCORES:
            num_failed = len(batch)
            errors = [drop.detail]
        elif "reward_errors" in batch:
            errors = batch["reward_errors"]

        first = ""
        if num_failed:
            first = f"{next(filter(None, errors), 'no score')} (node '{node.node_id}')"

        self.call_counts.add(RewardCounts(num_asked, num_failed, first, as_text=as_text))

    async def loop(self, queue: SampleQueuePort) -> None:
        """consumes prompt groups · waits for capacity · unblocked by released steps and ended
        groups · produces groups

        At staleness 0 the groups that the queue hands out together are a generation batch, which
        ends before the next one is fetched. Otherwise groups start as capacity allows. Raises
        RolloutLoopFailed, or the user's error.
        """
        running = set[asyncio.Task[None]]()
        client = self.client
        try:
            # a failing task ends them all: no step waits for its group
            async with asyncio.TaskGroup() as groups:
                async for prompt_groups in queue.prompt_groups(
                    lambda: client.version.step if client is not None else None
                ):
                    if self.row_loader is not None:
                        self._load_rows(self.row_loader, prompt_groups, queue)
                        continue
                    if isinstance(prompt_groups, ForeseenGroups):
                        continue

                    with self.events.waits("rollout", "rows", on=DATA):
                        self.prepare_rows([prompt_group.row for prompt_group in prompt_groups])

                    if self.in_batches:
                        await self._run_batch(prompt_groups, queue)
                    else:
                        for prompt_group in prompt_groups:
                            task = groups.create_task(self._run_group(prompt_group, queue))
                            running.add(task)
                            task.add_done_callback(running.discard)

                for task in list(running):
                    task.cancel()
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            if isinstance(first, UserError | TrustError):
                raise first from None
            raise RolloutLoopFailed(
                f"the rollout loop has failed: {type(first).__name__}: {first}"
            ) from first

    def _load_rows(
        self, loader: RowLoader, prompt_groups: list[PromptGroup], queue: SampleQueuePort
    ) -> None:
        """Complete these groups, or load those that are foreseen."""
        if isinstance(prompt_groups, ForeseenGroups):
            loader.load_ahead(prompt_groups)
            if loader.batch_ahead is not None:
                queue.store_ahead(loader.batch_ahead)
            return

        started = time.time()
        with self.events.waits("rollout", "rows", on=DATA):
            loaded = loader.load(prompt_groups)

        for prompt_group, unusable in loaded.unusable:
            self._end(prompt_group, f"{unusable.reason}: {unusable}", started)
            queue.end_groups(DroppedGroup(prompt_group, unusable.reason))

        if loaded.groups.prompt_groups:
            self._end(loaded.groups.prompt_groups[0], "complete", started)  # one span, of the first
            self.group_recorder.keep_loaded(loaded.groups)
            queue.end_groups(loaded.groups)

    async def _run_batch(self, prompt_groups: Sequence[PromptGroup], queue: RolloutQueue) -> None:
        """With `stops_early` there are more groups than the step may need."""
        client = self.client
        stop = EarlyStop(prompt_groups) if self.stops_early else None

        tasks: dict[GroupTask, PromptGroup] = {}
        for prompt_group in prompt_groups:
            task = asyncio.create_task(self._run_group(prompt_group, queue, stop))
            tasks[task] = prompt_group

        try:
            if stop is not None:
                stop.expect(tasks)

            if client is not None:
                self._batch = client.begin_batch(tasks, stop, self.asks_in_rounds)
            elif stop is not None:
                stop.begin()

            if stop is None:
                await asyncio.gather(*tasks)
                return

            await stop.run()
            if aborted := await stop.abort(self.plain_calls):
                attempts = {group.group_id: group.attempt for group in aborted}
                queue.end_groups(AbortedGroups(attempts))
        finally:
            for task in tasks:
                task.cancel()

    async def _run_group(
        self, prompt_group: PromptGroup, queue: RolloutQueue, stop: EarlyStop | None = None
    ) -> None:
        """A failing node loses only its own group, and is recorded. stop: cancels the group if it
        is not needed."""
        group_task.set(asyncio.current_task())
        self.group_recorder.begin(prompt_group)

        started = time.time()
        try:
            ended, outcome, batch = await self._ended(prompt_group)
            await self._turn(stop, accepted=isinstance(ended, FinishedGroup))
        except asyncio.CancelledError:
            if stop is not None and stop.over:
                self._end(prompt_group, "aborted: the step was complete", started)
            raise

        self._end(prompt_group, outcome, started)
        if isinstance(ended, FinishedGroup):
            self.group_recorder.keep(batch)
        elif batch is not None:
            self.events.dropped(prompt_group.version, outcome, batch)
        elif ended.failure is not None:
            self.events.failed(prompt_group.group_id, ended.failure)

        queue.end_groups(ended)

    async def _ended(
        self, prompt_group: PromptGroup
    ) -> tuple[FinishedGroup[Batch] | DroppedGroup, str, Batch | None]:
        """Run the nodes on a group: what has become of it, the same in words, and its columns; None
        if not all nodes that were to run have run."""
        try:
            with self.events.waits("rollout", "rows", on=DATA):
                group = self.make_group(prompt_group)
        except UnusableRow as err:
            return DroppedGroup(prompt_group, err.reason), f"{err.reason}: {err}", None

        running_group.set((self.events.waits, prompt_group.group_id))
        try:
            drop = await self.run(group, self.steps, self.context)
        except NodeError as err:
            failure = Failure(str(err), users=isinstance(err, UserError))
            dropped = DroppedGroup(prompt_group, "error", failure, lost=not failure.users)
            return dropped, f"error: {err}", None

        batch = group.batch()
        if drop is None:
            return finished_group(prompt_group, batch, group.measured), "complete", batch
        if drop.reason == TOO_FEW_SCORES:
            dropped = DroppedGroup(prompt_group, drop.reason, Failure(drop.detail, users=True))
            return dropped, f"{drop.reason}: {drop.detail}", batch

        dropped = DroppedGroup(prompt_group, drop.reason, score=mean_score(batch))
        return dropped, drop.reason, batch

    def _end(self, prompt_group: PromptGroup, outcome: str, started: float) -> None:
        self.events.ended(
            prompt_group.group_id, prompt_group.version, outcome, started, time.time()
        )

    async def _turn(self, stop: EarlyStop | None, accepted: bool) -> None:
        """Wait until the group may report to the queue."""
        task = group_task.get()
        if stop is not None:
            if self._batch is not None and task is not None:
                self._batch.asks_no_more(task)
            with group_waits("its turn", on=OTHER_GROUPS):
                await stop.turn(accepted)


async def _score_samples(
    router: RewardRouter, waits: Waits, samples: Sequence[Sample]
) -> list[RewardOutcome]:
    """The function behind a node's `reward_fn`, which binds router and waits."""
    with waits("reward", "scores", on=REWARDS), deadline_paused():
        return await router(samples)


def _episode_results(samples: Sequence[Sample]) -> list[RewardResult] | None:
    """The results of episodes that their workflow did not reject; None for samples that no workflow
    has scored."""
    results = [
        sample.outcome.reward_result
        for sample in samples
        if isinstance(sample.outcome, RewardOutcome)
    ]
    if results or any(sample.rejected for sample in samples):
        return results

    return None
