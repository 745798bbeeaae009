"""What an advantage estimator knows of a response. Its references get only samples with a score."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sample:
    """A response, by the tokens that the policy wrote. Lists have one entry for each of them."""

    group: int
    rewards: list[float]
    values: list[float]
    """Of the critic, before each token."""
    turns: list[int]
    """The number of each token's turn, which never falls."""
    orders: list[int]
    """The place of each token's turn among those of all agents of the episode."""
    truncated: bool
    baseline: float
    """The score of a greedy response to the same prompt."""
    domain: str = "default"
    parts: dict[str, float] = field(default_factory=dict)
    """Unweighted scores by reward function."""

    @property
    def score(self) -> float:
        return math.fsum(self.rewards)


Rows = list[list[float]]
"""A number for each token of each sample."""
Advantages = tuple[Rows, Rows]
"""Advantages and returns."""


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The group of each sample."""
    return [[other for other in samples if other.group == own.group] for own in samples]


def on_all_tokens(samples: Sequence[Sample], values: Sequence[float]) -> Advantages:
    """One value a sample, as its advantage and return on each of its tokens."""
    rows = [[value] * len(own.rewards) for own, value in zip(samples, values, strict=True)]
    return rows, rows


Rule = Callable[[float, Sequence[float]], float]
"""(score of a sample, scores of its group) → advantage."""


def by_scores(samples: Sequence[Sample], rule: Rule) -> list[float]:
    found = []
    for own, group in zip(samples, groups_of(samples), strict=True):
        found.append(rule(own.score, [other.score for other in group]))
    return found
