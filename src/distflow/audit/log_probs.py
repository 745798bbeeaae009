"""Checks: the log-probs of trainer and reference and the critic's values are those of the models' own forward; the
reference does not move."""

import torch
from torch import Tensor, nn

from distflow.audit.plain_model import Ids, fits, log_probs_of, logits_of, plain_scores, plainly, vocabulary_of
from distflow.audit.recorded_data import Check, RecordedStep, Sample, Wrong, doubles
from distflow.audit.recorder import OpenEngine, UpdateRecord
from distflow.config.derived_settings import is_rl

MOST, LEAST = 16, 8
SHARE = 0.04
MOST_ENTRIES = 2**26  # of softmaxes in float64: about a second on one core
EXACT, ROUNDED = (1e-4, 3e-3), (0.15, 5.0)


def audit_log_probs(recorded: RecordedStep) -> str | None:
    if not any(recorded.is_written(column) for column in ("old_log_probs", "ref_log_prob", "values")):
        return ""
    chosen = audited_samples(recorded)
    if not chosen:
        return "no sample is short enough to hold the logits of all its tokens"
    parts = recorded.parts
    own = "prox_log_probs" if recorded.is_written("prox_log_probs") else "old_log_probs"
    theirs = recorded.is_written("prox_alpha") or recorded.config.algorithm.recompute_old_log_probs == "false"
    if theirs and recorded.is_ours("old_log_probs") and own == "old_log_probs":
        _is_the_engines(recorded)
    elif own in recorded.batch and not recorded.parts.exact and recorded.is_ours(own) and _copied(recorded, own):
        raise Wrong(f"{own} are the engine's, bit for bit: they were copied, not computed by the trainer")
    passed, tokens = [], [ids_of(sample) for sample in chosen]
    if isinstance(parts.actor, OpenEngine):
        _score_policy(recorded, parts.actor.model, chosen)
        if own not in recorded.batch or (theirs and own == "old_log_probs"):
            passed.append("the input of the loss, which the check of the loss compares")
        elif recorded.is_ours(own):
            for sample in chosen:
                _same(recorded, sample, own, recorded.plain[sample["uid"]].log_probs)
            passed.append(own)
    reference = getattr(parts.ref, "model", None)
    if isinstance(reference, nn.Module) and recorded.is_ours("ref_log_prob"):
        with (
            torch.no_grad(),
            plainly(reference, adapter=not without_adapter(parts.ref), compute_dtype=dtype_of(parts.ref)),
        ):
            for logits, sample in zip(logits_of(parts.turns.run, reference, tokens), chosen, strict=True):
                temperature = recorded.sampling(sample).temperature if is_rl(recorded.config) else 1.0
                expected = log_probs_of(logits, ids_of(sample)[1], temperature)
                _same(recorded, sample, "ref_log_prob", expected)
                if recorded.fresh and sample["uid"] in recorded.plain:
                    _starts_equal(recorded, sample, expected)
        passed.append("ref_log_prob")
    if isinstance(parts.critic, OpenEngine) and recorded.is_ours("values"):
        with torch.no_grad(), plainly(parts.critic.model, compute_dtype=dtype_of(parts.critic)):
            for values, sample in zip(logits_of(parts.turns.run, parts.critic.model, tokens), chosen, strict=True):
                _same(recorded, sample, "values", values[:, 0])
        passed.append("values")
    return None if passed else "no built-in node scores with a model that is exposed"


def _is_the_engines(recorded: RecordedStep) -> None:
    """For configs in which nothing scores a step before its update."""
    for sample in recorded.samples:
        if not torch.equal(sample["old_log_probs"], sample["rollout_log_probs"]):
            raise Wrong(f"old_log_probs of sample {sample['uid']} must be the engine's, according to the config")


def _copied(recorded: RecordedStep, own: str) -> bool:
    """In low precision, engine and trainer never round alike over a whole step."""
    ours, theirs = recorded.batch.flat(own), recorded.batch.flat("rollout_log_probs")
    return len(ours) >= 50 and torch.equal(ours, theirs)


def audited_samples(recorded: RecordedStep) -> list[Sample]:
    """A few samples, with a small share of the step's tokens."""
    model = getattr(recorded.parts.actor, "model", None)
    total = sum(len(sample["response_ids"]) + len(sample["prompt_ids"]) for sample in recorded.samples)
    chosen: list[Sample] = []
    taken = entries = 0
    for sample in recorded.some_samples(MOST):
        length = len(sample["response_ids"]) + len(sample["prompt_ids"])
        taken += length
        entries += len(sample["response_ids"]) * (vocabulary_of(model) if isinstance(model, nn.Module) else 0)
        if (len(chosen) >= LEAST and taken > SHARE * total) or (chosen and entries > MOST_ENTRIES):
            break
        if isinstance(model, nn.Module) and len(sample["response_ids"]) and fits(model, length):
            chosen.append(sample)
    return chosen


def without_adapter(scorer: object) -> bool:
    return bool(getattr(scorer, "without_adapter", False))


