"""The metrics of a step: of its samples, of prompt groups, and of nodes over all ranks."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.data.dataset_columns import DEFAULT_DOMAIN
from distflow.observe.metrics import Measured, find_metric
from distflow.rewards.reward_results import is_right
from distflow.runtime.sample_rows import scores_of
from distflow.scheduling.group_states import GroupCounts
from distflow.training.engine import Collective
from distflow.user_values import LARGEST_NUMBER

DECODED = "rollout/decoded_tokens"
DECODED_S = "rollout/decode_s"

STEPS_OF_FLOAT = 1000
"""Fewer steps of float64 between the lowest and the highest score of a group hold no three digits
of a difference."""
_LARGE = 2.0**30
"""Smaller scores differ by so little only by the rounding of sums."""


class SampleFigures(NamedTuple):
    """What the metrics read of one sample."""

    group: int
    domain: str
    prompt_length: int
    response_length: int
    is_truncated: bool
    score: float | None
    """None if nothing scores, or for a reward error."""
    reward: float | None
    """What advantages are computed from: the score, unless a node changed it."""
    acc: float | None
    """None without a score."""
    parts: Mapping[str, float]
    """Of the reward, by name."""
    advantage: float | None
    """Of the last token of the policy, NaN without one; None if the step has no advantages."""
    largest: float
    """The largest absolute advantage (or return, if a critic learns it) of its tokens."""


@dataclass(frozen=True)
class Figures:
    """The inputs of a step's metrics, of one rank or of several joined."""

    samples: list[SampleFigures]
    versions: Counter[int]
    """The number of the policy's tokens by version."""
    num_tokens: int
    """Including prompts."""

    @staticmethod
    def of(batch: Batch) -> "Figures":
        size = len(batch)
        accuracies: list[float | None] = [None] * size
        if "token_level_scores" in batch and "acc" in batch:
            valid = batch["valid"].tolist()
            found = batch["acc"].tolist()
            accuracies = [found[i] if valid[i] else None for i in range(size)]

        advantages: list[float | None] = [None] * size
        largest = [0.0] * size
        if "advantages" in batch:
            advantages, largest = _advantages(batch)
        columns = (
            batch["group_index"].tolist(),
            batch["domain"],
            batch.lengths("prompt").tolist(),
            _longest_responses(batch).tolist(),
            batch["truncated"].tolist(),
            scores_of(batch, "token_level_scores"),
            scores_of(batch, "token_level_rewards"),
            accuracies,
            batch["reward_parts"] if "reward_parts" in batch else [{}] * size,  # noqa: SIM401
            advantages,
            largest,
        )
        samples = [SampleFigures(*values) for values in zip(*columns, strict=True)]
        versions = batch.flat("versions")
        counts = Counter[int](versions[versions >= 0].tolist())

        return Figures(samples, counts, int(batch.lengths("sequence").sum()))

    @staticmethod
    def joined(ranks: Sequence["Figures"]) -> "Figures":
        """The figures of all ranks, in order."""
        samples = list(chain.from_iterable(rank.samples for rank in ranks))
        versions = Counter[int]()
        for rank in ranks:
            versions += rank.versions
        return Figures(samples, versions, sum(rank.num_tokens for rank in ranks))


def _longest_responses(batch: Batch) -> Tensor:
    """Tokens of each response; with branches, of the longest conversation from its first drawn
    token on."""
    lengths = batch.lengths("response").clone()
    masks = batch.flat("response_mask").split(lengths.tolist())

    branches = batch["forks"] if "forks" in batch else ()  # noqa: SIM401  no dict
    for row, forks in enumerate(branches):
        if not forks:
            continue
        parts = masks[row].tensor_split([start for _, start in forks])
        drawn = [part > 0 for part in parts if part.any()]
        lengths[row] = max(len(part) - int(part.int().argmax()) for part in drawn)

    return lengths


def _advantages(batch: Batch) -> tuple[list[float | None], list[float]]:
    """As in `SampleFigures`."""
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

    return last.tolist(), largest.tolist()


