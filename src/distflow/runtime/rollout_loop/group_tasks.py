"""The rollout loop: one asyncio task per prompt group takes it from the prompt to the scored and
filtered group."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakSet

from distflow.algorithms.normalization_filters_and_weights import TOO_FEW_SCORES
from distflow.data.batch import Batch
from distflow.data.encoded_prompts import PromptRows, UnusableRow
from distflow.data.sample import Segment
from distflow.errors import TrustError, UserError
from distflow.graph import BoundNode, Drop, NodeRole
from distflow.observe.writing.timing import (
    DATA,
    ENGINE,
    OTHER_GROUPS,
    Waits,
    group_waits,
    running_group,
)
from distflow.rewards.reward_results import CallCounts, RewardCounts, Score
from distflow.rollout.engine import GenerateRequest, RolloutEngine, generate_whole
from distflow.runtime import fault_injection
from distflow.runtime.audit_protocol import GroupRecorder
from distflow.runtime.compiled_node import (
    Contexts,
    NodeContext,
    Step,
    compile_steps,
    episode_results,
    score_samples,
)
from distflow.runtime.engines_and_services import Resources
from distflow.runtime.rollout_loop.generation_batches import EarlyStop, Rounds, cancel
from distflow.runtime.rollout_loop.group_samples_and_columns import (
    Group,
    accuracy_of,
    finished_group,
)
from distflow.runtime.rollout_loop.row_loader import RowLoader
from distflow.runtime.rollout_loop.user_calls import PlainCalls, deadline_paused
from distflow.runtime.run_errors_and_limits import Failure, NodeError
from distflow.runtime.sample_queue.protocol import (
    AbortedGroups,
    DroppedGroup,
    ForeseenGroups,
    SampleQueuePort,
)
from distflow.runtime.spec import Spec
from distflow.scheduling.group_states import GroupState, PromptGroup, Version

group_task: ContextVar[asyncio.Task[None] | None] = ContextVar("group_task", default=None)
"""The running group's task; tasks that a node starts (`gather`, `wait_for`) inherit it."""

MakeContext = Callable[[Group, str], NodeContext]


class RolloutLoopFailed(RuntimeError):
    """Something other than a node failed in the rollout loop, so that groups would never
    complete."""


@dataclass(frozen=True)
class GroupEvents:
    """Callbacks for events of prompt groups.

    ended: (group id, version, "complete" or the reason it was dropped, start, end) with
    `time.time()`, for every group, before it reaches the queue. dropped: (version, reason, columns)
    if a node dropped it. failed: (group id, reason) if a node raised. waits: logs how long each
    group waits for its rewards.
    """

    ended: Callable[[int, int, str, float, float], None] = (
        lambda group_id, version, outcome, started, ended: None
    )
    dropped: Callable[[int, str, Batch], None] = lambda version, reason, batch: None
    failed: Callable[[int, Failure], None] = lambda group_id, failure: None
    waits: Waits = field(default_factory=Waits)


