"""What a training loop of the user's own steers of the experience plane. One file a wire implements it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from distflow.config.errors import UserError
from distflow.flow.account import Account


class NothingToWaitFor(UserError):
    """What is waited for would never come: no group runs, and none will start before the caller does something."""


@dataclass(frozen=True)
class Standing:
    """How the prompt groups stand. num_offered: rows that wait for a credit. num_owed: groups that must still be taken
    before the step may be released."""

    account: Account
    num_offered: int
    num_owed: int


class IntakePort(Protocol):
    """Between that loop and the coordinator."""

    def open_data(self) -> None:
        """From now on groups of the data set start whenever there is a credit."""
        ...

    def offer(self, keep: Callable[[int], None]) -> None:
        """A row of the caller's own waits for its credit. keep: told the number that its ticket will name it by, before
        anybody can look for it."""
        ...

    def hold(self, held: bool) -> None:
        """While held no further group starts; those that run go on."""
        ...

    def standing(self) -> Standing:
        """At this moment."""
        ...
