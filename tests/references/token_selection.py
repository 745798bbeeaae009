"""Which tokens of a step Clip-Cov and KL-Cov select (arXiv:2505.22617)."""

from collections.abc import Sequence

from tests.references import numbers


def covariances(advantages: Sequence[float], log_probs: Sequence[float]) -> list[float]:
    """(A − mean A)(log π − mean log π) of each token of the step."""
    found = []
    for advantage, log_prob in zip(advantages, log_probs, strict=True):
        found.append(
            numbers.above_mean(advantage, advantages) * numbers.above_mean(log_prob, log_probs)
        )
    return found


def num_selected(share: float, num_tokens: int) -> int:
    return max(int(share * num_tokens), 1)


def kl_cov(covariance: Sequence[float], share: float = 0.0002) -> set[int]:
    """The share with the largest covariance, if no two are equal."""
    ranked = sorted(range(len(covariance)), key=lambda token: -covariance[token])
    return set(ranked[: num_selected(share, len(covariance))])


def within(covariance: Sequence[float], low: float = 1.0, high: float = 5.0) -> set[int]:
    """The tokens that Clip-Cov draws from."""
    return {token for token, value in enumerate(covariance) if low < value < high}
