"""The difficulty filter: a row is skipped for some epochs if the share of correct responses was too
high or too low when it was last used."""

from collections.abc import Mapping
from dataclasses import dataclass

TOO_EASY = "too_easy"
TOO_HARD = "too_hard"
"""Reasons to drop the group of a skipped row."""

SavedSkips = dict[str, dict[str, int]]
"""By reason, then by row: how many more times it is skipped."""


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of a group's responses: how many are correct, and how many have a score."""

    num_right: int
    num_judged: int


@dataclass(frozen=True)
class SkipPlan:
    """outside: by domain, the range of the share of correct responses within which a row is used.
    epochs: how many times other rows are skipped before they are used again."""

    outside: Mapping[str, tuple[float, float]]
    epochs: int = 1


class Skips:
    """Counts how many more times each row is skipped."""

    def __init__(self, plan: SkipPlan | None, saved: SavedSkips | None = None) -> None:
        self._plan = plan
        saved = saved or {}
        self._left = {
            reason: {int(row): left for row, left in saved.get(reason, {}).items()}
            for reason in (TOO_EASY, TOO_HARD)
        }

    def record(self, domain: str, row: int, accuracy: Accuracy) -> None:
        """Note the accuracy of the responses to a row, replacing the previous one."""
        if self._plan is None or domain not in self._plan.outside or not accuracy.num_judged:
            return
        low, high = self._plan.outside[domain]
        share = accuracy.num_right / accuracy.num_judged
        for reason, is_so in ((TOO_EASY, share > high), (TOO_HARD, share < low)):
            self._left[reason].pop(row, None)
            if is_so:
                self._left[reason][row] = self._plan.epochs

    def pass_over(self, row: int) -> str | None:
        """Why the row is skipped this time, or None; counts the skip."""
        for reason, left in self._left.items():
            if row in left:
                left[row] -= 1
                if not left[row]:
                    del left[row]
                return reason
        return None

    def saved_skips(self) -> SavedSkips:
        return {
            reason: {str(row): left[row] for row in sorted(left)}
            for reason, left in self._left.items()
        }
