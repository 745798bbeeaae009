"""Checks: the log-probs of trainer, reference and teachers and the critic's values match the
models' own forward; reference and teachers do not move."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor

from distflow.checks import plain_forward
from distflow.checks.check import NOT_APPLICABLE, Wrong, check
from distflow.checks.recorded_step import CheckedRun, RecordedStep
from distflow.checks.samples import Sample, conversations_of, doubles, policies_of_conversations
from distflow.checks.update_records import OpenEngine
from distflow.config.derived_settings import is_rl
from distflow.config.keys.distill import teachers_of
from distflow.training.multi_policy_engine import models_of

MOST = 16
LEAST = 4
SHARE = 0.04
"""Of the step's tokens, for the samples that are run again."""
MOST_ENTRIES = 2**26
"""Entries of their softmaxes in float64: about a second on one core."""
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
    "the log-probs of policy, reference and teachers, and the critic's values, equal those of the "
    "models' own padded forward pass",
    needs="samples whose logits fit into 1 GiB",
    limit=f"mean {EXACT[0]:g}, largest {EXACT[1]:g} (bfloat16: {ROUNDED[0]:g}, {ROUNDED[1]:g})",
)
def check_log_probs(recorded: RecordedStep) -> str | None:
    columns = ("old_log_probs", "ref_log_prob", "teacher_log_probs", "values")
    if not any(map(recorded.is_written, columns)):
        return NOT_APPLICABLE

    resources = recorded.run.resources
    policy = "old_log_probs"
    if recorded.is_written("prox_log_probs"):
        policy = "prox_log_probs"

    chosen = scored_samples(recorded)
    if not chosen and plain_forward.model_of(resources.actor) is None:
        return f"the model that computes {policy} is not exposed"
    if not chosen:
        return "no sample is short enough to hold the logits of all its tokens, or it has numbers"

    _check_policy(recorded, policy, chosen)
    if recorded.is_ours("teacher_log_probs"):
        _check_teachers(recorded, chosen)
    if plain_forward.model_of(resources.ref) is not None and recorded.is_ours("ref_log_prob"):
        score = _log_probs_at(lambda sample: 1.0)
        if is_rl(recorded.config):
            score = _log_probs_at(recorded.temperatures)
        scores = forward_samples(recorded.run, resources.ref, chosen, score)
        for sample, expected in zip(chosen, scores, strict=True):
            _same(recorded, sample, "ref_log_prob", expected)

    if isinstance(resources.critic, OpenEngine) and recorded.is_ours("values"):
        values = forward_samples(
            recorded.run, resources.critic, chosen, lambda values, _: values[:, 0]
        )
        for sample, expected in zip(chosen, values, strict=True):
            _same(recorded, sample, "values", expected)

    engines = {policy: resources.actor, "ref_log_prob": resources.ref, "values": resources.critic}
    hidden = []
    for name, engine in engines.items():
        is_hidden = engine is not None and plain_forward.model_of(engine) is None
        if is_hidden and recorded.is_ours(name):
            hidden.append(name)

    if hidden:
        return f"the model that computes {', '.join(hidden)} is not exposed"
    return None


def _check_policy(recorded: RecordedStep, column: str, chosen: Sequence[Sample]) -> None:
    """column: has the policy's log-probs before the step."""
    takes_engines = column == "old_log_probs" and (
        recorded.is_written("prox_alpha")
        or recorded.config.algorithm.recompute_old_log_probs == "false"
    )
    if takes_engines and recorded.is_ours(column):
        _check_copied(recorded)

    actor = recorded.run.resources.actor
    if not isinstance(actor, OpenEngine):
        return

    recorded.plain |= policy_scores(recorded, actor, chosen)
    # else the check of the loss compares it as the input of the loss
    if column in recorded.batch and not takes_engines and recorded.is_ours(column):
        for sample in chosen:
            _same(recorded, sample, column, recorded.plain[sample["uid"]].log_probs)