def batch_metrics(figures: Figures) -> dict[str, float]:
    """Scores over samples without a reward error, lengths over all."""
    samples = figures.samples
    lengths = [sample.response_length for sample in samples]
    metrics = {
        "rollout/avg_response_length": sum(lengths) / len(samples),
        "rollout/avg_prompt_length": sum(each.prompt_length for each in samples) / len(samples),
        "rollout/max_response_length": float(max(lengths)),
        "rollout/truncated": sum(sample.is_truncated for sample in samples) / len(samples),
    }
    metrics |= _score_metrics(_scores(samples))
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if rewards != _scores(samples):
        metrics["reward/mean_reward"] = math.fsum(rewards) / len(rewards)
    metrics |= _compare_scores(samples)
    right = [is_right(sample.acc) for sample in samples if sample.acc is not None]
    if right:
        metrics["reward/accuracy"] = sum(right) / len(right)
    for name, value in part_means([sample.parts for sample in samples]).items():
        metrics[f"reward/{name}/mean"] = value
    of_domain = defaultdict[str, list[SampleFigures]](list)
    for sample in samples:
        of_domain[sample.domain].append(sample)

    if set(of_domain) != {DEFAULT_DOMAIN}:
        for domain, own in of_domain.items():
            metrics |= _domain_metrics(domain, own)

    return metrics


def _domain_metrics(domain: str, samples: Sequence[SampleFigures]) -> dict[str, float]:
    metrics = {f"domains/{domain}/groups": float(len({sample.group for sample in samples}))}
    if scores := _scores(samples):
        metrics[f"reward/{domain}/mean_score"] = math.fsum(scores) / len(scores)
    for name, value in part_means([sample.parts for sample in samples]).items():
        metrics[f"reward/{domain}/{name}"] = value
    return metrics


def _scores(samples: Sequence[SampleFigures]) -> list[float]:
    return [sample.score for sample in samples if sample.score is not None]


def _score_metrics(scores: Sequence[float]) -> dict[str, float]:
    if not scores:
        return {}

    mean = math.fsum(scores) / len(scores)  # large scores may cancel

    # differences of large scores are exact, their mean is not
    near = [score - mean for score in scores]
    rest = math.fsum(near) / len(near)
    squares = [(difference - rest) ** 2 for difference in near]

    return {
        "reward/mean_score": mean,
        "reward/std": math.sqrt(math.fsum(squares) / len(squares)),
        "reward/max": max(scores),
        "reward/min": min(scores),
    }


