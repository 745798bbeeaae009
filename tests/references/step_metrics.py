"""Metrics of a step and of a validation, counted sample by sample."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from tests.references import numbers


@dataclass(frozen=True)
class Row:
    """A sample of a step."""

    prompt_length: int
    response_length: int
    is_truncated: bool
    group: int
    domain: str
    score: float | None
    """None without a score."""
    acc: float
    parts: dict[str, float]


def of_step(rows: Sequence[Row]) -> dict[str, float]:
    """Lengths over all samples, scores over those with one."""
    lengths = [float(row.response_length) for row in rows]
    found = {
        "rollout/avg_response_length": numbers.mean(lengths),
        "rollout/avg_prompt_length": numbers.mean([float(row.prompt_length) for row in rows]),
        "rollout/max_response_length": max(lengths),
        "rollout/truncated": sum(row.is_truncated for row in rows) / len(rows),
    }
    scored = [row for row in rows if row.score is not None]

    scores = [row.score for row in rows if row.score is not None]
    if scores:
        found["reward/mean_score"] = numbers.mean(scores)
        found["reward/std"] = math.sqrt(numbers.variance(scores, len(scores)))
        found["reward/max"] = max(scores)
        found["reward/min"] = min(scores)
        found["reward/accuracy"] = sum(row.acc >= 1.0 - 1e-6 for row in scored) / len(scored)

    num_equal = []
    for group in {row.group for row in scored}:
        own = [row.score for row in scored if row.group == group]
        if len(own) > 1:
            num_equal.append(len({*own}) == 1)

    if num_equal:
        found["reward/frac_reward_zero_std"] = sum(num_equal) / len(num_equal)
    for name, value in part_means(rows).items():
        found[f"reward/{name}/mean"] = value
    return found | of_domains(rows)


def part_means(rows: Sequence[Row]) -> dict[str, float]:
    """Of each part of the reward, over the samples that have it."""
    found = {}
    for name in {name for row in rows for name in row.parts}:
        found[name] = numbers.mean([row.parts[name] for row in rows if name in row.parts])
    return found


def of_domains(rows: Sequence[Row]) -> dict[str, float]:
    found = dict[str, float]()
    for domain in {row.domain for row in rows}:
        own = [row for row in rows if row.domain == domain]
        found[f"domains/{domain}/groups"] = float(len({row.group for row in own}))
        scores = [row.score for row in own if row.score is not None]
        if scores:
            found[f"reward/{domain}/mean_score"] = numbers.mean(scores)
        for name, value in part_means(own).items():
            found[f"reward/{domain}/{name}"] = value

    return found


def staleness(versions: Sequence[int], step: int) -> dict[str, float]:
    """versions: of the policy's tokens, at least one."""
    ages = [step - version for version in versions]
    found = {
        "async/version_start": float(min(versions)),
        "async/version_end": float(max(versions)),
        "async/version_diff/mean": sum(ages) / len(ages),
        "async/version_diff/max": float(max(ages)),
    }
    for age in range(max(ages) + 1):
        found[f"async/staleness/{age}"] = ages.count(age) / len(ages)
    return found


def mean_over_tokens(values: Sequence[float]) -> float:
    return math.fsum(values) / max(len(values), 1)


def pass_at_k(outcomes: Sequence[bool], k: int) -> float:
    """The share of all draws of k responses of which one is right (arXiv:2107.03374)."""
    draws = [any(draw) for draw in combinations(outcomes, k)]
    return sum(draws) / len(draws)
