"""Assigns a sample queue's groups to rollout workers: which groups each worker has, and which one
gets the next."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from distflow.scheduling.group_states import PromptGroup


@dataclass
class RolloutWorker:
    """A rollout worker, and the groups that it has."""

    name: str
    number: int
    """Its place."""
    engine_version: int | None
    """The lowest weight version of its engine, as last reported."""
    assigned: list[int] = field(default_factory=list)
    """Ids of groups that it has not fetched yet."""
    running: dict[int, int] = field(default_factory=dict)
    """Ids of all its groups, including those assigned, with the attempt of each."""
    stored: set[int] = field(default_factory=set)
    """Ids of complete groups stored with it."""
    foresaw: int = -1
    """The last step during which it was told the groups of the next one."""
    takes: bool = True
    """False for a later worker before its first request, and for a lost one."""
    gone: bool = False


class GroupsByWorker:
    """Rollout workers, numbered in order of arrival. The owner holds the lock."""

    def __init__(self, names: Sequence[str], engine_version: int) -> None:
        self._all = [
            RolloutWorker(name, number, engine_version) for number, name in enumerate(names)
        ]
        self._working_on: dict[int, RolloutWorker] = {}  # by group id
        self._taken_away = set[tuple[int, int]]()  # from lost workers: group id and attempt

    def is_gone(self, number: int) -> bool:
        return self._all[number].gone

    def is_passed_over(self, group_id: int, attempt: int) -> bool:
        """Whether the group was reassigned from a lost worker, whose late results are ignored."""
        return (group_id, attempt) in self._taken_away

    def ask(self, number: int, engine_version: int | None) -> int | None:
        """A worker with this weight version requests groups. Returns the lowest version of all
        workers, or None."""
        worker = self._all[number]
        worker.engine_version = engine_version
        worker.takes = True
        return min(
            (each.engine_version for each in self._all if each.engine_version is not None),
            default=None,
        )

    def assign(self, group_id: int, attempt: int) -> str:
        """Assign a group to the worker with the fewest groups (on a tie, the first); returns its
        name."""
        takers = (worker for worker in self._all if worker.takes)
        chosen = min(takers, key=lambda worker: len(worker.running))
        chosen.assigned.append(group_id)
        chosen.running[group_id] = attempt
        self._working_on[group_id] = chosen
        return chosen.name

    def foresee(
        self, number: int, step: int, groups: Sequence[PromptGroup]
    ) -> Sequence[PromptGroup]:
        """Which of these groups the worker will get if no worker has one when they are assigned;
        none if it was told during this step already."""
        worker = self._all[number]
        if worker.foresaw == step or not worker.takes:
            return ()
        worker.foresaw = step
        takers = [each.number for each in self._all if each.takes]
        return groups[takers.index(number) :: len(takers)]

    def fetch(self, number: int) -> list[int]:
        """Ids of the groups assigned to a worker since the last call."""
        worker = self._all[number]
        fetched = worker.assigned
        worker.assigned = []
        return fetched

    def end(self, group_id: int, complete: bool) -> None:
        """The group no longer runs. complete: it is stored with its worker. Groups assigned
        elsewhere are ignored."""
        worker = self._working_on.pop(group_id, None)
        if worker is not None:
            worker.running.pop(group_id)
            if complete:
                worker.stored.add(group_id)

    def take(self, group_ids: Iterable[int]) -> dict[int, RolloutWorker]:
        """A step takes these groups. Returns the worker that stores each, if any does."""
        wanted = set(group_ids)  # so that each intersection costs what the worker stores
        stored_by = dict[int, RolloutWorker]()
        for each in self._all:
            taken = each.stored & wanted
            each.stored -= taken
            stored_by |= dict.fromkeys(taken, each)

        return stored_by

    def lose(self, number: int) -> tuple[str, list[int], list[int]]:
        """Remove a lost worker. Returns its name, and the ids of its running groups and of those
        stored with it."""
        gone = self._all[number]
        self._taken_away.update(gone.running.items())
        for group_id in gone.running:
            self._working_on.pop(group_id)
        self._all[number] = RolloutWorker(gone.name, number, None, takes=False, gone=True)
        return gone.name, list(gone.running), list(gone.stored)

    def join(self, name: str) -> int:
        """Add a replacement; returns its number. It gets groups after its first request."""
        self._all.append(RolloutWorker(name, len(self._all), None, takes=False))
        return len(self._all) - 1
