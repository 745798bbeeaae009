"""Prompt groups as a shared edge holds and hands them out, whatever they are held as."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from distflow.flow.account import Account
from distflow.flow.balance import divide_step
from distflow.flow.curriculum import Accuracy
from distflow.flow.minibatch import minibatches
from distflow.flow.snapshot import Snapshot
from distflow.flow.ticket import Version
from distflow.observe.metrics import Measured
from distflow.rewards.tally import Judged
from distflow.runtime.ports.edge import Failure

T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """What the edge knows of a complete group. num_tokens: of all its samples, prompts included. version: the lowest of
    any of their tokens, None where there is none. failure: why it has no verdict at all. num_bytes: that it takes where
    groups are held, where that is bounded. accuracy: of its answers, None where nothing judges them."""

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
    """One rank's part of a step: see `Share`. own, groups: its own tickets and their groups, whole, in ticket order.
    like: the step's first, for where it has none."""

    tickets: tuple[int, ...]
    own: tuple[int, ...]
    groups: Sequence[T]
    like: T
    metrics: Mapping[str, float]
    judged: Judged


@dataclass(frozen=True)
class Consumed(Generic[T]):
    """How the run stands once all ranks have trained on a step: see `Released`. live: groups that no step has taken.
    domains: see `DomainShares`."""

    version: Version
    finished: bool
    stopping: bool
    account: Account
    cut: Snapshot
    live: Mapping[int, Held[T]]
    domains: Mapping[str, Mapping[str, float]]


def places(team: Team, loads: Sequence[int], numbers: Sequence[int], step: int) -> Iterator[list[int]]:
    """Of each rank of the team, which of the step's groups it takes."""
    size = team.mini_batch or len(numbers)
    passes = [minibatches(len(numbers), numbers, size, team.seed, step, epoch) for epoch in range(team.epochs)]
    parts = divide_step(loads, passes, max(team.shares) + 1)
    return (parts[share] for share in team.shares)