def _check_teachers(recorded: RecordedStep, chosen: Sequence[Sample]) -> None:
    """Also of the teacher's likeliest tokens."""
    scored = [sample for sample in chosen if bool((sample["kl_weights"] > 0).any())]
    teachers = teachers_of(recorded.config.distill)
    named = {domain for teacher in teachers.values() for domain in teacher.domains}

    for name, teacher in teachers.items():
        own = list[Sample]()
        for sample in scored:
            domain = sample["domain"]
            if domain in teacher.domains or not (teacher.domains or domain in named):
                own.append(sample)

        def score(logits: Tensor, sample: Sample) -> tuple[Tensor, Tensor | None]:
            scores = (logits / recorded.temperatures(sample).to(logits)).log_softmax(-1)
            ids = sample["response_ids"][:, None]
            if "teacher_top_ids" not in sample:
                return scores.gather(-1, ids.to(scores.device))[:, 0], None
            ids = torch.cat([ids, sample["teacher_top_ids"]], dim=1)
            found = scores.gather(-1, ids.to(scores.device))
            return found[:, 0], found[:, 1:].flatten()

        engine = recorded.run.resources.scoring_models[name]
        for sample, (log_probs, top) in zip(
            own, forward_samples(recorded.run, engine, own, score), strict=True
        ):
            _same(recorded, sample, "teacher_log_probs", log_probs)
            if top is not None:
                k = sample["teacher_top_ids"].shape[1]
                flat = {"uid": sample["uid"]}
                flat["response_mask"] = sample["response_mask"].repeat_interleave(k)
                flat["teacher_top_log_probs"] = sample["teacher_top_log_probs"].flatten()
                _same(recorded, flat, "teacher_top_log_probs", top)


def _check_copied(recorded: RecordedStep) -> None:
    for sample in recorded.samples:
        if not torch.equal(sample["old_log_probs"], sample["rollout_log_probs"]):
            raise Wrong(
                f"old_log_probs of sample {sample['uid']} must be the engine's, according to the "
                "config"
            )


@check(
    "reference",
    "on fixed tokens the reference and teachers give the same log-probs as at the start of the run",
    needs="a pipeline with a reference or a teacher",
    limit=f"mean {REFERENCE_EXACT:g} (bfloat16: {REFERENCE_ROUNDED:g})",
)
def check_reference(recorded: RecordedStep) -> str | None:
    resources = recorded.run.resources
    frozen: dict[str, Any] = {"reference": resources.ref}
    for name in teachers_of(recorded.config.distill):
        frozen[name] = resources.scoring_models.get(name)

    present = {name: engine for name, engine in frozen.items() if engine is not None}
    if not present:
        return NOT_APPLICABLE
    for name, engine in present.items():
        if plain_forward.model_of(engine) is None:
            return f"the model of the {name} is not exposed"
        _check_unmoved(recorded, name, engine)
    return None


def _check_unmoved(recorded: RecordedStep, name: str, engine: Any) -> None:
    model = plain_forward.model_of(engine)
    assert model is not None, "above"
    scores = forward_samples(recorded.run, engine, _fixed(model), _log_probs_at(lambda sample: 1.0))
    now = torch.cat(scores)
    then = recorded.run.state.setdefault(name, now.tolist())
    gap = float((now - torch.tensor(then, dtype=torch.float64)).abs().mean())

    limit = recorded.limit(REFERENCE_EXACT, REFERENCE_ROUNDED)
    if not gap <= limit:
        raise Wrong(
            f"the {name} moved: on fixed tokens its log-probs differ by {gap:.3g} on average "
            f"from those at the start of the run (limit {limit:g}). It shares weights with the "
            "policy, or is being trained"
        )


def scored_samples(recorded: RecordedStep) -> list[Sample]:
    """A few samples, with a small share of the step's tokens. Samples with several weight versions
    come first: only they can have keys and values from other weights."""
    model = plain_forward.model_of(recorded.run.resources.actor)
    if model is None or "number_head" in recorded.batch:  # numbers have no softmax
        return []

    total = int(recorded.batch.lengths("sequence").sum())
    vocabulary = plain_forward.vocabulary_of(model)
    drawn = recorded.some_samples(MOST)
    drawn.sort(key=lambda sample: -len(sample["versions"].unique()))

    chosen: list[Sample] = []
    num_tokens = 0
    entries = 0
    for sample in drawn:
        response = len(sample["response_ids"])
        length = response + len(sample["prompt_ids"])
        num_tokens += length
        entries += response * vocabulary
        if len(chosen) >= LEAST and num_tokens > SHARE * total:
            break
        if chosen and entries > MOST_ENTRIES:
            break
        if response and length * vocabulary <= plain_forward.MAX_LOGITS:
            chosen.append(sample)

    return chosen


