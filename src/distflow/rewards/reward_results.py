"""Results of reward functions: a score or a reward error (never a score of 0 instead), accuracy,
counts, deadlines.

Accuracy, which validation counts and DAPO's filter compares, is the reward function's own judgement
of the response, without weights, penalties and format bonuses.
"""

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from distflow.builtin_names import CUSTOM_REWARD, REWARDS
from distflow.observe.crash_safe_files import JSON
from distflow.observe.metrics import TIMED_OUT
from distflow.user_values import finite_number, plain_value

CUT = "cut_tokens"
"""Key of a reward function's result: how many tokens it did not read."""
ACC = "acc"
"""Key under which a function that returns a mapping reports accuracy, apart from its `score` (as in
verl)."""
AS_TEXT = "stored as text"
"""Key beside values of which samples have only a text: their types, by key."""
RIGHT = 1.0 - 1e-6
MAX_TEXT = 4000
"""Characters of one text; a longer one keeps both ends."""
MAX_IN_ALL = 20_000
"""Characters of all extra values that a reward function returns for one sample."""
_MAX_ENTRIES = 50
_MAX_DEPTH = 6
_LEFT_OUT = "… left out"

TRAINING = "training"
VALIDATION = "validation"
counted_for: ContextVar[str] = ContextVar("counted_for", default=TRAINING)
"""The purpose of the scores of the running task and of tasks that it starts. Both may run at the
same time."""
in_episode: ContextVar[bool] = ContextVar("in_episode", default=False)
"""Whether a workflow requests the scores, so that its episode, not each score, counts as a
sample."""
_due: ContextVar[float] = ContextVar("due", default=math.inf)
OF_WORKFLOW = "workflow "
"""How the error of a workflow begins, before its name; that of a reward function begins with the
function's name."""


@dataclass(frozen=True)
class Score:
    """A finite score."""

    value: float
    extra: dict[str, JSON] = field(default_factory=dict, compare=False)
    """Further values to show, which are no part of the score."""


@dataclass(frozen=True)
class Timeout:
    """The reward function was killed at its deadline."""

    after_s: float
    part: str = field(default="", compare=False)
    """Its name, if a reward has several."""

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

    In this order of preference: a function that returns `acc`, a built-in that compares with the
    ground truth, a user function, any other; among several the one with the largest weight, then
    the first. A part with a weight of 0 or less (a penalty, or only measured) decides nothing
    unless there is no other.
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
    """A reward result in words: the score, and the first failed case if the reward function reports
    one."""
    if not isinstance(reward_result, Score):
        return str(reward_result)

    failed = reward_result.extra.get("failed")
    first = failed[0] if isinstance(failed, list) and failed else None
    if isinstance(first, dict) and "why" in first:
        return f"{own_reward_result(reward_result):g}, {first.get('case', '')}: {first['why']}"

    return f"{own_reward_result(reward_result):g}"


def read_score(returned: object) -> Score:
    """The score, with the other entries of a dictionary within bounds (only `acc` is used). Raises
    ValueError for a score or an `acc` that is no number, or none that `finite_number` accepts."""
    extra = dict[str, JSON]()
    if isinstance(returned, dict):
        if "score" not in returned:
            raise ValueError(
                "it returned a dictionary without 'score' (keys: "
                f"{', '.join(map(str, returned)) or 'none'})"
            )

        given = {key: value for key, value in returned.items() if key not in ("score", ACC)}
        extra = _SizeLimit().extra(given)
        if returned.get(ACC) is not None:
            extra[ACC] = finite_number(returned[ACC], where=f" as '{ACC}'")
        returned = returned["score"]

    return Score(finite_number(returned), extra)


def read_extra(given: Mapping[object, object]) -> dict[str, JSON]:
    """The values as JSON, of any size."""
    return _SizeLimit(math.inf, math.inf).extra(given)


def texts_of(extra: Mapping[str, JSON]) -> dict[str, JSON]:
    """The types of values that samples have only as texts, by key."""
    found = extra.get(AS_TEXT)
    return found if isinstance(found, dict) else {}


