"""A worker's rank, device, dp group and folder, and what the sample queue must know about each dp
group."""

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from distflow.data.bin_packing import divide_step
from distflow.errors import UserError
from distflow.planning.layouts import Layout, Sizes
from distflow.planning.plan import Plan
from distflow.runtime.spec import Spec
from distflow.scheduling.data_plan import minibatches


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
    """A worker's place among the others. rank: in the plan. dp_groups: the ranks of each, in order;
    see `dp_groups_of`. generators: the ranks that generate. threads: of torch. generator: its
    number among those that generate, new for a replacement; -1 if it does not generate."""

    rank: int
    dp_groups: tuple[tuple[int, ...], ...]
    generators: tuple[int, ...]
    threads: int
    home: Home
    generator: int = -1

    @property
    def trainers(self) -> tuple[int, ...]:
        return tuple(rank for dp_group in self.dp_groups for rank in dp_group)

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
        return self.trainers.index(self.dp_group[0]) if self.dp_group else -1

    @property
    def part(self) -> int:
        """Its number in the run's folder; the leading worker has the first."""
        order = [*self.trainers, *(rank for rank in self.generators if rank not in self.trainers)]
        return order.index(self.rank)


def dp_group_layout(plan: Plan, ranks: tuple[int, ...]) -> Layout:
    """The layout of the models of a dp group, which is the same for all."""
    found = (
        layout for layout in plan.layouts if layout.role != "rollout" and layout.ranks == ranks
    )
    return next(found, Layout("", "", ranks, Sizes(data=len(ranks))))


def with_samples(plan: Plan, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks of a dp group with separate samples: the first of tensor-parallel ranks, which
    share theirs."""
    layout = dp_group_layout(plan, ranks)
    return tuple(rank for rank in ranks if layout.place(rank)["tensor"] == 0)


def kept_share(
    plan: Plan, dp_groups: Sequence[tuple[int, ...]], rank: int
) -> tuple[int, int] | None:
    """Which share of a step's samples this rank writes, and the number of shares; the first dp
    group writes them."""
    keepers = with_samples(plan, dp_groups[0])
    return (keepers.index(rank), len(keepers)) if rank in keepers else None


@dataclass(frozen=True)
class DpGroupShares:
    """Ranks that train the same nodes on every step.

    shares: which part of a step each rank takes, from 0; ranks that hold parts of the same tensors
    take the same. mini_batch: groups of an optimizer step, drawn by `seed` in each pass; None if a
    step has one. epochs: passes over a step.
    """

    shares: tuple[int, ...] = (0,)
    mini_batch: int | None = None
    seed: int = 0
    epochs: int = 1


def divide_among_ranks(
    dp_group: DpGroupShares, loads: Sequence[int], numbers: Sequence[int], step: int
) -> Iterator[list[int]]:
    """For each rank of the dp group, which of the step's groups it takes."""
    if max(dp_group.shares) == 0:  # one rank takes all
        return ([*range(len(numbers))] for _ in dp_group.shares)
    size = dp_group.mini_batch or len(numbers)
    passes = [
        minibatches(len(numbers), numbers, size, dp_group.seed, step, epoch)
        for epoch in range(dp_group.epochs)
    ]
    parts = divide_step(loads, passes, max(dp_group.shares) + 1)
    return (parts[share] for share in dp_group.shares)


def queue_dp_group(spec: Spec, ranks: Sequence[int]) -> DpGroupShares:
    """ranks: of one dp group, in order. Mini-batches are those of the policy, if the dp group
    trains one."""
    config = spec.config
    engines = spec.plan.ranks[ranks[0]].engines
    actor = config.actor_rollout_ref.actor
    critic = config.critic
    size = actor.ppo_mini_batch_size
    epochs = actor.ppo_epochs
    if "actor" not in engines:
        size = critic.ppo_mini_batch_size or size
        epochs = critic.ppo_epochs
    layout = dp_group_layout(spec.plan, tuple(ranks))
    return DpGroupShares(
        tuple(layout.place(rank)["data"] for rank in ranks), size, config.trainer.seed, epochs
    )


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
            "none on "
            f"{platform.node()}: install a driver and a torch for {wanted} there, or set "
            "trainer.device=cpu"
        )
    return torch.get_device_module(wanted).get_device_name()
