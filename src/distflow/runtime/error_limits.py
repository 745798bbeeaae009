"""Errors that a run bears up to a limit: reward errors, which are reported, and above some rate end
the run before the step is trained on; and groups that fail one after another, which end it before
it uses up its data.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from distflow.errors import UserError
from distflow.observe.sanitized_output import escape_control
from distflow.rewards.reward_results import RewardCounts
from distflow.runtime.run_errors import Failure, NoProgress, UserNoProgress, repair_advice

WARN_ABOVE = 0.05
_SHOWN_CHARACTERS = 500


class TooManyErrors(UserError):
    """A step has more reward errors than `reward.max_error_rate` allows."""


@dataclass
class ErrorShare:
    """Checks the share of reward errors in each step. Warns once, and again whenever the share has
    doubled; and once of each key whose values cannot be stored."""

    max_share: float
    warn: Callable[[str], None]
    show: Callable[[str], None] = lambda reason: None
    """Called with a reward error, in every step that has one."""
    _warned_share: float = field(default=0.0, init=False)
    _as_text: set[str] = field(default_factory=set, init=False)

    def step(self, calls: RewardCounts, step: int) -> dict[str, float]:
        """A step's metrics after all its reward calls, also of dropped groups. step: from 1. Raises
        TooManyErrors."""
        if calls.first:
            self.show(calls.first)

        for key in sorted(calls.as_text.keys() - self._as_text):
            self._as_text.add(key)
            self.warn(
                f"'{escape_control(key, _SHOWN_CHARACTERS, one_line=True)}', returned beside a "
                f"score, has a value of type {calls.as_text[key]}, of which the samples have only "
                "a text: return numbers below 2^63, bools, texts, None, or lists or mappings of "
                "them"
            )

        what = f"{described(calls)} at step {step}"
        if calls.share > self.max_share:
            raise TooManyErrors(
                f"{what}, more than reward.max_error_rate={self.max_share:g} allows: the remaining "
                f"samples are not representative. {_first(calls)}; reward.max_error_rate=1 never "
                "stops"
            )

        if calls.share <= WARN_ABOVE:
            self._warned_share = 0.0
        elif calls.share >= 2 * self._warned_share:
            self._warned_share = calls.share
            self.warn(
                f"{what}; such responses are excluded from training. {_first(calls)}. Above "
                f"reward.max_error_rate={self.max_share:g} the run stops"
            )

        if not calls.asked:
            return {}
        return {"reward/calls": float(calls.asked), "reward/error_rate": calls.share}


def warn_of_errors(calls: RewardCounts, warn: Callable[[str], None]) -> None:
    """Warn after a validation, in which responses with reward errors count as wrong."""
    if calls.share > WARN_ABOVE:
        warn(f"{described(calls)} in a validation, and count as wrong. {_first(calls)}")


def described(calls: RewardCounts) -> str:
    return f"{calls.failed:,} of {calls.asked:,} scores are reward errors ({calls.share:.0%})"


def _first(calls: RewardCounts) -> str:
    """The first error, and what to do about it."""
    first = escape_control(calls.first, _SHOWN_CHARACTERS, one_line=True)
    return f"The first error was: {first}\n{repair_advice(calls.first)}"


@dataclass
class GroupFailures:
    """Warns of the first failing group, and whenever their number has doubled."""

    warn: Callable[[str], None]
    _number: int = field(default=0, init=False)

    def add(self, group_id: int, failure: Failure) -> None:
        self._number += 1
        if self._number & (self._number - 1):
            return

        then = "generated again, unless this was its third attempt"
        if failure.users:
            then = "dropped"

        message = escape_control(failure.message, _SHOWN_CHARACTERS)
        self.warn(
            f"group {group_id} has failed (failures so far: {self._number}) and is {then}: "
            f"{message}"
        )


class FailuresInARow:
    """Failures without a successful group in between. consumer_batch: groups per step."""

    def __init__(self, consumer_batch: int) -> None:
        self._consumer_batch = consumer_batch
        self._failures: list[Failure] = []

    @property
    def last(self) -> str | None:
        if self._failures:
            return self._failures[-1].message
        return None

    def count(self, failure: Failure | None) -> None:
        """failure: None for a success, which resets the count. Raises NoProgress after two steps'
        worth of failures."""
        if failure is None:
            self._failures.clear()
            return
        self._failures.append(failure)
        self.refuse(of_steps=2)

    def refuse(self, of_steps: int) -> None:
        """Raises NoProgress if the failures would have filled this many steps."""
        if len(self._failures) < of_steps * self._consumer_batch:
            return

        first = self._failures[0]
        message = (
            f"the last {len(self._failures)} prompt groups all failed, so the run cannot progress; "
            f"the first error: {first.message}"
        )
        raise (
            UserNoProgress(f"{message}\n{repair_advice(first.message)}")
            if first.users
            else NoProgress(message)
        )
