"""One process of a run: the nodes and engines of its rank, with the rollout loop on an asyncio
thread and the training loop on the main thread."""

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

from distflow.data.batch import Batch
from distflow.data.sample import Segment
from distflow.rewards.reward_results import RewardCounts
from distflow.rollout.engine import GenerateRequest, server_metrics
from distflow.runtime.checkpoint.saved_parts import (
    copy_of_state,
    merge_node_states,
    part_of_rank,
    saved_parts,
)
from distflow.runtime.checkpoint.saver import Saver
from distflow.runtime.checks_protocol import RunChecks, Updates
from distflow.runtime.compiled_node import Step
from distflow.runtime.error_limits import ErrorShare
from distflow.runtime.metric_stop import MetricStop
from distflow.runtime.node_context import Contexts, NodeContext
from distflow.runtime.offload import Offload
from distflow.runtime.reshard_columns import ColumnReshard
from distflow.runtime.rollout_loop.group_tasks import RolloutLoop
from distflow.runtime.rollout_loop.rollout_services import RolloutServices
from distflow.runtime.sample_queue.protocol import NewWorkers, Released, TrainingStep
from distflow.runtime.step_metrics import (
    Figures,
    batch_metrics,
    group_metrics,
    over_ranks,
    throughput,
)
from distflow.runtime.validation import ValidationRunner, score
from distflow.runtime.weight_sync.receiver import WeightReceiver
from distflow.runtime.weight_sync.sender import WeightSync
from distflow.runtime.worker_inputs import WorkerInputs
from distflow.scheduling.group_states import Version
from distflow.scheduling.sample_queue import Exhausted
from distflow.training.engine import LossFn

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Worker:
    """Runs its part of a pipeline. A context manager: inside, its rollout loop runs the groups of
    the queue."""

    inputs: WorkerInputs
    services: RolloutServices
    """With the engines and services, the rollout engine watched."""
    training_nodes: Sequence[Step]
    """Compiled, in order."""
    checks: RunChecks
    updates: Updates
    contexts: Contexts
    rollout_loop: RolloutLoop
    reshard: ColumnReshard
    validation: ValidationRunner
    """Validates, including on prompts for other workers."""
    weight_sync: WeightSync
    offload: Offload
    saver: Saver
    errors: ErrorShare
    reward_counts: Callable[[], RewardCounts]
    """Of this worker's reward calls since the last call."""

    def __post_init__(self) -> None:
        inputs = self.inputs
        self.resources = self.services.resources
        self._spec = inputs.spec
        self._ports = inputs.ports
        self._recorder = inputs.recorder
        self._phases = inputs.recorder.phases
        self._stop = inputs.stop
        self._version = inputs.version
        self._rank = inputs.ports.collective.rank  # among the training ranks
        self._saved_at = inputs.version.step
        self._metric_stop = MetricStop(
            inputs.spec.data.stop_when, partial(inputs.recorder.note, "warning")
        )
        self._released: Released | None = None

    def __enter__(self) -> "Worker":
        """Start services and engine, send the first weights, validate if configured, and start the
        rollout loop."""
        with ExitStack() as stack, self._phases("start"):
            stack.enter_context(self.services)
            stack.enter_context(self.saver)

            if (engine := self.resources.rollout) is not None:
                receiver = WeightReceiver(engine, self.services, self._recorder.waits)
                stack.callback(self._ports.engine.attach(receiver))

            if self.training_nodes:
                self._recorder.started(self._version.step, self.weight_sync.begin())
                if self._spec.config.trainer.val_before_train and self._version.step == 0:
                    self.validation.validate(0)

            if self.rollout_loop.steps:
                self._generating = self.services.start(self.rollout_loop.loop(self._ports.queue))
                self._generating.add_done_callback(self._rollout_ended)

            # Collections skip what is there now (models, modules), which they would scan again and
            # again.
            gc.freeze()
            stack.callback(gc.unfreeze)
            self._leave = stack.pop_all()

        return self

    def __exit__(self, *exception: Any) -> None:
        self._leave.__exit__(*exception)

    def training_loop(self) -> int:
        """consumes steps · waits until one is complete · unblocked by the rollout loop · produces
        versions

        Returns the number of steps consumed in total.
        """
        with self._phases("check"):
            self.checks.loop_begins()

        validated: Mapping[str, float] = {}
        while not self._stop.wanted:
            with self._recorder.profiled(self.step + 1):
                step = self.take()
                counts = RewardCounts() if step is None else step.reward_counts

                rewards = self.reward_metrics(counts)
                if step is None:
                    validated = self._end(self.step)
                    break

                if self._spec.frees_engine:
                    self.services.release_engine()

                for node, ctx in self._nodes(step):
                    step.batch, measured = node(step.batch, ctx)
                    step.measured.append(measured)

                self.finish(step.batch, {**step.metrics, **self._measured(step), **rewards})

        # a signal may have come just after the step
        if self._spec.data.saves and self._saved_at < self.step:
            assert self._released is not None, "a step that is not saved yet was released"
            self._save(self._released, validated, last=True)

        return self.step

    def serve(self) -> int:
        """For a worker that only generates; returns its last weight version when the queue hands
        out no more groups."""
        self._generating.result()
        assert self.resources.rollout is not None, "a worker that only generates has an engine"
        return self.resources.rollout.version.step

    @property
    def step(self) -> int:
        """Steps consumed in total, i.e. the number (from 0) of the next one."""
        if self._released is not None:
            return self._released.version.step
        return self._version.step

    def take(
        self, wanted: int | None = None, deadline: float | None = None
    ) -> TrainingStep[Batch] | None:
        """This rank's part of the next step, or of a part of it; None if there is none. See
        `SampleQueuePort.take`."""
        try:
            with self._phases("rollout" if self._spec.plan.generates else "data"):
                self.offload.only(())
                take = partial(self._ports.queue.take, self.step, self._rank, wanted, deadline)
                while isinstance(step := self.services.wait_for(take), NewWorkers):
                    self.send_to_new_workers()
        except Exhausted:
            self.reward_metrics()  # which may be the reason
            raise

        if step is not None:
            self.check_taken(step.group_ids, step.batch)
            # not before: it would keep this thread from its step
            self._ports.queue.note_training(self.step)

        return step

    def check_taken(self, group_ids: tuple[int, ...], batch: Batch) -> None:
        """Check this rank's part of a step that was taken. group_ids: of all ranks."""
        engine_version = None
        if self._spec.plan.generates:
            engine_version = self.weight_sync.step
        with self._phases("check"):
            self.checks.step_taken(self.step, group_ids, batch, engine_version)

    def wait_for_call(self, blocking: Callable[[], T]) -> T:
        """Wait for a call of the user's own loop while this worker's engine generates."""
        self.offload.only(())
        with self._phases("rollout"):
            return self.services.wait_for(blocking)

    def send_to_new_workers(self) -> None:
        self.weight_sync.send_to_new_workers(self.step)

    def finish_saving(self) -> None:
        """Wait until the checkpoint being written is complete."""
        self.saver.finish()

    # immutable
    def reward_metrics(self, others: RewardCounts = RewardCounts()) -> dict[str, float]:  # noqa: B008
        """Metrics of the reward calls of all workers since the last call. others: of workers that
        do not train, passed to one of the ranks. Raises TooManyErrors on every rank."""
        with self._phases("check"):
            own = RewardCounts.joined([self.reward_counts(), others])
            every = RewardCounts.joined(self._ports.collective.gather(own))
            return {**self.errors.step(every, self.step + 1), **every.counts}

    def learn(self, group_ids: Sequence[int], batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Run the training nodes on this rank's part of a step, for a user's own training loop.
        group_ids: of all ranks. Returns the batch with the nodes' columns, and their metrics over
        all ranks."""
        step = TrainingStep(tuple(group_ids), (), batch)
        for node, ctx in self._nodes(step):
            step.batch, measured = node(step.batch, ctx)
            step.measured.append(measured)
        return step.batch, self._measured(step)

    def forward(self, role: str, batch: Batch, outputs: tuple[str, ...]) -> Batch:
        """Outputs of an engine outside of the nodes; see `Scorer.forward`."""
        self.offload.only((role,))
        return cast(Batch, getattr(self.resources, role).forward(batch, outputs))

    def apply(self, batch: Batch, function: Callable[[Batch], object]) -> Batch:
        """Have a user's function write columns."""
        function(batch)
        return batch

    def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        """Generate with this worker's engine, beside its groups; callable on any thread."""
        return self.services.call(self._generate(request))

    async def agenerate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        """`generate` in the caller's event loop."""
        return await asyncio.wrap_future(self.services.start(self._generate(request)))

    async def _generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        """Generate; responses also end at the model's stop tokens."""
        engine = self.resources.rollout
        params = request.params
        assert engine is not None, "only workers that generate are asked"
        params = replace(
            params, stop_token_ids=(*params.stop_token_ids, *self.resources.stop_token_ids)
        )
        return await engine.generate(replace(request, params=params))

    def train_step(self, role: str, batch: Batch, loss: LossFn) -> dict[str, float]:
        """An optimizer step outside of the nodes, checked like theirs."""
        engine = self.resources.trained()[role]
        self.offload.only((role,))
        with self._phases(f"update_{role}"):
            metrics = engine.train_step(batch, self.updates.before(engine, batch, loss))
        self.updates.after(engine, batch, metrics, first=False, step=self.step)
        return metrics

    def finish(self, batch: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
        """After training on a step: send its weights, release it, then validate, record and save if
        due; nothing is generated meanwhile. Returns all of its metrics.

        A step is recorded before it is saved, so that a resumed run has the metrics of all its
        steps. A stop saves unless saving is off, and validates only if that was due anyway.
        """
        step = self.step
        metrics = dict(metrics)
        with self._phases("save"):
            self.saver.check()
        with self._phases("check"):
            metrics |= self.checks.step_trained(batch, metrics, step)

        with self._phases("record"):
            figures = Figures.joined(self._ports.data.gather(Figures.of(batch)))
            metrics |= batch_metrics(figures)

        sent, compared = self._send_weights(step + 1)
        metrics |= compared
        with self._phases("release"):
            released = self._ports.queue.release(step, self._rank, sent)
        due = released.due
        validated = dict[str, float]()
        if "validate" in due or ("save" in due and self._spec.keep_best is not None):
            validated = self.validation.validate(step + 1)
        self._record(released, batch, metrics, figures)
        plan = self._spec.data
        ends = self._ends(step + 1, metrics | validated)
        if ends and plan.validates and self.validation.step <= step:
            validated = self.validation.validate(step + 1)
        stops = ends or self._stop.wanted
        if "save" in due or (stops and plan.saves):
            self._save(released, validated, last=stops or released.finished)
        self._released = released

        return metrics

    def _send_weights(self, version: int) -> tuple[bool, dict[str, float]]:
        """Whether weights were sent, and the canary's metrics."""
        if version % self._spec.update_frequency:
            return False, {}

        phase = "release"
        if self._spec.plan.generates:
            phase = "update_weights"

        with self._phases(phase):
            return self.weight_sync.send(Version(self._version.restart, version))

    def _nodes(self, step: TrainingStep[Batch]) -> Iterator[tuple[Step, NodeContext]]:
        """The training nodes in turn, each to be run before the next is requested: a loop that runs
        them itself is few frames away from what they compute. Times them (`perf/NODE`, in seconds)
        if `dag.enable_perf` is on."""
        for compiled in self.training_nodes:
            name = compiled.node.node_id
            started = time.perf_counter()

            if self.reshard.waits_for(name):
                with self._phases("exchange"):
                    step.batch = self.reshard.receive(name, step.batch, self.step)

            before = step.batch
            with self._phases(compiled.node.phase):
                self.offload.only(compiled.node.engines)
                yield compiled, self.contexts.for_training(self.step, step.group_ids, name)

            with self._phases("check"):
                self.checks.node_finished(step.batch)

            if self.reshard.sends(name):
                with self._phases("exchange"):
                    self.reshard.send(name, before, step.batch, self.step)

            if self._spec.config.dag.enable_perf:
                step.times[f"perf/{name}"] = time.perf_counter() - started

    def _measured(self, step: TrainingStep[Batch]) -> dict[str, float]:
        """Metrics of the nodes over all ranks, and their times."""
        with self._phases("record"):
            measured = self._over_dp_groups(over_ranks(step.measured, self._ports.data))
        return measured | step.times

    def _over_dp_groups(self, measured: dict[str, float]) -> dict[str, float]:
        """Metrics of the nodes of all dp groups; if several ran a node, of the first."""
        everyone = self._ports.everyone
        if everyone.size == self._ports.collective.size:
            return measured

        found = dict[str, float]()
        for own in reversed(everyone.gather(measured)):
            found |= own
        return found

    def _record(
        self, released: Released, batch: Batch, metrics: dict[str, float], figures: Figures
    ) -> None:
        """Record a step, with further metrics."""
        step = released.version.step
        engine = self.resources.rollout
        with self._phases("record"):
            metrics |= group_metrics(released.group_counts, figures.versions, step - 1)
        metrics |= self._phases.finish_step() | self._recorder.memory.finish_step()
        step_s = metrics["timing_s/step"]
        metrics["throughput/tokens_per_s"] = figures.num_tokens / step_s
        if "acting/env_steps" in metrics:
            metrics["throughput/env_steps_per_s"] = metrics["acting/env_steps"] / step_s

        with self._phases("record"):
            self._recorder.engine_activity(engine)
            phases = [each.node.phase for each in self.training_nodes if each.node.engines]
            num_tokens = int(batch.lengths("sequence").sum())
            metrics |= throughput(metrics, phases, num_tokens, self._ports.everyone)
            metrics |= server_metrics(engine)
            self._recorder.training_step(step, metrics, batch)
            self._recorder.keep_groups(step, batch, self.resources.tokenizer)

    def _ends(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether a metric ends the run here: the leading rank decides for all, before any takes
        another step."""
        if self._metric_stop.condition is None:
            return False

        everyone = self._ports.everyone
        why = ""
        if everyone.rank == 0:
            why = self._metric_stop.reason(metrics)

        if why:
            self._ports.queue.end_run(why)
            self._recorder.why = {"why": why}
            self._recorder.note("info", f"the run ends after step {step}: {why}")

        return everyone.max(float(bool(why))) > 0

    def _end(self, step: int) -> dict[str, float]:
        """No step is left, even if step `step` was not known to be the last, because no later group
        succeeded. Returns the metrics of its validation."""
        if self._ports.everyone.rank == 0:
            self._metric_stop.report_missing()
        if self._spec.data.validates and self.validation.step < step:
            return self.validation.validate(step)
        return {}

    def _rollout_ended(self, rollout_nodes: "Future[None]") -> None:
        """Whatever ends the rollout loop must wake the trainer, which would otherwise wait for
        groups forever.

        Called on the asyncio thread, or by the thread that ends it: `abort` may be called on any. A
        loop that ends because of a failure elsewhere reports nothing.
        """
        error = CancelledError() if rollout_nodes.cancelled() else rollout_nodes.exception()
        if error is not None:
            self._ports.abort(error)

    def _save(self, released: Released, validated: Mapping[str, float], last: bool) -> None:
        """validated: the metrics of these weights, for `keep_best`. last: wait until the checkpoint
        is complete."""
        if self.saver.is_busy:
            with self._phases("save_wait"):
                self.saver.finish()

        step = released.version.step
        best = self._spec.keep_best
        self._saved_at = step

        metric = None
        if best is not None and validated:
            metric = score(best, validated)

        everyone = self._ports.everyone
        with self._phases("save"):
            self._recorder.saving()
            state = merge_node_states(everyone.gather(copy_of_state(self.inputs.state)))
            point = self._ports.queue.resume_point
            seen = self.checks.state_saved
            parts = saved_parts(self._spec, self.resources, point, state, everyone.rank, seen)
            others = [part_of_rank(rank) for rank in range(1, everyone.size)]
            self.saver.save(step, parts, others, metric, wait=last)
