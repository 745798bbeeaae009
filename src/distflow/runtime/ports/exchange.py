"""The exchange between ranks that learn in teams of different nodes. One file a wire implements it."""

from collections.abc import Sequence
from typing import Protocol

from distflow.data.batch import Batch
from distflow.flow.exchange import Key


class ExchangePort(Protocol):
    """Between nodes of one team and those of another that read what they wrote."""

    def put(self, key: Key, batch: Batch, writer: int, num_writers: int) -> None:
        """This writer's samples of a step, none too: the step is complete once all `num_writers` have put theirs.

        Waits while too much is held. Raises ExchangeError where this step cannot be, and whatever ended another rank.
        """
        ...

    def pick(self, key: Key, rank: int, num_ranks: int, uids: Sequence[str]) -> Batch:
        """The samples of these uids, in that order, in memory of its own; each of `num_ranks` picks its own.

        Waits until the step is complete. Raises ExchangeError where it cannot be completed any more, and whatever ended
        another rank.
        """
        ...
