"""Complete groups in a shared sample queue and their division among ranks, however they are stored; and groups that
fail one after another, after which the run ends instead of spending its data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from distflow.observe.metrics import Measured
from distflow.rewards.score import RewardCounts
from distflow.runtime.errors import REPAIR_ADVICE
from distflow.runtime.sample_queue.protocol import Failure, NoProgress, UserNoProgress
from distflow.scheduling.bin_packing import divide_step
from distflow.scheduling.curriculum import Accuracy
from distflow.scheduling.data_order import minibatches
from distflow.scheduling.groups import GroupCounts, Version
from distflow.scheduling.snapshot import Snapshot

T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """What the queue knows of a complete group. num_tokens: of all its samples, prompts included. version: the lowest
    of any of their tokens, None if there is none. failure: why it has no score at all. num_bytes: its size in storage,
    if that is bounded. accuracy: of its responses, None if they are not scored."""

    num_tokens: int
    version: int | None
    failure: Failure | None
    num_bytes: int = 0
    accuracy: Accuracy | None = None


@dataclass(frozen=True)
class DpGroupShares:
    """Ranks that train the same nodes on every step.

    shares: by rank, which part of a step it takes, from 0; ranks that hold parts of the same tensors take the same.
    mini_batch: groups of an optimizer step, drawn by `seed` in each pass; None if a step has one. epochs: passes over a
    step.
    """

    shares: tuple[int, ...] = (0,)
    mini_batch: int | None = None
    seed: int = 0
    epochs: int = 1


@dataclass(frozen=True)
class PendingGroup(Generic[T]):
    """A group that waits for its step. measured: by its nodes."""

    group: T
    num_tokens: int
    measured: Sequence[Measured]


@dataclass(frozen=True)
class Portion(Generic[T]):
    """One rank's part of a step: see `Share`. own, groups: ids and data of its own groups, whole, in order. like: the
    step's first group, in case the rank has none."""

    group_ids: tuple[int, ...]
    own: tuple[int, ...]
    groups: Sequence[T]
    like: T
    metrics: Mapping[str, float]
    judged: RewardCounts


@dataclass(frozen=True)
class Consumed(Generic[T]):
    """The state of the run after all ranks have trained on a step: see `Released`. live: groups that no step has taken.
    domains: see `DomainShares`."""

    version: Version
    finished: bool
    stopping: bool
    group_counts: GroupCounts
    cut: Snapshot
    live: Mapping[int, PendingGroup[T]]
    domains: Mapping[str, Mapping[str, float]]


def places(dp_group: DpGroupShares, loads: Sequence[int], numbers: Sequence[int], step: int) -> Iterator[list[int]]:
    """For each rank of the dp group, which of the step's groups it takes."""
    size = dp_group.mini_batch or len(numbers)
    passes = [minibatches(len(numbers), numbers, size, dp_group.seed, step, epoch) for epoch in range(dp_group.epochs)]
    parts = divide_step(loads, passes, max(dp_group.shares) + 1)
    return (parts[share] for share in dp_group.shares)


class FailuresInARow:
    """Failures without a successful group between them. consumer_batch: groups of a step."""

    def __init__(self, consumer_batch: int) -> None:
        self._consumer_batch = consumer_batch
        self._failures: list[Failure] = []

    @property
    def last(self) -> str | None:
        """The message of the last failure."""
        return self._failures[-1].message if self._failures else None

    def count(self, failure: Failure | None) -> None:
        """None is a successful group, which resets the failures. Raises NoProgress after two steps of failures."""
        if failure is None:
            self._failures.clear()
            return
        self._failures.append(failure)
        self.refuse(of_steps=2)

    def refuse(self, of_steps: int) -> None:
        """Raises NoProgress if the failures would have filled this number of steps."""
        if len(self._failures) < of_steps * self._consumer_batch:
            return
        first = self._failures[0]
        message = (
            f"the last {len(self._failures)} prompt groups all failed, so nothing can progress; the first said: "
            f"{first.message}"
        )
        raise UserNoProgress(f"{message}\n{REPAIR_ADVICE}") if first.users else NoProgress(message)
