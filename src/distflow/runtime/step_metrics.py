"""The metrics of every step's batch, each sample's row in the samples file, and the results of a
validation."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from math import comb
from operator import add
from typing import Any

import torch
from torch import Tensor

from distflow.algorithms.advantages.group_estimator_base import sample_scores
from distflow.data.batch import Batch
from distflow.data.dataset_columns import DEFAULT_DOMAIN
from distflow.errors import UserError
from distflow.observe.metrics import Measured, find_metric
from distflow.rewards.reward_results import is_right
from distflow.scheduling.group_states import GroupCounts
from distflow.training.engine import Collective
from distflow.user_values import LARGEST_NUMBER

DECODED = "rollout/decoded_tokens"
DECODED_S = "rollout/decode_s"


@dataclass(frozen=True)
class Figures:
    """The inputs of a step's metrics: one value for each sample, of one rank or of several joined.

    scores, valid: None if nothing scores. parts: of the reward. advantages: of the last token of
    the policy (NaN without one), and the largest absolute advantage (or return, if a critic learns
    it) of all tokens, `(bs, 2)`. versions: the number of the policy's tokens by version.
    num_tokens: including prompts.
    """

    prompt_lengths: Tensor
    response_lengths: Tensor
    truncated: Tensor
    groups: Tensor
    domains: list[str]
    scores: Tensor | None
    valid: Tensor | None
    acc: Tensor | None
    parts: list[Mapping[str, float]] | None
    advantages: Tensor | None
    versions: Counter[int]
    num_tokens: int

    @staticmethod
    def of(batch: Batch) -> "Figures":
        is_scored = "token_level_scores" in batch
        versions = batch.flat("versions")
        return Figures(
            batch.lengths("prompt"),
            _longest_responses(batch),
            batch["truncated"],
            batch["group_index"],
            batch["domain"],
            scores(batch) if is_scored else None,
            batch["valid"] if is_scored else None,
            batch["acc"] if is_scored and "acc" in batch else None,
            batch["reward_parts"] if "reward_parts" in batch else None,  # noqa: SIM401  no dict
            _advantages(batch) if "advantages" in batch else None,
            Counter(versions[versions >= 0].tolist()),
            int(batch.lengths("sequence").sum()),
        )

    @staticmethod
    def joined(ranks: Sequence["Figures"]) -> "Figures":
        """The figures of all ranks, in order."""
        values = ([getattr(rank, each.name) for rank in ranks] for each in fields(Figures))
        return Figures(*map(_joined_values, values))


def _longest_responses(batch: Batch) -> Tensor:
    """Tokens of each response; with branches, of the longest conversation from its first drawn
    token on."""
    lengths = batch.lengths("response").clone()
    masks = batch.flat("response_mask").split(lengths.tolist())
    branches = batch["forks"] if "forks" in batch else ()  # noqa: SIM401  no dict
    for row, forks in enumerate(branches):
        if forks:
            parts = masks[row].tensor_split([start for _, start in forks])
            lengths[row] = max(
                len(part) - int((part > 0).int().argmax()) for part in parts if part.any()
            )
    return lengths


def _advantages(batch: Batch) -> Tensor:
    is_drawn = batch.flat("response_mask").cpu() > 0
    rows = batch.rows()[is_drawn]
    values = batch.flat("advantages").cpu().double()[is_drawn]
    places = torch.full((len(batch),), -1).scatter_reduce(0, rows, torch.arange(len(rows)), "amax")
    last = torch.full((len(batch),), torch.nan, dtype=torch.float64)
    last[places >= 0] = values[places[places >= 0]]
    largest = torch.zeros(len(batch), dtype=torch.float64)
    for name in ("advantages", "returns") if "values" in batch else ("advantages",):
        sizes = batch.flat(name).cpu().double()[is_drawn].abs()
        largest = largest.scatter_reduce(0, rows, sizes, "amax")
    return torch.stack([last, largest], dim=1)


def _joined_values(values: list[Any]) -> Any:
    """Tensors and lists are concatenated, numbers and counts added. None if the first rank has
    none, as its samples lack the column; otherwise ranks without values are skipped."""
    if values[0] is None:
        return None
    values = [value for value in values if value is not None]
    return torch.cat(values) if isinstance(values[0], Tensor) else reduce(add, values)


def batch_metrics(figures: Figures) -> dict[str, float]:
    """Scores over samples without a reward error, lengths over all."""
    lengths = figures.response_lengths.double()
    metrics = {
        "rollout/avg_response_length": float(lengths.mean()),
        "rollout/avg_prompt_length": float(figures.prompt_lengths.double().mean()),
        "rollout/max_response_length": float(lengths.max()),
        "rollout/truncated": float(figures.truncated.double().mean()),
    }
    if figures.scores is not None and figures.valid is not None:
        metrics |= score_metrics(figures.scores, figures.valid)
        metrics |= equal_groups(figures.scores, figures.valid, figures.groups)
        if figures.acc is not None and bool(figures.valid.any()):
            right = [is_right(accuracy) for accuracy in figures.acc[figures.valid].tolist()]
            metrics["reward/accuracy"] = sum(right) / len(right)
        metrics |= differences_lost(figures)
    if figures.parts is not None:
        means = part_means(figures.parts)
        metrics = _joined(metrics, {f"reward/{name}/mean": value for name, value in means.items()})
    if set(figures.domains) - {DEFAULT_DOMAIN}:
        metrics = _joined(metrics, domain_metrics(figures))
    return metrics


def _joined(metrics: dict[str, float], others: dict[str, float]) -> dict[str, float]:
    """Raises UserError if two metrics have the same name, e.g. a part `mean` of a domain named like
    another part."""
    if clash := min(metrics.keys() & others.keys(), default=None):
        raise UserError(
            f"the metric '{clash}' would have two meanings: rename that part of the reward, or "
            "that domain"
        )
    return metrics | others


def domain_metrics(figures: Figures) -> dict[str, float]:
    """For each domain: its number of groups in this step, `reward/<domain>/mean_score` and each
    part of its reward, `reward/<domain>/<part>`, over the samples that have it."""
    metrics = {}
    for domain in sorted(set(figures.domains)):
        own = [i for i, name in enumerate(figures.domains) if name == domain]
        metrics[f"domains/{domain}/groups"] = float(figures.groups[own].unique().numel())
        if figures.scores is not None and figures.valid is not None:
            scored = score_metrics(figures.scores[own], figures.valid[own])
            metrics |= {
                f"reward/{domain}/mean_score": value
                for name, value in scored.items()
                if "mean" in name
            }
        if figures.parts is not None:
            parts = part_means([figures.parts[i] for i in own])
            metrics = _joined(
                metrics, {f"reward/{domain}/{name}": value for name, value in parts.items()}
            )
    return metrics


def scores(batch: Batch) -> Tensor:
    """The score of each sample: `(bs,)`."""
    return sample_scores(batch["token_level_scores"], batch["response_mask"])


def score_metrics(values: Tensor, valid: Tensor) -> dict[str, float]:
    """Score metrics over the samples without a reward error; empty if all have one. values, valid:
    `(bs,)`."""
    valid_scores = values[valid].double()
    if not valid_scores.numel():
        return {}
    mean = math.fsum(valid_scores.tolist()) / len(valid_scores)  # large scores may cancel
    # differences of large scores are exact, their mean is not
    near = valid_scores - mean
    return {
        "reward/mean_score": mean,
        "reward/std": float((near - near.mean()).square().mean().sqrt()),
        "reward/max": float(valid_scores.max()),
        "reward/min": float(valid_scores.min()),
    }


def equal_groups(values: Tensor, valid: Tensor, groups: Tensor) -> dict[str, float]:
    """The share of groups with equal scores among those with at least two scores; empty if there
    are none.

    Their responses have zero group-relative advantage. values, valid, groups: `(bs,)`.
    """
    equal = []
    for group in groups.unique().tolist():
        valid_scores = values[valid & (groups == group)]
        if valid_scores.numel() > 1:
            equal.append(bool(valid_scores.max() == valid_scores.min()))
    return {"reward/frac_reward_zero_std": sum(equal) / len(equal)} if equal else {}


STEPS_OF_FLOAT = 1000
"""Fewer steps of float64 between the lowest and the highest score of a group hold no three digits
of a difference."""
_LARGE = 2.0**30
"""Smaller scores differ by so little only by the rounding of sums."""


def differences_lost(figures: Figures) -> dict[str, float]:
    """`reward/lost_in_float64_frac`: the share of groups whose scores are too large for float64 to
    hold their differences. `reward/lost_in_float32_frac`: the share of samples whose advantage
    float32 does not hold: its square is beyond the range, so that gradients and value losses are,
    or it equals that of a sample of the group with another score. Each only if it is not 0."""
    assert figures.scores is not None and figures.valid is not None
    scores = figures.scores.tolist()
    groups = defaultdict[int, list[int]](list)
    found = dict[str, float]()
    for row, (group, is_valid) in enumerate(
        zip(figures.groups.tolist(), figures.valid.tolist(), strict=True)
    ):
        if is_valid:
            groups[group].append(row)
    parts = figures.parts or [{}] * len(scores)
    lost = [
        _lose_differences([scores[row] for row in own], [parts[row] for row in own])
        for own in groups.values()
    ]
    if any(lost):
        found["reward/lost_in_float64_frac"] = sum(lost) / len(lost)
    if figures.advantages is not None:
        last, largest = figures.advantages.unbind(dim=1)
        rounded = last.float().tolist()
        exact = last.tolist()
        is_beyond = (largest.square() > LARGEST_NUMBER).tolist()
        number = 0
        for own in groups.values():
            first = dict[float, int]()
            for row in own:
                same = first.setdefault(rounded[row], row)
                is_same = scores[same] != scores[row] and exact[same] != exact[row]
                number += is_same or is_beyond[row]
        if number:
            found["reward/lost_in_float32_frac"] = number / sum(map(len, groups.values()))
    return found


def _lose_differences(scores: Sequence[float], parts: Sequence[Mapping[str, float]]) -> bool:
    """Whether the scores of a group, or parts that they are sums of, differ by less than float64
    holds beside their size. From 2^53 on, where it has no odd numbers, equal ones may have differed
    before they were floats."""
    size = max(map(abs, scores))
    spread = max(scores) - min(scores)
    if len(scores) < 2 or size < _LARGE:
        return False
    for name in parts[0] if not spread else ():
        values = [part[name] for part in parts if name in part]
        spread = max(spread, max(values) - min(values))
    return spread < STEPS_OF_FLOAT * math.ulp(size) if spread else size >= 2.0**53


def part_means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each reward part over the samples that have it, by name."""
    found = dict[str, float]()
    for name in sorted({name for part in parts for name in part}):
        values = [part[name] for part in parts if name in part]
        found[name] = math.fsum(values) / len(values)
    return found


