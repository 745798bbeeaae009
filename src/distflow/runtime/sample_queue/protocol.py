"""Protocols of the sample queue, in which complete groups wait until a step takes them, and of what a training loop of
the user's own controls of the rollout loop. One file for each transport implements them."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.observe.metrics import Measured
from distflow.rewards.score import RewardCounts
from distflow.scheduling.curriculum import Accuracy
from distflow.scheduling.groups import GroupCounts, PromptGroup, Version
from distflow.scheduling.snapshot import Snapshot


class NoProgress(RuntimeError):
    """Every group fails: continuing would only spend the data."""


class UserNoProgress(NoProgress, UserError):
    """The same, if the user's functions or their time limit fail every group."""


@dataclass(frozen=True)
class Failure:
    """Why a group failed. users: it is for the user to repair."""

    message: str
    users: bool


@dataclass(frozen=True)
class Share:
    """One rank's part of a step. group_ids: of the whole step, over all ranks, ascending. metrics: of the step's
    groups, over all ranks. judged: reward counts since the last step of workers that do not train, for one of the
    ranks."""

    group_ids: tuple[int, ...]
    batch: Batch
    metrics: Mapping[str, float]
    judged: RewardCounts = RewardCounts()


@dataclass(frozen=True)
class NewWorkers:
    """In place of a share: new engines of other processes have no weights yet. All ranks get it at the same point, send
    their weights, and request the step again."""


@dataclass(frozen=True)
class Live:
    """Complete groups that no step has taken yet, for a checkpoint. measured: by their nodes, by group id."""

    batch: Batch | None
    measured: Mapping[int, Sequence[Measured]]


@dataclass(frozen=True)
class ResumePoint:
    """What a run resumes from, besides weights."""

    cut: Snapshot
    live: Live


@dataclass(frozen=True)
class Released:
    """The state of the run after all ranks have trained on a step.

    version: of the weights after it. finished: no step is left. kept: fetches what a checkpoint of this moment saves;
    to be called by the rank that leads, before it takes the next step. domains: metrics of each, if a curriculum
    changes their shares.
    """

    version: Version
    finished: bool
    group_counts: GroupCounts
    kept: Callable[[], ResumePoint]
    domains: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class SampleQueuePort(Protocol):
    """Between the workers that fill it and those that train from it."""

    def prompt_groups(self, served: Callable[[], int | None]) -> AsyncIterator[list[PromptGroup]]:
        """consumes capacity · waits for released steps and dropped groups · produces groups to start together

        served: the lowest weight version of this worker's engines; None if it has none.
        """
        ...

    def put(self, prompt_group: PromptGroup, batch: Batch, measured: Sequence[Measured]) -> None:
        """A group has completed the rollout loop. measured: by its nodes."""
        ...

    def drop(
        self,
        prompt_group: PromptGroup,
        reason: str,
        failure: Failure | None = None,
        *,
        lost: bool = False,
        accuracy: Accuracy | None = None,
    ) -> None:
        """A group is dropped without being trained on; another may start in its place.

        failure: if it failed. lost: through no fault of the group, so that it is retried, three times in all. accuracy:
        of its responses, if they were scored.
        """
        ...

    def count(self, judged: RewardCounts) -> None:
        """By a worker that does not train, before it puts or drops the group: the next step reports the counts."""
        ...

    def take(
        self, step: int, rank: int, wanted: int | None = None, deadline: float | None = None
    ) -> Share | NewWorkers | None:
        """consumes this step's groups · waits until they are complete · produces this rank's share, in group order

        rank: among those that train. wanted: groups of a step that is taken in parts, None for the whole step.
        deadline: by `time.monotonic()`. None after the end of the data. Raises NoProgress, Exhausted, TimeoutError,
        which takes nothing, NothingToWaitFor for a part that could never come, and the error that ended the rollout
        loop.
        """
        ...

    def release(self, step: int, rank: int, published: bool) -> Released:
        """This rank has trained on its share. Waits until all ranks have.

        published: whether new weights were sent; if not, the version has the weights that were sent last.
        """
        ...


@runtime_checkable
class StoppingSampleQueue(SampleQueuePort, Protocol):
    """A queue for more running groups than a step has places, some of which are ended early. Of one process: which come
    first is decided by the order in which the engine responds."""

    def has_place(self, prompt_group: PromptGroup) -> bool:
        """Whether the current step has a place for a running group."""
        ...

    def is_full(self) -> bool:
        """Whether the current step has all groups that it needs."""
        ...

    def abort(self, prompt_groups: Sequence[PromptGroup], num_tokens: int) -> None:
        """Running groups were ended because the step is full. Each is handed out again, before any new one.

        num_tokens: generated for them and discarded.
        """
        ...


class NothingToWaitFor(UserError):
    """What is waited for would never come: no group runs, and none will start before the caller does something."""


@dataclass(frozen=True)
class Standing:
    """The state of the prompt groups. num_offered: rows that wait for capacity. num_owed: groups that must still be
    taken before the step may be released."""

    group_counts: GroupCounts
    num_offered: int
    num_owed: int


class IntakePort(Protocol):
    """Between a training loop of the user's own and the coordinator."""

    def open_data(self) -> None:
        """From now on groups of the data set start whenever there is capacity."""
        ...

    def offer(self, keep: Callable[[int], None]) -> None:
        """A row of the caller's own waits for capacity. keep: called with the number by which its group will name it,
        before anybody can look it up."""
        ...

    def hold(self, held: bool) -> None:
        """While held no further group starts; running ones continue."""
        ...

    def standing(self) -> Standing:
        """The current state."""
        ...
