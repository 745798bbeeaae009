"""ReMax: the reward of a greedy response to the same prompt is the baseline."""

from torch import Tensor

from distflow.algorithms.advantages.gae import rewards_to_go
from distflow.algorithms.advantages.group_estimator_base import counted_tokens
from distflow.algorithms.masked_reductions import under_mask
from distflow.algorithms.registry import register_adv_est

PAPER = "Li et al. 2024, arXiv:2310.10505"
SETTINGS = """
defaults: [grpo, _self_]
algorithm:
  adv_estimator: remax
  use_kl_in_reward: true
actor_rollout_ref:
  actor:
    policy_loss: gpg  # algorithm 1: the plain gradient
    use_kl_loss: false
  rollout: {n: 1}
trainer: {experiment_name: remax_training}
"""


@register_adv_est("remax", scope="sample")
def compute_remax_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    reward_baselines: Tensor,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Undiscounted reward to go − baseline, reward_baselines `(bs,)`, on every policy token;
    returns are the reward to go."""
    mask = counted_tokens(response_mask, valid)
    returns = rewards_to_go(token_level_rewards, mask, 1.0)
    advantages = under_mask(returns - reward_baselines.double()[:, None], mask)
    return advantages, returns
