"""Which rows are passed over for a while: those whose answers were right too often, or too seldom, when last judged."""

from collections.abc import Mapping
from dataclasses import dataclass

from distflow.flow.curriculum import Accuracy

TOO_EASY, TOO_HARD = "too_easy", "too_hard"
"""Why the ticket of a row that is passed over is dropped."""

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
