"""Samples that are masked or weighted by difficulty and length (alibaba/ROLL)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tests.references import numbers

Band = tuple[float, float]


@dataclass(frozen=True)
class Response:
    """A response with a score."""

    group: int
    acc: float
    length: int
    """In tokens of the policy."""
    truncated: bool = False
    finish_reason: str = "stop"


def share_right(own: Response, responses: Sequence[Response]) -> float:
    """Mean accuracy of its group."""
    return numbers.mean([other.acc for other in responses if other.group == own.group])


def weigh(
    responses: Sequence[Response], difficulty_weight: Band | None, length_weight: Band | None
) -> list[float]:
    """Weights with mean 1, from the first value of a band (all right; shortest) to its second (none
    right; longest)."""
    lengths = [each.length for each in responses]
    weights = []
    for own in responses:
        weight = 1.0
        if difficulty_weight is not None:
            easiest, hardest = difficulty_weight
            share = share_right(own, responses)
            weight *= share * easiest + (1.0 - share) * hardest

        if length_weight is not None:
            shortest, longest = length_weight
            span = max(lengths) - min(lengths)
            place = (own.length - min(lengths)) / span if span else 0.0
            weight *= (1.0 - place) * shortest + place * longest

        weights.append(weight)

    total = math.fsum(weights)
    return [weight * len(weights) / total for weight in weights] if total > 0 else weights


def masked_for(
    own: Response,
    responses: Sequence[Response],
    mask_truncated: bool = False,
    mask_max_turns: bool = False,
    mask_long_errors: int | None = None,
    difficulty_mask: Band | None = None,
) -> set[str]:
    """Why a response is left out of the loss; empty if it is not."""
    reasons = set()
    if mask_truncated and own.truncated:
        reasons.add("truncated")
    if mask_max_turns and own.finish_reason == "max_turns":
        reasons.add("max_turns")
    is_long = mask_long_errors is not None and own.length >= mask_long_errors
    if is_long and own.acc < 1.0 - 1e-6:
        reasons.add("long_errors")

    if difficulty_mask is not None:
        low, high = difficulty_mask
        if not low < share_right(own, responses) < high:
            reasons.add("difficulty")

    return reasons
