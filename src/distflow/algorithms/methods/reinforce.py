"""REINFORCE: the reward that follows a token, without a baseline."""

from torch import Tensor

from distflow.algorithms.advantages.gae import rewards_to_go
from distflow.algorithms.advantages.group_estimator_base import counted_tokens
from distflow.algorithms.registry import register_adv_est

PAPER = "Williams 1992"
SETTINGS = """
defaults: [grpo, _self_]
algorithm: {adv_estimator: reinforce}
actor_rollout_ref:
  actor:
    policy_loss: gpg  # the plain gradient
    use_kl_loss: false
  rollout: {n: 1}
trainer: {experiment_name: reinforce_training}
"""


@register_adv_est("reinforce", scope="sample")
def compute_reinforce_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    valid: Tensor | None = None,
    *,
    gamma: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Reward to go of each policy token; returns are the same. Tokens between the policy's pass it
    on undiscounted."""
    returns = rewards_to_go(token_level_rewards, counted_tokens(response_mask, valid), gamma)
    return returns, returns.clone()
