"""Validation: accuracy by domain, on all workers with an engine, or the validation loss if there
are none."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn.functional import logsigmoid

from distflow.data.batch import Batch
from distflow.data.sample import Sample, Segment
from distflow.errors import UserError
from distflow.graph import Drop
from distflow.rewards.reward_results import VALIDATION, is_right, validating
from distflow.rollout.engine import SamplingParams
from distflow.runtime import fault_injection
from distflow.runtime.checks_protocol import RunChecks
from distflow.runtime.compiled_node import Contexts
from distflow.runtime.error_limits import warn_of_errors
from distflow.runtime.offload import Offload
from distflow.runtime.rollout_loop.group import Group
from distflow.runtime.rollout_loop.group_tasks import RolloutLoop
from distflow.runtime.rollout_loop.rollout_services import RolloutServices
from distflow.runtime.run_errors import NodeError
from distflow.runtime.spec import ValidationSet
from distflow.runtime.step_metrics import Outcomes, SampleRows, ValidationResults, sample_rows
from distflow.runtime.worker_inputs import WorkerInputs
from distflow.scheduling.group_states import PromptGroup
from distflow.scheduling.sample_queue import MAX_ATTEMPTS
from distflow.training.engine import Scorer


@dataclass(frozen=True)
class Validator:
    """Runs a pipeline's validating nodes on validation prompts. Its groups need no rollout
    capacity.

    say: called if a node failed on a prompt; only the responses to that prompt are then errors.
    finished: called for each finished prompt with its number of responses.
    """

    sets: Sequence[ValidationSet]
    contexts: Contexts
    rollout_loop: RolloutLoop
    stop_token_ids: tuple[int, ...]
    seed: int
    say: Callable[[str], None]
    finished: Callable[[int], object] = lambda number: None

    @property
    def num_responses(self) -> int:
        return sum(
            len(s.rows) * ((s.greedy is not None) + s.num_samples * (s.sampled is not None))
            for s in self.sets
        )

    async def run(self, step: int, part: int = 0, num_parts: int = 1) -> ValidationResults:
        """Validate after `step` steps, on every `num_parts`-th prompt from number `part` on."""
        rows: SampleRows = []
        greedy: Outcomes = {}
        sampled: Outcomes = {}
        errors = 0
        for chosen in self.sets:
            numbers = range(part, len(chosen.rows), num_parts)
            for params, count, into in (
                (chosen.greedy, 1, greedy),
                (chosen.sampled, chosen.num_samples, sampled),
            ):
                if params is None or count == 0:
                    continue
                kind = "greedy" if params.greedy else "sampled"
                stream = f"val/{chosen.name}/{kind}"
                prompt_groups = [
                    PromptGroup(number, step, number, count, step, stream=stream)
                    for number in numbers
                ]
                groups = await asyncio.gather(
                    *(self._respond(chosen, each, params) for each in prompt_groups)
                )
                for number, group in zip(numbers, groups, strict=True):
                    right = _right(group, count)
                    errors += sum(1 for r in right if r is None)
                    row = chosen.rows[number]
                    into.setdefault((row.domain, row.tag), []).append([bool(r) for r in right])
                    if isinstance(group, Batch):
                        rows += [
                            {**r, "set": chosen.name, "kind": kind} for r in sample_rows(group)
                        ]
        return ValidationResults(greedy, sampled, errors, rows)

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


def validation_loss(
    sets: Sequence[ValidationSet], actor: Scorer
) -> tuple[dict[str, float], SampleRows]:
    """Mean negative log-likelihood per token of the data's responses (`sft/val_loss`); a row per
    response with its sum and number of tokens. For preference pairs, a reward model's metrics."""
    if sets[0].rows[0].rejected_ids is not None:
        return _validation_of_pairs(sets, actor)
    total = 0.0
    tokens = 0.0
    rows = SampleRows()
    for chosen in sets:
        samples = []
        for i, row in enumerate(chosen.rows):
            prompt = Segment("prompt", tuple(row.prompt_ids), images=row.images)
            samples.append(Sample(f"{i}-0", i, [prompt, *row.answer(0)]))
        batch = Batch.from_samples(samples)
        trained = batch.flat("response_mask") > 0
        lengths = batch.lengths("response").tolist()
        log_probs = actor.forward(batch, ("log_probs",)).flat("log_probs").double()
        total -= float(log_probs[trained].sum())
        tokens += float(trained.sum())
        for i, (own, mask) in enumerate(
            zip(log_probs.split(lengths), trained.split(lengths), strict=True)
        ):
            who = {
                "set": chosen.name,
                "kind": "loss",
                "row": i,
                "sample": 0,
                "versions": [],
                "wrong": "",
            }
            rows.append({**who, "loss": -float(own[mask].sum()), "tokens": int(mask.sum())})
    return {"sft/val_loss": total / max(tokens, 1.0)}, rows


