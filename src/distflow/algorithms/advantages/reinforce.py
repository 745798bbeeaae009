"""REINFORCE and its variants, by their baseline.

- REINFORCE (Williams 1992): the discounted reward to go, without a baseline.
- REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): whitened over the batch, with or without a group baseline.
- ReMax (Li et al. 2024, arXiv:2310.10505): minus the reward of a greedy response to the same prompt.
- RLOO: REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).
- OPO: on-policy RL with an optimal baseline (Hao et al. 2025, arXiv:2505.23585).
"""

from torch import Tensor

from distflow.algorithms.advantages import group_estimator_base
from distflow.algorithms.advantages.gae import discounted_sum
from distflow.algorithms.masked_reductions import Reduce, masked_whiten, under_mask
from distflow.algorithms.registry import register_adv_est


def rewards_to_go(token_level_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Σ γ^k r_(t+k) over the tokens under the mask, float64 `(bs, response_length)`, 0 elsewhere."""
    return under_mask(discounted_sum(under_mask(token_level_rewards, mask), mask, gamma), mask)


@register_adv_est("reinforce", scope="sample", describe=lambda gamma: f"reward to go, discounted by gamma {gamma:g}")
def compute_reinforce_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, valid: Tensor | None = None, *, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Reward to go of each policy token; returns are the same. Tokens between the policy's pass it on undiscounted."""
    returns = rewards_to_go(
        token_level_rewards, group_estimator_base.counted_tokens(response_mask, valid), gamma
    ).float()
    return returns, returns.clone()


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
    """Rewards to go of the policy's tokens, whitened over the global batch of valid samples; returns are unwhitened."""
    mask = group_estimator_base.counted_tokens(response_mask, valid)
    returns = rewards_to_go(token_level_rewards, mask, gamma)
    return masked_whiten(returns, mask, reduce).float(), returns.float()


@register_adv_est(
    "reinforce_plus_plus_baseline",
    scope="global",
    describe=lambda: f"{group_estimator_base.GroupRule()}, whitened over the batch",
)
def compute_reinforce_plus_plus_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    valid: Tensor | None = None,
    *,
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """reward − mean of its group on every policy token, whitened over the tokens of the global batch.

    Returns are the advantages. A group of one keeps its reward before whitening.
    """
    scores = group_estimator_base.sample_scores(token_level_rewards, response_mask)
    centred = group_estimator_base.group_advantage(scores, group_index, group_estimator_base.GroupRule(), valid)
    spread = centred[:, None].expand(response_mask.shape)
    advantages = masked_whiten(spread, group_estimator_base.counted_tokens(response_mask, valid), reduce).float()
    return advantages, advantages.clone()


@register_adv_est("remax", scope="sample", describe=lambda: "reward to go − reward of a greedy sample")
def compute_remax_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, reward_baselines: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Undiscounted reward to go − baseline, reward_baselines `(bs,)`, on every policy token; returns are the reward to
    go."""
    mask = group_estimator_base.counted_tokens(response_mask, valid)
    returns = rewards_to_go(token_level_rewards, mask, 1.0)
    advantages = under_mask(returns - reward_baselines.double()[:, None], mask)
    return advantages.float(), returns.float()


RLOO = group_estimator_base.GroupRule(leave_one_out=True, alone="zero")


@register_adv_est("rloo", scope="group", describe=lambda: str(RLOO))
def compute_rloo_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, group_index: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """reward − mean of the group's other rewards, on every policy token; 0 in a group of one; returns are the same."""
    return group_estimator_base.advantages_of_rule(token_level_rewards, response_mask, group_index, RLOO, valid)


OPO = group_estimator_base.GroupRule(baseline="length_weighted_mean")


@register_adv_est("opo", scope="group", describe=lambda: str(OPO))
def compute_opo_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, group_index: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """reward − length-weighted mean reward of its group, on every policy token; returns are the same.

    Lengths count the policy's tokens. A group of one keeps its reward.
    """
    return group_estimator_base.advantages_of_rule(token_level_rewards, response_mask, group_index, OPO, valid)