def with_value(score: Score, value: float) -> Score | Error:
    """The score with a value computed from it, or the error that this is no finite number."""
    try:
        return replace(score, value=finite_number(value, "its score is"))
    except ValueError as error:
        return Error(str(error))


def shortened(text: str, most: int = MAX_TEXT) -> str:
    """At most `most` characters of a text, with a note in place of the middle."""
    half = most // 2
    if len(text) <= most:
        return text
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"


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
    """How many samples were scored, and how many of them have no score."""

    asked: int = 0
    failed: int = 0
    first: str = ""
    """The first reward error."""
    counts: Mapping[str, float] = {}
    """Metrics of the reward functions."""
    as_text: Mapping[str, JSON] = {}
    """Types as in `texts_of`, by PART/KEY."""

    @property
    def share(self) -> float:
        """Share of the samples that failed."""
        return self.failed / self.asked if self.asked else 0.0

    @staticmethod
    def joined(parts: Sequence["RewardCounts"]) -> "RewardCounts":
        """The sum of several counts."""
        counts = Counter[str]()
        as_text = dict[str, JSON]()
        for part in parts:
            counts.update(part.counts)
            as_text |= part.as_text
        first = next((part.first for part in parts if part.first), "")
        asked = sum(part.asked for part in parts)
        failed = sum(part.failed for part in parts)

        return RewardCounts(asked, failed, first, dict(counts), as_text)


class CallCounts:
    """Counts of scored samples, separate for training and validation: the asyncio thread adds, the
    trainer takes."""

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
    if name == CUSTOM_REWARD or name not in REWARDS:
        return 2
    return 3


class _SizeLimit:
    """Values as JSON: long texts are cut in the middle, and what comes after `most_characters` is
    left out."""

    def __init__(
        self, most_characters: float = MAX_IN_ALL, most_entries: float = _MAX_ENTRIES
    ) -> None:
        self._left = most_characters
        self._most_entries = most_entries
        self._odd = ""  # the type of a value that became a text
        self._as_text: dict[str, JSON] = {}

    def extra(self, given: Mapping[object, object]) -> dict[str, JSON]:
        """The values, and `AS_TEXT`."""
        found = self.mapping(given)
        if self._as_text:
            return {**found, AS_TEXT: self._as_text}
        return found

    def mapping(self, value: Mapping[object, object], depth: int = 0) -> dict[str, JSON]:
        found: dict[str, JSON] = {}
        for key, entry in value.items():
            if len(found) == self._most_entries or self._left <= 0:
                found[_LEFT_OUT] = len(value) - len(found)
                break

            name = str(key)[:200]
            self._left -= len(name)
            found[name] = self._plain(entry, depth + 1)

            if depth == 0 and self._odd:
                self._as_text[name] = self._odd
                self._odd = ""

        return found

    def _plain(self, value: object, depth: int) -> JSON:
        self._left -= 4
        if depth < _MAX_DEPTH and getattr(value, "shape", None) and hasattr(value, "tolist"):
            with suppress(RuntimeError, TypeError):  # a sparse tensor cannot be iterated over
                # an array has a length and entries
                return self._list(value, depth)  # type: ignore[arg-type]

        value = plain_value(value)
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, int) and abs(value) < 2**63:
            return value
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            return self.mapping(value, depth)
        if isinstance(value, list | tuple | set | frozenset) and depth < _MAX_DEPTH:
            return self._list(value, depth)

        self._odd = type(value).__name__
        if isinstance(value, int):
            return self._text(f"an integer of {value.bit_length():,} bits")
        return self._text(_LEFT_OUT if depth >= _MAX_DEPTH else f"{value!r:.1000}")

    def _list(self, value: Collection[object], depth: int) -> list[JSON]:
        found: list[JSON] = []
        for entry in value:
            if len(found) == self._most_entries or self._left <= 0:
                return [*found, f"{_LEFT_OUT}: {len(value) - len(found):,}"]
            found.append(self._plain(entry, depth + 1))
        return found

    def _text(self, text: str) -> str:
        if self._left == math.inf:
            return text
        text = shortened(text, min(MAX_TEXT, max(int(self._left), 100)))
        self._left -= len(text)
        return text