def forward_samples(
    run: CheckedRun,
    engine: Any,
    samples: Sequence[Sample],
    score: Callable[[Tensor, Sample], T],
    dtype: torch.dtype | None = None,
) -> list[T]:
    """`score(logits, sample)` of each sample, by the own forward of the engine's model, without
    gradient; each of its conversations alone. dtype: to compute in; None for the engine's."""
    adapter = not getattr(engine, "without_adapter", False)
    models = models_of(engine.model)
    dtype = dtype or dtype_of(engine)

    with torch.no_grad(), ExitStack() as plain:
        for model in models.values():
            plain.enter_context(plain_forward.plainly(model, adapter=adapter, compute_dtype=dtype))

        owners = []
        sequences: dict[str, list[plain_forward.Ids]] = {name: [] for name in models}
        for sample in samples:
            conversations = sequences_of(sample)
            names = [*models] * len(conversations)
            if len(models) > 1:
                names = policies_of_conversations(run.spec.config, sample)
            owners.append(names)
            for name, ids in zip(names, conversations, strict=True):
                sequences[name].append(ids)

        logits = {}
        for name, model in models.items():
            logits[name] = plain_forward.logits_of(run.passes.run, model, sequences[name])

        scores = list[T]()
        for names, sample in zip(owners, samples, strict=True):
            of_sample = joined_logits([next(logits[name]) for name in names])
            scores.append(score(of_sample, sample))

        return scores


def policy_scores(
    recorded: RecordedStep,
    actor: OpenEngine,
    samples: Sequence[Sample],
    dtype: torch.dtype | None = None,
) -> dict[str, plain_forward.PlainScores]:
    """Scores of the samples, by uid, by the policy's own forward; see `forward_samples`."""

    def score(logits: Tensor, sample: Sample) -> plain_forward.PlainScores:
        tokens = recorded.sampling_of_tokens(sample)
        ids = ids_of(sample).response
        return plain_forward.plain_scores(logits, ids, tokens)

    scores = forward_samples(recorded.run, actor, samples, score, dtype)
    return {str(sample["uid"]): found for sample, found in zip(samples, scores, strict=True)}


def dtype_of(engine: object) -> torch.dtype | None:
    dtype = getattr(engine, "compute_dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def ids_of(sample: Sample) -> plain_forward.Ids:
    return plain_forward.Ids(sample["prompt_ids"].tolist(), sample["response_ids"].tolist())


def sequences_of(sample: Sample) -> list[plain_forward.Ids]:
    """The sample's conversations: prompt and response of the first, first token and the rest of the
    others."""
    first, *others = conversations_of(sample)
    images = sample.get("images") or [()] * (1 + len(others))
    prompt_length = -first.first

    sequences = [plain_forward.Ids(first.ids[:prompt_length], first.ids[prompt_length:], images[0])]
    for talk, paths in zip(others, images[1:], strict=True):
        given = 0
        if paths:
            drawn = sample["response_mask"][talk.first : talk.first + len(talk.ids)] > 0
            given = int(drawn.long().argmax())
        sequences.append(plain_forward.Ids(talk.ids[:1], talk.ids[1:], paths, given))

    return sequences


def joined_logits(parts: Sequence[Tensor]) -> Tensor:
    """One row for each token of the response, from those of `sequences_of`; zeros for the first
    token of a fork, which is given."""
    first, *others = parts
    rows = [first]
    for own in others:
        rows += [first.new_zeros(1, first.shape[-1]), own]
    return torch.cat(rows)


def is_beyond(gap: Tensor, limits: tuple[float, float]) -> bool:
    """Whether differences `(tokens,)` exceed the limit for their mean or maximum; NaN does."""
    if not len(gap):
        return False

    is_small = float(gap.mean()) <= limits[0] and float(gap.max()) <= limits[1]
    return not is_small  # also if it is NaN


def _fixed(model: torch.nn.Module) -> list[Sample]:
    """The tokens that each check scores with the reference, spread over the vocabulary."""
    size = plain_forward.vocabulary_of(model)
    found = list[Sample]()
    for row in range(NUM_ROWS):
        ids = torch.tensor([(STRIDE * i + row) % size for i in range(NUM_TOKENS)])
        found.append({"prompt_ids": ids[:1], "response_ids": ids[1:]})
    return found


def _log_probs_at(
    temperature: Callable[[Sample], float | Tensor],
) -> Callable[[Tensor, Sample], Tensor]:
    return lambda logits, sample: plain_forward.log_probs_of(
        logits, ids_of(sample).response, temperature(sample)
    )


def _same(recorded: RecordedStep, sample: Sample, column: str, expected: Tensor) -> None:
    drawn = sample["response_mask"] > 0
    gap = (doubles(sample[column]) - doubles(expected)).abs()[drawn]

    limits = recorded.limit(EXACT, ROUNDED)
    if is_beyond(gap, limits):
        raise Wrong(
            f"{column} of sample {sample['uid']} differs by {float(gap.mean()):.3g} on average and "
            f"{float(gap.max()):.3g} at most from the model's own padded forward at the sampling "
            f"temperature (limits {limits[0]:g}, {limits[1]:g}): a shift, another temperature, "
            "another model, or attention between packed sequences"
        )
