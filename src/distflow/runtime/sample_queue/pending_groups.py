"""Prompt groups as a shared edge holds and hands them out, whatever they are held as.

Prompt groups that fail one after another: once nothing can progress, the run ends instead of spending its data.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from distflow.observe.metrics import Measured
from distflow.rewards.call_counts import RewardCounts
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
    of any of their tokens, None where there is none. failure: why it has no verdict at all. num_bytes: that it takes
    where groups are held, where that is bounded. accuracy: of its answers, None where nothing judges them."""

    num_tokens: int
    version: int | None
    failure: Failure | None
    num_bytes: int = 0
    accuracy: Accuracy | None = None


@dataclass(frozen=True)
class Team:
    """Ranks that learn the same, together, from every step.

    shares: by rank, which part of a step it takes, from 0; ranks that hold parts of the same tensors take the same.
    mini_batch: groups of an optimizer step, drawn by `seed` in each pass; None where a step has one. epochs: passes
    over a step.
    """

    shares: tuple[int, ...] = (0,)
    mini_batch: int | None = None
    seed: int = 0
    epochs: int = 1


@dataclass(frozen=True)
class Held(Generic[T]):
    """A group that waits for its step. measured: by its nodes."""

    group: T
    num_tokens: int
    measured: Sequence[Measured]


@dataclass(frozen=True)
class Portion(Generic[T]):
    """One rank's part of a step: see `Share`. own, groups: its own groups and their groups, whole, in group order.
    like: the step's first, for where it has none."""

    group_ids: tuple[int, ...]
    own: tuple[int, ...]
    groups: Sequence[T]
    like: T
    metrics: Mapping[str, float]
    judged: RewardCounts


@dataclass(frozen=True)
class Consumed(Generic[T]):
    """How the run stands once all ranks have trained on a step: see `Released`. live: groups that no step has taken.
    domains: see `DomainShares`."""

    version: Version
    finished: bool
    stopping: bool
    group_counts: GroupCounts
    cut: Snapshot
    live: Mapping[int, Held[T]]
    domains: Mapping[str, Mapping[str, float]]


def places(dp_group: Team, loads: Sequence[int], numbers: Sequence[int], step: int) -> Iterator[list[int]]:
    """Of each rank of the team, which of the step's groups it takes."""
    size = dp_group.mini_batch or len(numbers)
    passes = [minibatches(len(numbers), numbers, size, dp_group.seed, step, epoch) for epoch in range(dp_group.epochs)]
    parts = divide_step(loads, passes, max(dp_group.shares) + 1)
    return (parts[share] for share in dp_group.shares)


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