class SubmissionGate:
    """A wrapper of the rollout engine that tracks which groups of a generation batch have sent
    their request, or ended without one.

    The rollout loop's nodes are compiled with the gate in place of the engine, and use its
    `generate`, `pause` and `resume`. Between generation batches it only forwards. It runs only on
    the asyncio thread, so it needs no lock.
    """

    def __init__(self, engine: RolloutEngine, group_recorder: GroupRecorder) -> None:
        self._engine = engine
        self._recorder = group_recorder
        self.pause = engine.pause
        self.resume = engine.resume
        self._waiting: set[asyncio.Task[None] | None] = set()
        self._all_in = asyncio.Event()
        self._early_stop: EarlyStop | None = None
        self._rounds: Rounds | None = None

    def expect(
        self,
        tasks: Collection[asyncio.Task[None]],
        early_stop: EarlyStop | None = None,
        in_rounds: bool = False,
    ) -> None:
        """Begin a generation batch of these group tasks. None of them has run yet: there was no
        await since they were created. early_stop: informed of every response. in_rounds: later
        requests go to the engine in rounds too."""
        self._waiting = set(tasks)
        self._early_stop = early_stop
        self._all_in = asyncio.Event()
        self._rounds = Rounds(tasks, self.pause, self.resume) if in_rounds else None
        for task in tasks:
            # a task that ends without a request must not be waited for
            task.add_done_callback(self.arrived)

    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        """The engine's `generate`; the request is in the engine's queue before this first yields.
        Responses that a weight update aborted are generated again."""
        with deadline_paused():
            fault_injection.reach("rollout.generate")
            if self._rounds is not None:
                with group_waits("a round of requests", on=OTHER_GROUPS):
                    await self._rounds.turn(group_task.get(), request.samples[0])
            with group_waits("responses", on=ENGINE):
                result = await generate_whole(self._ask, request)
            self._recorder.generated(request, result)
            return result

    async def _ask(self, request: GenerateRequest) -> tuple[Segment, ...]:
        pending = asyncio.ensure_future(self._engine.generate(request))
        own = asyncio.current_task()
        rounds = self._rounds
        task = group_task.get() or own
        assert task is not None and own is not None

        def end(cause: asyncio.Future[Any]) -> None:
            pending.cancel()

        causes: tuple[asyncio.Future[Any], ...] = (
            (task, rounds.failed) if rounds is not None else (task,)
        )
        # the group no longer waits for a task that it started, or the task cannot end
        for cause in causes:
            cause.add_done_callback(end)
        try:
            try:
                # `pending` runs to its first await, which queues its request
                await asyncio.sleep(0)
            finally:  # a request cancelled meanwhile must not be waited for
                self.arrived(task)
                if rounds is not None:
                    rounds.submitted(task)
            result = await pending
            if self._early_stop is not None:
                self._early_stop.responded(task, sum(len(made.token_ids) for made in result))
            return result
        except asyncio.CancelledError:
            if rounds is None or not rounds.failed.done() or own.cancelling():
                raise
            raise rounds.failed.result() from None
        finally:
            for cause in causes:
                cause.remove_done_callback(end)
            # no effect if done; else this group was cancelled, and so is its request
            pending.cancel()

    async def all_in(self) -> None:
        """Wait until every group of the generation batch has arrived."""
        if self._waiting:
            await self._all_in.wait()

    @property
    def version(self) -> Version:
        return self._engine.version

    async def num_generated_tokens(self) -> int:
        """The number of tokens generated so far, once cancelled requests add none. 0 for an engine
        that does not count them, or also counts those of other workers."""
        if getattr(self._engine, "is_shared", False):
            return 0
        await self.pause()
        number = getattr(self._engine, "num_generated_tokens", 0)
        await self.resume()
        return int(number)

    def asks_no_more(self, task: asyncio.Task[None] | None) -> None:
        """The group has finished all of its nodes."""
        self.arrived(task)
        if self._rounds is not None:
            self._rounds.left(task)

    def arrived(self, task: asyncio.Task[None] | None) -> None:
        """The group has sent its request, or needs none."""
        self._waiting.discard(task)
        if not self._waiting:
            self._all_in.set()


