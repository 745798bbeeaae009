"""Decides whether a step is audited, records it, runs the checks and reports the result."""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from distflow.audit import all_checks
from distflow.audit.audit_schedule import AuditSchedule, Depth, drawn_update
from distflow.audit.audited_step.log_probs import score_before
from distflow.audit.check import NOT_APPLICABLE, Check, Wrong
from distflow.audit.record_groups_and_updates import (
    GradientWatch,
    GroupRecord,
    GroupRecords,
    OpenEngine,
    UpdateRecord,
    UpdateWatch,
)
from distflow.audit.recorded_step import AuditedRun, RecordedStep
from distflow.audit.resume_and_loaded_weights import Memory, audit_resume
from distflow.audit.validation import Facts, Validated, check_end, sample_facts
from distflow.data import global_random_states
from distflow.data.batch import Batch
from distflow.errors import TrustError, count_of
from distflow.graph import BoundPipeline
from distflow.observe.metrics import Measured
from distflow.rollout.engine_weights import stripe_hashes
from distflow.runtime.audit_protocol import AUDIT_STATE
from distflow.runtime.compiled_node import Step
from distflow.runtime.rollout_loop.rollout_services import RolloutServices
from distflow.runtime.sample_queue.protocol import ResumePoint
from distflow.runtime.worker_inputs import WorkerInputs
from distflow.training.engine import LossFn, TrainEngine

NUM_SCORED_AGAIN = 2
"""The number of later mini-batches of a step before which the policy is run on a sample."""

NUM_GROUPS = {Depth.QUICK: 1, Depth.LOOK: 2}
NUM_SAMPLES = {Depth.QUICK: 2, Depth.LOOK: 4}
"""Groups that a look checks, and samples of them whose loss it checks."""

NUM_TENSORS = 8
"""Weights that a look compares with the engine's."""

LOOKS_TOLD_EVERY = 50
"""Steps between two lines in `events.jsonl` that count the looks."""


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


