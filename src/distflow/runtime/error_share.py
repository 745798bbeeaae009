"""Verdicts that failed: told, and above some share the end of the run, before anything is learned from the rest."""

from collections.abc import Callable
from dataclasses import dataclass, field

from distflow.config.errors import UserError
from distflow.observe.text import visible
from distflow.rewards.tally import Verdicts
from distflow.runtime.blame import REPAIR_ADVICE

WARN_ABOVE = 0.05
_SHOWN_CHARACTERS = 500


class TooManyErrors(UserError):
    """More of a step's verdicts failed than `reward.max_error_share` allows."""


@dataclass
class ErrorShare:
    """Judges the verdicts of each step. What lasts is told once, and again when the share has doubled.

    show: given why a verdict failed, in every step where one did.
    """

    max_share: float
    warn: Callable[[str], None]
    show: Callable[[str], None] = lambda reason: None
    _told: float = field(default=0.0, init=False)

    def step(self, verdicts: Verdicts, step: int) -> dict[str, float]:
        """After all verdicts of a step, dropped groups' too; its metrics. step: from 1. Raises TooManyErrors."""
        if verdicts.first:
            self.show(verdicts.first)
        if verdicts.share > self.max_share:
            raise TooManyErrors(
                f"{described(verdicts)} at step {step}, more than reward.max_error_share={self.max_share:g} allows: "
                f"what is left is chance. {_first(verdicts)}\n{REPAIR_ADVICE}; reward.max_error_share=1 never stops"
            )
        if verdicts.share <= WARN_ABOVE:
            self._told = 0.0
        elif verdicts.share >= 2 * self._told:
            self._told = verdicts.share
            self.warn(
                f"{described(verdicts)} at step {step}; such answers are left out of the training. {_first(verdicts)}\n"
                f"{REPAIR_ADVICE}. Above reward.max_error_share={self.max_share:g} the run stops"
            )
        if not verdicts.asked:
            return {}
        return {"reward/verdicts": float(verdicts.asked), "reward/error_share": verdicts.share}


def warn_of_errors(verdicts: Verdicts, warn: Callable[[str], None]) -> None:
    """After a validation, in which such answers count as wrong."""
    if verdicts.share > WARN_ABOVE:
        warn(f"{described(verdicts)} in a validation, and count as wrong. {_first(verdicts)}\n{REPAIR_ADVICE}")


def described(verdicts: Verdicts) -> str:
    return f"{verdicts.failed:,} of {verdicts.asked:,} verdicts failed ({verdicts.share:.0%})"


def _first(verdicts: Verdicts) -> str:
    return f"The first said: {visible(verdicts.first, _SHOWN_CHARACTERS, one_line=True)}"
