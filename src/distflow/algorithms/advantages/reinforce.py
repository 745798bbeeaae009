"""REINFORCE (Williams 1992): the discounted reward to go, without a baseline."""

from torch import Tensor

from distflow.algorithms.advantages.group import counted_tokens
from distflow.algorithms.advantages.scan import discounted_sum
from distflow.algorithms.masking import under_mask
from distflow.algorithms.registry import register_adv_est


def rewards_to_go(token_level_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Σ γ^k r_(t+k) over the tokens under the mask, float64 `(bs, response_length)`, 0 elsewhere."""
    return under_mask(discounted_sum(under_mask(token_level_rewards, mask), mask, gamma), mask)


@register_adv_est(
    "reinforce",
    scope="sample",
    describe=lambda gamma: f"reward to go, discounted by gamma {gamma:g}",
)
def compute_reinforce_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, valid: Tensor | None = None, *, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Reward to go of each policy token; returns are the same.

    token_level_rewards, response_mask: `(bs, response_length)`; valid: `(bs,)`. Tokens between the policy's carry it
    over and discount nothing.
    """
    returns = rewards_to_go(token_level_rewards, counted_tokens(response_mask, valid), gamma).float()
    return returns, returns.clone()
