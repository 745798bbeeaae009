"""GRPO over turns: a turn is compared with the same turn of the group's other episodes."""

from dataclasses import replace

import torch
from torch import Tensor

from distflow.algorithms.advantages.group_estimator_base import (
    counted_tokens,
    group_advantage,
    grpo_rule,
    on_turns,
    sum_by_turn,
)
from distflow.algorithms.registry import register_adv_est

SETTINGS = """
defaults: [grpo, _self_]
algorithm: {adv_estimator: grpo_turns}
actor_rollout_ref:
  rollout: {workflow: multi_turn}
trainer: {experiment_name: grpo_turns_training}
"""


@register_adv_est("grpo_turns", scope="group")
def compute_grpo_turns_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    turn_index: Tensor,
    group_index: Tensor,
    valid: Tensor | None = None,
    *,
    norm_adv_by_std_in_grpo: bool = True,
    adv_epsilon: float = 1e-6,
    turn_discount: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(G_k − mean) / (std + ε) over the turns k of a group's samples, on the tokens of turn k;
    returns are the same.

    G_k = Σ_(j ≥ k) turn_discount^(j−k) r_j, r_j the sum of the rewards on the tokens of turn j. A
    turn that only one sample has gets 0.
    """
    index = torch.where(counted_tokens(response_mask, valid), turn_index, -1)
    returns = sum_by_turn(token_level_rewards, index)
    num_turns = returns.shape[1]
    for turn in reversed(range(num_turns - 1)):
        returns[:, turn] += turn_discount * returns[:, turn + 1]
    is_there = sum_by_turn(torch.ones_like(index), index) > 0
    peers = torch.as_tensor(group_index)[:, None] * num_turns + torch.arange(
        num_turns, device=returns.device
    )
    rule = replace(grpo_rule(norm_adv_by_std_in_grpo, adv_epsilon), alone="zero")
    found = group_advantage(returns.flatten(), peers.flatten(), rule, is_there.flatten())
    advantages = on_turns(found.view_as(returns), index)

    return advantages, advantages.clone()
