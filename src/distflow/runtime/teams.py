"""Ranks that learn the same: which of them hold parts of the same tensors, and what the experience edge must know."""

from collections.abc import Sequence

from distflow.planning.layout import Layout, Sizes
from distflow.planning.plan import Plan
from distflow.runtime.ports.held import Team
from distflow.runtime.spec import Spec


def team_layout(plan: Plan, ranks: tuple[int, ...]) -> Layout:
    """How the models of a team lie, which all lie alike."""
    found = (layout for layout in plan.layouts if layout.role != "rollout" and layout.ranks == ranks)
    return next(found, Layout("", "", ranks, Sizes(data=len(ranks))))


def with_samples(plan: Plan, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a team that have samples of their own: of ranks that compute layers together, which have the same, the
    first."""
    layout = team_layout(plan, ranks)
    return tuple(rank for rank in ranks if layout.place(rank)["tensor"] == 0)


def kept_share(plan: Plan, teams: Sequence[tuple[int, ...]], rank: int) -> tuple[int, int] | None:
    """Which share of a step this rank keeps the samples of, and of how many: each is kept once, by the first team."""
    keepers = with_samples(plan, teams[0])
    return (keepers.index(rank), len(keepers)) if rank in keepers else None


def edge_team(spec: Spec, ranks: Sequence[int]) -> Team:
    """ranks: of one team, in order. Mini-batches are those of the policy, where the team trains one."""
    config, engines = spec.config, spec.plan.ranks[ranks[0]].engines
    actor, critic = config.actor_rollout_ref.actor, config.critic
    size, epochs = actor.ppo_mini_batch_size, actor.ppo_epochs
    if "actor" not in engines:
        size, epochs = critic.ppo_mini_batch_size or size, critic.ppo_epochs
    layout = team_layout(spec.plan, tuple(ranks))
    return Team(tuple(layout.place(rank)["data"] for rank in ranks), size, config.trainer.seed, epochs)
