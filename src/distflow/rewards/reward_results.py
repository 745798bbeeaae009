"""Results of reward functions: a score or a reward error (never a score of 0 instead), accuracy, counts, deadlines.

Accuracy, which validation counts and DAPO's filter compares, is the reward function's own judgement of the response,
without weights, penalties and format bonuses.
"""

import math
import numbers
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from distflow.builtin_names import CUSTOM_REWARD, REWARDS
from distflow.observe.crash_safe_files import JSON
from distflow.observe.metrics import TIMED_OUT

CUT = "cut_tokens"
"""Key of a reward function's result: how many tokens it did not read."""
ACC = "acc"
"""Key under which a function that returns a mapping reports accuracy, apart from its `score` (as in verl)."""
RIGHT = 1.0 - 1e-6
MAX_TEXT = 4000
"""Characters of one text; a longer one keeps both ends."""
MAX_IN_ALL = 20_000
"""Characters of all extra values that a reward function returns for one sample."""
_MAX_ENTRIES, _MAX_DEPTH = 50, 6
_LEFT_OUT = "… left out"

TRAINING, VALIDATION = "training", "validation"
counted_for: ContextVar[str] = ContextVar("counted_for", default=TRAINING)
"""The purpose of the scores of the running task and of tasks that it starts. Both may run at the same time."""
in_episode: ContextVar[bool] = ContextVar("in_episode", default=False)
"""Whether a workflow requests the scores, so that its episode, not each score, counts as a sample."""
_due: ContextVar[float] = ContextVar("due", default=math.inf)
OF_WORKFLOW = "workflow "
"""How the error of a workflow begins, before its name; that of a reward function begins with the function's name."""


@dataclass(frozen=True)
class Score:
    """A finite score; `extra` holds further values to show; it is not part of the score."""

    value: float
    extra: dict[str, JSON] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Timeout:
    """The reward function was killed at its deadline. part: its name, if a reward has several."""

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
    acc = score.extra.get(ACC)
    return acc if isinstance(acc, float) else score.value


def scored_right(reward_result: RewardResult) -> bool:
    """Whether the function has scored the response, as correct by its own accuracy."""
    return isinstance(reward_result, Score) and is_right(own_reward_result(reward_result))


def why(reward_result: RewardResult) -> str:
    """A reward result in words: the score, and the first failed case if the reward function reports one."""
    if not isinstance(reward_result, Score):
        return str(reward_result)
    failed = reward_result.extra.get("failed")
    first = failed[0] if isinstance(failed, list) and failed else None
    if isinstance(first, dict) and "why" in first:
        return f"{own_reward_result(reward_result):g}, {first.get('case', '')}: {first['why']}"
    return f"{own_reward_result(reward_result):g}"


@dataclass(frozen=True)
class Case:
    """A response with a known score: 1 if it is `good`, else 0, unless `score` has another one."""

    response: str
    ground_truth: object
    good: bool
    extra_info: dict[str, object] = field(default_factory=dict)
    score: float | None = None

    @property
    def expected(self) -> float:
        return float(self.good) if self.score is None else self.score


def read_score(returned: object) -> tuple[float, dict[str, JSON]]:
    """The score, and the other entries of a dictionary within bounds (only `acc` is used). Raises ValueError for a
    score or an `acc` that is not a finite number."""
    extra: dict[str, JSON] = {}
    if isinstance(returned, dict):
        if "score" not in returned:
            raise ValueError(
                f"it returned a dictionary without 'score' (keys: {', '.join(map(str, returned)) or 'none'})"
            )
        extra = bounded({key: value for key, value in returned.items() if key not in ("score", ACC)})
        if returned.get(ACC) is not None:
            extra[ACC] = _number(returned[ACC], f" as '{ACC}'")
        returned = returned["score"]
    return _number(returned), extra


def bounded(remarks: Mapping[object, object]) -> dict[str, JSON]:
    """The remarks as JSON: long texts are cut in the middle, and everything after `MAX_IN_ALL` is left out."""
    return _SizeLimit().mapping(remarks, 0)