@dataclass
class RolloutLoop:
    """Runs the compiled nodes of the rollout loop on groups.

    make_group: makes the group of a prompt group, without responses. gate: wraps the rollout
    engine; None if the pipeline generates nothing. group_recorder: records what engine and reward
    functions did for each group. timeout_s: limit of a sync function for each sample. in_batches:
    groups start together as a generation batch, and the next ones when these have ended.
    stops_early: groups of a generation batch that remain when the step is full are aborted.
    call_counts: of reward calls on all groups, including dropped ones. prepare_rows: called with
    the rows of groups about to start. asks_in_rounds: groups that start together also send their
    later requests together. row_loader: loads the groups that start together, in place of the
    steps; None if there is more to do. surplus: tasks of groups that the queue ended.
    """

    steps: Sequence[Step]
    make_group: Callable[[PromptGroup], Group]
    context: MakeContext
    gate: SubmissionGate | None
    timeout_s: float
    events: GroupEvents
    group_recorder: GroupRecorder
    in_batches: bool = True
    stops_early: bool = False
    plain_calls: PlainCalls = field(default_factory=PlainCalls)
    call_counts: CallCounts = field(default_factory=CallCounts)
    prepare_rows: Callable[[Sequence[int]], None] = lambda rows: None
    asks_in_rounds: bool = False
    row_loader: RowLoader | None = None
    surplus: "WeakSet[asyncio.Task[None]]" = field(default_factory=WeakSet)

    @staticmethod
    def of(
        spec: Spec,
        nodes: Sequence[BoundNode],
        resources: Resources,
        contexts: Contexts,
        group_recorder: GroupRecorder,
        events: GroupEvents,
    ) -> "RolloutLoop":
        gate = (
            SubmissionGate(resources.rollout, group_recorder)
            if resources.rollout is not None
            else None
        )
        parts = {**resources.by_name(), **({"rollout": gate} if gate else {})}
        if resources.reward_fn is not None:
            parts["reward_fn"] = partial(score_samples, resources.reward_fn, events.waits)
        ends = resources.stop_token_ids
        sampling = replace(spec.sampling, stop_token_ids=ends)
        sampling_of = {
            name: replace(own, stop_token_ids=ends) for name, own in spec.sampling_of.items()
        }

        def make_group(prompt_group: PromptGroup) -> Group:
            row = spec.rows[prompt_group.row]
            return Group(
                prompt_group, row, sampling_of.get(row.domain, sampling), spec.options.seed
            )

        return RolloutLoop(
            compile_steps(nodes, parts),
            make_group,
            contexts.for_rollout,
            gate,
            spec.options.timeout_s,
            events,
            group_recorder,
            in_batches=spec.data.max_staleness == 0,
            stops_early=spec.data.oversampling > 0,
            call_counts=resources.reward_fn.call_counts
            if resources.reward_fn is not None
            else CallCounts(),
            prepare_rows=spec.rows.prepare
            if isinstance(spec.rows, PromptRows)
            else lambda rows: None,
            asks_in_rounds=spec.config.actor_rollout_ref.rollout.workflow is not None,
            row_loader=RowLoader.of(nodes, spec.rows, resources.tokenizer),
        )

    async def run(self, group: Group, steps: Sequence[Step], context: MakeContext) -> Drop | None:
        """Run the steps on the group; returns `Drop` if one of them dropped it. Raises
        NodeError."""
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
        as_text = dict[str, str]()
        if (results := episode_results(group.samples)) is not None:
            errors = [str(result) for result in results if not isinstance(result, Score)]
            for result in results:
                as_text |= result.as_text if isinstance(result, Score) else {}
            num_asked = len(results)
            num_failed = len(errors)
        elif drop is not None and drop.reason == TOO_FEW_SCORES:
            num_failed = len(batch)
            errors = [drop.detail]
        elif "reward_errors" in batch:
            errors = batch["reward_errors"]
        first = (
            f"{next(filter(None, errors), 'no score')} (node '{node.node_id}')"
            if num_failed
            else ""
        )
        self.call_counts.add(RewardCounts(num_asked, num_failed, first, as_text=as_text))

    async def loop(self, queue: SampleQueuePort) -> None:
        """consumes prompt groups · waits for capacity · unblocked by released steps and ended
        groups · produces groups

        At staleness 0 the groups that the queue hands out together are a generation batch:
        submitted in group order to a paused engine that then resumes, so that decode batches never
        depend on timing, and ended before the next one is fetched. Otherwise groups start as
        capacity allows. Raises RolloutLoopFailed, or the user's error.
        """
        running = dict[int, asyncio.Task[None]]()
        gate = self.gate
        try:
            # a failing task ends them all: no step waits for its group
            async with asyncio.TaskGroup() as groups:
                async for prompt_groups in queue.prompt_groups(
                    lambda: gate.version.step if gate is not None else None
                ):
                    if isinstance(prompt_groups, ForeseenGroups):
                        if self.row_loader is not None:
                            self.row_loader.load_ahead(prompt_groups)
                            if self.row_loader.batch_ahead is not None:
                                queue.store_ahead(self.row_loader.batch_ahead)
                        continue
                    for group in prompt_groups:
                        if group.state is GroupState.WAITING and group.group_id in running:
                            self.surplus.add(running[group.group_id])
                            groups.create_task(
                                cancel([running.pop(group.group_id)], self.plain_calls)
                            )
                    prompt_groups = [
                        group for group in prompt_groups if group.state is not GroupState.WAITING
                    ]
                    if self.row_loader is not None:
                        self._load_rows(self.row_loader, prompt_groups, queue)
                        continue
                    with self.events.waits("rollout", "rows", on=DATA):
                        self.prepare_rows([prompt_group.row for prompt_group in prompt_groups])
                    if self.in_batches:
                        await self._run_batch(prompt_groups, queue)
                    else:
                        started = {
                            prompt_group.group_id: groups.create_task(
                                self._run_group(prompt_group, queue)
                            )
                            for prompt_group in prompt_groups
                        }
                        running = {
                            number: task for number, task in running.items() if not task.done()
                        } | started
                for task in running.values():
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
        """Complete these groups."""
        started = time.time()
        with self.events.waits("rollout", "rows", on=DATA):
            loaded = loader.load(prompt_groups)
        for prompt_group, unusable in loaded.unusable:
            self._end(prompt_group, f"{unusable.reason}: {unusable}", started)
            queue.drop(DroppedGroup(prompt_group, unusable.reason))
        if loaded.groups.prompt_groups:
            self._end(loaded.groups.prompt_groups[0], "complete", started)  # one span, of the first
            self.group_recorder.keep_loaded(loaded.groups)
            queue.put_loaded(loaded.groups)

    async def _run_batch(
        self, prompt_groups: Sequence[PromptGroup], queue: SampleQueuePort
    ) -> None:
        """With `stops_early` there are more groups than the step may need."""
        gate = self.gate
        stop = None
        before = 0
        if self.stops_early:
            stop = EarlyStop(prompt_groups)
            before = await gate.num_generated_tokens() if gate is not None else 0
        if gate is not None:
            await gate.pause()
        tasks = {
            asyncio.create_task(self._run_group(prompt_group, queue, stop)): prompt_group
            for prompt_group in prompt_groups
        }
        try:
            if stop is not None:
                stop.expect(tasks)
            if gate is not None:
                gate.expect(tasks, stop, self.asks_in_rounds)
                await gate.all_in()
            if stop is not None:
                stop.begin()
            if gate is not None:
                await gate.resume()
            if stop is None:
                await asyncio.gather(*tasks)
                return
            await stop.run()
            if aborted := await stop.abort(self.plain_calls):
                drawn = await gate.num_generated_tokens() - before if gate is not None else 0
                num_tokens = max(
                    drawn - stop.num_tokens(passed=True), stop.num_tokens(passed=False)
                )
                queue.abort(
                    AbortedGroups({group.group_id: group.attempt for group in aborted}, num_tokens)
                )
        finally:
            for task in tasks:
                task.cancel()

    async def _run_group(
        self, prompt_group: PromptGroup, queue: SampleQueuePort, stop: EarlyStop | None = None
    ) -> None:
        """A failing node loses only its own group, and is recorded. stop: cancels the group if it
        is not needed."""
        group_task.set(asyncio.current_task())
        self.group_recorder.begin(prompt_group)
        started = time.time()
        try:
            with self.events.waits("rollout", "rows", on=DATA):
                group = self.make_group(prompt_group)
        except UnusableRow as unusable:
            await self._turn(stop, accepted=False)
            self._end(prompt_group, f"{unusable.reason}: {unusable}", started)
            queue.drop(DroppedGroup(prompt_group, unusable.reason))
            return
        running_group.set((self.events.waits, prompt_group.group_id))
        try:
            try:
                drop = await self.run(group, self.steps, self.context)
                batch = group.batch()
            except NodeError:
                await self._turn(stop, accepted=False)
                raise
            await self._turn(stop, accepted=drop is None)
        except asyncio.CancelledError:
            if (stop is not None and stop.over) or asyncio.current_task() in self.surplus:
                self._end(prompt_group, "aborted: the step was complete", started)
                num_tokens = sum(
                    len(part.token_ids) for each in group.samples for part in each.response_segments
                )
                if stop is None and num_tokens:
                    queue.abort(AbortedGroups({}, num_tokens))
            raise
        except NodeError as err:
            failure = Failure(str(err), users=isinstance(err, UserError))
            self._end(prompt_group, f"error: {err}", started)
            self.events.failed(prompt_group.group_id, failure)
            queue.drop(DroppedGroup(prompt_group, "error", failure, lost=not failure.users))
            return
        if drop is None:
            self._end(prompt_group, "complete", started)
            self.group_recorder.keep(batch)
            queue.put(finished_group(prompt_group, batch, group.measured))
            return
        if drop.reason == TOO_FEW_SCORES:
            outcome = f"{drop.reason}: {drop.detail}"
            dropped = DroppedGroup(prompt_group, drop.reason, Failure(drop.detail, users=True))
        else:
            outcome = drop.reason
            dropped = DroppedGroup(prompt_group, drop.reason, accuracy=accuracy_of(batch))
        self._end(prompt_group, outcome, started)
        self.events.dropped(prompt_group.version, outcome, batch)
        self.group_recorder.drop(drop.reason, batch)
        queue.drop(dropped)

    def _end(self, prompt_group: PromptGroup, outcome: str, started: float) -> None:
        self.events.ended(
            prompt_group.group_id, prompt_group.version, outcome, started, time.time()
        )

    async def _turn(self, stop: EarlyStop | None, accepted: bool) -> None:
        """Wait until the group may report to the queue."""
        if stop is not None:
            if self.gate is not None:
                self.gate.asks_no_more(group_task.get())
            with group_waits("its turn", on=OTHER_GROUPS):
                await stop.turn(accepted)
