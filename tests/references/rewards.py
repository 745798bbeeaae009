"""From scores of reward functions to the reward of a sample, and groups without a signal."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from tests.references import numbers


def overlong_penalty(length: int, limit: int, buffer_tokens: int, factor: float) -> float:
    """DAPO (arXiv:2503.14476, equation 13): 0 up to L_max − L_cache, −1 beyond L_max, linear in
    between; times a factor."""
    if buffer_tokens == 0 or length <= limit - buffer_tokens:
        return 0.0
    if length > limit:
        return -factor
    return factor * ((limit - buffer_tokens) - length) / buffer_tokens


def weighted_sum(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Σ weight · score, rounded once."""
    return float(sum(Fraction(weights[name]) * Fraction(scores[name]) for name in scores))


def shaped(score: float, shift: float, scale: float) -> float:
    return scale * (score + shift)


def drop_reason(
    scores: Sequence[float], mean_range: tuple[float, float] | None = None
) -> str | None:
    """DAPO's filter (arXiv:2503.14476, equation 11) on the samples of a group that have a score."""
    if len(scores) < 2:
        return "too_few_scores"
    if min(scores) == max(scores):
        # from 2^53 on float64 has no odd numbers, and scores may have differed
        return "all_equal" if abs(scores[0]) < 9007199254740992.0 else "too_large"
    if mean_range is None:
        return None

    middle = numbers.mean(scores)
    if middle <= mean_range[0]:
        return "mean_too_low"
    if middle >= mean_range[1]:
        return "mean_too_high"

    return None
