"""Where a worker stands: among the others, and in the driver's folder.

Ranks that learn the same: which of them hold parts of the same tensors, and what the sample queue must know.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from distflow.planning.layout import Layout, Sizes
from distflow.planning.plan import Plan
from distflow.runtime.sample_queue.pending_groups import Team
from distflow.runtime.spec import Spec


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
    order; see `dp_groups_of`. generators: the ranks that generate. threads: of torch. generator: its number among
    those that generate, one that comes in place of another has a new one; of one that does not, none that is asked
    for."""

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
        """Its own; empty for a worker that does not learn."""
        return next((dp_group for dp_group in self.dp_groups if self.rank in dp_group), ())

    @property
    def leads(self) -> bool:
        """What is true of all is told by this one."""
        return self.rank == self.trainers[0]

    @property
    def first(self) -> int:
        """The place of its team's first rank among those that learn."""
        return self.trainers.index(self.dp_group[0]) if self.dp_group else -1

    @property
    def part(self) -> int:
        """Its number in the run's folder: the one that leads has the first."""
        order = [*self.trainers, *(rank for rank in self.generators if rank not in self.trainers)]
        return order.index(self.rank)


def dp_group_layout(plan: Plan, ranks: tuple[int, ...]) -> Layout:
    """How the models of a team lie, which all lie alike."""
    found = (layout for layout in plan.layouts if layout.role != "rollout" and layout.ranks == ranks)
    return next(found, Layout("", "", ranks, Sizes(data=len(ranks))))


def with_samples(plan: Plan, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a team that have samples of their own: of ranks that compute layers together, which have the same, the
    first."""
    layout = dp_group_layout(plan, ranks)
    return tuple(rank for rank in ranks if layout.place(rank)["tensor"] == 0)


def kept_share(plan: Plan, dp_groups: Sequence[tuple[int, ...]], rank: int) -> tuple[int, int] | None:
    """Which share of a step this rank keeps the samples of, and of how many: each is kept once, by the first team."""
    keepers = with_samples(plan, dp_groups[0])
    return (keepers.index(rank), len(keepers)) if rank in keepers else None


def edge_team(spec: Spec, ranks: Sequence[int]) -> Team:
    """ranks: of one team, in order. Mini-batches are those of the policy, where the team trains one."""
    config, engines = spec.config, spec.plan.ranks[ranks[0]].engines
    actor, critic = config.actor_rollout_ref.actor, config.critic
    size, epochs = actor.ppo_mini_batch_size, actor.ppo_epochs
    if "actor" not in engines:
        size, epochs = critic.ppo_mini_batch_size or size, critic.ppo_epochs
    layout = dp_group_layout(spec.plan, tuple(ranks))
    return Team(tuple(layout.place(rank)["data"] for rank in ranks), size, config.trainer.seed, epochs)