def group_metrics(
    group_counts: GroupCounts, versions: Mapping[int, int], step: int
) -> dict[str, float]:
    """Counts of prompt groups since the start of the run, and the staleness of this step's tokens.

    versions: number of tokens by version.
    """
    metrics = {
        "async/enqueued": float(group_counts.issued),
        "async/submitted": float(group_counts.issued),
        "async/accepted": float(group_counts.consumed + group_counts.complete),
        "async/running": float(group_counts.running),
        "async/rejected": float(sum(group_counts.dropped.values())),
        "async/stale_data_count": float(group_counts.dropped.get("stale", 0)),
    }
    metrics |= {
        f"async/dropped/{reason}": float(count) for reason, count in group_counts.dropped.items()
    }
    if group_counts.aborted:
        metrics |= {
            "async/aborted": float(group_counts.aborted),
            "async/aborted_tokens": float(group_counts.aborted_tokens),
        }
    for name, domain in group_counts.domains.items():
        metrics |= {
            f"domains/{name}/issued": float(domain.issued),
            f"domains/{name}/consumed": float(domain.consumed),
        }
        metrics |= {
            f"domains/{name}/dropped/{reason}": float(count)
            for reason, count in domain.dropped.items()
        }
        if domain.aborted:
            metrics[f"domains/{name}/aborted"] = float(domain.aborted)
    if versions:
        total = sum(versions.values())
        metrics |= {
            "async/version_start": float(min(versions)),
            "async/version_end": float(max(versions)),
            "async/version_diff/mean": sum((step - version) * n for version, n in versions.items())
            / total,
            "async/version_diff/max": float(step - min(versions)),
        }
        metrics |= staleness_shares({step - version: count for version, count in versions.items()})
    return metrics


