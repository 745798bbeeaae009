"""Runs the checks of a worker: those of every step, and of the steps that are checked whole, which
it records."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from distflow.checks import all_checks
from distflow.checks.advantages import check_advantages
from distflow.checks.check import NOT_APPLICABLE, Check, Wrong
from distflow.checks.gradients import check_cleared
from distflow.checks.group_records import GroupRecord, GroupRecords
from distflow.checks.invariants import Invariants
from distflow.checks.losses import check_losses, run_plainly
from distflow.checks.mini_batches import planned_updates
from distflow.checks.recorded_step import CheckedRun, RecordedStep
from distflow.checks.resume import Memory
from distflow.checks.schedule import CheckSchedule, drawn_update
from distflow.checks.update_records import OpenEngine, UpdateWatch
from distflow.checks.validation import Facts, Validated, sample_facts
from distflow.data import global_random_states
from distflow.data.batch import Batch
from distflow.errors import TrustError, count_of
from distflow.graph import BoundPipeline
from distflow.rollout.engine_weights import stripe_hashes
from distflow.runtime.checks_protocol import CHECK_STATE
from distflow.runtime.compiled_node import Step
from distflow.runtime.rollout_loop.rollout_services import RolloutServices
from distflow.runtime.sample_queue.protocol import ResumePoint
from distflow.runtime.worker_inputs import WorkerInputs
from distflow.training.engine import LossFn, TrainEngine


@contextmanager
def _on_one_thread() -> Iterator[None]:
    """Inside, torch computes on the calling thread alone: checks of columns are many small
    computations, after each of which its other threads wait in a loop. No model runs inside."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)


