"""The validation of pipelines that generate nothing: the loss over the data's own responses."""

from collections.abc import Sequence

import torch
from torch.nn.functional import logsigmoid

from distflow.algorithms.objectives import PreferenceObjective
from distflow.data.batch import Batch
from distflow.data.sample import Sample, Segment
from distflow.graph import BoundPipeline
from distflow.runtime.sample_rows import SampleRows
from distflow.runtime.spec import ValidationSet
from distflow.training.engine import Scorer


def preference_objective(pipeline: BoundPipeline) -> PreferenceObjective | None:
    """The loss over pairs by which the pipeline trains a policy; None if it has none."""
    for node in pipeline.training_nodes:
        objective = getattr(node.fn, "keywords", {}).get("objective")
        if isinstance(objective, PreferenceObjective):
            return objective
    return None


def validation_loss(
    sets: Sequence[ValidationSet],
    actor: Scorer,
    ref: Scorer | None = None,
    objective: PreferenceObjective | None = None,
) -> tuple[dict[str, float], SampleRows]:
    """Mean negative log-likelihood per token of the data's responses (`sft/val_loss`); a row per
    response with its sum and number of tokens. For preference pairs, the metrics of a reward model,
    or of the policy's preference loss, if it is given. ref: the reference that such a loss
    reads."""
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
            rows.append(_who(chosen, "pair", i))
            for each in (row, row.rejected):
                samples.append(Sample("", i, [Segment("prompt", row.prompt_ids), *each.answer(0)]))

    batch = Batch.from_samples(samples)
    log_probs = actor.forward(batch, ("log_probs",))["log_probs"].double()
    if objective.preference_loss.has_reference:
        assert ref is not None, "the pipeline has the node that computes the reference's log-probs"
        batch["ref_log_prob"] = ref.forward(batch, ("log_probs",)).flat("log_probs")

    values = objective.values(log_probs, batch, objective.counts(batch))
    losses, chosen_rewards, rejected_rewards = objective.compare(values)
    margins = chosen_rewards - rejected_rewards
    rewards = zip(rows, chosen_rewards.tolist(), rejected_rewards.tolist(), strict=True)
    for shown, own, other in rewards:
        shown |= {"chosen": own, "rejected": other}

    return {
        "preference/val_loss": float(losses.mean()),
        "preference/val_accuracy": float((margins > 0).double().mean()),
        "preference/val_margin": float(margins.mean()),
    }, rows


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
