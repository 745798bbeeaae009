"""Checks: the log-probs of trainer and reference and the critic's values match the models' own
forward; the reference does not move."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import repeat
from typing import Any, TypeVar

import torch
from torch import Tensor

from distflow.audit import model_forward
from distflow.audit.check import NOT_APPLICABLE, Sample, Wrong, check, doubles
from distflow.audit.record_groups_and_updates import OpenEngine, UpdateRecord
from distflow.audit.recorded_step import (
    AuditedRun,
    RecordedStep,
    conversations_of,
    policies_of_conversations,
)
from distflow.config.derived_settings import is_rl
from distflow.training.multi_policy_engine import models_of

MOST = 16
LEAST = 4
SHARE = 0.04
MOST_ENTRIES = 2**26  # entries of softmaxes in float64: about a second on one core
EXACT = (1e-4, 3e-3)
ROUNDED = (0.15, 5.0)
NUM_ROWS = 2
NUM_TOKENS = 32
STRIDE = 7919
REFERENCE_EXACT = 3e-5
REFERENCE_ROUNDED = 0.02

T = TypeVar("T")


@check(
    "log_probs",
    "the log-probs of policy and reference, and the critic's values, equal those of the models' "
    "own padded forward "
    "pass at the sampling temperature; before the first update the reference equals the policy",
    needs="samples whose logits fit into 1 GiB",
    limit=f"mean {EXACT[0]:g}, largest {EXACT[1]:g} (bfloat16: {ROUNDED[0]:g}, {ROUNDED[1]:g})",
)
def audit_log_probs(recorded: RecordedStep) -> str | None:
    if not any(
        recorded.is_written(column) for column in ("old_log_probs", "ref_log_prob", "values")
    ):
        return NOT_APPLICABLE
    resources = recorded.run.resources
    own = "prox_log_probs" if recorded.is_written("prox_log_probs") else "old_log_probs"
    chosen = audited_samples(recorded)
    if not chosen and model_forward.model_of(resources.actor) is None:
        return f"the model that computes {own} is not exposed"
    if not chosen:
        return "no sample is short enough to hold the logits of all its tokens"
    of_engine = own == "old_log_probs" and (
        recorded.is_written("prox_alpha")
        or recorded.config.algorithm.recompute_old_log_probs == "false"
    )
    if of_engine and recorded.is_ours(own):
        for sample in recorded.samples:
            if not torch.equal(sample["old_log_probs"], sample["rollout_log_probs"]):
                raise Wrong(
                    f"old_log_probs of sample {sample['uid']} must be the engine's, according to "
                    "the config"
                )
    elif (
        own in recorded.batch
        and not recorded.run.is_exact
        and not recorded.partial
        and recorded.is_ours(own)
    ):
        ours = recorded.batch.flat(own)  # in low precision they never round alike over a whole step
        if len(ours) >= 50 and torch.equal(ours, recorded.batch.flat("rollout_log_probs")):
            raise Wrong(
                f"{own} are the engine's, bit for bit: they were copied instead of computed by the "
                "trainer"
            )
    actor = resources.actor
    reference = resources.ref
    critic = resources.critic
    passed = []
    if isinstance(actor, OpenEngine):
        recorded.plain |= policy_scores(recorded, actor, chosen)
        if own not in recorded.batch or of_engine:
            passed.append(own)  # the loss's check compares it as the input of the loss
        elif recorded.is_ours(own):
            for sample in chosen:
                _same(recorded, sample, own, recorded.plain[sample["uid"]].log_probs)
            passed.append(own)
    if model_forward.model_of(reference) is not None and recorded.is_ours("ref_log_prob"):
        _check_reference(recorded, chosen)
        passed.append("ref_log_prob")
    if isinstance(critic, OpenEngine) and recorded.is_ours("values"):
        values = forward_samples(recorded.run, critic, chosen, lambda values, _: values[:, 0])
        for sample, expected in zip(chosen, values, strict=True):
            _same(recorded, sample, "values", expected)
        passed.append("values")
    engines = {own: actor, "ref_log_prob": reference, "values": critic}
    hidden = [
        name
        for name in engines
        if engines[name] is not None and recorded.is_ours(name) and name not in passed
    ]
    if hidden:
        return f"the model that computes {', '.join(hidden)} is not exposed"
    return None if passed else "no built-in node scores with a model that is exposed"


@check(
    "reference",
    "on fixed tokens the reference gives the same log-probs as at the start of the run",
    needs="a pipeline with a reference",
    limit=f"mean {REFERENCE_EXACT:g} (bfloat16: {REFERENCE_ROUNDED:g})",
)
def audit_reference(recorded: RecordedStep) -> str | None:
    reference = recorded.run.resources.ref
    model = model_forward.model_of(reference)
    if model is None:
        return NOT_APPLICABLE if reference is None else "the reference's model is not exposed"
    now = recorded.fixed_tokens
    if now is None:
        now = torch.cat(
            forward_samples(
                recorded.run, reference, _fixed(model), _log_probs_at(lambda sample: 1.0)
            )
        )
    then = recorded.run.state.setdefault("reference", now.tolist())
    gap = float((now - torch.tensor(then, dtype=torch.float64)).abs().mean())
    limit = recorded.limit(REFERENCE_EXACT, REFERENCE_ROUNDED)
    if not gap <= limit:
        raise Wrong(
            f"the reference moved: on fixed tokens its log-probs differ by {gap:.3g} on average "
            "from those at the "
            f"start of the run (limit {limit:g}). It shares weights with the policy, or is being "
            "trained"
        )
    return None


def audited_samples(recorded: RecordedStep) -> list[Sample]:
    """A few samples, with a small share of the step's tokens; one sample in a look."""
    model = model_forward.model_of(recorded.run.resources.actor)
    if model is None:
        return []
    least = 1 if recorded.partial else LEAST
    total = int(recorded.batch.lengths("sequence").sum())
    chosen: list[Sample] = []
    num_tokens = entries = 0
    # Samples with several weight versions first: only they can have keys and values from other
    # weights.
    for sample in sorted(
        recorded.some_samples(MOST), key=lambda sample: -len(sample["versions"].unique())
    ):
        length = len(sample["response_ids"]) + len(sample["prompt_ids"])
        num_tokens += length
        entries += len(sample["response_ids"]) * model_forward.vocabulary_of(model)
        if (len(chosen) >= least and (recorded.partial or num_tokens > SHARE * total)) or (
            chosen and entries > MOST_ENTRIES
        ):
            break
        if (
            len(sample["response_ids"])
            and length * model_forward.vocabulary_of(model) <= model_forward.MAX_LOGITS
        ):
            chosen.append(sample)
    return chosen


