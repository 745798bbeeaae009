"""What a verifier answers: a score, or why there is none. A timeout or an error is never a score of 0.

Which answers are right: what validation counts and DAPO's filter compares.

An answer is as right as its verifier says, whatever it is paid: weights, penalties, a bonus for the form are rewards.

Known answers, beside the reward that must judge them rightly.

Until when the verdict that a verifier process is giving must be there, for verifiers that can stop in time.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from distflow.observe.files import JSON
from distflow.observe.reading.reward_results import TIMED_OUT
from distflow.registry import CUSTOM_REWARD, REWARDS

CUT = "cut_tokens"
"""What a verifier calls the number of tokens that it did not read, beside its score."""


@dataclass(frozen=True)
class Score:
    """A finite score; `extra` holds whatever else the verifier wants shown beside it, and is no part of the verdict."""

    value: float
    extra: dict[str, JSON] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Timeout:
    """The verifier was killed at its deadline. part: of the reward, where several are told apart."""

    after_s: float
    part: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{TIMED_OUT} {self.after_s:g} s" + (f" from {self.part}" if self.part else "")


@dataclass(frozen=True)
class Error:
    """The verifier raised, crashed or answered something that is no finite number."""

    reason: str

    def __str__(self) -> str:
        return self.reason


RewardResult = Score | Timeout | Error


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
    return own_reward_result(parts[deciding])


def own_reward_result(score: Score) -> float:
    """What a function says of the answer: its `acc` where it has one, else its score."""
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
    """Inside, verdicts are due that soon."""
    token = _due.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _due.reset(token)


def left_s() -> float:
    """Seconds until the process is killed; inf outside of a pool."""
    return _due.get() - time.monotonic()