def shortened(text: str, most: int = MAX_TEXT) -> str:
    """At most `most` characters of a text, with a note in place of the middle."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"


@contextmanager
def due_within(seconds: float) -> Iterator[None]:
    """Inside, a score is due within this many seconds."""
    token = _due.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _due.reset(token)


def left_s() -> float:
    """Seconds until the process is killed; inf outside of a pool."""
    return _due.get() - time.monotonic()


@contextmanager
def validating() -> Iterator[None]:
    """Inside, scores are counted for validation."""
    token = counted_for.set(VALIDATION)
    try:
        yield
    finally:
        counted_for.reset(token)


class RewardCounts(NamedTuple):
    """asked, failed: numbers of samples. first: the first reward error. counts: metrics of the reward functions."""

    asked: int = 0
    failed: int = 0
    first: str = ""
    counts: Mapping[str, float] = {}

    @property
    def share(self) -> float:
        """Share of the samples that failed."""
        return self.failed / self.asked if self.asked else 0.0

    @staticmethod
    def joined(parts: Sequence["RewardCounts"]) -> "RewardCounts":
        """The sum of several counts."""
        counts = Counter[str]()
        for part in parts:
            counts.update(part.counts)
        first = next((part.first for part in parts if part.first), "")
        return RewardCounts(sum(part.asked for part in parts), sum(part.failed for part in parts), first, dict(counts))


class CallCounts:
    """Counts of scored samples, separate for training and validation: the asyncio thread adds, the trainer takes."""

    def __init__(self) -> None:
        self._counted: dict[str, RewardCounts] = defaultdict(RewardCounts)
        self._lock = threading.Lock()

    def add(self, new: RewardCounts) -> None:
        with self._lock:
            scope = counted_for.get()
            self._counted[scope] = RewardCounts.joined([self._counted[scope], new])

    def take(self, scope: str = TRAINING) -> RewardCounts:
        """The counts since the last call."""
        with self._lock:
            return self._counted.pop(scope, RewardCounts())


def _kind(name: str, score: Score) -> int:
    if score.extra.get(ACC) is not None:
        return 0
    if name in REWARDS and REWARDS[name].needs_answer:
        return 1
    return 2 if name == CUSTOM_REWARD or name not in REWARDS else 3


def _number(value: object, where: str = "") -> float:
    """float of a number, bool, or numpy or torch scalar. Raises ValueError for anything else."""
    if not isinstance(value, numbers.Real) and callable(item := getattr(value, "item", None)):
        if math.prod(shape := tuple(getattr(value, "shape", ()))) != 1:
            raise ValueError(f"it returned a {type(value).__name__} of shape {shape}{where}, which is not a number")
        value = item()
    if not isinstance(value, numbers.Real):
        raise ValueError(f"it returned {value!r:.80}{where}, which is not a number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"it returned{where} a number that is too large for a float") from None
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}{where}, which is not finite")
    return number


class _SizeLimit:
    def __init__(self) -> None:
        self._left = MAX_IN_ALL

    def mapping(self, value: Mapping[object, object], depth: int) -> dict[str, JSON]:
        found: dict[str, JSON] = {}
        for key, entry in value.items():
            if len(found) == _MAX_ENTRIES or self._left <= 0:
                found[_LEFT_OUT] = len(value) - len(found)
                break
            name = str(key)[:200]
            self._left -= len(name)
            found[name] = self._plain(entry, depth + 1)
        return found

    def _plain(self, value: object, depth: int) -> JSON:
        self._left -= 4
        if isinstance(value, bool | float | None):
            return value
        if isinstance(value, int):
            return value if abs(value) < 2**63 else self._text(f"an integer of {value.bit_length():,} bits")
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            return self.mapping(value, depth)
        if isinstance(value, list | tuple | set | frozenset) and depth < _MAX_DEPTH:
            found: list[JSON] = []
            for entry in value:
                if len(found) == _MAX_ENTRIES or self._left <= 0:
                    return [*found, f"{_LEFT_OUT}: {len(value) - len(found):,}"]
                found.append(self._plain(entry, depth + 1))
            return found
        return self._text(f"{value!r:.1000}" if not isinstance(value, Mapping | list | tuple | set) else _LEFT_OUT)

    def _text(self, text: str) -> str:
        text = shortened(text, min(MAX_TEXT, max(self._left, 100)))
        self._left -= len(text)
        return text