def staleness_shares(staleness: Mapping[int, int]) -> dict[str, float]:
    """`async/staleness/N`, the share of tokens with staleness N, for each N up to the largest.

    staleness: number of tokens by staleness, at least one token.
    """
    counts = Counter[int]()
    for steps, count in staleness.items():
        counts[max(steps, 0)] += count
    return {
        f"async/staleness/{steps}": counts[steps] / counts.total()
        for steps in range(max(counts) + 1)
    }


def over_ranks(measured: Sequence[Measured], collective: Collective) -> dict[str, float]:
    """The metrics of nodes over all ranks: weighted means, except for maxima. If two nodes of a
    rank have the same metric, the later one counts; ranks that lack a metric are skipped.

    A number that is the same on every rank (e.g. of an update) is unchanged.
    """
    own = {name: (value, weight) for metrics, weight in measured for name, value in metrics.items()}
    if collective.size == 1:
        return {name: value for name, (value, _) in own.items()}
    ranks = collective.gather(own)
    found = dict[str, float]()
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        pairs = [rank[name] for rank in ranks if name in rank]
        metric = find_metric(name)
        total = sum(weight for _, weight in pairs)
        if metric is not None and metric.kind == "max":
            found[name] = max(value for value, _ in pairs)
        else:
            found[name] = (
                sum(value * weight for value, weight in pairs if weight) / total if total else 0.0
            )
    return found


