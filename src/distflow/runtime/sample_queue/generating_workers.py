"""The workers that generate: which prompt groups each has, and which worker gets the next."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from distflow.scheduling.groups import PromptGroup

_MAX_GROUPS = 1000
"""In one reply: 40 kB, if it goes to another process."""


@dataclass
class Generator:
    """One worker. served: the lowest weight version of its engine, as last reported. given: groups assigned to it and
    not fetched yet. running: all its prompt groups, by id, including those. holds: ids of complete groups stored with
    it. takes: False for a later worker before its first request, and for one that is gone."""

    name: str
    served: int | None
    given: list[PromptGroup] = field(default_factory=list)
    running: dict[int, PromptGroup] = field(default_factory=dict)
    holds: set[int] = field(default_factory=set)
    takes: bool = True
    gone: bool = False


class Generators:
    """Numbered in order of arrival. The owner locks them."""

    def __init__(self, names: Sequence[str], served: int) -> None:
        self._all = [Generator(name, served) for name in names]
        self._working_on: dict[int, Generator] = {}  # by group id
        self._taken_away = set[PromptGroup]()  # from workers that are gone

    def is_gone(self, number: int) -> bool:
        return self._all[number].gone

    def is_passed_over(self, prompt_group: PromptGroup) -> bool:
        """It was reassigned from a worker that is gone, whose late results do not count."""
        return prompt_group in self._taken_away

    def ask(self, number: int, served: int | None) -> int | None:
        """A worker with this weight version requests groups. Returns the lowest version of all workers, or None."""
        self._all[number].served, self._all[number].takes = served, True
        return min((each.served for each in self._all if each.served is not None), default=None)

    def give(self, prompt_group: PromptGroup) -> str:
        """Assign to the worker with the fewest groups, the first of such; returns its name."""
        chosen = min((each for each in self._all if each.takes), key=lambda each: len(each.running))
        chosen.given.append(prompt_group)
        chosen.running[prompt_group.group_id] = prompt_group
        self._working_on[prompt_group.group_id] = chosen
        return chosen.name

    def fetch(self, number: int) -> list[PromptGroup]:
        """The groups assigned to a worker, at most as many as fit into one reply."""
        mine = self._all[number]
        prompt_groups, mine.given = mine.given[:_MAX_GROUPS], mine.given[_MAX_GROUPS:]
        return prompt_groups

    def end(self, prompt_group: PromptGroup, complete: bool) -> None:
        """The group no longer runs. complete: it is stored with its worker. Groups assigned elsewhere are ignored."""
        worked = self._working_on.pop(prompt_group.group_id, None)
        if worked is not None:
            worked.running.pop(prompt_group.group_id)
            if complete:
                worked.holds.add(prompt_group.group_id)

    def take(self, numbers: Iterable[int]) -> dict[int, Generator]:
        """A step takes these groups. Returns the worker that stores each, if any does."""
        holders = {number: each for each in self._all for number in each.holds.intersection(numbers)}
        for number, each in holders.items():
            each.holds.discard(number)
        return holders

    def lose(self, number: int) -> tuple[str, list[PromptGroup], list[int]]:
        """A worker is gone. Returns its name, its prompt groups, and the ids of the complete groups stored with it."""
        gone = self._all[number]
        prompt_groups, holds = list(gone.running.values()), list(gone.holds)
        for prompt_group in prompt_groups:
            self._taken_away.add(prompt_group)
            self._working_on.pop(prompt_group.group_id)
        self._all[number] = Generator(gone.name, None, takes=False, gone=True)
        return gone.name, prompt_groups, holds

    def join(self, name: str) -> int:
        """Add a replacement; returns its number. It gets groups after its first request."""
        self._all.append(Generator(name, None, takes=False))
        return len(self._all) - 1
