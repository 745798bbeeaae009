"""Credits: how many prompt groups may start now. Staleness is bounded here, by admission, not by dropping later."""

from dataclasses import dataclass


def capacity(
    max_concurrent: int, running: int, max_staleness: int, version: int, consumer_batch: int, accepted: int
) -> int:
    """Groups that may still start (AReaL, arXiv 2505.24298, its rule for bounded staleness). It may be negative.

    version: the lowest step that an engine which may take the ticket serves, not the trainer's.
    accepted: `consumer_batch` for each consumed step, short or not, plus the complete groups not yet consumed.
    """
    consumer_batch = max(1, consumer_batch)
    admitted = (max_staleness + version + 1) * consumer_batch - (accepted + running)
    return min(max(1, max_concurrent) - running, admitted)


@dataclass(frozen=True)
class Credits:
    """The admission rule of a run.

    max_concurrent: groups that may run at once. consumer_batch: groups of a step.
    max_staleness: steps by which weights that made a token may be older than the step that trains on it.
    """

    max_concurrent: int
    max_staleness: int
    consumer_batch: int

    def open(self, running: int, version: int, accepted: int) -> int:
        """Credits to give out now, with the lost groups that wait to be issued again not counted in `running`.

        At staleness 0 they open in waves: none while a group of the last wave runs. What shares a batch in the
        engine is then decided by the ledger alone, never by who finished first, and a resumed run repeats it.
        """
        if self.max_staleness == 0 and running:
            return 0
        return max(
            0, capacity(self.max_concurrent, running, self.max_staleness, version, self.consumer_batch, accepted)
        )
