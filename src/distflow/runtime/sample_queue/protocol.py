"""The sample queue, where complete groups wait until a step takes them: the records that pass
through it, and its protocol for workers. Each transport has a file that implements it."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, Protocol, TypeVar

from distflow.data.batch import Batch
from distflow.observe.metrics import Measured, combine
from distflow.rewards.reward_results import RewardCounts
from distflow.runtime.run_errors import Failure
from distflow.scheduling.group_states import GroupCounts, PromptGroup, Version
from distflow.scheduling.scheduler_snapshot import Snapshot

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class FinishedGroup(Generic[T]):
    """A group that has completed the rollout loop."""

    prompt_group: PromptGroup
    data: T
    """Its samples as columns, or a reference to them."""
    num_tokens: int
    """Of all samples, including prompts."""
    version: int | None = None
    """The lowest of their tokens."""
    measured: Sequence[Measured] = ()
    """By its nodes."""
    num_bytes: int = 0
    """Of the data, if storage is bounded."""
    score: float | None = None
    """The mean of its responses; None if they were not scored."""
    failure: Failure | None = None
    """Set if none of them has a score although they should."""
    rows: range | None = None
    """Its samples in `data`, if those of other groups are there too; None for all."""

    def stored_as(self, data: U) -> "FinishedGroup[U]":
        """The same group with its samples in another form."""
        return FinishedGroup(**{**vars(self), "data": data})


@dataclass(frozen=True)
class LoadedGroups(Generic[T]):
    """Groups whose samples are rows of the data set, which were loaded together."""

    prompt_groups: Sequence[PromptGroup]
    data: T
    """The samples of all groups in turn, as many of each, or a reference to them."""
    num_tokens: Sequence[int]
    """Of each sample."""
    num_bytes: int = 0
    """Of the data, if storage is bounded."""

    @staticmethod
    def of(prompt_groups: Sequence[PromptGroup], batch: Batch) -> "LoadedGroups[Batch]":
        return LoadedGroups(prompt_groups, batch, batch.lengths("sequence").tolist())

    @property
    def group_size(self) -> int:
        return len(self.num_tokens) // max(1, len(self.prompt_groups))

    @cached_property
    def finished(self) -> list[FinishedGroup[T]]:
        size = self.group_size
        num_bytes = self.num_bytes // max(1, len(self.prompt_groups))

        found = []
        for place, prompt_group in enumerate(self.prompt_groups):
            rows = range(place * size, (place + 1) * size)
            num_tokens = sum(self.num_tokens[rows.start : rows.stop])
            found.append(
                FinishedGroup(
                    prompt_group,
                    self.data,
                    num_tokens,
                    prompt_group.version,
                    num_bytes=num_bytes,
                    rows=rows,
                )
            )

        return found


class ForeseenGroups(list[PromptGroup]):
    """Groups that will probably start next, so that their rows may be loaded now. They are not
    issued yet."""


@dataclass(frozen=True)
class DroppedGroup:
    """A group that has left the rollout loop without being trained on."""

    prompt_group: PromptGroup
    reason: str
    failure: Failure | None = None
    """Set if it failed."""
    lost: bool = False
    """Without its own fault; it is retried, three times in total."""
    score: float | None = None
    """As in `FinishedGroup`."""


@dataclass(frozen=True)
class AbortedGroups:
    """The rest of a generation batch with more groups than its step needed; they are handed out
    again before any new one."""

    attempts: Mapping[int, int]
    """By group id."""


EndedGroups = FinishedGroup[T] | LoadedGroups[T] | DroppedGroup | AbortedGroups
"""What has become of groups that leave the rollout loop."""


@dataclass
class TrainingStep(Generic[T]):
    """One rank's part of a step, and its training nodes' results."""

    group_ids: tuple[int, ...]
    """Of the whole step, over all ranks, ascending."""
    own: tuple[int, ...]
    """Ids of this rank's groups, in order."""
    batch: T
    """Their samples. On the way from the queue, it is a list of the groups' data; a rank without
    groups gets the step's first group, for its columns."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the groups of all ranks."""
    reward_counts: RewardCounts = RewardCounts()
    """Since the last step, of workers that do not train, passed to one of the ranks."""
    measured: list[Measured] = field(default_factory=list)
    """By the nodes."""
    times: dict[str, float] = field(default_factory=dict)
    """Of the nodes, by the names of their metrics."""
    loads: tuple[int, ...] = ()
    """Tokens of each of this rank's groups."""