def _validation_of_pairs(
    sets: Sequence[ValidationSet], actor: Scorer
) -> tuple[dict[str, float], SampleRows]:
    """`rm/val_loss`, `rm/val_accuracy` and `rm/val_margin` of a reward model, means over pairs; and
    the scores."""
    rows = SampleRows()
    margins = list[float]()
    for chosen in sets:
        texts = [
            (i, row, ids)
            for i, row in enumerate(chosen.rows)
            for ids in (row.response_ids, row.rejected_ids)
        ]
        batch = Batch.from_samples(
            [
                Sample("", i, [Segment("prompt", r.prompt_ids), Segment("environment", ids or ())])
                for i, r, ids in texts
            ]
        )
        ends = batch.lengths("response").cumsum(0) - 1
        scores = (
            actor.forward(batch, ("text_scores",))
            .flat("text_scores")[ends]
            .double()
            .view(-1, 2)
            .tolist()
        )
        who = {"set": chosen.name, "kind": "pair", "sample": 0, "versions": [], "wrong": ""}
        rows += [
            {**who, "row": i, "chosen": own[0], "rejected": own[1]} for i, own in enumerate(scores)
        ]
        margins += [own[0] - own[1] for own in scores]
    x = torch.tensor(margins, dtype=torch.float64)
    columns = {"loss": -logsigmoid(x), "accuracy": (x > 0).double(), "margin": x}
    return {f"rm/val_{name}": float(column.mean()) for name, column in columns.items()}, rows


class ValidationRunner:
    """A worker's part in the validation. step: of the last validation."""

    def __init__(
        self,
        inputs: WorkerInputs,
        services: RolloutServices,
        validator: Validator,
        offload: Offload,
        checks: RunChecks,
    ) -> None:
        self._checks = checks
        self._spec = inputs.spec
        self._ports = inputs.ports
        self._recorder = inputs.recorder
        self._services = services
        self._validator = validator
        self._offload = offload
        self._resources = services.resources
        self.step = inputs.version.step

    def validate(self, step: int) -> dict[str, float]:
        """The metrics, on the leading rank; empty if there is no validation data."""
        self.step = step
        if not self._spec.validation:
            return {}
        rows: SampleRows = []
        with self._recorder.phases("eval"):
            if not self._spec.plan.generates:
                if self._resources.actor is None:
                    return {}
                self._offload.only(("actor",))
                metrics, rows = validation_loss(self._spec.validation, self._resources.actor)
            elif results := self._results(step):
                joined = ValidationResults.joined(results)
                metrics = joined.metrics()
                rows = joined.rows
            else:
                return {}
        with self._recorder.phases("check"):
            self._checks.validated(step, rows, metrics)
        if self._spec.keep_best is not None:
            score(self._spec.keep_best, metrics)
        with self._recorder.phases("record"):
            self._recorder.validation(step, metrics, ())
        return metrics

    def validate_part(self, step: int, part: int, num_parts: int) -> ValidationResults:
        """Validate on every `num_parts`-th prompt from number `part` on; on any thread."""
        fault_injection.reach("validate")
        results = self._services.call(self._validator.run(step, part, num_parts))
        self._recorder.validation(step, {}, results.rows)
        counts = self._validator.rollout_loop.call_counts.take(VALIDATION)
        warn_of_errors(counts, partial(self._recorder.note, "warning"))
        return replace(results, rows=self._checks.part_validated(results.rows))

    def _results(self, step: int) -> Sequence[ValidationResults]:
        """The results of all workers with an engine. None if other workers have them and another
        rank requests them."""
        self._offload.only(())
        if self._resources.rollout is None:
            return self._ports.validate(step)
        ranks = self._ports.collective
        return ranks.gather(self.validate_part(step, ranks.rank, ranks.size))


def score(name: str, validated: Mapping[str, float]) -> float:
    """The score for `keep_best`, higher is better; for a loss its negative. Raises UserError for an
    unknown name."""
    if name not in validated:
        raise UserError(
            f"trainer.keep_best_metric={name} is not a metric of the validation; choose one of "
            f"{', '.join(sorted(validated))}"
        )
    return -validated[name] if name.endswith("loss") else validated[name]
