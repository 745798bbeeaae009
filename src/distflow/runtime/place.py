"""Where a worker stands: among the others, and in the driver's folder."""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Home:
    """The driver's folder, from which paths and modules are named, and where it finds modules."""

    folder: str
    module_paths: tuple[str, ...]

    @staticmethod
    def of_driver() -> "Home":
        return Home(os.getcwd(), tuple(sys.path))

    def enter(self) -> None:
        """As far as this machine has it: what is missing is told by whoever needs it."""
        with suppress(OSError):
            os.chdir(self.folder)
        sys.path += [path for path in self.module_paths if path not in sys.path]


@dataclass(frozen=True)
class Place:
    """A worker among the others. rank: in the plan. teams: the ranks that learn the same together, those of each in
    order; see `learning_teams`. generators: the ranks that generate. threads: of torch. generator: its number among
    those that generate, one that comes in place of another has a new one; of one that does not, none that is asked
    for."""

    rank: int
    teams: tuple[tuple[int, ...], ...]
    generators: tuple[int, ...]
    threads: int
    home: Home
    generator: int = -1

    @property
    def learners(self) -> tuple[int, ...]:
        return tuple(rank for team in self.teams for rank in team)

    @property
    def team(self) -> tuple[int, ...]:
        """Its own; empty for a worker that does not learn."""
        return next((team for team in self.teams if self.rank in team), ())

    @property
    def leads(self) -> bool:
        """What is true of all is told by this one."""
        return self.rank == self.learners[0]

    @property
    def first(self) -> int:
        """The place of its team's first rank among those that learn."""
        return self.learners.index(self.team[0]) if self.team else -1

    @property
    def part(self) -> int:
        """Its number in the run's folder: the one that leads has the first."""
        order = [*self.learners, *(rank for rank in self.generators if rank not in self.learners)]
        return order.index(self.rank)
