"""A worker's rank, device, dp group and folder."""

import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import torch

from distflow.errors import UserError


@dataclass(frozen=True)
class Home:
    """The driver's folder, to which paths are relative, and its module search path."""

    folder: str
    module_paths: tuple[str, ...]

    @staticmethod
    def of_driver() -> "Home":
        return Home(os.getcwd(), tuple(sys.path))

    def enter(self) -> None:
        """Enter the folder, if this machine has it, and add the search path. A missing file is
        reported on use."""
        with suppress(OSError):
            os.chdir(self.folder)
        sys.path += [path for path in self.module_paths if path not in sys.path]


@dataclass(frozen=True)
class Place:
    """A worker's place among the others."""

    rank: int
    """In the plan."""
    dp_groups: tuple[tuple[int, ...], ...]
    """The ranks of each, in order; see `dp_groups_of`."""
    generators: tuple[int, ...]
    """The ranks that generate."""
    threads: int
    """Of torch."""
    home: Home
    generator: int = -1
    """Its number among those that generate, new for a replacement; -1 if it does not generate."""

    @property
    def trainers(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(self.dp_groups))

    @property
    def dp_group(self) -> tuple[int, ...]:
        """Its own dp group; empty for a worker that does not train."""
        return next((dp_group for dp_group in self.dp_groups if self.rank in dp_group), ())

    @property
    def leads(self) -> bool:
        """Whether it reports for all ranks."""
        return self.rank == self.trainers[0]

    @property
    def first(self) -> int:
        """The index of its dp group's first rank among the training ranks."""
        if self.dp_group:
            return self.trainers.index(self.dp_group[0])
        return -1

    @property
    def part(self) -> int:
        """Its number in the run's folder; the leading worker has the first."""
        order = [*self.trainers, *(rank for rank in self.generators if rank not in self.trainers)]
        return order.index(self.rank)


class MissingDevice(UserError):
    """A process lacks the device that the plan gives it."""


def own_device(planned: str) -> str:
    """The name of the device of this process. Raises MissingDevice."""
    wanted = torch.device(planned).type
    found = torch.accelerator.current_accelerator(check_available=True)
    if wanted == "cpu":
        return "CPU"
    if found is None or found.type != wanted:
        raise MissingDevice(
            f"the plan has a GPU ({wanted}) for this process, but torch {torch.__version__} finds "
            f"none on {platform.node()}: install a driver and a torch for {wanted} there, or set "
            "trainer.device=cpu"
        )

    return torch.get_device_module(wanted).get_device_name()
