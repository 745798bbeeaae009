"""Results of reward functions: a score or a reward error (never a score of 0), accuracy, known cases, deadlines.

Accuracy, which validation counts and DAPO's filter compares, is what the reward function says about the response,
without weights, penalties and format bonuses.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from distflow.builtin_names import CUSTOM_REWARD, REWARDS
from distflow.observe.files import JSON
from distflow.observe.metrics import TIMED_OUT

CUT = "cut_tokens"
"""Key of a reward function's result: how many tokens it did not read."""


@dataclass(frozen=True)
class Score:
    """A finite score; `extra` holds further values to show; it is not part of the score."""

    value: float
    extra: dict[str, JSON] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Timeout:
    """The reward function was killed at its deadline. part: its name, where a reward has several."""

    after_s: float
    part: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{TIMED_OUT} {self.after_s:g} s" + (f" from {self.part}" if self.part else "")


@dataclass(frozen=True)
class Error:
    """The reward function raised, crashed or returned something that is not a finite number."""

    reason: str

    def __str__(self) -> str:
        return self.reason


RewardResult = Score | Timeout | Error


ACC = "acc"
"""Key under which a function that returns a mapping reports accuracy, apart from its `score` (as in verl)."""
RIGHT = 1.0 - 1e-6


def is_right(accuracy: float) -> bool:
    """Whether this accuracy means that the response is correct: it is 1 or more."""
    return accuracy >= RIGHT


def accuracy(parts: Mapping[str, Score], weights: Mapping[str, float]) -> float:
    """Unweighted accuracy by the one part that decides whether the response is correct.

    In this order of preference: a function that returns `acc`, a built-in that compares with the ground truth, a user
    function, any other; among several the one with the largest weight, then the first. A part with a weight of 0 or
    less (a penalty, or only measured) decides nothing unless there is no other.
    """
    counted = [name for name in parts if weights[name] > 0] or list(parts)
    deciding = max(counted, key=lambda name: (-_kind(name, parts[name]), weights[name]))
    return own_reward_result(parts[deciding])


def own_reward_result(score: Score) -> float:
    """A function's own accuracy: its `acc` if it has one, else its score."""
    said = score.extra.get(ACC)
    return said if isinstance(said, float) else score.value


def _kind(name: str, score: Score) -> int:
    if score.extra.get(ACC) is not None:
        return 0
    if name in REWARDS and REWARDS[name].needs_answer:
        return 1
    return 2 if name == CUSTOM_REWARD or name not in REWARDS else 3


@dataclass(frozen=True)
class Case:
    """A response whose score is known: `good` ones score 1, the others 0, unless another score is named."""

    response: str
    ground_truth: object
    good: bool
    extra_info: dict[str, object] = field(default_factory=dict)
    score: float | None = None

    @property
    def expected(self) -> float:
        return float(self.good) if self.score is None else self.score


_due: ContextVar[float] = ContextVar("due", default=math.inf)


@contextmanager
def due_within(seconds: float) -> Iterator[None]:
    """Inside, a score is due within so many seconds."""
    token = _due.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _due.reset(token)


def left_s() -> float:
    """Seconds until the process is killed; inf outside of a pool."""
    return _due.get() - time.monotonic()
