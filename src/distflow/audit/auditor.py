"""Decides whether a step is audited, records it, runs the checks and reports the result."""

import random
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from distflow.audit.all_checks import AFTER, BEFORE, OF_A_FEW_GROUPS, OF_EVERY_STEP, ON_ARRIVAL
from distflow.audit.log_probs import score_before
from distflow.audit.model_forward import KeptWeights, Turns
from distflow.audit.recorded_data import AuditedRun, Check, RecordedStep, Wrong
from distflow.audit.recorder import GroupRecord, GroupRecords, OpenEngine, UpdateRecord, UpdateWatch
from distflow.audit.schedule import AuditSchedule
from distflow.data import global_generators
from distflow.data.batch import Batch
from distflow.errors import TrustError
from distflow.graph import BoundPipeline
from distflow.models.sharding import is_spread
from distflow.rollout.weights import stripe_hash
from distflow.runtime.audit_protocol import AUDIT_STATE
from distflow.runtime.compiled_node import Step
from distflow.runtime.rollout_services import Session
from distflow.runtime.worker_inputs import WorkerInputs
from distflow.training.engine import LossFn, TrainEngine

NUM_SCORED_AGAIN = 2
"""Number of later mini-batches of a step before which the policy is run on a sample."""

NUM_FIRST_LOOKS = 32
"""First steps of a process in which a few groups are checked whatever it costs."""

NUM_GROUPS = 2
"""Groups that are checked then."""