class Checker:
    """The `RunChecks` of one worker. Called on the training thread, except for the group recorder.

    A failed check ends the run with TrustError. A check that cannot be made, or raises another
    error, is only reported."""

    def __init__(
        self,
        inputs: WorkerInputs,
        pipeline: BoundPipeline,
        training_steps: Sequence[Step],
        services: RolloutServices,
        bring: Callable[[], None],
    ) -> None:
        """bring: brings all models of the worker onto the device."""
        spec = inputs.spec
        resources = services.resources
        self.groups = GroupRecords(None if training_steps else self._group_kept)
        self._invariants = Invariants.of(spec, resources, inputs.recorder.note)
        self._ranks = inputs.ports.collective
        self._first_step = inputs.version.step
        if resources.reward_fn is not None and spec.check_freq > 0:
            resources.reward_fn.pools.set_on_result(self.groups.add_score)
        state = inputs.state.setdefault(CHECK_STATE, {})
        self._memory = Memory(inputs, resources)
        again = self._memory.compare_again
        self._run = CheckedRun(inputs, services, pipeline, training_steps, bring, state, again)
        self._schedule = CheckSchedule(
            spec.check_freq,
            self._first_step,
            spec.data.max_staleness,
            (spec.config.trainer.critic_warmup,),  # the first step that trains the policy
            spec.data.total_steps - 1,
        )
        self._updates: dict[str, int] = state.setdefault("updates", {})
        """Optimizer steps by role since the run's start."""
        self._sent_hashes: Mapping[str, str] = {}
        self._is_due = False
        self._taken: RecordedStep | None = None
        """The current step, with the columns as they are now; None if nothing is checked."""
        self._recorded: RecordedStep | None = None
        """The same with a copy of the columns before the first update, if the step is checked."""
        self._watch: UpdateWatch | None = None
        self._found: dict[str, str | None] = {}
        self._has_told = False
        """Whether it was reported what cannot be checked."""

    @property
    def _is_on(self) -> bool:
        return self._schedule.frequency > 0

    def loop_begins(self) -> None:
        run = self._run
        if self._is_on and run.inputs.ports.everyone.rank == 0:
            self._found = self._check_all(all_checks.AT_START, run, "the data")
        if self._is_on and run.inputs.resumed is not None:
            self._check("resume", self._memory.compare_at_start, run, "the resume")

    def state_saved(
        self, nodes: Mapping[str, Any], point: ResumePoint[Batch] | None
    ) -> dict[str, Any]:
        if not self._is_on:
            return {}
        return {**self._memory.models(), **self._memory.others(nodes, point)}

    def step_taken(
        self,
        step: int,
        group_ids: Sequence[int],
        batch: Batch,
        synced_version: int | None,
    ) -> None:
        self._invariants.step_taken(batch, step, synced_version)
        records = self.groups.take(group_ids)
        if not self._is_on:
            return

        # Decided once for all ranks, since clocks differ.
        self._is_due = bool(self._ranks.max(float(self._schedule.is_due(step))))
        self._run.older_weights.forget(step - self._run.spec.data.max_staleness - 1)

        with self._schedule.timed():
            every = self._run.spec.update_frequency
            expected = max(self._first_step, step - step % every)
            if synced_version is not None and synced_version < expected:
                raise TrustError(
                    f"step {step + 1} begins with version {synced_version} sent, but {expected} is "
                    "due"
                )

            if synced_version == step:
                self._remember_weights(step)
            self._taken = RecordedStep(
                self._run,
                step,
                records,
                group_ids,
                batch,
                synced_version,
                self._sent_hashes,
                dict(self._updates),
            )
            self._recorded = None

    def _remember_weights(self, version: int) -> None:
        """The policy was synced as `version` right before this step."""
        run = self._run
        self._sent_hashes = {}
        actor = run.resources.actor
        if actor is None:
            return

        model = actor.model if isinstance(actor, OpenEngine) else None
        is_spread = model is not None and run.passes.is_spread(model)

        # all ranks take part in making sharded weights whole
        if self._is_due and (run.resources.rollout is not None or is_spread):
            served = run.engine_hashes()
            weights = ((name, weight) for name, weight in actor.weights() if name in served)
            self._sent_hashes = stripe_hashes(weights, run.spec.weight_dtype)

        if model is not None and not is_spread and self._schedule.expects(version):
            run.older_weights.keep(version, model)

    def node_finished(self, batch: Batch) -> None:
        taken = self._taken
        if taken is None:
            return

        is_written = "advantages" in batch and "advantages" not in taken.batch
        taken.batch = batch

        if is_written and self._is_due:
            now = replace(taken)  # without what it has cached of its samples
            with self._schedule.timed(), global_random_states.lent():
                self._found |= self._check_all((check_advantages,), now)

    def before_update(self, role: str, engine: TrainEngine, batch: Batch, loss: LossFn) -> LossFn:
        taken = self._taken
        if taken is None:
            return loss

        with self._schedule.timed():
            self._check("gradients", lambda _: check_cleared(role, engine), taken)
            if not self._is_due:
                return loss

            recorded = self._recorded or self._begin(taken)
            self._watch = UpdateWatch(role, engine, batch, loss)
            number = len(recorded.updates_of(role))

            others = drawn_update(role, recorded.step, planned_updates(recorded, role))
            if number in (0, others):
                with global_random_states.lent():  # a user's loss may draw
                    run = partial(run_plainly, update=self._watch.record)
                    why_not = self._check(check_losses.name, run, recorded)
                    if why_not is not None:
                        self._found[check_losses.name] = why_not

            self._watch.begin(recorded.step)
            return self._watch

    def after_update(
        self,
        role: str,
        engine: TrainEngine,
        batch: Batch,
        metrics: dict[str, float],
        step: int,
        first: bool,
    ) -> None:
        self._invariants.updated(role, engine, batch, metrics, step, first)
        if self._watch is not None and self._recorded is not None:
            with self._schedule.timed():
                self._recorded.updates.append(self._watch.end(metrics))
        self._watch = None
        self._updates[role] = self._updates.get(role, 0) + int(not metrics.get("skipped"))

    def step_trained(self, batch: Batch, metrics: dict[str, float], step: int) -> dict[str, float]:
        found = self._invariants.step_trained(batch, metrics, step, self._run.ranks)
        taken = self._taken
        if taken is None:
            return found

        with self._schedule.timed(), global_random_states.lent(), _on_one_thread():
            if self._is_due:
                recorded = self._recorded or self._begin(taken)
                # a pass that could not be made stays the reason
                self._found = {**self._check_all(all_checks.AFTER, recorded), **self._found}
                self._report(f"step {step + 1}", self._ranks.gather(self._found))
                self._found = {}

        self._taken = None
        self._recorded = None
        return found

    def part_validated(self, rows: Facts) -> Facts:
        records = self.groups.take_validated()
        if self._is_on:
            return sample_facts(self._run, records, rows)
        return []

    def validated(self, step: int, rows: Facts, metrics: Mapping[str, float]) -> None:
        if not self._is_on:
            return

        every = self._run.spec.update_frequency
        version = max(self._first_step, step - step % every)
        what = f"the validation after step {step}"
        seen = Validated(self._run, version, rows, metrics)
        found = self._check_all(all_checks.OF_VALIDATION, seen, what)
        self._report(what, [found], of="validation")

    def _group_kept(self, record: GroupRecord, batch: Batch) -> None:
        """On a worker that only generates, which takes no step: check a group as it goes to the
        sample queue."""
        group = record.prompt_group
        if not self._schedule.is_due(group.version):
            return

        with self._schedule.timed():
            records = {group.group_id: record}
            part = RecordedStep(self._run, group.version, records, (), batch, None, {}, {})
            self._check_all(all_checks.OF_A_GROUP, part, f"group {group.group_id}")

    def _begin(self, taken: RecordedStep) -> RecordedStep:
        """Record the step as it is now, and run the checks before its first update."""
        self._run.bring()
        columns = taken.batch.select(range(len(taken.batch)))  # a copy
        budget_s = self._schedule.budget_s(taken.step)
        self._recorded = replace(taken, batch=columns, updates=[], budget_s=budget_s)
        self._found |= self._check_all(all_checks.BEFORE, self._recorded)
        return self._recorded

    def _check_all(
        self, checks: Sequence[Check], seen: object, what: str = ""
    ) -> dict[str, str | None]:
        """The result of each check by its name. what: the checked object, if it is not a step."""
        found = {check.name: self._check(check.name, check.run, seen, what) for check in checks}
        if isinstance(seen, RecordedStep):
            self._run.passes.finish()
        return found

    def _check(
        self, name: str, run: Callable[[Any], str | None], seen: object, what: str = ""
    ) -> str | None:
        """See `Check.run`."""
        if isinstance(seen, RecordedStep) and not what:
            what = f"step {seen.step + 1}"

        try:
            found = run(seen)
        except Wrong as wrong:
            raise TrustError(f"the checks of {what} found ({name}): {wrong}") from wrong
        except Exception as err:  # an error in a check must not end a healthy run
            found = f"the check itself failed: {type(err).__name__}: {err}"
            self._run.warn(f"the check '{name}' could not be made: {type(err).__name__}: {err}")

        return found

    def _report(self, what: str, every: Sequence[dict[str, str | None]], of: str = "step") -> None:
        """Report the checks over all ranks, on the first of them. every: results by rank."""
        passed = list[str]()
        not_checked = dict[str, str]()
        for name in every[0]:
            found = [each.get(name, NOT_APPLICABLE) for each in every]
            why_not = next((reason for reason in found if reason), None)
            if why_not is not None:
                not_checked[name] = why_not
            elif None in found:
                passed.append(name)

        if not_checked and not self._has_told:
            self._has_told = True
            reasons = "; ".join(f"{name} ({why_not})" for name, why_not in not_checked.items())
            self._run.inputs.recorder.note("info", f"not checked: {reasons}")

        message = f"{what}: {count_of(len(passed), 'check')} passed: {', '.join(passed)}"
        if not_checked:
            message += f"; not checked: {', '.join(not_checked)}"
        self._run.inputs.recorder.checked(message, passed, not_checked, of)
