"""Which answers are right: what validation counts and DAPO's filter compares.

An answer is as right as its verifier says, whatever it is paid: weights, penalties, a bonus for the form are rewards.
"""

from collections.abc import Mapping

from distflow.config.names import CUSTOM_REWARD, REWARDS
from distflow.rewards.verdict import Score

ACC = "acc"
"""What a function that returns a mapping calls its own verdict, apart from its `score` (as in verl)."""
RIGHT = 1.0 - 1e-6


def is_right(accuracy: float) -> bool:
    """Whether a verifier's own verdict says that the answer is right: it is 1, or more."""
    return accuracy >= RIGHT


def accuracy(parts: Mapping[str, Score], weights: Mapping[str, float]) -> float:
    """The verdict, unweighted, of the one part that decides whether the answer is right.

    That is the first kind there is of: a function that says `acc`, a built-in that compares with the row's answer, a
    function of the user, any other. Of several the one with the largest weight, then the first. A part whose weight is
    not above 0 penalises, or is only measured: it decides nothing, unless there is no other.
    """
    counted = [name for name in parts if weights[name] > 0] or list(parts)
    deciding = max(counted, key=lambda name: (-_kind(name, parts[name]), weights[name]))
    return own_verdict(parts[deciding])


def own_verdict(score: Score) -> float:
    """What a function says of the answer: its `acc` where it has one, else its score."""
    said = score.extra.get(ACC)
    return said if isinstance(said, float) else score.value


def _kind(name: str, score: Score) -> int:
    if score.extra.get(ACC) is not None:
        return 0
    if name in REWARDS and REWARDS[name].needs_answer:
        return 1
    return 2 if name == CUSTOM_REWARD or name not in REWARDS else 3