def forward_samples(
    run: AuditedRun,
    engine: Any,
    samples: Sequence[Sample],
    score: Callable[[Tensor, Sample], T],
    dtype: torch.dtype | None = None,
) -> list[T]:
    """`score(logits, sample)` of each sample, by the own forward of the engine's model, without
    gradient; each of its conversations alone. dtype: to compute in; None for the engine's."""
    adapter = not getattr(engine, "without_adapter", False)
    models = models_of(engine.model)
    with torch.no_grad(), ExitStack() as plain:
        for model in models.values():
            plain.enter_context(
                model_forward.plainly(
                    model, adapter=adapter, compute_dtype=dtype or dtype_of(engine)
                )
            )
        owners = (
            policies_of_conversations
            if len(models) > 1
            else lambda config, sample: repeat(next(iter(models)))
        )
        apart = [
            [*zip(owners(run.spec.config, own), sequences_of(own), strict=False)] for own in samples
        ]
        logits = {
            name: model_forward.logits_of(
                run.turns.run, model, [ids for own in apart for of, ids in own if of == name]
            )
            for name, model in models.items()
        }
        return [
            score(joined_logits([next(logits[name]) for name, _ in own]), sample)
            for own, sample in zip(apart, samples, strict=True)
        ]


def policy_scores(
    recorded: RecordedStep,
    actor: OpenEngine,
    samples: Sequence[Sample],
    dtype: torch.dtype | None = None,
) -> dict[str, model_forward.PlainScores]:
    """Scores of the samples, by uid, by the policy's own forward; see `forward_samples`."""

    def score(logits: Tensor, sample: Sample) -> model_forward.PlainScores:
        tokens = recorded.sampling_of_tokens(sample)
        return model_forward.plain_scores(logits, ids_of(sample)[1], tokens, numbers_of(sample))

    scores = forward_samples(recorded.run, actor, samples, score, dtype)
    return {str(sample["uid"]): found for sample, found in zip(samples, scores, strict=True)}


def score_before(recorded: RecordedStep, update: UpdateRecord) -> None:
    """Run the policy on one sample of a later mini-batch, since it has moved after the step was
    scored."""
    actor = recorded.run.resources.actor
    chosen = {str(sample["uid"]): sample for sample in audited_samples(recorded)}
    uid = next((uid for uid in update.batch["uid"] if uid in chosen), None)
    if isinstance(actor, OpenEngine) and uid is not None and "log_probs" in update.loss.outputs:
        update.plain |= policy_scores(recorded, actor, [chosen[uid]])


