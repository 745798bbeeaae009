"""Prompt groups that fail one after another: once nothing can progress, the run ends instead of spending its data."""

from distflow.runtime.blame import REPAIR_ADVICE
from distflow.runtime.ports.edge import Failure, NoProgress, UserNoProgress


class FailuresInARow:
    """With no group between them that came through. consumer_batch: groups of a step."""

    def __init__(self, consumer_batch: int) -> None:
        self._consumer_batch = consumer_batch
        self._failures: list[Failure] = []

    @property
    def last(self) -> str | None:
        """What the last one said."""
        return self._failures[-1].message if self._failures else None

    def count(self, failure: Failure | None) -> None:
        """None is a group that came through, and those before it are forgotten. Raises NoProgress for two steps of
        failures."""
        if failure is None:
            self._failures.clear()
            return
        self._failures.append(failure)
        self.refuse(of_steps=2)

    def refuse(self, of_steps: int) -> None:
        """Raises NoProgress where they would have filled so many steps."""
        if len(self._failures) < of_steps * self._consumer_batch:
            return
        first = self._failures[0]
        message = (
            f"the last {len(self._failures)} prompt groups all failed, so nothing can progress; the first said: "
            f"{first.message}"
        )
        raise UserNoProgress(f"{message}\n{REPAIR_ADVICE}") if first.users else NoProgress(message)
