"""The validation of pipelines that generate nothing: the loss over the data's own responses."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import mean

import torch
from torch.nn.functional import logsigmoid

from distflow.algorithms.objectives import KTOObjective, PreferenceObjective
from distflow.data.batch import Batch
from distflow.data.mismatched import add_mismatched, answered, mismatched
from distflow.data.sample import Sample, Segment
from distflow.graph import BoundPipeline
from distflow.runtime.sample_rows import SampleRows
from distflow.runtime.spec import ValidationSet
from distflow.training.engine import OneRank, Scorer
from distflow.training.mismatched_scores import compare_mismatched, mismatched_log_probs
from distflow.training.torch_engine import micro_batches

_TOKENS = 16384


def preference_objective(pipeline: BoundPipeline) -> PreferenceObjective | KTOObjective | None:
    """The loss over preferences by which the pipeline trains a policy; None if it has none."""
    for node in pipeline.training_nodes:
        objective = getattr(node.fn, "keywords", {}).get("objective")
        if isinstance(objective, PreferenceObjective | KTOObjective):
            return objective
    return None


def validation_loss(
    sets: Sequence[ValidationSet],
    actor: Scorer,
    ref: Scorer | None = None,
    objective: PreferenceObjective | KTOObjective | None = None,
    label: str = "",
) -> tuple[dict[str, float], SampleRows]:
    """Mean negative log-likelihood per token of the data's responses (`sft/val_loss`); a row per
    response with its sum and number of tokens. For preference pairs, the metrics of a reward model,
    or of the policy's preference loss, if it is given. ref: the reference that such a loss
    reads. label: the column of labels."""
    if isinstance(objective, KTOObjective):
        return _validation_of_labels(sets, objective, label, actor, ref)
    if objective is not None:
        return _validation_of_preferences(sets, objective, actor, ref)
    if sets[0].rows[0].rejected_ids is not None:
        return _validation_of_pairs(sets, actor)

    total = 0.0
    num_tokens = 0
    rows = SampleRows()
    for chosen in sets:
        samples = []
        for i, row in enumerate(chosen.rows):
            prompt = Segment("prompt", tuple(row.prompt_ids), images=row.images)
            samples.append(Sample(f"{i}-0", i, [prompt, *row.answer(0)]))

        batch = Batch.from_samples(samples)
        lengths = batch.lengths("response").tolist()
        masks = (batch.flat("response_mask") > 0).split(lengths)
        log_probs = actor.forward(batch, ("log_probs",)).flat("log_probs").double().split(lengths)

        for i, mask in enumerate(masks):
            loss = -float(log_probs[i][mask].sum())
            number = int(mask.sum())
            total += loss
            num_tokens += number
            rows.append({**_who(chosen, "loss", i), "loss": loss, "tokens": number})

    return {"sft/val_loss": total / max(num_tokens, 1)}, rows


def _validation_of_pairs(
    sets: Sequence[ValidationSet], actor: Scorer
) -> tuple[dict[str, float], SampleRows]:
    """`rm/val_loss`, `rm/val_accuracy` and `rm/val_margin` of a reward model, means over pairs; and
    the scores."""
    rows = SampleRows()
    margins = list[float]()
    for chosen in sets:
        samples = []
        for i, row in enumerate(chosen.rows):
            for ids in (row.response_ids, row.rejected_ids):
                segments = [Segment("prompt", row.prompt_ids), Segment("environment", ids or ())]
                samples.append(Sample("", i, segments))

        batch = Batch.from_samples(samples)
        ends = batch.lengths("response").cumsum(0) - 1

        scores = actor.forward(batch, ("text_scores",)).flat("text_scores")[ends].double()
        for i, (own, other) in enumerate(scores.view(-1, 2).tolist()):
            rows.append({**_who(chosen, "pair", i), "chosen": own, "rejected": other})
            margins.append(own - other)

    margin = torch.tensor(margins, dtype=torch.float64)
    return {
        "rm/val_loss": float(-logsigmoid(margin).mean()),
        "rm/val_accuracy": float((margin > 0).double().mean()),
        "rm/val_margin": float(margin.mean()),
    }, rows


def _validation_of_preferences(
    sets: Sequence[ValidationSet], objective: PreferenceObjective, actor: Scorer, ref: Scorer | None
) -> tuple[dict[str, float], SampleRows]:
    """`preference/val_loss`, `preference/val_accuracy` and `preference/val_margin`, means over
    pairs; and the rewards of each pair."""
    samples = list[Sample]()
    rows = SampleRows()
    for chosen in sets:
        for i, row in enumerate(chosen.rows):
            for each in (row, row.rejected):
                segments = [Segment("prompt", row.prompt_ids), *each.answer(0)]
                samples.append(Sample("", len(rows), segments))
            rows.append(_who(chosen, "pair", i))

    batch = Batch.from_samples(samples)
    _score(batch, actor, ref if objective.preference_loss.has_reference else None)
    parts, counts = _parts(batch, objective)
    losses = list[float]()
    margins = list[float]()
    for part in parts:
        values = objective.values(part["log_probs"].double(), part, counts)
        of_pairs = [each.tolist() for each in objective.compare(values)]
        numbers = part["group_index"].tolist()[::2]
        for number, loss, own, other in zip(numbers, *of_pairs, strict=True):
            rows[number] |= {"chosen": own, "rejected": other}
            losses.append(loss)
            margins.append(own - other)

    return {
        "preference/val_loss": mean(losses),
        "preference/val_accuracy": mean(margin > 0 for margin in margins),
        "preference/val_margin": mean(margins),
    }, rows


def _validation_of_labels(
    sets: Sequence[ValidationSet],
    objective: KTOObjective,
    label: str,
    actor: Scorer,
    ref: Scorer | None,
) -> tuple[dict[str, float], SampleRows]:
    """`preference/val_loss`, a mean over responses whose baseline is that of all, and
    `preference/val_margin`, if there are responses of both kinds. label: its column."""
    samples = list[Sample]()
    rows = SampleRows()
    desirable = list[bool]()
    for chosen in sets:
        for i, row in enumerate(chosen.rows):
            segments = [Segment("prompt", row.prompt_ids), *row.answer(0)]
            samples.append(Sample("", len(rows), segments))
            rows.append(_who(chosen, "pair", i))
            desirable.append(bool((row.extra_info or {})[label]))

    batch = Batch.from_samples(samples)
    batch["desirable"] = torch.tensor(desirable)
    assert ref is not None, "KTO has a reference"
    _score(batch, actor, ref)
    add_mismatched(batch, mismatched(answered(batch)))
    batch["ref_mismatched_log_prob"] = mismatched_log_probs(batch, ref)
    parts, counts = _parts(compare_mismatched(batch, actor), objective)

    sums = defaultdict[str, float](float)
    for part in parts:
        _, shares = objective({"log_probs": part["log_probs"].double()}, part, counts)
        for name, share in shares.items():
            sums[name] += float(share)

    found = objective.finish(dict(sums), counts)
    metrics = {"preference/val_loss": found["loss"]}
    if "rewards/margins" in found:
        metrics["preference/val_margin"] = found["rewards/margins"]
    return metrics, rows


def _score(batch: Batch, actor: Scorer, ref: Scorer | None) -> None:
    """Write the log-probs of the policy, and of the reference, if there is one."""
    batch["log_probs"] = actor.forward(batch, ("log_probs",)).flat("log_probs")
    if ref is not None:
        batch["ref_log_prob"] = ref.forward(batch, ("log_probs",)).flat("log_probs")


def _parts(
    batch: Batch, objective: PreferenceObjective | KTOObjective
) -> tuple[list[Batch], dict[str, float]]:
    """Parts of a few tokens, since a loss pads what it reads; and the counts of all. The samples of
    a pair stay together."""
    parts = [
        batch.select(rows) for rows in micro_batches(batch, _TOKENS, OneRank(), whole_groups=True)
    ]
    counts = defaultdict[str, float](float)
    for part in parts:
        for name, number in objective.counts(part).items():
            counts[name] += number
    return parts, dict(counts)


def _who(chosen: ValidationSet, kind: str, row: int) -> dict[str, object]:
    """What the checks read of every row of a validation."""
    return {
        "set": chosen.name,
        "kind": kind,
        "row": row,
        "sample": 0,
        "versions": [],
        "wrong": "",
    }
