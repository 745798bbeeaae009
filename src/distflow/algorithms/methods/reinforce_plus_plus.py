"""REINFORCE++: returns whitened over the whole batch, with PPO's clip and the KL in the reward."""

from torch import Tensor

from distflow.algorithms.advantages.gae import rewards_to_go
from distflow.algorithms.advantages.group_estimator_base import counted_tokens
from distflow.algorithms.masked_reductions import Reduce, masked_whiten
from distflow.algorithms.registry import register_adv_est

PAPER = "Hu et al. 2025, arXiv:2501.03262"
SETTINGS = """
defaults: [grpo, _self_]
algorithm:
  adv_estimator: reinforce_plus_plus
  use_kl_in_reward: true
actor_rollout_ref:
  actor: {use_kl_loss: false}
  rollout: {n: 1}
trainer: {experiment_name: reinforce_plus_plus_training}
"""


@register_adv_est("reinforce_plus_plus", scope="global")
def compute_reinforce_plus_plus_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    valid: Tensor | None = None,
    *,
    gamma: float = 1.0,
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """Rewards to go of the policy's tokens, whitened over the global batch of valid samples;
    returns are unwhitened."""
    mask = counted_tokens(response_mask, valid)
    returns = rewards_to_go(token_level_rewards, mask, gamma)
    return masked_whiten(returns, mask, reduce), returns