def dtype_of(engine: object) -> torch.dtype | None:
    dtype = getattr(engine, "compute_dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def ids_of(sample: Sample) -> model_forward.Ids:
    return model_forward.Ids(sample["prompt_ids"].tolist(), sample["response_ids"].tolist())


def numbers_of(sample: Sample) -> model_forward.Numbers | None:
    """The numbers of continuous actions; None if the policy draws tokens."""
    if sample.get("number_head") is None:
        return None
    values = torch.where(sample["response_mask"] > 0, doubles(sample["action_values"]), torch.nan)
    return model_forward.Numbers(values, sample["number_head"])


def sequences_of(sample: Sample) -> list[model_forward.Ids]:
    """The sample's conversations: prompt and response of the first, first token and the rest of the
    others."""
    first, *others = conversations_of(sample)
    images = sample.get("images") or [()] * (1 + len(others))
    found = [model_forward.Ids(first.ids[: -first.first], first.ids[-first.first :], images[0])]
    for own, paths in zip(others, images[1:], strict=True):
        given = (
            int((sample["response_mask"][own.first : own.first + len(own.ids)] > 0).long().argmax())
            if paths
            else 0
        )
        found.append(model_forward.Ids(own.ids[:1], own.ids[1:], paths, given))
    return found


def joined_logits(parts: Sequence[Tensor]) -> Tensor:
    """One row for each token of the response, from those of `sequences_of`; zeros where
    `is_predicted` is false."""
    first, *others = parts
    return torch.cat(
        [first, *(row for own in others for row in (first.new_zeros(1, first.shape[-1]), own))]
    )


def is_predicted(sample: Sample) -> Tensor:
    """bool, for each token of the response: all but the first of a fork, which is given."""
    predicted = torch.ones(len(sample["response_ids"]), dtype=torch.bool)
    predicted[[start for _, start in sample.get("forks", ())]] = False
    return predicted


def is_beyond(gap: Tensor, limits: tuple[float, float]) -> bool:
    """Whether differences `(tokens,)` exceed the limit for their mean or maximum; NaN does."""
    return bool(len(gap)) and not (float(gap.mean()) <= limits[0] and float(gap.max()) <= limits[1])


def _check_reference(recorded: RecordedStep, chosen: Sequence[Sample]) -> None:
    def temperature(sample: Sample) -> float | Tensor:
        return (
            recorded.temperatures(sample) if "domain" in sample and is_rl(recorded.config) else 1.0
        )

    reference: Any = recorded.run.resources.ref
    fixed = _fixed(reference.model) if recorded.partial else []  # one pass instead of two
    scores = forward_samples(recorded.run, reference, [*chosen, *fixed], _log_probs_at(temperature))
    recorded.fixed_tokens = torch.cat(scores[len(chosen) :]) if fixed else None
    for sample, expected in zip(chosen, scores, strict=False):
        _same(recorded, sample, "ref_log_prob", expected)
        if recorded.num_updates.get("actor") or sample["uid"] not in recorded.plain:
            continue
        gap = (recorded.plain[sample["uid"]].log_probs - expected).abs()
        if not float(gap.mean()) <= recorded.limit(EXACT, ROUNDED)[0]:
            raise Wrong(
                "before the first update the reference must be the policy, but on sample "
                f"{sample['uid']} their "
                f"log-probs differ by {float(gap.mean()):.3g} on average"
            )


def _fixed(model: torch.nn.Module) -> list[Sample]:
    """The tokens that each audit scores with the reference, spread over the vocabulary."""
    size = model_forward.vocabulary_of(model)
    ids = torch.tensor(
        [[(STRIDE * i + row) % size for i in range(NUM_TOKENS)] for row in range(NUM_ROWS)]
    )
    return [{"prompt_ids": row[:1], "response_ids": row[1:]} for row in ids]


def _log_probs_at(
    temperature: Callable[[Sample], float | Tensor],
) -> Callable[[Tensor, Sample], Tensor]:
    return lambda logits, own: model_forward.log_probs_of(
        logits, ids_of(own)[1], temperature(own), numbers_of(own)
    )


def _same(recorded: RecordedStep, sample: Sample, column: str, expected: Tensor) -> None:
    gap = (doubles(sample[column]) - doubles(expected)).abs()[sample["response_mask"] > 0]
    # the density of a number far from the mean rounds relative to its logarithm
    if "action_values" in sample:
        gap = gap / doubles(expected).abs().clamp(min=1.0)[sample["response_mask"] > 0]
    limits = recorded.limit(EXACT, ROUNDED)
    if is_beyond(gap, limits):
        raise Wrong(
            f"{column} of sample {sample['uid']} differs by {float(gap.mean()):.3g} on average and "
            f"{float(gap.max()):.3g} at most from the model's own padded forward at the sampling "
            f"temperature (limits {limits[0]:g}, {limits[1]:g}): a shift, another temperature, "
            "another model, or "
            "attention between packed sequences"
        )
