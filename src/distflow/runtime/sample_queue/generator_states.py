"""The workers that generate: which prompt groups each has, and who gets the next."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from distflow.scheduling.groups import PromptGroup

_MOST_TICKETS = 1000
"""In one answer: 40 kB, where they go to another process."""


@dataclass
class Generator:
    """One of them. served: the lowest step that its engine serves, as it said last. given: groups that are to be
    fetched. running: the groups that it has, by number, those included. holds: complete groups that lie with it. takes:
    False before one that came later has asked first, and of one that is gone."""

    name: str
    served: int | None
    given: list[PromptGroup] = field(default_factory=list)
    running: dict[int, PromptGroup] = field(default_factory=dict)
    holds: set[int] = field(default_factory=set)
    takes: bool = True
    gone: bool = False


class Generators:
    """Counted in the order in which they came. Whoever has them guards them."""

    def __init__(self, names: Sequence[str], served: int) -> None:
        self._all = [Generator(name, served) for name in names]
        self._working_on: dict[int, Generator] = {}  # by group
        self._taken_away = set[PromptGroup]()  # from those that are gone

    def is_gone(self, number: int) -> bool:
        return self._all[number].gone

    def is_passed_over(self, prompt_group: PromptGroup) -> bool:
        """It was taken from one that is gone: what still comes of it does not count."""
        return prompt_group in self._taken_away

    def ask(self, number: int, served: int | None) -> int | None:
        """One wants groups, and serves that step. The oldest that any of them serves, None where none does."""
        self._all[number].served, self._all[number].takes = served, True
        return min((each.served for each in self._all if each.served is not None), default=None)

    def give(self, prompt_group: PromptGroup) -> str:
        """To the one that has the fewest groups, the first of such; its name."""
        chosen = min((each for each in self._all if each.takes), key=lambda each: len(each.running))
        chosen.given.append(prompt_group)
        chosen.running[prompt_group.group_id] = prompt_group
        self._working_on[prompt_group.group_id] = chosen
        return chosen.name

    def fetch(self, number: int) -> list[PromptGroup]:
        """What was given to it, no more than go into one answer."""
        mine = self._all[number]
        prompt_groups, mine.given = mine.given[:_MOST_TICKETS], mine.given[_MOST_TICKETS:]
        return prompt_groups

    def end(self, prompt_group: PromptGroup, complete: bool) -> None:
        """Its group runs no more. complete: it lies with who made it. One that somebody else handed out is nobody's."""
        worked = self._working_on.pop(prompt_group.group_id, None)
        if worked is not None:
            worked.running.pop(prompt_group.group_id)
            if complete:
                worked.holds.add(prompt_group.group_id)

    def take(self, numbers: Iterable[int]) -> dict[int, Generator]:
        """A step takes these groups: with whom each lies, if with any."""
        holders = {number: each for each in self._all for number in each.holds.intersection(numbers)}
        for number, each in holders.items():
            each.holds.discard(number)
        return holders

    def lose(self, number: int) -> tuple[str, list[PromptGroup], list[int]]:
        """It is gone: its name, the groups that it had, and the numbers of the complete groups that lay with it."""
        gone = self._all[number]
        prompt_groups, holds = list(gone.running.values()), list(gone.holds)
        for prompt_group in prompt_groups:
            self._taken_away.add(prompt_group)
            self._working_on.pop(prompt_group.group_id)
        self._all[number] = Generator(gone.name, None, takes=False, gone=True)
        return gone.name, prompt_groups, holds

    def join(self, name: str) -> int:
        """One comes in place of another; its number. It gets groups once it has asked."""
        self._all.append(Generator(name, None, takes=False))
        return len(self._all) - 1