def metrics_of_parts(parts: Sequence[TrainingStep[T]]) -> dict[str, float]:
    """The metrics of the groups of a step that was taken in parts."""
    return combine([(dict(part.metrics), len(part.group_ids)) for part in parts])


@dataclass(frozen=True)
class NewWorkers:
    """Returned instead of a step if new engines of other processes have no weights yet. All ranks
    get it at the same point, send their weights, and request the step again."""


@dataclass(frozen=True)
class ResumePoint(Generic[T]):
    """What a run resumes from, besides weights."""

    snapshot: Snapshot
    queued: Mapping[int, FinishedGroup[T]]
    """The complete groups that no step has taken, by group id."""


@dataclass(frozen=True)
class Released:
    """The state of the run after all ranks have trained on a step."""

    version: Version
    """Of the weights after it."""
    finished: bool
    """No step is left."""
    stopping: bool
    """The run is to end here."""
    group_counts: GroupCounts
    due: frozenset[str] = frozenset()
    """Which of "save" and "validate" are due now, on all ranks."""


class RolloutQueue(Protocol):
    """The queue as the rollout loop sees it, which fills it with groups."""

    def prompt_groups(
        self, engine_version: Callable[[], int | None]
    ) -> AsyncIterator[list[PromptGroup]]:
        """consumes capacity · waits for released steps and dropped groups · produces groups to
        start together

        If groups are only loaded, `ForeseenGroups` come while a step trains.

        engine_version: the lowest weight version of this worker's engines; None if it has none.
        """

    def end_groups(self, ended: EndedGroups[Batch]) -> None:
        """Groups have left the rollout loop; others may start in the place of dropped ones."""

    def store_ahead(self, batch: Batch) -> None:
        """Store the batch of groups that will probably end as `LoadedGroups` next."""

    def count(self, reward_counts: RewardCounts) -> None:
        """For workers that do not train, before they end the group; the next step reports the
        counts."""


class TrainingQueue(Protocol):
    """The queue as the training loop sees it, which takes steps from it."""

    def take(
        self, step: int, rank: int, wanted: int | None = None, deadline: float | None = None
    ) -> TrainingStep[Batch] | NewWorkers | None:
        """consumes this step's groups · waits until they are complete · produces this rank's part,
        in group order

        rank: among the training ranks. wanted: the number of groups if a step is taken in parts;
        None for the whole step. deadline: in `time.monotonic()`. Returns None after the end of the
        data. Raises NoProgress, Exhausted, TimeoutError (which takes nothing), NothingToWaitFor for
        a part that could never come, and the error that ended the rollout loop.
        """

    def note_training(self, step: int) -> None:
        """This rank trains on its part of the step from now on, so that rows of the next one may be
        loaded."""

    def release(self, step: int, rank: int, sent_weights: bool) -> Released:
        """Report that this rank has trained on its part, and wait until all ranks have.

        sent_weights: whether new weights were sent; if not, the version has the weights that were
        sent last.
        """

    def end_run(self, why: str) -> None:
        """End the run after the step released last, as `Coordinator.end` does. For the leading
        rank, before any rank takes the next step."""

    def resume_point(self) -> ResumePoint[Batch]:
        """The state to save in a checkpoint of the step released last, or that the run starts from.
        For the leading rank, before it takes the next step."""


class SampleQueuePort(RolloutQueue, TrainingQueue, Protocol):
    """The queue between the workers that fill it and those that train from it."""
