"""ReMax (Li et al. 2024, arXiv:2310.10505): the reward less that of a greedy answer to the same prompt."""

from torch import Tensor

from distflow.algorithms.advantages.group import counted_tokens
from distflow.algorithms.advantages.reinforce import rewards_to_go
from distflow.algorithms.masking import under_mask
from distflow.algorithms.registry import register_adv_est


@register_adv_est("remax", scope="sample", describe=lambda: "reward to go − reward of a greedy sample")
def compute_remax_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, reward_baselines: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Undiscounted reward to go − baseline on every policy token; returns are the reward to go.

    token_level_rewards, response_mask: `(bs, response_length)`; reward_baselines, valid: `(bs,)`.
    """
    mask = counted_tokens(response_mask, valid)
    returns = rewards_to_go(token_level_rewards, mask, 1.0)
    advantages = under_mask(returns - reward_baselines.double()[:, None], mask)
    return advantages.float(), returns.float()
