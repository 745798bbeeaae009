"""Validation: accuracy by domain, on all workers with an engine, or the validation loss if there
are none."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.graph import Drop
from distflow.rewards.reward_results import VALIDATION, is_right, validating
from distflow.rollout.engine import SamplingParams
from distflow.runtime import fault_injection
from distflow.runtime.checks_protocol import RunChecks
from distflow.runtime.error_limits import warn_of_errors
from distflow.runtime.node_context import Contexts
from distflow.runtime.offload import Offload
from distflow.runtime.rollout_loop.group import Group
from distflow.runtime.rollout_loop.group_tasks import RolloutLoop
from distflow.runtime.rollout_loop.rollout_services import RolloutServices
from distflow.runtime.run_errors import NodeError
from distflow.runtime.sample_rows import SampleRows, sample_rows
from distflow.runtime.spec import ValidationSet
from distflow.runtime.validation_loss import preference_objective, validation_loss
from distflow.runtime.validation_results import Outcomes, ValidationResults
from distflow.runtime.worker_inputs import WorkerInputs
from distflow.scheduling.group_states import PromptGroup
from distflow.scheduling.sample_queue import MAX_ATTEMPTS


@dataclass(frozen=True)
class Validator:
    """Runs a pipeline's validating nodes on validation prompts. Its groups need no rollout
    capacity."""

    sets: Sequence[ValidationSet]
    contexts: Contexts
    rollout_loop: RolloutLoop
    stop_token_ids: tuple[int, ...]
    seed: int
    say: Callable[[str], None]
    """Called if a node failed on a prompt; only the responses to that prompt are then errors."""
    finished: Callable[[int], object] = lambda number: None
    """Called for each finished prompt with its number of responses."""

    @property
    def num_responses(self) -> int:
        number = 0
        for chosen in self.sets:
            number += len(chosen.rows) if chosen.greedy is not None else 0
            number += len(chosen.rows) * chosen.num_samples if chosen.sampled is not None else 0
        return number

    async def run(self, step: int, part: int = 0, num_parts: int = 1) -> ValidationResults:
        """Validate after `step` steps, on every `num_parts`-th prompt from number `part` on."""
        parts = []
        for chosen in self.sets:
            numbers = range(part, len(chosen.rows), num_parts)
            if chosen.greedy is not None:
                outcomes, errors, rows = await self._run_set(
                    chosen, chosen.greedy, step, numbers, 1
                )
                parts.append(ValidationResults(outcomes, {}, errors, rows))

            if chosen.sampled is not None and chosen.num_samples:
                outcomes, errors, rows = await self._run_set(
                    chosen, chosen.sampled, step, numbers, chosen.num_samples
                )
                parts.append(ValidationResults({}, outcomes, errors, rows))

        return ValidationResults.joined(parts)

    async def _run_set(
        self,
        chosen: ValidationSet,
        params: SamplingParams,
        step: int,
        numbers: Sequence[int],
        count: int,
    ) -> tuple[Outcomes, int, SampleRows]:
        """(outcomes, number of responses without a score, rows) of `count` responses to each of
        these prompts."""
        kind = "greedy" if params.greedy else "sampled"
        stream = f"val/{chosen.name}/{kind}"

        responding = []
        for number in numbers:
            prompt_group = PromptGroup(number, step, number, count, step, stream=stream)
            responding.append(self._respond(chosen, prompt_group, params))

        outcomes: Outcomes = {}
        num_errors = 0
        rows: SampleRows = []
        for number, group in zip(numbers, await asyncio.gather(*responding), strict=True):
            right = _right(group, count)
            num_errors += right.count(None)
            row = chosen.rows[number]
            own = outcomes.setdefault((row.domain, row.tag), [])
            own.append([bool(each) for each in right])
            if isinstance(group, Batch):
                rows += [{**each, "set": chosen.name, "kind": kind} for each in sample_rows(group)]

        return outcomes, num_errors, rows

    async def _respond(
        self, chosen: ValidationSet, prompt_group: PromptGroup, params: SamplingParams
    ) -> Batch | Drop:
        params = replace(params, stop_token_ids=self.stop_token_ids)
        steps = [step for step in self.rollout_loop.steps if step.node.validates]

        make_context = partial(self.contexts.for_rollout, validating=True)
        try:
            for attempt in range(1, MAX_ATTEMPTS + 1):
                group = Group(prompt_group, chosen.rows[prompt_group.row], params, self.seed)
                self.rollout_loop.group_recorder.begin(prompt_group)

                try:
                    with validating():
                        drop = await self.rollout_loop.run(group, steps, make_context)
                    break
                except NodeError as err:
                    is_last = isinstance(err, UserError) or attempt == MAX_ATTEMPTS
                    then = "" if is_last else "; it is tried again"
                    self.say(
                        f"validation prompt {prompt_group.row} of '{chosen.name}': {err}{then}"
                    )
                    if is_last:
                        return Drop("error", str(err))
        finally:
            self.rollout_loop.group_recorder.keep()
            self.finished(prompt_group.group_size)

        return group.batch() if drop is None else drop


def _right(group: Batch | Drop, count: int) -> list[bool | None]:
    """Whether each response is right; None if it has no score."""
    if isinstance(group, Drop):
        return [None] * count
    return [
        is_right(accuracy) if valid else None
        for accuracy, valid in zip(group["acc"].tolist(), group["valid"].tolist(), strict=True)
    ]


@dataclass(eq=False, repr=False)
class ValidationRunner:
    """A worker's part in the validation."""

    inputs: WorkerInputs
    services: RolloutServices
    validator: Validator
    offload: Offload
    checks: RunChecks
    step: int = field(init=False)
    """Of the last validation."""

    def __post_init__(self) -> None:
        self.step = self.inputs.version.step
        self._recorder = self.inputs.recorder

    def validate(self, step: int) -> dict[str, float]:
        """The metrics, on the leading rank; empty if there is no validation data."""
        spec = self.inputs.spec
        self.step = step
        if not spec.validation:
            return {}

        with self._recorder.phases("eval"):
            metrics, rows = self._measure(step)
        if not metrics:
            return {}

        with self._recorder.phases("check"):
            self.checks.validated(step, rows, metrics)
        if spec.keep_best is not None:
            score(spec.keep_best, metrics)
        with self._recorder.phases("record"):
            self._recorder.validation(step, metrics, ())
        return metrics

    def validate_part(self, step: int, part: int, num_parts: int) -> ValidationResults:
        """Validate on every `num_parts`-th prompt from number `part` on; on any thread."""
        fault_injection.reach("validate")
        results = self.services.call(self.validator.run(step, part, num_parts))
        self._recorder.validation(step, {}, results.rows)
        counts = self.validator.rollout_loop.call_counts.take(VALIDATION)
        warn_of_errors(counts, partial(self._recorder.note, "warning"))
        return replace(results, rows=self.checks.part_validated(results.rows))

    def _measure(self, step: int) -> tuple[dict[str, float], SampleRows]:
        """The metrics and rows of all workers; empty if another rank has them."""
        spec = self.inputs.spec
        ports = self.inputs.ports
        resources = self.services.resources

        if not spec.plan.generates:
            if resources.actor is None:
                return {}, []
            self.offload.only(("actor", "ref"))
            objective = preference_objective(spec.pipeline())
            label = spec.config.data.label_key
            return validation_loss(
                spec.validation, resources.actor, resources.ref, objective, label
            )

        self.offload.only(())
        if resources.rollout is None:
            parts = ports.validate(step)
        else:
            ranks = ports.collective
            parts = ranks.gather(self.validate_part(step, ranks.rank, ranks.size))

        if not parts:
            return {}, []
        joined = ValidationResults.joined(parts)
        return joined.metrics(), joined.rows


def score(name: str, validated: Mapping[str, float]) -> float:
    """The score for `keep_best`, higher is better; for a loss its negative. Raises UserError for an
    unknown name."""
    if name not in validated:
        raise UserError(
            f"trainer.keep_best_metric={name} is not a metric of the validation; choose one of "
            f"{', '.join(sorted(validated))}"
        )
    if name.endswith("loss"):
        return -validated[name]

    return validated[name]
