"""The curriculum: shares of domains as a function of accuracy."""

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, TypedDict, cast

from distflow.builtin_names import CURRICULA
from distflow.errors import UserError, nearest
from distflow.import_target import LoadError, load_function, users_code
from distflow.user_values import finite_number

PARTS = 10**6
"""Shares are multiples of 1/PARTS, so that a domain's lag stays a short fraction however often they
change."""

_KEY = "data.curriculum.function"


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of a group's responses: how many are correct, and how many have a score."""

    num_right: int
    num_judged: int


@dataclass(frozen=True)
class CurriculumPlan:
    """function: a name of `CURRICULA`, "module:function" or "file.py:function". every: in steps.
    smoothing: decay of the moving means."""

    function: str
    every: int = 1
    smoothing: float = 0.9


@dataclass(frozen=True)
class Progress:
    """The progress of a domain, including dropped groups.

    weight: of the config. share: the current one. accuracy: share of correct responses among those
    scored since the last call; None if there was none. learnability: mean of p · (1 - p) over its
    groups, p being a group's share of correct responses. mean_accuracy, mean_learnability: moving
    means of these; None before the first value. num_judged: scored responses since the run began.
    """

    weight: float
    share: float
    accuracy: float | None = None
    learnability: float | None = None
    mean_accuracy: float | None = None
    mean_learnability: float | None = None
    num_judged: int = 0


CurriculumFunction = Callable[[Mapping[str, Progress], int, dict[str, Any]], Mapping[str, float]]
"""(progress by domain, steps done, state) → relative weights by domain. state: empty at the start;
the function may write JSON values to it, which persist to the next call, even in a resumed run."""


class SavedCurriculum(TypedDict):
    """domains: the fields of `_Measured`, `learnability` as a fraction. state: the function's."""

    domains: dict[str, dict[str, Any]]
    state: dict[str, Any]


@dataclass
class _Measured:
    """Exact sums, independent of the order in which groups end. learnability: sum of each group's p
    · (1 - p)."""

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

    def progress(
        self, weight: float, share: Fraction, smoothing: float
    ) -> tuple[Progress, "_Measured"]:
        """The progress up to now, and fresh counts for the next call."""
        accuracy = learnability = None
        after = _Measured(0, 0, 0, Fraction(0), self.mean_accuracy, self.mean_learnability)
        if self.num_judged:
            accuracy = self.num_right / self.num_judged
            learnability = float(self.learnability / self.num_groups)
            after.mean_accuracy = _moved(self.mean_accuracy, accuracy, smoothing)
            after.mean_learnability = _moved(self.mean_learnability, learnability, smoothing)
        after.num_judged_before = self.num_judged_before + self.num_judged
        means = (after.mean_accuracy, after.mean_learnability)
        return Progress(
            weight, float(share), accuracy, learnability, *means, after.num_judged_before
        ), after


class Curriculum:
    """Counts scored groups, and calls a function for the shares of the domains."""

    def __init__(
        self,
        plan: CurriculumPlan,
        weights: Mapping[str, float],
        saved: SavedCurriculum | None = None,
    ) -> None:
        """weights: of the config, by domain. Raises UserError for an unknown function."""
        self._plan = plan
        self._weights = weights
        self._function = load_curriculum(plan.function)
        domains = saved["domains"] if saved else {}
        self._measured = {
            name: _Measured(
                **{**domains[name], "learnability": Fraction(domains[name]["learnability"])}
            )
            if name in domains
            else _Measured()
            for name in weights
        }
        self._state = json.dumps(saved["state"] if saved else {})

    def count(self, domain: str, group: Accuracy) -> None:
        """Count a scored group of the domain."""
        self._measured[domain].count(group)

    def shares(
        self, step: int, before: Iterable[Fraction]
    ) -> tuple[list[Fraction], dict[str, Progress]]:
        """New shares in the domains' order, and the progress. step: steps done. before: the current
        shares. Raises UserError, and changes nothing, if the function fails or returns no valid
        weights."""
        measured = {
            name: self._measured[name].progress(weight, share, self._plan.smoothing)
            for (name, weight), share in zip(self._weights.items(), before, strict=True)
        }
        progress = {name: known for name, (known, _) in measured.items()}
        state = json.loads(self._state)
        who = f"{_KEY}={self._plan.function}: after step {step} the curriculum"
        with users_code(f"{who} failed:", passes=UserError, advice=f". {_GO_ON}"):
            returned = self._function(progress, step, state)
        shares = _shares(_weights(returned, list(self._weights), who))
        self._state = _as_json(state, who)
        self._measured = {name: after for name, (_, after) in measured.items()}
        return shares, progress

    def saved_curriculum(self) -> SavedCurriculum:
        measured = self._measured.items()
        domains = {
            name: {**asdict(each), "learnability": str(each.learnability)}
            for name, each in measured
        }
        return {"domains": domains, "state": json.loads(self._state)}


