"""The curriculum: shares of domains as a function of how many answers are right, and what it keeps of that.

Which rows are passed over for a while: those whose answers were right too often, or too seldom, when last judged.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from numbers import Real
from typing import Any, TypedDict, cast

from distflow.errors import UserError, nearest, users_place
from distflow.import_target import LoadError, load_function
from distflow.registry import CURRICULA

PARTS = 10**6
"""Shares are whole parts of these, so that what a domain is behind stays a fraction of few digits however often they
change."""

_KEY = "data.curriculum.function"


@dataclass(frozen=True)
class Accuracy:
    """Of the answers of a group: how many are right, of those that have a verdict."""

    num_right: int
    num_judged: int


@dataclass(frozen=True)
class CurriculumPlan:
    """function: a name of `CURRICULA`, "module:function" or "file.py:function". every: in steps. smoothing: what of a
    moving mean stays each time."""

    function: str
    every: int = 1
    smoothing: float = 0.9


@dataclass(frozen=True)
class Progress:
    """What is known of a domain, of groups that were dropped too.

    weight: as the config has it. share: of the places that were given out last. accuracy: share of right answers, of
    those judged since weights were asked for last; None where none was. learnability: mean of p · (1 - p) over its
    groups, p being a group's share of right answers. mean_accuracy, mean_learnability: moving means of them, of the
    times that there was one; None before the first. num_judged: answers since the run began.
    """

    weight: float
    share: float
    accuracy: float | None = None
    learnability: float | None = None
    mean_accuracy: float | None = None
    mean_learnability: float | None = None
    num_judged: int = 0


CurriculumFunction = Callable[[Mapping[str, Progress], int, dict[str, Any]], Mapping[str, float]]
"""(what is known by domain, steps done, state) → weights by domain, relative to each other. state: empty at the start;
what the function leaves there, which JSON must be able to hold, it finds again the next time, in a resumed run too."""


class _Kept(TypedDict):
    num_right: int
    num_judged: int
    num_groups: int
    learnability: str
    mean_accuracy: float | None
    mean_learnability: float | None
    num_judged_before: int


class SavedCurriculum(TypedDict):
    """domains: counts since weights were asked for last, and means. state: the function's own."""

    domains: dict[str, _Kept]
    state: dict[str, Any]


@dataclass
class _Measured:
    """Exact sums, so that the order in which groups end changes nothing. learnability: p · (1 - p), of each group."""

    num_right: int = 0
    num_judged: int = 0
    num_groups: int = 0
    learnability: Fraction = Fraction(0)
    mean_accuracy: float | None = None
    mean_learnability: float | None = None
    num_judged_before: int = 0

    def count(self, group: Accuracy) -> None:
        if group.num_judged:
            share = Fraction(group.num_right, group.num_judged)
            self.num_right += group.num_right
            self.num_judged += group.num_judged
            self.num_groups += 1
            self.learnability += share * (1 - share)

    def told(self, weight: float, share: Fraction, smoothing: float) -> tuple[Progress, "_Measured"]:
        """What is known now, and what is counted on from there."""
        accuracy = learnability = None
        after = _Measured(0, 0, 0, Fraction(0), self.mean_accuracy, self.mean_learnability)
        if self.num_judged:
            accuracy, learnability = self.num_right / self.num_judged, float(self.learnability / self.num_groups)
            after.mean_accuracy = _moved(self.mean_accuracy, accuracy, smoothing)
            after.mean_learnability = _moved(self.mean_learnability, learnability, smoothing)
        after.num_judged_before = self.num_judged_before + self.num_judged
        means = (after.mean_accuracy, after.mean_learnability)
        return Progress(weight, float(share), accuracy, learnability, *means, after.num_judged_before), after


class Curriculum:
    """Counts what is judged, and asks a function for the shares of the domains."""

    def __init__(
        self, plan: CurriculumPlan, weights: Mapping[str, float], saved: SavedCurriculum | None = None
    ) -> None:
        """weights: of the config, by domain. Raises UserError where there is no such function."""
        self._plan, self._weights = plan, weights
        self._function = load_curriculum(plan.function)
        kept = saved["domains"] if saved else {}
        self._measured = {
            name: _Measured(**cast(Any, {**kept[name], "learnability": Fraction(kept[name]["learnability"])}))
            if name in kept
            else _Measured()
            for name in weights
        }
        self._state = json.dumps(saved["state"] if saved else {})

    def count(self, domain: str, group: Accuracy) -> None:
        """A group of the domain was judged."""
        self._measured[domain].count(group)

    def is_due(self, step: int) -> bool:
        """Whether shares are asked for when that many steps are done."""
        return step % self._plan.every == 0

    def shares(self, step: int, before: Iterable[Fraction]) -> tuple[list[Fraction], dict[str, Progress]]:
        """New ones, in the domains' order, and what was known. step: that many are done. before: the shares given out
        last. Raises UserError, and has counted nothing, where the function fails or returns what are no weights."""
        told = {
            name: self._measured[name].told(weight, share, self._plan.smoothing)
            for (name, weight), share in zip(self._weights.items(), before, strict=True)
        }
        progress = {name: known for name, (known, _) in told.items()}
        state = json.loads(self._state)
        who = f"{_KEY}={self._plan.function}: after step {step} the curriculum"
        try:
            returned = self._function(progress, step, state)
        except UserError:
            raise
        except Exception as err:  # the edge of a user's code
            place = f" (at {found})" if (found := users_place(err)) else ""
            raise UserError(f"{who} failed: {type(err).__name__}: {err}{place}. {_GO_ON}") from err
        shares = _shares(_weights(returned, list(self._weights), who))
        self._state = _as_json(state, who)
        self._measured = {name: after for name, (_, after) in told.items()}
        return shares, progress

    def saved(self) -> SavedCurriculum:
        kept = {name: {**asdict(each), "learnability": str(each.learnability)} for name, each in self._measured.items()}
        return {"domains": cast(dict[str, _Kept], kept), "state": json.loads(self._state)}


