"""Decides whether a step is audited, records it, runs the checks and reports the result."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distflow.audit.all_checks import (
    AFTER,
    AT_START,
    BEFORE,
    OF_A_FEW_GROUPS,
    OF_EVERY_STEP,
    OF_VALIDATION,
    ON_ARRIVAL,
)
from distflow.audit.log_probs import score_before
from distflow.audit.model_forward import KeptWeights, Turns, model_of
from distflow.audit.recorded_data import NOT_APPLICABLE, AuditedRun, Check, RecordedStep, Wrong
from distflow.audit.recorder import GroupRecords, OpenEngine, UpdateRecord, UpdateWatch
from distflow.audit.resume import Memory, audit_resume
from distflow.audit.schedule import AuditSchedule
from distflow.audit.validation import Facts, Validated, sample_facts
from distflow.data import global_generators
from distflow.data.batch import Batch
from distflow.errors import TrustError
from distflow.graph import BoundPipeline
from distflow.models.sharding import is_spread
from distflow.rollout.weights import stripe_hash
from distflow.runtime.audit_protocol import AUDIT_STATE
from distflow.runtime.compiled_node import Step
from distflow.runtime.rollout_services import Session
from distflow.runtime.sample_queue.protocol import ResumePoint
from distflow.runtime.worker_inputs import WorkerInputs
from distflow.training.engine import LossFn, TrainEngine

NUM_SCORED_AGAIN = 2
"""Number of later mini-batches of a step before which the policy is run on a sample."""

NUM_FIRST_LOOKS = 32
"""First steps of a process in which a few groups are checked whatever it costs."""

NUM_GROUPS = 2
"""Groups that are checked then."""


class Auditor:
    """The `StepAuditor` of one worker. Called on the training thread, except for the group recorder.

    A failed check ends the run with TrustError. A check that cannot be made, or that raises another error, is reported
    and has no other effect.
    """

    def __init__(
        self,
        inputs: WorkerInputs,
        pipeline: BoundPipeline,
        training_steps: Sequence[Step],
        services: Session,
        bring: Callable[[], None],
    ) -> None:
        """bring: brings all models of the worker onto the device."""
        spec, resources, ranks = inputs.spec, services.resources, inputs.ports.collective
        self.groups, self._ranks, self._first_step = GroupRecords(), ranks, inputs.version.step
        if resources.reward_fn is not None and spec.options.audit_freq > 0:
            resources.reward_fn.pools.set_on_result(self.groups.add_score)
        engines = (resources.actor, resources.critic, resources.ref)
        turns = Turns(ranks, [model for engine in engines if (model := model_of(engine)) is not None])
        older_weights = KeptWeights(spec.data.max_staleness + 1, spec.weight_dtype)
        state = inputs.state.setdefault(AUDIT_STATE, {})
        self._memory = Memory(inputs, resources)
        again = self._memory.compare_again
        self._run = AuditedRun(inputs, services, pipeline, training_steps, bring, turns, older_weights, state, again)
        trains_policy = spec.config.trainer.critic_warmup  # the first step that does
        self._schedule = AuditSchedule(
            spec.options.audit_freq, self._first_step, spec.data.max_staleness, (trains_policy,)
        )
        self._updates: dict[str, int] = state.setdefault("updates", {})
        """Optimizer steps by role since the run's start."""
        self._sent_hashes: Mapping[str, str] = {}
        self._due = self._looks = False  # to audit the step; to run the cheap checks on it
        self._taken: RecordedStep | None = None
        """The current step, with the columns as they are now."""
        self._recorded: RecordedStep | None = None
        """The same with a copy of the columns, if the step is audited."""
        self._watch: UpdateWatch | None = None
        self._found: dict[str, str | None] = {}
        self._at_start: dict[str, str | None] = {}

    def loop_begins(self) -> None:
        run = self._run
        if self._schedule.frequency > 0 and run.inputs.ports.everyone.rank == 0:
            self._at_start = self._check(AT_START, run.spec, "the data")
        if self._schedule.frequency > 0 and run.inputs.resumed is not None:
            self._check((replace(audit_resume, run=self._memory.compare_at_start),), None, "the resume")

    def state_saved(self, nodes: Mapping[str, Any], point: ResumePoint[Batch] | None) -> dict[str, Any]:
        return {**self._memory.models(), **self._memory.others(nodes, point)} if self._schedule.frequency > 0 else {}

    def step_taken(self, step: int, group_ids: Sequence[int], batch: Batch, synced_version: int | None) -> None:
        early = step - self._first_step < NUM_FIRST_LOOKS
        looks = self._schedule.frequency > 0 and (early or self._schedule.is_affordable())
        # Decided once for all ranks, as clocks differ.
        agreed = self._ranks.max({"due": float(self._schedule.is_due(step)), "looks": float(looks)})
        self._due, self._looks = bool(agreed["due"]), bool(agreed["looks"])
        records = self.groups.take(group_ids)
        self._run.older_weights.forget(step - self._run.spec.data.max_staleness - 1)
        with self._schedule.timed():
            if synced_version == step:
                self._remember(step)
            updates, sent = dict(self._updates), self._sent_hashes
            self._taken = RecordedStep(self._run, step, records, group_ids, batch, synced_version, sent, updates)
            self._recorded = None
            if not self._due and self._looks:
                self._check(ON_ARRIVAL, self._taken)

    def _remember(self, version: int) -> None:
        """The policy was synced as `version` right before this step."""
        run, self._sent_hashes = self._run, {}
        actor = run.resources.actor
        if actor is None:
            return
        model = actor.model if isinstance(actor, OpenEngine) else None
        spread = model is not None and is_spread(model)
        if (run.resources.rollout is not None or spread) and (self._due or self._looks):
            dtype, engine = run.spec.weight_dtype, run.engine_hashes()
            self._sent_hashes = {name: stripe_hash(w, dtype) for name, w in actor.weights() if name in engine}
        if self._schedule.expects(version) and model is not None and not spread:
            run.older_weights.keep(version, model)

    def node_finished(self, batch: Batch) -> None:
        if self._taken is not None:
            self._taken.batch = batch

    def before_update(self, role: str, engine: TrainEngine, batch: Batch, loss: LossFn) -> LossFn:
        first_of_its_kind = self._schedule.frequency > 0 and role not in self._updates
        with self._schedule.timed():
            if self._recorded is None and (self._due or first_of_its_kind):
                self._begin()
            if self._recorded is None:
                if self._taken is not None:
                    self._taken.updates.append(UpdateRecord(role, engine, loss, batch))
                return loss
            self._watch = UpdateWatch(role, engine, batch, loss, self._recorded.step)
            number = len(self._recorded.updates_of(role))
            if role == "actor" and 0 < number <= NUM_SCORED_AGAIN:
                score_before(self._recorded, self._watch.record)
                self._run.turns.finish()
            return self._watch

    def after_update(self, role: str, metrics: Mapping[str, float]) -> None:
        if self._watch is not None and self._recorded is not None:
            self._recorded.updates.append(self._watch.end(metrics))
            self._watch = None
        elif self._taken is not None and self._taken.updates:
            self._taken.updates[-1].metrics = metrics
        self._updates[role] = self._updates.get(role, 0) + int(not metrics.get("skipped"))

    def step_trained(self, metrics: Mapping[str, float]) -> None:
        taken = self._taken
        if taken is None:
            return
        with self._schedule.timed():
            if self._recorded is None and self._due:
                self._begin()
            if self._recorded is not None:
                self._recorded.metrics = metrics
                with global_generators.lent(global_generators.states()):  # user functions may draw
                    self._found |= self._check(AFTER, self._recorded)
                self._found, self._at_start = self._at_start | self._found, {}
                self._report(f"step {taken.step + 1}", self._ranks.gather(self._found))
            elif self._schedule.frequency > 0:
                self._look(taken, metrics)
        if "actor/kl_coef" in metrics:
            self._run.state["kl_control"] = {
                "step": taken.step,
                "coefficient": metrics["actor/kl_coef"],
                "kl": metrics["actor/reward_kl_penalty"],
                "samples": len(taken.batch),
            }
        self._taken = self._recorded = None

    def part_validated(self, rows: Facts) -> Facts:
        records = self.groups.take_validated()
        return sample_facts(self._run.spec, records, rows) if self._schedule.frequency > 0 else []

    def validated(self, step: int, rows: Facts, metrics: Mapping[str, float]) -> None:
        if self._schedule.frequency > 0:
            version = max(self._first_step, step - step % self._run.spec.options.update_frequency)
            what = f"the validation after step {step}"
            found = self._check(OF_VALIDATION, Validated(self._run.spec, version, rows, metrics), what)
            self._report(what, [found], of="validation")

    def _begin(self) -> None:
        if (taken := self._taken) is None:
            return
        self._schedule.begins()
        self._run.bring()
        self._recorded = replace(taken, batch=taken.batch.select(range(len(taken.batch))))  # a copy of the columns
        self._recorded.budget_s = self._schedule.budget_s(taken.step - self._first_step + 1)
        self._found = self._check(BEFORE, self._recorded)

    def _look(self, taken: RecordedStep, metrics: Mapping[str, float]) -> None:
        """Run the cheap checks; also check a few random groups, in the first steps and while the time budget allows."""
        whole = replace(taken)  # the samples of `taken` lack the columns that nodes have written since
        whole.updates, whole.metrics = taken.updates, metrics
        self._check(OF_EVERY_STEP, whole)
        if self._looks and "response_mask" in taken.batch and "advantages" in taken.batch:
            groups = taken.batch["group_index"].tolist()
            few = random.Random(taken.step).sample(sorted(set(groups)), min(NUM_GROUPS, len(set(groups))))
            part = replace(taken, batch=taken.batch.select([row for row, group in enumerate(groups) if group in few]))
            part.metrics, part.partial = metrics, True
            self._check(OF_A_FEW_GROUPS, part)

    def _check(self, checks: Sequence[Check], seen: object, what: str = "") -> dict[str, str | None]:
        """The result of each check by its name. what: is checked, where it is not a recorded step."""
        found: dict[str, str | None] = {}
        for check in checks:
            try:
                found[check.name] = check.run(seen)
            except Wrong as wrong:
                of = f"step {seen.step + 1}" if isinstance(seen, RecordedStep) else what
                raise TrustError(f"the audit of {of} found ({check.name}): {wrong}") from wrong
            except Exception as err:  # an error in the auditor must not end a healthy run
                found[check.name] = f"the check itself failed: {type(err).__name__}: {err}"
                self._run.warn(f"the audit could not make its check '{check.name}': {type(err).__name__}: {err}")
        if isinstance(seen, RecordedStep):
            self._run.turns.finish()
        return found

    def _report(self, what: str, every: Sequence[dict[str, str | None]], of: str = "step") -> None:
        """Report the checks over all ranks, on the first of them. every: results by rank."""
        passed, not_checked = list[str](), dict[str, str]()
        for name in every[0]:
            found = [each.get(name, NOT_APPLICABLE) for each in every]
            if why_not := next((why_not for why_not in found if why_not), None):
                not_checked[name] = why_not
            elif None in found:
                passed.append(name)
        left = f"; not checked: {', '.join(not_checked)}" if not_checked else ""
        message = f"audit of {what}: {len(passed)} checks passed: {', '.join(passed)}{left}"
        self._run.inputs.recorder.audited(message, passed, not_checked, of)
