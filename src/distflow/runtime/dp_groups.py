"""What the sample queue must know about each dp group: which part of a step its ranks take."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distflow.data.bin_packing import divide_step
from distflow.planning.layouts import Layout, Sizes
from distflow.planning.plan import Plan
from distflow.runtime.spec import Spec
from distflow.scheduling.data_plan import minibatches


def dp_group_layout(plan: Plan, ranks: tuple[int, ...]) -> Layout:
    """The layout of the models of a dp group, which is the same for all."""
    found = (
        layout for layout in plan.layouts if layout.role != "rollout" and layout.ranks == ranks
    )
    return next(found, Layout("", "", ranks, Sizes(data=len(ranks))))


def with_samples(plan: Plan, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks of a dp group with separate samples: the first of those that share theirs."""
    layout = dp_group_layout(plan, ranks)
    return tuple(rank for rank in ranks if layout.sample_place(rank) == 0)


def kept_share(
    plan: Plan, dp_groups: Sequence[tuple[int, ...]], rank: int
) -> tuple[int, int] | None:
    """Which share of a step's samples this rank writes, and the number of shares; the first dp
    group writes them."""
    keepers = with_samples(plan, dp_groups[0])
    if rank in keepers:
        return (keepers.index(rank), len(keepers))
    return None


@dataclass(frozen=True)
class DpGroupShares:
    """Ranks that train the same nodes on every step."""

    shares: tuple[int, ...] = (0,)
    """Which part of a step each rank takes, from 0; ranks that hold parts of the same tensors take
    the same."""
    mini_batch: int | None = None
    """Groups of an optimizer step, drawn by `seed` in each pass; None if a step has one."""
    seed: int = 0
    epochs: int = 1
    """Passes over a step."""


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
        tuple(layout.data_place(rank) for rank in ranks), size, config.trainer.seed, epochs
    )
