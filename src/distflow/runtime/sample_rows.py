"""A readable row for each sample of a batch, as the samples file has it."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from distflow.algorithms.advantages.group_estimator_base import sample_scores
from distflow.data.batch import Batch

SampleRows = list[dict[str, object]]
"""A row for each sample."""


def sample_rows(batch: Batch) -> SampleRows:
    """Texts, scores, the advantage (mean over the policy's tokens), and the share of these tokens
    that is masked in the loss. A sample with a reward error has no score unless `reward.on_error`
    set one, and is neither right nor wrong."""
    nothing = [None] * len(batch)
    valid = batch["valid"].tolist()
    errors = _column(batch, "reward_errors", nothing)
    score = scores_of(batch, "token_level_scores")
    reward = scores_of(batch, "token_level_rewards")
    accuracy = batch["acc"].tolist() if "acc" in batch else nothing
    is_trained = "advantages" in batch
    response_lengths = batch.lengths("response").tolist()
    versions = batch.flat("versions").split(response_lengths)
    columns: dict[str, Sequence[object]] = {
        "uid": batch["uid"],
        "prompt": batch["prompts"],
        "response": batch["responses"],
        "ground_truth": batch["ground_truth"],
        "score": score,
        "acc": [accuracy[i] if valid[i] and not errors[i] else None for i in range(len(batch))],
        "reward_parts": _column(batch, "reward_parts", [{}] * len(batch)),
        "extra": _column(batch, "reward_extra", [{}] * len(batch)),
        "errors": errors,
        "advantage": _mean_over_policy_tokens(batch, "advantages") if is_trained else nothing,
        "prompt_length": batch.lengths("prompt").tolist(),
        "response_length": response_lengths,
        "finish_reason": batch["finish_reason"],
        "versions": [sorted(set(own.tolist()) - {-1}) for own in versions],
        "domain": batch["domain"],
    }
    if reward != score:
        columns["reward"] = reward
    if any(said := _column(batch, "conversation", nothing)):
        columns["conversation"] = said
    if any(shown := _column(batch, "images", [])):
        columns["images"] = [list(chain.from_iterable(paths)) for paths in shown]
    if is_trained:
        columns["masked"] = [1.0 - share for share in _mean_over_policy_tokens(batch, "loss_mask")]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def scores_of(batch: Batch, name: str) -> list[float | None]:
    """The sum of each sample's scores or rewards, by the column's name; None without one, or for a
    reward error."""
    if name not in batch:
        return [None] * len(batch)
    valid = batch["valid"].tolist()
    found = sample_scores(batch[name], batch["response_mask"]).tolist()
    return [found[i] if valid[i] else None for i in range(len(batch))]


def _column(batch: Batch, name: str, default: Sequence[Any]) -> Sequence[Any]:
    return batch[name] if name in batch else default  # noqa: SIM401  no dict


def _mean_over_policy_tokens(batch: Batch, name: str) -> list[float]:
    mask = batch["response_mask"]
    return ((batch[name] * mask).sum(-1) / mask.sum(-1).clamp(min=1)).tolist()