_GO_ON = "What was saved is whole: mend the function and start the same command again"


def load_curriculum(name: str) -> CurriculumFunction:
    """A built-in, or the user's. Raises UserError."""
    try:
        return cast(CurriculumFunction, load_function(CURRICULA[name].target if name in CURRICULA else name))
    except LoadError as err:
        raise UserError(f"{_KEY}: {err}; there are {', '.join(CURRICULA)}, or a function of yours") from err


def learnability(progress: Mapping[str, Progress], step: int, state: dict[str, Any]) -> dict[str, float]:
    """The config's weights times the moving mean of p · (1 - p) over the prompts of a domain, the variance of a right
    answer: what all of a group's answers get right or wrong teaches nothing (Foster et al. 2025, *Learning to Reason at
    the Frontier of Learnability*, arXiv:2502.12272; Tzannetos et al. 2023, arXiv:2304.12877).

    At least a fifth of the most that there can be, 1/4, so that each domain goes on being measured. One that was not
    measured yet counts as 1/4.
    """

    def worth(known: Progress) -> float:
        return 0.25 if known.mean_learnability is None else max(known.mean_learnability, 0.05)

    return {name: known.weight * worth(known) for name, known in progress.items()}


def _moved(before: float | None, now: float, smoothing: float) -> float:
    return now if before is None else smoothing * before + (1 - smoothing) * now


def _weights(returned: object, names: list[str], who: str) -> list[Fraction]:
    """In the order of the names. Raises UserError."""
    if not isinstance(returned, Mapping):
        raise UserError(f"{who} returned {_shown(returned)}, no mapping of domains to weights. {_GO_ON}")
    for name in returned:
        if name not in names:
            meant = f", did you mean {near}" if (near := nearest(str(name), names)) else ""
            raise UserError(f"{who} gave a weight to {name!r}, which is no domain that is drawn from{meant}. {_GO_ON}")
    if missing := [name for name in names if name not in returned]:
        raise UserError(f"{who} gave no weight to '{missing[0]}'; 0 leaves a domain out. {_GO_ON}")
    for name in names:
        weight = returned[name]
        if not isinstance(weight, Real) or not math.isfinite(weight) or weight < 0:
            raise UserError(f"{who} gave '{name}' the weight {_shown(weight)}, no finite number ≥ 0. {_GO_ON}")
    weights = [Fraction(float(returned[name])) for name in names]
    if not any(weights):
        raise UserError(f"{who} gave every domain the weight 0: nothing would be trained on. {_GO_ON}")
    return weights


def _shares(weights: list[Fraction]) -> list[Fraction]:
    """In whole `PARTS`, by largest remainders, then by order."""
    exact = [weight / sum(weights) * PARTS for weight in weights]
    parts = [math.floor(share) for share in exact]
    by_rest = sorted(range(len(parts)), key=lambda number: parts[number] - exact[number])
    for number in by_rest[: PARTS - sum(parts)]:
        parts[number] += 1
    return [Fraction(part, PARTS) for part in parts]


def _as_json(state: dict[str, Any], who: str) -> str:
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as err:
        raise UserError(f"{who} left a state that JSON cannot hold: {err}. {_GO_ON}") from err
    if json.loads(text) != state:
        raise UserError(
            f"{who} left a state that JSON would give back otherwise: {_shown(state)}. Use texts as keys, and lists, "
            f"not tuples. {_GO_ON}"
        )
    return text


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


TOO_EASY, TOO_HARD = "too_easy", "too_hard"
"""Why the group of a row that is passed over is dropped."""

SavedSkips = dict[str, dict[str, int]]
"""By reason, then by row: how many times it is still passed over."""


@dataclass(frozen=True)
class SkipPlan:
    """outside: by domain, the share of right answers from and up to which a row is wanted. epochs: how many times one
    is passed over before it is tried again."""

    outside: Mapping[str, tuple[float, float]]
    epochs: int = 1


class Skips:
    """Counts the times that a row is still to be passed over."""

    def __init__(self, plan: SkipPlan | None, saved: SavedSkips | None = None) -> None:
        self._plan = plan
        saved = saved or {}
        self._left = {
            reason: {int(row): left for row, left in saved.get(reason, {}).items()} for reason in (TOO_EASY, TOO_HARD)
        }

    def judged(self, domain: str, row: int, accuracy: Accuracy) -> None:
        """The answers to a row. What was known of it before no longer counts."""
        if self._plan is None or domain not in self._plan.outside or not accuracy.num_judged:
            return
        low, high = self._plan.outside[domain]
        share = accuracy.num_right / accuracy.num_judged
        for reason, is_so in ((TOO_EASY, share > high), (TOO_HARD, share < low)):
            self._left[reason].pop(row, None)
            if is_so:
                self._left[reason][row] = self._plan.epochs

    def pass_over(self, row: int) -> str | None:
        """Whether the row is passed over, and why: it then is so once less."""
        for reason, left in self._left.items():
            if row in left:
                left[row] -= 1
                if not left[row]:
                    del left[row]
                return reason
        return None

    def saved(self) -> SavedSkips:
        return {reason: {str(row): left[row] for row in sorted(left)} for reason, left in self._left.items()}