def throughput(
    metrics: dict[str, float], phases: Iterable[str], own: int, ranks: Collective
) -> dict[str, float]:
    """`throughput/rollout` from the tokens that engines decoded, which it removes from the metrics;
    and `throughput/PHASE`: tokens per second over all ranks that have the phase. own: tokens of
    this rank."""
    tokens = metrics.pop(DECODED, 0.0)
    seconds = metrics.pop(DECODED_S, 0.0)
    found = {"throughput/rollout": tokens / seconds} if seconds else {}
    timings = {
        phase: metrics[f"timing_s/{phase}"] for phase in phases if f"timing_s/{phase}" in metrics
    }
    gathered = ranks.gather((own, timings))
    for phase in dict.fromkeys(phase for _, seconds_of in gathered for phase in seconds_of):
        pairs = [
            (number, seconds_of[phase]) for number, seconds_of in gathered if phase in seconds_of
        ]
        found[f"throughput/{phase}"] = sum(number for number, _ in pairs) / sum(
            seconds for _, seconds in pairs
        )
    return found


def sample_rows(batch: Batch) -> list[dict[str, object]]:
    """A readable row for each sample: texts, scores, the advantage (mean over the policy's tokens),
    and the share of these tokens that is masked in the loss. A sample with a reward error has no
    score unless `reward.on_error` set one, and is neither right nor wrong."""
    score = scores(batch).tolist() if "token_level_scores" in batch else [None] * len(batch)
    accuracy = batch["acc"].tolist() if "acc" in batch else [None] * len(batch)
    # no dict
    errors = batch["reward_errors"] if "reward_errors" in batch else [None] * len(batch)  # noqa: SIM401
    parts, extra = (
        batch[name] if name in batch else [{}] * len(batch)
        for name in ("reward_parts", "reward_extra")
    )
    valid = batch["valid"].tolist()
    is_trained = "advantages" in batch
    prompt_lengths, response_lengths = (
        batch.lengths(axis).tolist() for axis in ("prompt", "response")
    )
    versions = batch.flat("versions").split(response_lengths)
    columns: dict[str, Sequence[object]] = {
        "uid": batch["uid"],
        "prompt": batch["prompts"],
        "response": batch["responses"],
        "ground_truth": batch["ground_truth"],
        "score": [each if is_valid else None for each, is_valid in zip(score, valid, strict=True)],
        "acc": [accuracy[i] if valid[i] and not errors[i] else None for i in range(len(batch))],
        "reward_parts": parts,
        "extra": extra,
        "errors": errors,
        "advantage": _mean_over_policy_tokens(batch, "advantages")
        if is_trained
        else [None] * len(batch),
        "prompt_length": prompt_lengths,
        "response_length": response_lengths,
        "finish_reason": batch["finish_reason"],
        "versions": [sorted(set(own.tolist()) - {-1}) for own in versions],
        "domain": batch["domain"],
    }
    if "conversation" in batch and any(said := batch["conversation"]):
        columns["conversation"] = said
    if "images" in batch and any(shown := batch["images"]):
        columns["images"] = [[path for own in paths for path in own] for paths in shown]
    if is_trained:
        columns["masked"] = [1.0 - share for share in _mean_over_policy_tokens(batch, "loss_mask")]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _mean_over_policy_tokens(batch: Batch, name: str) -> list[float]:
    mask = batch["response_mask"]
    return ((batch[name] * mask).sum(-1) / mask.sum(-1).clamp(min=1)).tolist()