def part_means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each reward part over the samples that have it, by name."""
    found = dict[str, float]()
    for name in sorted(set().union(*parts)):
        values = [part[name] for part in parts if name in part]
        found[name] = math.fsum(values) / len(values)
    return found


def _compare_scores(samples: Sequence[SampleFigures]) -> dict[str, float]:
    """`reward/frac_reward_zero_std`: the share of groups with equal scores among those with at
    least two, whose responses have zero group-relative advantage.
    `reward/lost_in_float64_frac`: the share of groups whose scores are too large for float64 to
    hold their differences. `reward/lost_in_float32_frac`: the share of samples whose advantage
    float32 does not hold. The last two only if they are not 0."""
    groups = defaultdict[int, list[SampleFigures]](list)
    for sample in samples:
        if sample.score is not None:
            groups[sample.group].append(sample)

    equal = list[bool]()
    num_lost = 0
    num_rounded = 0
    for own in groups.values():
        scores = _scores(own)
        if len(scores) > 1:
            equal.append(max(scores) == min(scores))
        num_lost += _lose_differences(scores, [sample.parts for sample in own])
        num_rounded += _count_rounded(own)

    metrics = dict[str, float]()
    if equal:
        metrics["reward/frac_reward_zero_std"] = sum(equal) / len(equal)
    if num_lost:
        metrics["reward/lost_in_float64_frac"] = num_lost / len(groups)
    if num_rounded:
        metrics["reward/lost_in_float32_frac"] = num_rounded / sum(map(len, groups.values()))
    return metrics


def _count_rounded(group: Sequence[SampleFigures]) -> int:
    """The samples whose advantage float32 does not hold: its square is beyond the range, so that
    gradients and value losses are, or it equals that of a sample with another score."""
    first = dict[float, SampleFigures]()
    number = 0
    for sample in group:
        if sample.advantage is None:
            continue
        rounded = float(torch.tensor(sample.advantage, dtype=torch.float32))
        same = first.setdefault(rounded, sample)
        is_same = same.score != sample.score and same.advantage != sample.advantage
        number += is_same or sample.largest * sample.largest > LARGEST_NUMBER

    return number


def _lose_differences(scores: Sequence[float], parts: Sequence[Mapping[str, float]]) -> bool:
    """Whether the scores of a group, or parts that they are sums of, differ by less than float64
    holds beside their size. From 2^53 on, where it has no odd numbers, equal ones may have differed
    before they were floats."""
    size = max(map(abs, scores))
    spread = max(scores) - min(scores)
    if len(scores) < 2 or size < _LARGE:
        return False

    if not spread:
        for name in parts[0]:
            values = [part[name] for part in parts if name in part]
            spread = max(spread, max(values) - min(values))

    if spread:
        return spread < STEPS_OF_FLOAT * math.ulp(size)
    return size >= 2.0**53


def group_metrics(
    group_counts: GroupCounts, versions: Mapping[int, int], step: int
) -> dict[str, float]:
    """Counts of prompt groups since the start of the run, and the staleness of this step's tokens.

    versions: number of tokens by version.
    """
    dropped = group_counts.dropped
    metrics = {
        "async/enqueued": float(group_counts.issued),
        "async/submitted": float(group_counts.issued),
        "async/accepted": float(group_counts.consumed + group_counts.complete),
        "async/running": float(group_counts.running),
        "async/rejected": float(sum(dropped.values())),
        "async/stale_data_count": float(dropped.get("stale", 0)),
    }
    for reason, count in dropped.items():
        metrics[f"async/dropped/{reason}"] = float(count)
    if group_counts.aborted:
        metrics["async/aborted"] = float(group_counts.aborted)

    for name, domain in group_counts.domains.items():
        metrics[f"domains/{name}/issued"] = float(domain.issued)
        metrics[f"domains/{name}/consumed"] = float(domain.consumed)
        for reason, count in domain.dropped.items():
            metrics[f"domains/{name}/dropped/{reason}"] = float(count)
        if domain.aborted:
            metrics[f"domains/{name}/aborted"] = float(domain.aborted)

    if versions:
        ages = sum((step - version) * n for version, n in versions.items())
        metrics["async/version_start"] = float(min(versions))
        metrics["async/version_end"] = float(max(versions))
        metrics["async/version_diff/mean"] = ages / sum(versions.values())
        metrics["async/version_diff/max"] = float(step - min(versions))
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
    own = dict[str, tuple[float, float]]()
    for metrics, weight in measured:
        for name, value in metrics.items():
            own[name] = (value, weight)

    if collective.size == 1:
        return {name: value for name, (value, _) in own.items()}

    pairs_of = defaultdict[str, list[tuple[float, float]]](list)
    for rank in collective.gather(own):
        for name, pair in rank.items():
            pairs_of[name].append(pair)

    found = dict[str, float]()
    for name, pairs in pairs_of.items():
        metric = find_metric(name)
        if metric is not None and metric.kind == "max":
            found[name] = max(value for value, _ in pairs)
            continue

        weighted = [(value, weight) for value, weight in pairs if weight]
        total = sum(weight for _, weight in weighted)
        found[name] = sum(v * w for v, w in weighted) / total if total else 0.0

    return found


def throughput(
    metrics: dict[str, float], phases: Iterable[str], own: int, ranks: Collective
) -> dict[str, float]:
    """`throughput/rollout` from the tokens that engines decoded, which it removes from the metrics;
    and `throughput/PHASE`: tokens per second over all ranks that have the phase. own: tokens of
    this rank."""
    found = dict[str, float]()
    decoded = metrics.pop(DECODED, 0.0)
    if decode_s := metrics.pop(DECODED_S, 0.0):
        found["throughput/rollout"] = decoded / decode_s
    timings = {phase: metrics.get(f"timing_s/{phase}") for phase in phases}

    num_tokens = Counter[str]()
    seconds = defaultdict[str, float](float)
    for number, seconds_of in ranks.gather((own, timings)):
        for phase, spent_s in seconds_of.items():
            if spent_s is not None:
                num_tokens[phase] += number
                seconds[phase] += spent_s

    for phase, spent_s in seconds.items():
        found[f"throughput/{phase}"] = num_tokens[phase] / spent_s
    return found
