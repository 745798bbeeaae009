"""On-policy RL with an optimal baseline (Hao et al. 2025, arXiv:2505.23585)."""

from torch import Tensor

from distflow.algorithms.advantages.group import GroupRule, group_advantage, on_tokens, sample_scores
from distflow.algorithms.registry import register_adv_est

OPO = GroupRule(baseline="length_weighted_mean")


@register_adv_est("opo", scope="group", describe=lambda: str(OPO))
def compute_opo_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, group_index: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """reward − length-weighted mean reward of its group, on every policy token; returns are the same.

    token_level_rewards, response_mask: `(bs, response_length)`; group_index, valid: `(bs,)`. Lengths count the
    policy's tokens. A group of one keeps its reward.
    """
    scores = sample_scores(token_level_rewards, response_mask)
    lengths = (response_mask > 0).sum(dim=-1)
    advantages = on_tokens(group_advantage(scores, group_index, OPO, valid, lengths), response_mask)
    return advantages, advantages.clone()
