"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740)."""

from torch import Tensor

from distflow.algorithms.advantages.group import GroupRule, group_advantage, on_tokens, sample_scores
from distflow.algorithms.registry import register_adv_est

RLOO = GroupRule(leave_one_out=True, alone="zero")


@register_adv_est("rloo", scope="group", describe=lambda: str(RLOO))
def compute_rloo_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, group_index: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """reward − mean of the others of its group, on every policy token; returns are the same.

    token_level_rewards, response_mask: `(bs, response_length)`; group_index, valid: `(bs,)`. A group of one gets 0.
    """
    scores = sample_scores(token_level_rewards, response_mask)
    advantages = on_tokens(group_advantage(scores, group_index, RLOO, valid), response_mask)
    return advantages, advantages.clone()