SampleRows = list[dict[str, object]]
"""A row for each sample (see `sample_rows`) with its `set` and `kind` ("greedy" or "sampled")."""

Labels = tuple[str, str]
"""Domain and tag of a prompt."""
Outcomes = dict[Labels, list[list[bool]]]
"""By domain and tag: for each prompt, whether each of its responses is right."""


@dataclass(frozen=True)
class ValidationResults:
    """Results on validation prompts. errors: responses without a score, which count as wrong."""

    greedy: Outcomes
    sampled: Outcomes
    errors: int
    rows: SampleRows

    @staticmethod
    def joined(parts: Sequence["ValidationResults"]) -> "ValidationResults":
        """The results of several parts of the same prompts."""
        greedy = _join_outcomes([part.greedy for part in parts])
        sampled = _join_outcomes([part.sampled for part in parts])
        rows = [row for part in parts for row in part.rows]
        return ValidationResults(greedy, sampled, sum(part.errors for part in parts), rows)

    def metrics(self) -> dict[str, float]:
        """`val_correct/*` and `val/errors`.

        `mean` is the share of greedy responses that are right (of sampled ones if none is greedy);
        `mean@n` and `pass@k` are estimated from the n sampled responses to each prompt.
        """
        means = {
            f"val_correct/{name}/mean": sum(map(sum, groups)) / sum(map(len, groups))
            for name, groups in _everything_and_each(self.greedy or self.sampled).items()
        }
        return means | _at_k(self.sampled) | {"val/errors": float(self.errors)}

    def num_prompts(self) -> dict[str, int]:
        """The number of greedy responses over which each `val_correct/NAME/mean` is computed."""
        return {
            f"val_correct/{name}/mean": len(groups)
            for name, groups in _everything_and_each(self.greedy).items()
        }


def _join_outcomes(parts: Sequence[Outcomes]) -> Outcomes:
    whole: Outcomes = {}
    for part in parts:
        for labels, groups in part.items():
            whole.setdefault(labels, []).extend(groups)
    return whole


def _at_k(sampled: Outcomes) -> dict[str, float]:
    """`pass@k` for the powers of two up to n and for n, the number of responses to a prompt;
    `mean@n`."""
    metrics = {}
    for name, groups in _everything_and_each(sampled).items():
        n = len(groups[0])
        metrics[f"val_correct/{name}/mean@{n}"] = sum(map(sum, groups)) / (n * len(groups))
        for k in sorted({2**i for i in range(n.bit_length())} | {n}):
            metrics[f"val_correct/{name}/pass@{k}"] = sum(
                pass_at_k(n, sum(g), k) for g in groups
            ) / len(groups)
    return metrics


def _everything_and_each(outcomes: Outcomes) -> dict[str, list[list[bool]]]:
    """The outcomes under each name of `validation_names`."""
    return {
        name: [g for labels in own for g in outcomes[labels]]
        for name, own in validation_names(outcomes).items()
    }


def validation_names(found: Iterable[Labels]) -> dict[str, list[Labels]]:
    """The names in metrics, with the domains and tags that each covers: "all"; every domain, if
    rows name any; every tag; and DOMAIN/TAG, for a tag of several domains. Raises UserError if one
    name stands for different prompts."""
    labels = list(dict.fromkeys(found))
    names = dict[str, list[Labels]]()
    of_domain = {domain: [each for each in labels if each[0] == domain] for domain, _ in labels}
    of_tag = {tag: [each for each in labels if each[1] == tag] for _, tag in labels if tag}
    sets = [("all", labels)] if labels else []
    sets += [*(of_domain.items() if set(of_domain) != {DEFAULT_DOMAIN} else ()), *of_tag.items()]
    sets += [("/".join(each), [each]) for each in labels if len(of_tag.get(each[1], ())) > 1]
    for name, own in sets:
        if names.setdefault(name, own) != own:
            raise UserError(
                f"the accuracy val_correct/{name}/mean would be over two sets of rows: rename the "
                f"tag '{name}' (column "
                "data.tag_key), or the domain"
            )
    return names


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased chance that one of k responses is right: 1 − C(n − c, k) / C(n, k)
    (arXiv:2107.03374, equation 1)."""
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)
