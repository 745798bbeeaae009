"""OPO: a group's mean, weighted by length, is the baseline; strictly on-policy."""

from torch import Tensor

from distflow.algorithms.advantages.group_estimator_base import GroupRule, advantages_of_rule
from distflow.algorithms.registry import register_adv_est

PAPER = "Hao et al. 2025, arXiv:2505.23585"
SETTINGS = """
defaults: [grpo, _self_]
algorithm: {adv_estimator: opo}
actor_rollout_ref:
  actor:
    ppo_mini_batch_size: ${data.train_batch_size}  # exactly on-policy: one update a step
    use_kl_loss: false
trainer: {experiment_name: opo_training}
"""


OPO = GroupRule(baseline="length_weighted_mean")


@register_adv_est("opo", scope="group")
def compute_opo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """reward − length-weighted mean reward of its group, on every policy token; returns are the
    same.

    Lengths count the policy's tokens. A group of one keeps its reward.
    """
    return advantages_of_rule(token_level_rewards, response_mask, group_index, OPO, valid)
