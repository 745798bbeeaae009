"""Audits staleness and the order of versions from journal records alone."""

from collections.abc import Callable

from distflow.flow.account import AccountingError
from distflow.flow.record import Record


class StalenessAudit:
    """Applies the records of one surviving timeline in order. That tickets move as they may is `Tally`'s to say.

    The staleness of a group is the step that consumed it less the lowest version of its tokens. Earlier releases wrote
    no `plan`, which leaves staleness without a bound, and no version of complete groups, which then is the ticket's.
    """

    def __init__(self) -> None:
        self._max_staleness: int | None = None
        self._next_step = 0
        self._versions: dict[int, int] = {}  # of tickets on the edge
        self._incarnation = -1
        self._served = self._weights = 0  # lowest that may come next in this incarnation
        self._apply: dict[str, Callable[[Record], None]] = {
            "plan": self._plan,
            "issued": self._issued,
            "complete": self._complete,
            "dropped": self._dropped,
            "consumed": self._consumed,
            "version": self._version,
            "inherited": self._inherited,
        }

    def apply(self, record: Record) -> None:
        """Raises AccountingError naming the ticket or the step."""
        if record["inc"] != self._incarnation:
            self._incarnation, self._served, self._weights = record["inc"], 0, 0
        apply = self._apply.get(record["kind"])
        if apply is not None:
            apply(record)

    def _plan(self, record: Record) -> None:
        self._max_staleness = record["max_staleness"]

    def _issued(self, record: Record) -> None:
        version = record["version"]
        if not self._served <= version <= self._next_step:
            raise AccountingError(
                f"ticket {record['ticket']} was issued at version {version}, but {self._served} was served before and "
                f"step {self._next_step} is the next one: versions never go backwards, nor ahead of the steps"
            )
        self._served = version
        self._versions[record["ticket"]] = version

    def _complete(self, record: Record) -> None:
        if "version" in record:
            self._versions[record["ticket"]] = record["version"]

    def _dropped(self, record: Record) -> None:
        self._versions.pop(record["ticket"], None)

    def _consumed(self, record: Record) -> None:
        step, bound = record["step"], self._max_staleness
        for number in record["tickets"]:
            version = self._versions.pop(number, None)
            if bound is not None and version is not None and not 0 <= step - version <= bound:
                raise AccountingError(
                    f"step {step} consumed ticket {number}, which holds tokens of version {version}, but max_staleness "
                    f"was {bound}"
                )
        self._next_step = step + 1

    def _version(self, record: Record) -> None:
        step, weights = record["step"], record["weights"]
        if step != self._next_step or not self._weights <= weights <= step:
            raise AccountingError(
                f"version {step} with the weights of step {weights} was made, but step {self._next_step} ended and the "
                f"weights of step {self._weights} were there before: versions never go backwards"
            )
        self._weights = weights

    def _inherited(self, record: Record) -> None:
        self._next_step = record["step"]
        self._versions = {group["ticket"]: group["version"] for group in record.get("live", ()) if "version" in group}
