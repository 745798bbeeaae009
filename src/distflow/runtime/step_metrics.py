"""What is measured of every step's batch, and each sample's row in the samples file."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from distflow.algorithms.advantages.group import sample_scores
from distflow.data.batch import Batch
from distflow.flow.account import Account
from distflow.observe.metrics import Measured, find_metric
from distflow.training.collective import Collective


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Scores over samples with a verdict, lengths over all."""
    lengths = batch.lengths("response").double()
    metrics = {
        "rollout/avg_response_length": float(lengths.mean()),
        "rollout/avg_prompt_length": float(batch.lengths("prompt").double().mean()),
        "rollout/max_response_length": float(lengths.max()),
        "rollout/truncated": float(batch["truncated"].double().mean()),
    }
    if "token_level_scores" in batch:
        metrics |= score_metrics(scores(batch), batch["valid"])
        metrics |= equal_groups(scores(batch), batch["valid"], batch["group_index"])
    if "reward_parts" in batch:
        metrics |= part_metrics(batch["reward_parts"])
    return metrics


def scores(batch: Batch) -> Tensor:
    """The verifiers' score of each sample: `(bs,)`."""
    return sample_scores(batch["token_level_scores"], batch["response_mask"])


def score_metrics(values: Tensor, valid: Tensor) -> dict[str, float]:
    """Over the samples with a verdict; none where no sample has one. values, valid: `(bs,)`."""
    judged = values[valid].double()
    if not judged.numel():
        return {}
    return {
        "reward/mean_score": float(judged.mean()),
        "reward/std": float(judged.std(correction=0)),
        "reward/max": float(judged.max()),
        "reward/min": float(judged.min()),
    }


def equal_groups(values: Tensor, valid: Tensor, groups: Tensor) -> dict[str, float]:
    """The share of groups whose answers all scored the same, of those with two verdicts or more; none without such.

    Compared within the group they have no advantage and teach nothing. values, valid, groups: `(bs,)`.
    """
    equal = []
    for group in groups.unique().tolist():
        judged = values[valid & (groups == group)]
        if judged.numel() > 1:
            equal.append(bool(judged.max() == judged.min()))
    return {"reward/equal_groups": sum(equal) / len(equal)} if equal else {}


def part_metrics(parts: list[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each reward part over the samples that have it."""
    names = sorted({name for part in parts for name in part})
    means = {}
    for name in names:
        values = [part[name] for part in parts if name in part]
        means[f"reward/{name}/mean"] = sum(values) / len(values)
    return means


def group_metrics(account: Account, batch: Batch, step: int) -> dict[str, float]:
    """Counters of prompt groups since the start of the run, and the age of this step's tokens in versions."""
    versions = batch.flat("versions")
    versions = versions[versions >= 0]
    metrics = {
        "async/enqueued": float(account.issued),
        "async/submitted": float(account.issued),
        "async/accepted": float(account.consumed + account.complete),
        "async/running": float(account.running),
        "async/rejected": float(sum(account.dropped.values())),
        "async/stale_data_count": float(account.dropped.get("stale", 0)),
    }
    metrics |= {f"async/dropped/{reason}": float(count) for reason, count in account.dropped.items()}
    if versions.numel():
        metrics |= {
            "async/version_start": float(versions.min()),
            "async/version_end": float(versions.max()),
            "async/version_diff/mean": float((step - versions.double()).mean()),
            "async/version_diff/max": float(step - versions.min()),
        }
    return metrics


def over_ranks(measured: Sequence[Measured], collective: Collective) -> dict[str, float]:
    """What nodes measured, over all ranks: means by their weights, but for a maximum. Where two measure one thing the
    later counts.

    A number that is the same on every rank (of an update, say) stays what it is.
    """
    own = {name: (value, weight) for metrics, weight in measured for name, value in metrics.items()}
    if collective.size == 1:
        return {name: value for name, (value, _) in own.items()}
    totals = collective.sum({name: value * weight if weight else 0.0 for name, (value, weight) in own.items()})
    weights = collective.sum({name: weight for name, (_, weight) in own.items()})
    largest = collective.max({name: value for name, (value, _) in own.items()})
    return {
        name: largest[name] if _is_maximum(name) else total / weights[name] if weights[name] else 0.0
        for name, total in totals.items()
    }


def _is_maximum(name: str) -> bool:
    metric = find_metric(name)
    return metric is not None and metric.kind == "max"


def sample_rows(batch: Batch) -> list[dict[str, object]]:
    """One row a sample, for people: texts, verdicts, and the advantage (its mean over the policy's tokens)."""
    score = scores(batch).tolist() if "token_level_scores" in batch else [None] * len(batch)
    accuracy = batch["acc"].tolist() if "acc" in batch else [None] * len(batch)
    advantage = _mean_over_policy_tokens(batch, "advantages") if "advantages" in batch else [None] * len(batch)
    versions = batch.flat("versions").split(batch.lengths("response").tolist())
    return [
        {
            "uid": batch["uid"][i],
            "prompt": batch["prompts"][i],
            "response": batch["responses"][i],
            "ground_truth": batch["ground_truth"][i],
            "score": score[i],
            "acc": accuracy[i],
            "reward_parts": batch["reward_parts"][i] if "reward_parts" in batch else {},
            "extra": batch["reward_extra"][i] if "reward_extra" in batch else {},
            "errors": batch["reward_errors"][i] if "reward_errors" in batch else None,
            "advantage": advantage[i],
            "prompt_length": int(batch.lengths("prompt")[i]),
            "response_length": int(batch.lengths("response")[i]),
            "finish_reason": batch["finish_reason"][i],
            "versions": sorted(set(versions[i].tolist()) - {-1}),
            "domain": batch["domain"][i],
        }
        for i in range(len(batch))
    ]


def _mean_over_policy_tokens(batch: Batch, name: str) -> list[float]:
    mask = batch["response_mask"]
    return ((batch[name] * mask).sum(-1) / mask.sum(-1).clamp(min=1)).tolist()
