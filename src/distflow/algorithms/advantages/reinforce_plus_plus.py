"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): the reward to go, whitened over the batch."""

from torch import Tensor

from distflow.algorithms.advantages.group import counted_tokens
from distflow.algorithms.advantages.reinforce import rewards_to_go
from distflow.algorithms.masking import Reduce, masked_whiten
from distflow.algorithms.registry import register_adv_est


@register_adv_est(
    "reinforce_plus_plus",
    scope="global",
    describe=lambda gamma: f"reward to go, discounted by gamma {gamma:g}, whitened over the batch",
)
def compute_reinforce_plus_plus_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    valid: Tensor | None = None,
    *,
    gamma: float = 1.0,
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """Rewards to go of the policy's tokens, whitened over the global batch of valid samples; returns are unwhitened.

    token_level_rewards, response_mask: `(bs, response_length)`; valid: `(bs,)`.
    """
    mask = counted_tokens(response_mask, valid)
    returns = rewards_to_go(token_level_rewards, mask, gamma)
    return masked_whiten(returns, mask, reduce).float(), returns.float()
