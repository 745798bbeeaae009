"""Records engine requests, reward calls and their results for each prompt group."""

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from distflow.data.batch import Batch
from distflow.data.sample import Segment, on_event
from distflow.rewards.reward_results import RewardResult
from distflow.rollout.engine import GenerateRequest
from distflow.runtime.sample_queue.protocol import LoadedGroups
from distflow.scheduling.group_states import PromptGroup


@dataclass(frozen=True)
class GroupRecord:
    """What happened for a prompt group."""

    prompt_group: PromptGroup
    generated: list[tuple[GenerateRequest, tuple[Segment, ...]]] = field(default_factory=list)
    """Each request to the engine with its result."""
    scored: list[tuple[str, Mapping[str, object], RewardResult]] = field(default_factory=list)
    """Of each reward call the function's name, its arguments and its result."""
    events: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)
    """Of each episode, by its index; see `on_event`."""

    def add_event(self, index: int, *event: object) -> None:
        self.events.setdefault(index, []).append(event)


_current: ContextVar[GroupRecord | None] = ContextVar("group_record", default=None)
"""The record of the running task's group; tasks that it starts inherit it."""


class GroupRecords:
    """The `GroupRecorder` of a worker: keeps records until their step, and references only existing
    objects."""

    def __init__(self, on_keep: Callable[[GroupRecord, Batch], None] | None = None) -> None:
        """on_keep: receives training records with their columns on a worker that takes no step."""
        self._on_keep = on_keep
        self._kept: dict[int, GroupRecord] = {}
        self._validated: list[GroupRecord] = []

    def begin(self, prompt_group: PromptGroup) -> None:
        record = GroupRecord(prompt_group)
        _current.set(record)
        on_event.set(record.add_event)

    def generated(self, request: GenerateRequest, result: tuple[Segment, ...]) -> None:
        if (record := _current.get()) is not None:
            record.generated.append((request, result))

    def add_score(
        self, name: str, arguments: Mapping[str, object], reward_result: RewardResult
    ) -> None:
        if (record := _current.get()) is not None:
            record.scored.append((name, arguments, reward_result))

    def keep(self, batch: Batch | None = None) -> None:
        record = _current.get()
        if record is None:
            return

        if batch is None:
            self._validated.append(record)
        elif self._on_keep is not None:
            self._on_keep(record, batch)
        else:
            self._kept[record.prompt_group.group_id] = record

    def keep_loaded(self, loaded: LoadedGroups[Batch]) -> None:
        if self._on_keep is None:
            self._kept |= {group.group_id: GroupRecord(group) for group in loaded.prompt_groups}
            return
        for group in loaded.finished:
            self._on_keep(GroupRecord(group.prompt_group), loaded.data.select(group.rows or ()))

    def take_validated(self) -> list[GroupRecord]:
        """Remove and return the records of a validation."""
        taken = self._validated
        self._validated = []
        return taken

    def take(self, group_ids: Iterable[int]) -> dict[int, GroupRecord]:
        """Remove and return the records of a step's groups; groups of another worker or process
        have none."""
        return {number: self._kept.pop(number) for number in group_ids if number in self._kept}
