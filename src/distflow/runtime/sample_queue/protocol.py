"""The sample queue: where complete groups wait until a step takes them. One file a wire implements it.

What a training loop of the user's own steers of the rollout loop. One file a wire implements it.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.observe.metrics import Measured
from distflow.rewards.call_counts import RewardCounts
from distflow.scheduling.curriculum import Accuracy
from distflow.scheduling.groups import GroupCounts, PromptGroup, Version
from distflow.scheduling.snapshot import Snapshot


class NoProgress(RuntimeError):
    """Every group fails: going on would only spend the data."""


class UserNoProgress(NoProgress, UserError):
    """The same, where it is the user's functions or their time limit that fail every group."""


@dataclass(frozen=True)
class Failure:
    """What a group came to grief on. users: it is for the user to mend."""

    message: str
    users: bool


@dataclass(frozen=True)
class Share:
    """One rank's part of a step. groups: of the whole step, over all ranks, ascending. metrics: those that the step's
    groups measured, over all ranks. judged: by workers which do not learn, since the last step, for one of the
    ranks."""

    group_ids: tuple[int, ...]
    batch: Batch
    metrics: Mapping[str, float]
    judged: RewardCounts = RewardCounts()


@dataclass(frozen=True)
class NewWorkers:
    """In place of a share: engines of other processes have come that have no weights yet. All ranks are told it at the
    same place, send what they have, and ask for the step again."""


@dataclass(frozen=True)
class Live:
    """Complete groups that no step has taken yet, for a checkpoint. measured: by their nodes, by group."""

    batch: Batch | None
    measured: Mapping[int, Sequence[Measured]]


@dataclass(frozen=True)
class Kept:
    """What a checkpoint goes on from, beside weights."""

    cut: Snapshot
    live: Live


@dataclass(frozen=True)
class Released:
    """How the run stands once a step is trained on by all ranks.

    version: of the weights that it ended in. finished: no step is left. kept: fetches what a checkpoint of this moment
    goes on from; to be asked by the rank that leads, before it takes the next step. domains: figures of each, where a
    curriculum changes their shares.
    """

    version: Version
    finished: bool
    group_counts: GroupCounts
    kept: Callable[[], Kept]
    domains: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class SampleQueuePort(Protocol):
    """Between the workers that fill it and those that learn from it."""

    def prompt_groups(self, served: Callable[[], int | None]) -> AsyncIterator[list[PromptGroup]]:
        """consumes credits · waits for released steps and dropped groups · produces groups to start together

        served: the lowest step whose weights an engine of this worker serves; None where it has none.
        """
        ...

    def put(self, prompt_group: PromptGroup, batch: Batch, measured: Sequence[Measured]) -> None:
        """A group has passed the rollout loop. measured: by its nodes."""
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
        """A group leaves without being trained on; its credit opens another.

        failure: where that was no choice. lost: not by the group's own fault, so that it is tried again, three times in
        all. accuracy: of its answers, where they were judged.
        """
        ...

    def count(self, judged: RewardCounts) -> None:
        """By a worker that does not learn, before it puts or drops the group: whoever takes a step has its verdicts."""
        ...

    def take(
        self, step: int, rank: int, wanted: int | None = None, deadline: float | None = None
    ) -> Share | NewWorkers | None:
        """consumes this step's groups · waits until they are complete · produces this rank's share, in group order

        rank: among those that learn. wanted: groups of a step that is taken in parts, None for the whole step.
        deadline: by `time.monotonic()`. None where the data has ended. Raises NoProgress, Exhausted, TimeoutError,
        which takes nothing, NothingToWaitFor for a part that could never come, and whatever ended the rollout loop.
        """
        ...

    def release(self, step: int, rank: int, published: bool) -> Released:
        """This rank has trained on its share. Waits until all ranks have.

        published: whether new weights were sent; if not, the version is an alias of the last ones that were.
        """
        ...


@runtime_checkable
class StoppingSampleQueue(SampleQueuePort, Protocol):
    """One that more groups run for than its steps have places, so that some are ended early. Of one process: what comes
    first is decided where it is made, by the order in which the engine answers."""

    def has_place(self, prompt_group: PromptGroup) -> bool:
        """Whether the step that is being made has a place for a group that runs."""
        ...

    def is_full(self) -> bool:
        """Whether the step has all groups that it needs."""
        ...

    def abort(self, prompt_groups: Sequence[PromptGroup], num_tokens: int) -> None:
        """Groups that ran were ended because the step is full. Each is handed out again, before any new one.

        num_tokens: drawn for them and thrown away.
        """
        ...


class NothingToWaitFor(UserError):
    """What is waited for would never come: no group runs, and none will start before the caller does something."""


@dataclass(frozen=True)
class Standing:
    """How the prompt groups stand. num_offered: rows that wait for a credit. num_owed: groups that must still be taken
    before the step may be released."""

    group_counts: GroupCounts
    num_offered: int
    num_owed: int


class IntakePort(Protocol):
    """Between that loop and the coordinator."""

    def open_data(self) -> None:
        """From now on groups of the data set start whenever there is a credit."""
        ...

    def offer(self, keep: Callable[[int], None]) -> None:
        """A row of the caller's own waits for its credit. keep: told the number that its group will name it by, before
        anybody can look for it."""
        ...

    def hold(self, held: bool) -> None:
        """While held no further group starts; those that run go on."""
        ...

    def standing(self) -> Standing:
        """At this moment."""
        ...
