"""What the experience edge must know of the ranks that learn the same."""

from collections.abc import Sequence

from distflow.runtime.ports.shared_edge import Team
from distflow.runtime.spec import Spec


def edge_team(spec: Spec, ranks: Sequence[int]) -> Team:
    """ranks: of one team, in order. Mini-batches are those of the policy, where the team trains one."""
    config, engines = spec.config, spec.plan.ranks[ranks[0]].engines
    size = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if "actor" not in engines:
        size = config.critic.ppo_mini_batch_size or size
    return Team(tuple(range(len(ranks))), size, config.trainer.seed)