def dtype_of(engine: object) -> torch.dtype | None:
    """The dtype that the engine's model computes in."""
    dtype = getattr(getattr(engine, "scorer", engine), "compute_dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _score_policy(recorded: RecordedStep, model: nn.Module, chosen: list[Sample]) -> None:
    with torch.no_grad(), plainly(model, compute_dtype=dtype_of(recorded.parts.actor)):
        found = logits_of(recorded.parts.turns.run, model, [ids_of(sample) for sample in chosen])
        for logits, sample in zip(found, chosen, strict=True):
            recorded.plain[sample["uid"]] = plain_scores(logits, ids_of(sample)[1], recorded.sampling(sample))


def score_before(recorded: RecordedStep, update: UpdateRecord) -> None:
    """Run the policy on one sample of a later mini-batch, as it has moved since the step was scored."""
    actor = recorded.parts.actor
    chosen = {str(sample["uid"]): sample for sample in audited_samples(recorded)}
    uid = next((uid for uid in update.uids if uid in chosen), None)
    if not isinstance(actor, OpenEngine) or uid is None:
        return
    ids = ids_of(chosen[uid])
    with torch.no_grad(), plainly(actor.model, compute_dtype=dtype_of(actor)):
        (logits,) = logits_of(recorded.parts.turns.run, actor.model, [ids])
    update.plain[uid] = plain_scores(logits, ids[1], recorded.sampling(chosen[uid]))


def ids_of(sample: Sample) -> Ids:
    """The sample's prompt and response."""
    return sample["prompt_ids"].tolist(), sample["response_ids"].tolist()


def _same(recorded: RecordedStep, sample: Sample, column: str, expected: Tensor) -> None:
    policy = sample["response_mask"] > 0
    gap = (doubles(sample[column]) - doubles(expected)).abs()[policy]
    if not len(gap):
        return
    mean, largest = EXACT if recorded.parts.exact else ROUNDED
    if not (float(gap.mean()) <= mean and float(gap.max()) <= largest):
        raise Wrong(
            f"{column} of sample {sample['uid']} differs by {float(gap.mean()):.3g} on average and "
            f"{float(gap.max()):.3g} at most from the model's own padded forward at the sampling "
            f"temperature (limits {mean:g}, {largest:g}): a shift, another temperature, another model, or packed "
            "sequences that see each other"
        )


def _starts_equal(recorded: RecordedStep, sample: Sample, reference: Tensor) -> None:
    gap = (recorded.plain[sample["uid"]].log_probs - reference).abs()
    if not float(gap.mean()) <= (EXACT if recorded.parts.exact else ROUNDED)[0]:
        raise Wrong(
            f"before the first update the reference must be the policy, but on sample {sample['uid']} their log-probs "
            f"differ by {float(gap.mean()):.3g} on average"
        )


CHECK = Check(
    "log_probs",
    "log-probs of policy and reference and values of the critic are those of the models' own padded forward at the "
    "sampling temperature; before the first update the reference is the policy",
    "samples whose logits fit into 1 GiB",
    f"mean {EXACT[0]:g}, largest {EXACT[1]:g} (bfloat16: {ROUNDED[0]:g}, {ROUNDED[1]:g})",
    audit_log_probs,
)


NUM_ROWS, NUM_TOKENS, STRIDE = 2, 32, 7919
REFERENCE_EXACT, REFERENCE_ROUNDED = 3e-5, 0.02


def audit_reference(recorded: RecordedStep) -> str | None:
    model = getattr(recorded.parts.ref, "model", None)
    if not isinstance(model, nn.Module):
        return "" if recorded.parts.ref is None else "the reference's model is not exposed"
    now = _on_fixed_tokens(recorded, model)
    then = recorded.state.setdefault("reference", now.tolist())
    gap = float((now - torch.tensor(then, dtype=torch.float64)).abs().mean())
    limit = REFERENCE_EXACT if recorded.parts.exact else REFERENCE_ROUNDED
    if not gap <= limit:
        raise Wrong(
            f"the reference moved: on fixed tokens its log-probs differ by {gap:.3g} on average from those at the "
            f"start of the run (limit {limit:g}). It shares weights with the policy, or something trains it"
        )
    return None


def _on_fixed_tokens(recorded: RecordedStep, model: nn.Module) -> Tensor:
    """Log-probs of tokens spread over the vocabulary, float64."""
    size = vocabulary_of(model)
    ids = [[(STRIDE * i + row) % size for i in range(NUM_TOKENS)] for row in range(NUM_ROWS)]
    reference = recorded.parts.ref
    with torch.no_grad(), plainly(model, adapter=not without_adapter(reference), compute_dtype=dtype_of(reference)):
        logits = logits_of(recorded.parts.turns.run, model, [(one[:1], one[1:]) for one in ids])
        return torch.cat([log_probs_of(rows, one[1:], 1.0) for rows, one in zip(logits, ids, strict=True)])


REFERENCE = Check(
    "reference",
    "on fixed tokens the reference gives the same log-probs as at the start of the run",
    "a pipeline with a reference",
    f"mean {REFERENCE_EXACT:g} (bfloat16: {REFERENCE_ROUNDED:g})",
    audit_reference,
)
