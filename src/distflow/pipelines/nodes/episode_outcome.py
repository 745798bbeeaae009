"""The outcome of an episode, from what its workflow returned."""

import math
from collections.abc import Mapping

from distflow.rewards.reward_results import ACC, Score, read_extra, read_score
from distflow.rewards.router import RewardOutcome
from distflow.user_values import finite_number

Outcome = RewardOutcome | None
"""None for an episode that its workflow rejects."""


def read_outcome(returned: object) -> Outcome:
    """The outcome of an episode's result: a number, a mapping of parts by name (their sum is the
    score, unless one is called `score`; `extra` is only shown), the result of `reward_fn`, or None,
    which rejects it. Raises ValueError for anything else."""
    if returned is None:
        return None
    if isinstance(returned, RewardOutcome):
        _check_finite(returned)
        return returned
    if not isinstance(returned, Mapping):
        score = read_score(returned)
        return RewardOutcome(score, {}, score.value)

    parts = dict[str, float]()
    for name, part in returned.items():
        if name not in ("score", ACC, "extra"):
            parts[str(name)] = finite_number(part, where=f" as '{name}'")

    if not parts and "score" not in returned:
        raise ValueError("it returned a mapping without a part")

    if "score" in returned:
        total = returned["score"]
    else:
        total = math.fsum(parts.values())

    value = finite_number(total)
    accuracy = value
    if ACC in returned:
        accuracy = finite_number(returned[ACC], where=f" as '{ACC}'")
    score = Score(value, read_extra(returned.get("extra", {})))

    return RewardOutcome(score, {name: Score(part) for name, part in parts.items()}, accuracy)


def _check_finite(outcome: RewardOutcome) -> None:
    """Raises ValueError: a workflow may have changed the outcome."""
    if not isinstance(outcome.reward_result, Score):
        return
    finite_number(outcome.accuracy, where=f" as '{ACC}'")
    for name, value in outcome.scores().items():
        finite_number(value, where=f" as '{name}'")
    finite_number(outcome.reward_result.value)
