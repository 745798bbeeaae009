"""Groups name the prompt groups of a run; versions name the weights that produced their tokens.

The account of groups: every one that was issued runs, waits, was consumed or was dropped for a reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

TRAIN = "train"


@dataclass(frozen=True, order=True)
class Version:
    """Weights as of the end of a step, ordered lexicographically: each resume raises the restart."""

    restart: int
    step: int


@dataclass(frozen=True)
class PromptGroup:
    """The identity of one prompt group: numbered globally, independent of the number of workers.

    group_id: position in the run's data order, from 0.
    epoch, row: which row of the data set, in which pass over it.
    group_size: samples to draw for the prompt.
    version: the step whose weights were served when the group was issued.
    attempt: raised each time that the group starts again, after a crash or because it was aborted.
    stream: "train", "train/<domain>", or "val/<set>".
    position: in the order of its domain, from 0; 0 of a run without domains, where `group_id` says it.
    """

    group_id: int
    epoch: int
    row: int
    group_size: int
    version: int
    attempt: int = 0
    stream: str = TRAIN
    position: int = 0


def stream_of(domain: str) -> str:
    """What a training group of the domain has; "" is that of a run without."""
    return f"{TRAIN}/{domain}" if domain else TRAIN


def domain_of(stream: str) -> str:
    """The inverse."""
    return stream.partition("/")[2]


class CountsError(RuntimeError):
    """A group was lost, doubled, or moved in a way that no run makes. A fault of ours; the message names it."""


@dataclass(frozen=True)
class DomainCounts:
    """Of one domain: groups that were issued, consumed, and dropped by reason. aborted: times, as in `GroupCounts`."""

    issued: int = 0
    consumed: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    aborted: int = 0


@dataclass(frozen=True)
class GroupCounts:
    """How many groups are where. dropped: counts by reason. aborted: times that a group was ended because its step had
    all that it needs, so that it waits to be issued again; aborted_tokens: what had been drawn for those. domains: of
    each that a group was issued for, empty of a run without them."""

    issued: int = 0
    running: int = 0
    complete: int = 0
    consumed: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    aborted: int = 0
    aborted_tokens: int = 0
    domains: Mapping[str, DomainCounts] = field(default_factory=dict)

    def check(self) -> None:
        """Raises CountsError where a group is nowhere or in two places."""
        known = self.running + self.complete + self.consumed + sum(self.dropped.values())
        if self.issued != known:
            raise CountsError(f"{self.issued} groups were issued, but {known} are accounted for: {self}")
