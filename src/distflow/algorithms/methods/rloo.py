"""RLOO: the mean of a group's other samples is the baseline."""

from torch import Tensor

from distflow.algorithms.advantages.group_estimator_base import GroupRule, advantages_of_rule
from distflow.algorithms.registry import register_adv_est

PAPER = "Ahmadian et al. 2024, arXiv:2402.14740"
SETTINGS = """
defaults: [grpo, _self_]
algorithm:
  adv_estimator: rloo
  use_kl_in_reward: true
actor_rollout_ref:
  actor: {use_kl_loss: false}
trainer: {experiment_name: rloo_training}
"""


RLOO = GroupRule(leave_one_out=True, alone="zero")


@register_adv_est("rloo", scope="group")
def compute_rloo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """reward − mean of the group's other rewards, on every policy token; 0 in a group of one;
    returns are the same."""
    return advantages_of_rule(token_level_rewards, response_mask, group_index, RLOO, valid)