class Auditor:
    """The `StepAuditor` of one worker. Called on the training thread, except for the group
    recorder.

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
        ranks = inputs.ports.collective
        self.groups = GroupRecords(None if training_steps else self._group_kept)
        self._ranks = ranks
        self._first_step = inputs.version.step
        if resources.reward_fn is not None and spec.audit_freq > 0:
            resources.reward_fn.pools.set_on_result(self.groups.add_score)
        state = inputs.state.setdefault(AUDIT_STATE, {})
        self._memory = Memory(inputs, resources)
        again = self._memory.compare_again
        self._run = AuditedRun(inputs, services, pipeline, training_steps, bring, state, again)
        trains_policy = spec.config.trainer.critic_warmup  # the first step that trains the policy
        staleness = spec.data.max_staleness
        last_step = spec.data.total_steps - 1
        self._schedule = AuditSchedule(
            spec.audit_freq, self._first_step, staleness, (trains_policy,), last_step
        )
        self._updates: dict[str, int] = state.setdefault("updates", {})
        """Optimizer steps by role since the run's start."""
        self._served: list[str] = []
        """Names of the tensors used by this worker's rollout engine."""
        self._sent_hashes: Mapping[str, str] = {}
        # whether to audit the step; how to look at it
        self._due = False
        self._looks = Depth.NONE
        self._taken: RecordedStep | None = None
        """The current step, with the columns as they are now."""
        self._recorded: RecordedStep | None = None
        """The same with a copy of the columns, if the step is audited."""
        self._look: RecordedStep | None = None
        """A few groups of the current step, if it is looked at."""
        self._looked: Counter[str] = Counter()
        """How often looks made each check since the last report."""
        self._watch: UpdateWatch | None = None
        self._gradients: dict[str, GradientWatch] = {}
        self._gradient: GradientWatch | None = None  # watch of the current update
        self._validated = -1  # number of steps before the last validation
        # steps released, and those before the last checkpoint
        self._released = self._saved = self._first_step
        self._measured: Sequence[Measured] = ()
        self._found: dict[str, str | None] = {}
        self._told = False  # whether it was reported what audits cannot check
        self._ended = False  # by trainer.stop_when

    def _group_kept(self, record: GroupRecord, batch: Batch) -> None:
        """On a worker that only generates, which takes no step: check a group as it goes to the
        sample queue."""
        group = record.prompt_group
        if self._schedule.looks_at(group.version) > Depth.BASE:
            with self._schedule.timed(group.version, Depth.LOOK):
                records = {group.group_id: record}
                part = RecordedStep(
                    self._run, group.version, records, (), batch, None, {}, {}, partial=True
                )
                self._check(all_checks.OF_A_GROUP, part, f"group {group.group_id}")

    def loop_begins(self) -> None:
        run = self._run
        if self._schedule.frequency > 0 and run.inputs.ports.everyone.rank == 0:
            self._found = self._check(all_checks.AT_START, run, "the data")
        if self._schedule.frequency > 0 and run.inputs.resumed is not None:
            self._check(
                (replace(audit_resume, run=self._memory.compare_at_start),), None, "the resume"
            )

    def state_saved(
        self, nodes: Mapping[str, Any], point: ResumePoint[Batch] | None
    ) -> dict[str, Any]:
        self._saved = self._released
        return (
            {**self._memory.models(), **self._memory.others(nodes, point)}
            if self._schedule.frequency > 0
            else {}
        )

    def step_taken(
        self, step: int, group_ids: Sequence[int], batch: Batch, synced_version: int | None
    ) -> None:
        if self._ended:
            raise TrustError(f"step {step + 1} was taken, but trainer.stop_when has ended the run")
        most = self._run.spec.data.max_concurrent
        at_once = self.groups.most_at_once
        if self._schedule.frequency > 0 and most is not None and at_once > most:
            raise TrustError(
                f"{at_once} groups ran at once, but async.max_concurrent_rollouts is {most}: the "
                "limit has no effect"
            )
        # Decided once for all ranks, since clocks differ.
        due = self._schedule.is_due(step) or bool(self._run.doubts)
        agreed = self._ranks.max({"due": float(due), "looks": float(self._schedule.looks_at(step))})
        self._due = bool(agreed["due"])
        self._looks = Depth.NONE if self._due else Depth(int(agreed["looks"]))
        records = self.groups.take(group_ids)
        self._run.older_weights.forget(step - self._run.spec.data.max_staleness - 1)
        with self._schedule.timed(step, Depth.AUDIT if self._due else self._looks):
            expected = max(self._first_step, step - step % self._run.spec.update_frequency)
            if (
                self._schedule.frequency > 0
                and synced_version is not None
                and synced_version < expected
            ):
                raise TrustError(
                    f"step {step + 1} begins with version {synced_version} sent, but {expected} is "
                    "due"
                )
            if synced_version == step:
                self._remember(step)
            self._taken = RecordedStep(
                *(
                    self._run,
                    step,
                    records,
                    group_ids,
                    batch,
                    synced_version,
                    self._sent_hashes,
                    dict(self._updates),
                ),
                passed_over=self.groups.passed_over,
            )
            self._recorded = self._look = None

    def _remember(self, version: int) -> None:
        """Remember weights: the policy was synced as `version` right before this step."""
        run = self._run
        self._sent_hashes = {}
        actor = run.resources.actor
        if actor is None:
            return
        model = actor.model if isinstance(actor, OpenEngine) else None
        spread = model is not None and run.turns.is_spread(model)
        looks = self._looks is Depth.LOOK
        if (run.resources.rollout is not None or spread) and (self._due or (looks and not spread)):
            dtype = run.spec.weight_dtype
            self._served = self._served or list(run.engine_hashes())
            most = NUM_TENSORS if looks else len(self._served)
            names = random.Random(version).sample(self._served, min(most, len(self._served)))
            self._sent_hashes = stripe_hashes(
                ((name, w) for name, w in actor.weights() if name in names), dtype
            )
        if self._schedule.expects(version) and model is not None and not spread:
            run.older_weights.keep(version, model)

    def node_finished(self, batch: Batch, measured: Sequence[Measured]) -> None:
        if self._taken is not None:
            self._taken.batch = batch
        self._measured = measured

    def before_update(self, role: str, engine: TrainEngine, batch: Batch, loss: LossFn) -> LossFn:
        if (taken := self._taken) is None:
            return loss
        first_of_its_kind = self._schedule.frequency > 0 and role not in self._updates
        audits = self._due or first_of_its_kind or self._recorded is not None
        with self._schedule.timed(taken.step, Depth.AUDIT if audits else self._looks):
            if audits and self._recorded is None:
                self._begin()
            if self._recorded is None:
                return self._look_before(taken, role, engine, batch, loss)
            self._watch = UpdateWatch(role, engine, batch, loss, self._recorded.step)
            number = len(self._recorded.updates_of(role))
            if role != "critic" and 0 < number <= NUM_SCORED_AGAIN:
                score_before(self._recorded, self._watch.record)
                self._run.turns.finish()
            return self._watch

    def after_update(self, role: str, metrics: Mapping[str, float]) -> None:
        step = self._recorded or self._taken
        if self._watch is not None and step is not None:
            with self._schedule.timed(step.step, Depth.AUDIT if self._recorded else self._looks):
                step.updates.append(self._watch.end(metrics))
            self._watch = None
        elif step is not None and step.updates:
            last = step.updates[-1]
            last.metrics = metrics
            if last.few:
                last.few.append(self._gradients[last.role].few())
            if self._gradient is not None:
                with self._schedule.timed(step.step, self._looks):
                    self._gradient.end(step.updates[-1])
                self._gradient = None
        self._updates[role] = self._updates.get(role, 0) + int(not metrics.get("skipped"))

    def step_trained(self, metrics: Mapping[str, float]) -> None:
        taken = self._taken
        if taken is None:
            return
        audits = self._due or self._recorded is not None
        depth = Depth.AUDIT if audits else self._looks
        may_draw = depth > Depth.BASE  # user functions, which may be called again
        lent = global_random_states.lent() if may_draw else nullcontext()
        with self._schedule.timed(taken.step, depth), lent, _on_one_thread():
            if audits and self._recorded is None:
                self._begin()
            for remember in all_checks.REMEMBERED_BEFORE if self._schedule.frequency > 0 else ():
                remember(replace(taken))
            if self._recorded is not None:
                self._recorded.metrics, self._recorded.dropped = metrics, self._dropped()
                self._recorded.measured = self._measured
                self._recorded.after = taken.batch
                # user functions may draw
                self._found |= self._check(all_checks.AFTER, self._recorded)
                self._report(f"step {taken.step + 1}", self._ranks.gather(self._found))
                self._found = {}
            elif self._schedule.frequency > 0:
                self._check(all_checks.OF_EVERY_STEP, replace(taken))
                if self._looks:
                    self._look_after(taken, metrics)
        self._tell(taken.step)
        taken.metrics = metrics
        for remember in all_checks.REMEMBERED_AFTER:
            remember(taken)
        self._taken = self._recorded = self._look = None

    def step_released(self, step: int, batch: Batch, metrics: Mapping[str, float]) -> None:
        if self._schedule.frequency > 0:
            released = RecordedStep(self._run, step, {}, (), batch, None, {}, {}, metrics=metrics)
            self._count_dropped(step)
            is_due = self._due or self._looks > Depth.NONE
            with self._schedule.timed(step, self._looks), _on_one_thread():
                self._count(
                    self._check(
                        (*all_checks.AT_RELEASE, *(all_checks.OF_RELEASED if is_due else ())),
                        released,
                    )
                )
            every = self._run.spec.data.validates.steps if self._run.spec.validation else 0
            knows = self._run.spec.plan.generates or self._run.resources.actor is not None
            leads = self._run.inputs.ports.everyone.rank == 0 and knows
            if leads and every > 0 and (step + 1) % every == 0 and self._validated != step + 1:
                raise TrustError(
                    f"the validation after step {step + 1} is due by trainer.test_freq, but was "
                    "not made"
                )
            saves = self._run.spec.data.saves.steps
            if saves > 0 and step > self._first_step and step % saves == 0 and self._saved != step:
                raise TrustError(
                    f"the checkpoint after step {step} is due by trainer.save_freq, but was not "
                    "written"
                )
        self._released = step + 1

    def _count_dropped(self, step: int) -> None:
        """Count by reason the groups that nodes have dropped since the run's start, unless audits
        were off in some steps."""
        known = self._run.state.setdefault("dropped", {})
        dropped = self.groups.take_num_dropped()
        if step == known.get("steps", 0):
            before = known.get("reasons", {})
            known |= {"steps": step + 1, "reasons": dict(Counter(before) + dropped)}
        else:
            known.clear()

    def end_decided(self, step: int, metrics: Mapping[str, float], ends: bool) -> None:
        if (condition := self._run.spec.data.stop_when) and self._schedule.frequency > 0:
            check_end(condition, metrics, ends, step)
            self._ended = ends

    def part_validated(self, rows: Facts) -> Facts:
        records = self.groups.take_validated()
        return sample_facts(self._run, records, rows) if self._schedule.frequency > 0 else []

    def validated(self, step: int, rows: Facts, metrics: Mapping[str, float]) -> None:
        self._validated = step
        if self._schedule.frequency > 0:
            version = max(self._first_step, step - step % self._run.spec.update_frequency)
            what = f"the validation after step {step}"
            found = self._check(
                all_checks.OF_VALIDATION, Validated(self._run, version, rows, metrics, step), what
            )
            self._report(what, [found], of="validation")

    def _begin(self) -> None:
        if (taken := self._taken) is None:
            return
        self._schedule.begins()
        self._run.doubts.clear()
        self._run.bring()
        columns = taken.batch.select(range(len(taken.batch)))  # a copy
        self._recorded = replace(
            taken, batch=columns, updates=[], budget_s=self._schedule.budget_s(taken.step)
        )
        self._found |= self._check(all_checks.BEFORE, self._recorded)

    def _look_before(
        self, taken: RecordedStep, role: str, engine: TrainEngine, batch: Batch, loss: LossFn
    ) -> LossFn:
        """Check the models on one sample before the first update, and watch one drawn update of
        each role."""
        number = len(taken.updates_of(role))
        if self._looks > Depth.BASE and self._look is None:
            self._look = self._few_groups(taken, batch)
            if self._looks is Depth.LOOK:
                self._run.bring()
                self._count(self._check(all_checks.LOOK_BEFORE, self._look))
        if self._look is None or number != drawn_update(taken, role):
            taken.updates.append(UpdateRecord(role, engine, loss, batch))
            if role not in self._gradients:
                self._gradients[role] = GradientWatch(engine)
            taken.updates[-1].leftover = self._gradients[role].leftover()
            if self._schedule.frequency > 0:
                taken.updates[-1].few.append(self._gradients[role].few())
            if self._looks:
                loss = self._gradient = self._gradients[role]
                self._gradient.begin(taken.updates[-1], self._updates.get(role, 0))
                if changed := taken.updates[-1].changed:
                    what = f"{', '.join(changed)} of the {role} changed between two optimizer steps"
                    self._run.warn(
                        f"{what}: something else wrote to it. Ignore this if your own code does so "
                        "on purpose"
                    )
            return loss
        few = self._few_groups(taken, batch) if taken.updates else self._look
        quick = self._looks is Depth.QUICK
        uids = [str(sample["uid"]) for sample in few.some_samples(NUM_SAMPLES[self._looks])]
        self._watch = UpdateWatch(role, engine, batch, loss, taken.step, uids or ("",), quick)
        if role != "critic" and number and not quick:
            score_before(few, self._watch.record)
            self._run.turns.finish()
        return self._watch

    def _few_groups(self, taken: RecordedStep, batch: Batch) -> RecordedStep:
        """A few drawn groups of `batch`, with the columns that they have in the step now."""
        groups = sorted(set(batch["group_index"].tolist()))
        few = set(
            random.Random(taken.step).sample(groups, min(NUM_GROUPS[self._looks], len(groups)))
        )
        return self._groups(taken, few)

    def _groups(self, taken: RecordedStep, groups: Collection[int]) -> RecordedStep:
        rows = [
            row for row, group in enumerate(taken.batch["group_index"].tolist()) if group in groups
        ]
        return replace(taken, batch=taken.batch.select(rows), partial=True)

    def _look_after(self, taken: RecordedStep, metrics: Mapping[str, float]) -> None:
        # The samples of `taken` lack the columns that nodes have written since.
        whole = replace(taken, metrics=metrics, dropped=self._dropped())
        is_looked_at = self._looks > Depth.BASE
        self._check(all_checks.OF_LOOKS if is_looked_at else all_checks.OF_MOST_STEPS, whole)
        if not is_looked_at:
            return
        look = self._look or self._few_groups(taken, taken.batch)
        watched = {
            uid for update in taken.updates for micro in update.micros for uid in micro.recorded
        }
        groups = {int(uid.split("-")[0]) for uid in watched} | set(
            look.batch["group_index"].tolist()
        )
        part = self._groups(whole, groups)
        part.plain = look.plain
        quick = self._looks is Depth.QUICK
        part.budget_s = 0.0 if quick else self._schedule.score_again_s()
        self._count(self._check(all_checks.QUICK_LOOK if quick else all_checks.LOOK_AFTER, part))
        compares = all_checks.compares_all_groups(self._run.spec.config) or whole.is_written(
            "srpo_distance"
        )
        if not quick and compares:
            self._check(all_checks.OF_ALL_GROUPS, whole)
        self._looked["steps"] += 1

    def _dropped(self) -> list[tuple[GroupRecord, str, Batch]]:
        """Remove and return the last groups that a node dropped; other threads add to them."""
        return [self.groups.dropped.popleft() for _ in range(len(self.groups.dropped))]

    def _count(self, found: Mapping[str, str | None]) -> None:
        self._looked.update(name for name, why_not in found.items() if why_not is None)

    def _tell(self, step: int) -> None:
        """Record from time to time the looks."""
        run = self._run
        ended = step + 1 == self._run.spec.data.total_steps
        if self._looked["steps"] and (ended or (step + 1) % LOOKS_TOLD_EVERY == 0):
            run.inputs.recorder.looked(self._looked)
            self._looked.clear()

    def _check(
        self, checks: Sequence[Check], seen: object, what: str = ""
    ) -> dict[str, str | None]:
        """The result of each check by its name. what: the checked object, if it is not a step."""
        found: dict[str, str | None] = {}
        for check in checks:
            try:
                found[check.name] = check.run(seen)
            except Wrong as wrong:
                of = (
                    f"step {seen.step + 1}" if isinstance(seen, RecordedStep) and not what else what
                )
                raise TrustError(f"the audit of {of} found ({check.name}): {wrong}") from wrong
            except Exception as err:  # an error in the auditor must not end a healthy run
                found[check.name] = f"the check itself failed: {type(err).__name__}: {err}"
                self._run.warn(
                    f"the audit could not make its check '{check.name}': {type(err).__name__}: "
                    f"{err}"
                )
        if isinstance(seen, RecordedStep):
            self._run.turns.finish()
        return found

    def _report(self, what: str, every: Sequence[dict[str, str | None]], of: str = "step") -> None:
        """Report the checks over all ranks, on the first of them. every: results by rank."""
        passed = list[str]()
        not_checked = dict[str, str]()
        for name in every[0]:
            found = [each.get(name, NOT_APPLICABLE) for each in every]
            if why_not := next((why_not for why_not in found if why_not), None):
                not_checked[name] = why_not
            elif None in found:
                passed.append(name)
        if not_checked and not self._told:
            self._told = True
            reasons = "; ".join(f"{name} ({why_not})" for name, why_not in not_checked.items())
            self._run.inputs.recorder.note("info", f"not audited: {reasons}")
        left = f"; not checked: {', '.join(not_checked)}" if not_checked else ""
        message = (
            f"audit of {what}: {count_of(len(passed), 'check')} passed: {', '.join(passed)}{left}"
        )
        self._run.inputs.recorder.audited(message, passed, not_checked, of)