_GO_ON = (
    "Fix the function and start the same command again: it resumes from the last checkpoint, if "
    "there is one"
)


def load_curriculum(name: str) -> CurriculumFunction:
    """A built-in or user function. Raises UserError."""
    try:
        function = cast(
            CurriculumFunction, load_function(CURRICULA[name].target if name in CURRICULA else name)
        )
    except LoadError as err:
        raise UserError(
            f"{_KEY}: {err}; there are {', '.join(CURRICULA)}, or use your own function"
        ) from err
    try:
        inspect.signature(function).bind({}, 0, {})
    except TypeError as err:
        raise UserError(f"{_KEY}: '{name}' must take (progress, step, state): {err}") from err
    return function


def learnability(
    progress: Mapping[str, Progress], step: int, state: dict[str, Any]
) -> dict[str, float]:
    """The config's weights times the moving mean of p · (1 - p) over the prompts of a domain, the
    variance of a correct response: a prompt that all responses get right or wrong has no learning
    signal (Foster et al. 2025, *Learning to Reason at the Frontier of Learnability*,
    arXiv:2502.12272; Tzannetos et al. 2023, arXiv:2304.12877).

    The mean is at least a fifth of its maximum, 1/4, so that each domain continues to be measured.
    A domain that is not measured yet counts as 1/4."""

    def worth(known: Progress) -> float:
        return 0.25 if known.mean_learnability is None else max(known.mean_learnability, 0.05)

    return {name: known.weight * worth(known) for name, known in progress.items()}


def _moved(before: float | None, now: float, smoothing: float) -> float:
    return now if before is None else smoothing * before + (1 - smoothing) * now


def _weights(returned: object, names: list[str], who: str) -> list[Fraction]:
    """The returned weights in the order of the names. Raises UserError."""
    if not isinstance(returned, Mapping):
        raise UserError(
            f"{who} returned {_shown(returned)}, not a mapping from domains to weights. {_GO_ON}"
        )
    for name in returned:
        if name not in names:
            meant = f", did you mean {near}" if (near := nearest(str(name), names)) else ""
            raise UserError(
                f"{who} gave a weight to {name!r}, which is not a domain of the run{meant}. "
                f"{_GO_ON}"
            )
    if missing := [name for name in names if name not in returned]:
        raise UserError(f"{who} gave no weight to '{missing[0]}'; 0 suspends a domain. {_GO_ON}")
    weights = list[Fraction]()
    for name in names:
        try:
            weight = finite_number(returned[name])
        except ValueError:
            weight = -math.inf
        if weight < 0:
            shown = _shown(returned[name])
            raise UserError(
                f"{who} gave '{name}' the weight {shown}, not a finite number ≥ 0. {_GO_ON}"
            )
        weights.append(Fraction(weight))
    if not any(weights):
        raise UserError(
            f"{who} gave every domain the weight 0: nothing would be trained on. {_GO_ON}"
        )
    return weights


def _shares(weights: list[Fraction]) -> list[Fraction]:
    """Shares in multiples of 1/PARTS, by largest remainders, then by order."""
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
        raise UserError(f"{who} left a state that JSON cannot represent: {err}. {_GO_ON}") from err
    if json.loads(text) != state:
        raise UserError(
            f"{who} left a state that JSON would change: {_shown(state)}. Use str as keys, and "
            "lists, "
            f"not tuples. {_GO_ON}"
        )
    return text


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
