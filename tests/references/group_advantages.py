"""Estimators that compare the samples of one prompt: one advantage a sample."""

import math
from collections.abc import Mapping, Sequence

from tests.references import numbers
from tests.references.samples import (
    Advantages,
    Sample,
    by_scores,
    groups_of,
    on_all_tokens,
)


def grpo(
    samples: Sequence[Sample],
    norm_adv_by_std_in_grpo: bool = True,
    adv_epsilon: float = 1e-6,
    scale_rewards: str | None = None,
) -> Advantages:
    """(r − mean) / (std + ε) of the group (arXiv:2402.03300); without std Dr.GRPO
    (arXiv:2503.20783); over the batch's std (arXiv:2508.08221)."""
    if scale_rewards is None:
        scale_rewards = "group" if norm_adv_by_std_in_grpo else "none"
    everyone = [sample.score for sample in samples]

    def rule(own: float, group: Sequence[float]) -> float:
        if scale_rewards == "batch":
            if len(group) == 1:
                return 0.0
            return numbers.above_mean(own, group) / (numbers.std(everyone) + adv_epsilon)
        return normalised(own, group, scale_rewards == "group", adv_epsilon)

    return on_all_tokens(samples, by_scores(samples, rule))


def normalised(own: float, group: Sequence[float], by_std: bool, epsilon: float) -> float:
    """GRPO's advantage. A group of one has no mean: its reward counts as it is."""
    if len(group) == 1:
        return own / (1.0 + epsilon) if by_std else own
    if max(group) == min(group):
        return 0.0
    above = numbers.above_mean(own, group)
    return above / (numbers.std(group) + epsilon) if by_std else above


def rloo(samples: Sequence[Sample]) -> Advantages:
    """r − mean of the others (arXiv:2402.14740): n / (n − 1) times the distance to the mean."""

    def rule(own: float, group: Sequence[float]) -> float:
        if len(group) == 1:
            return 0.0
        return numbers.above_mean(own, group) * len(group) / (len(group) - 1)

    return on_all_tokens(samples, by_scores(samples, rule))


def opo(samples: Sequence[Sample]) -> Advantages:
    """r − Σ lᵢ rᵢ / Σ lᵢ, l the lengths (arXiv:2505.23585)."""
    values = []
    for own, group in zip(samples, groups_of(samples), strict=True):
        total = sum(len(other.rewards) for other in group)
        weighed = math.fsum(len(other.rewards) * (own.score - other.score) for other in group)
        is_alone = len(group) == 1 or total == 0
        values.append(own.score if is_alone else weighed / total)

    return on_all_tokens(samples, values)


def gpg(samples: Sequence[Sample], f_norm: float = 1.0, alpha_counts: str = "groups") -> Advantages:
    """α (r − mean) / F_norm, α = B / (B − M), M the samples of groups without a difference
    (arXiv:2504.02546, equations 6 to 8); verl counts the rewards that are not 0 as B − M."""
    counted = 0
    for own, group in zip(samples, groups_of(samples), strict=True):
        scores = {other.score for other in group}
        if alpha_counts == "rewards" or len(group) == 1:
            counted += own.score != 0.0
        else:
            counted += len(scores) > 1

    alpha = len(samples) / max(counted, 1)

    def rule(own: float, group: Sequence[float]) -> float:
        return alpha * normalised(own, group, False, 0.0) / f_norm

    return on_all_tokens(samples, by_scores(samples, rule))


def grpo_passk(
    samples: Sequence[Sample], norm_adv_by_std_in_grpo: bool = True, adv_epsilon: float = 1e-6
) -> Advantages:
    """best − second best, over (std + ε), for the only best sample (arXiv:2503.19595)."""

    def rule(own: float, group: Sequence[float]) -> float:
        ordered = sorted(group)
        if len(group) == 1 or own != ordered[-1] or ordered[-2] == ordered[-1]:
            return 0.0
        lead = ordered[-1] - ordered[-2]
        return lead / (numbers.std(group) + adv_epsilon) if norm_adv_by_std_in_grpo else lead

    return on_all_tokens(samples, by_scores(samples, rule))


def reinforce_plus_plus_baseline(samples: Sequence[Sample]) -> Advantages:
    """r − mean of the group, whitened over the tokens of the batch (arXiv:2501.03262)."""
    return whitened_tokens(
        samples, by_scores(samples, lambda own, group: normalised(own, group, False, 0.0))
    )


def gdpo(
    samples: Sequence[Sample],
    reward_weights: Mapping[str, Mapping[str, float]] | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    adv_epsilon: float = 1e-6,
    whiten_over: str = "tokens",
) -> Advantages:
    """Σ_k w_k · GRPO's advantage of part k among the samples that have the part, whitened over the
    batch (arXiv:2601.05242)."""
    known = reward_weights or {}
    sums = []
    for own, group in zip(samples, groups_of(samples), strict=True):
        weights = known.get(own.domain) or known.get("default") or {}
        total = 0.0
        for name, score in own.parts.items():
            theirs = [other.parts[name] for other in group if name in other.parts]
            advantage = normalised(score, theirs, norm_adv_by_std_in_grpo, adv_epsilon)
            total += weights.get(name, 1.0) * advantage

        sums.append(total)

    if whiten_over == "samples":
        return on_all_tokens(samples, numbers.whitened(sums))
    return whitened_tokens(samples, sums)


def whitened_tokens(samples: Sequence[Sample], values: Sequence[float]) -> Advantages:
    """Of one value a sample, which counts once for each of its tokens."""
    rows, _ = on_all_tokens(samples, values)
    found = whitened_rows(rows)
    return found, found


def whitened_rows(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Over all tokens of the batch."""
    left = iter(numbers.whitened([value for row in rows for value in row]))
    return [[next(left) for _ in row] for row in rows]