class Auditor:
    """Audits steps of one worker. Called on the training thread, except for the group recorder.

    A failed check ends the run with TrustError. A check that cannot be made, or that raises another error, is reported
    and has no other effect.
    """

    def __init__(self, run: AuditedRun, groups: GroupRecords, schedule: AuditSchedule) -> None:
        """groups: records of each group."""
        self._run, self.groups, self._schedule = run, groups, schedule
        self._first_step, self._ranks = run.inputs.version.step, run.inputs.ports.collective
        self._served: int | None = None
        self._sent_hashes: Mapping[str, str] = {}
        self._due = self._looks = False
        self._group_ids: Sequence[int] = ()
        self._records: Mapping[int, GroupRecord] = {}
        self._batch: Batch | None = None
        self._step = self._first_step
        self._recorded: RecordedStep | None = None
        self._watch: UpdateWatch | None = None
        self._seen: list[UpdateRecord] = []
        self._before: dict[str, int] = {}
        self._found: dict[str, str | None] = {}

    @staticmethod
    def of(
        inputs: WorkerInputs,
        pipeline: BoundPipeline,
        training_steps: Sequence[Step],
        services: Session,
        bring: Callable[[], None],
    ) -> "Auditor":
        """The auditor of a worker. bring: brings all its models onto the device."""
        spec, resources, groups = inputs.spec, services.resources, GroupRecords()
        if resources.reward_fn is not None and spec.options.audit_freq > 0:
            resources.reward_fn.pools.set_on_result(groups.add_score)
        engines = (resources.actor, resources.critic, resources.ref)
        models = [model for each in engines if isinstance(model := getattr(each, "model", None), nn.Module)]
        turns = Turns(inputs.ports.collective, models)
        older_weights = KeptWeights(spec.data.max_staleness + 1, spec.weight_dtype)
        state = inputs.state.setdefault(AUDIT_STATE, {})
        run = AuditedRun(inputs, services, pipeline, training_steps, bring, turns, older_weights, state)
        first, warmup = inputs.version.step, spec.config.trainer.critic_warmup  # the policy is first trained after it
        return Auditor(run, groups, AuditSchedule(spec.options.audit_freq, first, spec.data.max_staleness, (warmup,)))

    def took(self, step: int, group_ids: Sequence[int], batch: Batch, served: int | None) -> None:
        """A step's groups have left the sample queue. served: the last synced version, None if nothing generates."""
        self._step, self._recorded, self._batch, self._seen = step, None, batch, []
        self._before = dict(self._updates)
        self._group_ids, self._served = group_ids, served
        self._decide(step)
        self._records = self.groups.take(group_ids)
        self._run.older_weights.forget(step - self._run.spec.data.max_staleness - 1)
        with self._schedule.timed():
            if served == step:
                self._remember(step)
            if not self._due and self._looks:
                self._check(ON_ARRIVAL, self._recorded_of(batch))

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

    def _decide(self, step: int) -> None:
        """Whether to audit the step or only to run the cheap checks: decided once for all ranks, as clocks differ."""
        early = step - self._first_step < NUM_FIRST_LOOKS
        looks = self._schedule.frequency > 0 and (early or self._schedule.is_affordable())
        agreed = self._ranks.max({"due": float(self._schedule.is_due(step)), "looks": float(looks)})
        self._due, self._looks = bool(agreed["due"]), bool(agreed["looks"])

    def scored(self, batch: Batch) -> None:
        """A node of the training loop has run."""
        self._batch = batch

    def before_update(self, role: str, engine: TrainEngine, batch: Batch, loss: LossFn) -> LossFn:
        """The loss function to call in this optimizer step: `loss`, or a recording wrapper."""
        first_of_its_kind = self._schedule.frequency > 0 and role not in self._updates
        with self._schedule.timed():
            if self._recorded is None and (self._due or first_of_its_kind):
                self._begin()
            if self._recorded is None:
                self._seen.append(UpdateRecord(role, engine, loss, batch))
                return loss
            self._watch = UpdateWatch(role, engine, batch, loss, self._step)
            number = len(self._recorded.updates_of(role))
            if role == "actor" and 0 < number <= NUM_SCORED_AGAIN:
                score_before(self._recorded, self._watch.record)
                self._run.turns.finish()
            return self._watch.loss

    def after_update(self, role: str, metrics: Mapping[str, float]) -> None:
        """An optimizer step was taken or skipped."""
        if self._watch is not None and self._recorded is not None:
            self._recorded.updates.append(self._watch.end(metrics))
            self._watch = None
        elif self._seen:
            self._seen[-1].metrics = metrics
        self._updates[role] = self._updates.get(role, 0) + int(not metrics.get("skipped"))

    def end(self, metrics: Mapping[str, float]) -> None:
        """All nodes of the step have run."""
        with self._schedule.timed():
            if self._recorded is None and self._due:
                self._begin()
            if self._recorded is not None:
                self._recorded.metrics = metrics
                with global_generators.lent(global_generators.states()):  # user functions may draw
                    self._found |= self._check(AFTER, self._recorded)
                self._report()
            elif self._schedule.frequency > 0 and self._batch is not None:
                self._look(self._batch, metrics)
        if "actor/kl_coef" in metrics and self._batch is not None:
            self._run.state["kl_control"] = {
                "step": self._step,
                "coefficient": metrics["actor/kl_coef"],
                "kl": metrics["actor/reward_kl_penalty"],
                "samples": len(self._batch),
            }
        self._recorded, self._records, self._batch = None, {}, None

    @property
    def _updates(self) -> dict[str, int]:
        """Optimizer steps by role since the run's start."""
        found: dict[str, int] = self._run.state.setdefault("updates", {})
        return found

    def _begin(self) -> None:
        if self._batch is None:
            return
        self._schedule.begins()
        self._run.bring()
        self._recorded = self._recorded_of(self._batch.select(range(len(self._batch))))  # later writes do not change it
        self._found = self._check(BEFORE, self._recorded)

    def _look(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        """Run the cheap checks; also check a few random groups, in the first steps and while the time budget allows."""
        whole = self._recorded_of(batch)
        whole.updates, whole.metrics = self._seen, metrics
        self._check(OF_EVERY_STEP, whole)
        if self._looks and "response_mask" in batch and "advantages" in batch:
            groups = batch["group_index"].tolist()
            few = random.Random(self._step).sample(sorted(set(groups)), min(NUM_GROUPS, len(set(groups))))
            rows = [row for row, group in enumerate(groups) if group in few]
            part = self._recorded_of(batch.select(rows))
            part.metrics, part.partial = metrics, True
            self._check(OF_A_FEW_GROUPS, part)

    def _recorded_of(self, batch: Batch) -> RecordedStep:
        return RecordedStep(
            run=self._run,
            step=self._step,
            records=self._records,
            group_ids=self._group_ids,
            batch=batch,
            served=self._served,
            sent_hashes=self._sent_hashes,
            num_updates=self._before,
            budget_s=self._schedule.budget_s(self._step - self._first_step + 1),
        )

    def _check(self, checks: Sequence[Check], recorded: RecordedStep) -> dict[str, str | None]:
        """The result of each check by its name."""
        found: dict[str, str | None] = {}
        for check in checks:
            try:
                found[check.name] = check.run(recorded)
            except Wrong as wrong:
                raise TrustError(f"the audit of step {self._step + 1} found ({check.name}): {wrong}") from wrong
            except Exception as err:  # an error in the auditor must not end a healthy run
                found[check.name] = f"the check itself failed: {type(err).__name__}: {err}"
                self._run.warn(f"the audit could not make its check '{check.name}': {type(err).__name__}: {err}")
        self._run.turns.finish()
        return found

    def _report(self) -> None:
        """Report the checks over all ranks, on the first of them."""
        every = self._ranks.gather(self._found)
        found = {name: next((each[name] for each in every if each.get(name)), None) for name in self._found}
        passed = [name for name, why_not in found.items() if why_not is None]
        not_checked = {name: why_not for name, why_not in found.items() if why_not}
        left = f"; not checked: {', '.join(not_checked)}" if not_checked else ""
        message = f"audit of step {self._step + 1}: {len(passed)} checks passed: {', '.join(passed)}{left}"
        self._run.inputs.recorder.audited(message, proven=passed, unproven=not_checked)
